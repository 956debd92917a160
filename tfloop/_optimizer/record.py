"""How the state of an optimizer is written down, and checked before it is taken over.

State is keyed by path and slot, groups are known by their members: nothing depends on positions
or on the order of declaration. Knows variables and bytes, not optimizers.
"""

import dataclasses
import json
import math
from collections.abc import Set

import numpy as np
import tensorflow as tf

from tfloop._checks.messages import listed

_FORMAT = 1
_CALL = "restoring a ModuleOptimizer"


@dataclasses.dataclass(frozen=True)
class GroupRecord:
    """The state of one group.

    Attributes:
      optimizer: The class of its optimizer.
      slots: Path -> slot -> variable, for every member.
      counters: What the group counts for all its members.
    """

    optimizer: str
    slots: dict[str, dict[str, tf.Variable]]
    counters: dict[str, tf.Variable]

    def variables(self) -> dict[str, tf.Variable]:
        """Every variable under a key of its own inside the group."""
        slots = {f"{p}/{name}": v for p, slots in self.slots.items() for name, v in slots.items()}
        return slots | {f"/{name}": counter for name, counter in self.counters.items()}


def dump(groups: list[GroupRecord]) -> bytes:
    """A line of JSON that says what follows, then the raw values."""
    manifest, values = [], []
    for group in groups:
        entries = []
        for key, variable in group.variables().items():
            value = variable.numpy()
            entries.append([key, variable.dtype.name, list(value.shape)])
            values.append(value.tobytes())
        members = list(group.slots)
        manifest.append({"optimizer": group.optimizer, "members": members, "entries": entries})
    head = json.dumps({"format": _FORMAT, "groups": manifest}).encode()
    return b"\n".join([head, b"".join(values)])


def load(state: bytes, groups: list[GroupRecord]) -> None:
    """Assigns a written state to live variables; all checks come before the first change.

    Raises:
      ValueError: Another format, optimizer, set of paths, shape or dtype.
    """
    for variable, value in assignments(parse(state), groups):
        variable.assign(value)


Saved = tuple[str, list[str], dict[str, np.ndarray]]
"""(optimizer, members, key -> value) of one group in a written state."""


def assignments(
    saved: list[Saved], groups: list[GroupRecord]
) -> list[tuple[tf.Variable, np.ndarray]]:
    """Pairs of live variable and saved value, after all checks and before any change.

    Raises:
      ValueError: Another optimizer, set of paths, shape or dtype.
    """
    owner = {path: n for n, (_, members, _) in enumerate(saved) for path in members}
    _check_paths(owner.keys(), {path for group in groups for path in group.slots})
    found = []
    for group in groups:
        numbers = {owner[path] for path in group.slots} or {
            n for n, (kind, _, _) in enumerate(saved) if kind == group.optimizer
        }
        if len(numbers) != 1:
            raise ValueError(
                f"`{_CALL}` found that the state of {listed(group.slots)} comes from "
                f"{len(numbers)} groups, expected one: their counts of steps differ. The groups "
                "were others when it was saved. Declare those: `optim.with_group(...)`."
            )
        kind, _, values = saved[numbers.pop()]
        if kind != group.optimizer:
            raise ValueError(
                f"`{_CALL}` got the state of {kind} for {listed(group.slots)}, expected that of "
                f"{group.optimizer}. The optimizer was changed since the state was saved. "
                f"Give the group the same one: `keras.optimizers.{kind}(...)`."
            )
        found += _matched(group, values)
    return found


def parse(state: bytes) -> list[Saved]:
    """Reads what `dump` wrote.

    Raises:
      ValueError: It is no such record, damaged, or of a newer format.
    """
    head, _, body = state.partition(b"\n")
    try:
        record = json.loads(head)
        found, groups = record["format"], record["groups"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"`{_CALL}` can't read the state: got {len(state)} bytes that are no record of "
            "an optimizer, expected one. The optimizer wasn't built when it was saved, or the "
            "file is damaged. Build, then save: `optim.build(model)`."
        ) from error
    if found != _FORMAT:
        raise ValueError(
            f"`{_CALL}` got a state of format {found}, expected {_FORMAT}. A newer tfloop wrote "
            "it. Upgrade: `pip install --upgrade tfloop-keras`."
        )
    entries = [entry for group in groups for entry in group["entries"]]
    kinds = [(np.dtype(tf.as_dtype(name).as_numpy_dtype), shape) for _, name, shape in entries]
    ends = np.cumsum([0, *(dtype.itemsize * math.prod(shape) for dtype, shape in kinds)])
    if ends[-1] != len(body):
        raise ValueError(
            f"`{_CALL}` found the state damaged: got {len(body)} bytes of values, expected "
            f"{ends[-1]}. The file was cut short or overwritten. Restore an older one: "
            "`checkpoint.restore(path)`."
        )
    values = iter(
        np.frombuffer(body[start:end], dtype).reshape(shape)
        for (dtype, shape), start, end in zip(kinds, ends[:-1], ends[1:], strict=True)
    )
    return [
        (group["optimizer"], group["members"], {key: next(values) for key, *_ in group["entries"]})
        for group in groups
    ]


def _check_paths(saved: Set[str], live: Set[str]) -> None:
    if saved != live:
        raise ValueError(
            f"`{_CALL}` found other parameters in the state: {_difference(saved, live)}, expected "
            "those of the model. The model, or what is frozen, was changed since it was saved. "
            "Compare `tfloop.named_parameters(model)`."
        )


def _difference(saved: Set[str], live: Set[str]) -> str:
    missing, extra = sorted(live - saved), sorted(saved - live)
    parts = [f"got none of {listed(missing)}"] if missing else []
    return " and ".join([*parts, f"got unknown {listed(extra)}"] if extra else parts)


def _matched(
    group: GroupRecord, values: dict[str, np.ndarray]
) -> list[tuple[tf.Variable, np.ndarray]]:
    """Pairs of live variable and saved value, the same keys, shapes and dtypes on both sides.

    The saved group may hold more parameters than this one: it may have been split since.
    """
    live = group.variables()
    members = {"", *group.slots}
    saved = {key for key in values if key.rpartition("/")[0] in members}
    if live.keys() != saved:
        raise ValueError(
            f"`{_CALL}` found other slots in the state of {group.optimizer}: "
            f"{_difference(saved, live.keys())}, expected those of its arguments. They (momentum, "
            "amsgrad, use_ema) were others when it was saved. Give those: "
            f"`keras.optimizers.{group.optimizer}(...)`."
        )
    for key, variable in live.items():
        found = tuple(values[key].shape), tf.as_dtype(values[key].dtype)
        expected = tuple(variable.shape), variable.dtype
        if found != expected:
            raise ValueError(
                f"`{_CALL}` got {key!r} with shape {found[0]} and dtype {found[1].name}, expected "
                f"{expected[0]} and {expected[1].name}. The model was changed since it was saved. "
                "Compare `tfloop.named_parameters(model)`."
            )
    return [(variable, values[key]) for key, variable in live.items()]

"""How the state of an optimizer is written down, and checked before it is taken over.

State is keyed by path and slot, groups are known by their members: nothing depends on positions
or on the order of declaration. Knows variables and bytes, not optimizers.
"""

import dataclasses
import json

import numpy as np
import tensorflow as tf

from tfloop._messages import listed

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
    for variable, value in assignments(_parse(state), groups):
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
    _check_paths(owner, {path for group in groups for path in group.slots})
    found = []
    for group in groups:
        numbers = {owner[path] for path in group.slots} or {
            n for n, (kind, _, _) in enumerate(saved) if kind == group.optimizer
        }
        if len(numbers) != 1:
            raise ValueError(
                f"`{_CALL}` found that the state of {listed(group.slots)} comes from "
                f"{len(numbers)} groups, expected one: their counts of steps differ. "
                "Declare the groups as they were when the state was saved: "
                "`optim.with_group(...)`."
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


def _parse(state: bytes) -> list[Saved]:
    """Reads what `dump` wrote."""
    head, separator, body = state.partition(b"\n")
    try:
        record = json.loads(head)
        found = record["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"`{_CALL}` can't read the state: got {len(state)} bytes that are no record of "
            "an optimizer. The optimizer wasn't built when it was saved, or the file is damaged. "
            "Save after a step: `optim.build(model)`, then save."
        ) from error
    if found != _FORMAT:
        raise ValueError(
            f"`{_CALL}` got a state of format {found}, expected {_FORMAT}. A newer tfloop wrote "
            "it. Upgrade tfloop, or save again with this version."
        )
    groups, at = [], 0
    for group in record["groups"]:
        values = {}
        for key, name, shape in group["entries"]:
            dtype = np.dtype(tf.as_dtype(name).as_numpy_dtype)
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            if at + size > len(body):
                raise ValueError(
                    f"`{_CALL}` found the state truncated at {key!r}: got {len(body)} bytes, "
                    f"expected at least {at + size}. The file is damaged. Restore an older one."
                )
            values[key] = np.frombuffer(body[at : at + size], dtype).reshape(shape)
            at += size
        groups.append((group["optimizer"], group["members"], values))
    return groups


def _check_paths(saved: dict[str, int], live: set[str]) -> None:
    missing = [path for path in live if path not in saved]
    extra = [path for path in saved if path not in live]
    if missing or extra:
        raise ValueError(
            f"`{_CALL}` found other parameters in the state: missing there {listed(missing)}, "
            f"unknown here {listed(extra)}. The model or what is frozen was changed since it "
            "was saved. Rebuild it as it was, or start afresh: `ModuleOptimizer(...)`."
        )


def _matched(group: GroupRecord, values: dict) -> list[tuple[tf.Variable, np.ndarray]]:
    """Pairs of live variable and saved value, the same keys, shapes and dtypes on both sides."""
    live = group.variables()
    if live.keys() != values.keys():
        missing, extra = sorted(live.keys() - values.keys()), sorted(values.keys() - live.keys())
        raise ValueError(
            f"`{_CALL}` found other slots in the state of {group.optimizer}: missing there "
            f"{listed(missing)}, unknown here {listed(extra)}. Its arguments were changed "
            "(momentum, amsgrad, use_ema) since it was saved. Give it the same arguments."
        )
    for key, variable in live.items():
        found = values[key].shape, tf.as_dtype(values[key].dtype)
        expected = tuple(variable.shape), variable.dtype
        if found != expected:
            raise ValueError(
                f"`{_CALL}` got {key!r} with shape {found[0]} and dtype {found[1].name}, expected "
                f"{expected[0]} and {expected[1].name}. The model was changed since it was saved. "
                "Rebuild it as it was."
            )
    return [(variable, values[key]) for key, variable in live.items()]

"""Who owns which parameter: the groups in their order, and the last match for every variable.

Refuses groups that serve nothing. How the variables of a group are updated is `update`'s
business, what a `ParamGroup` matches `group`'s.
"""

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfloop._checks.messages import described, listed, table_text
from tfloop._clipping.clipper import Clipper
from tfloop._clipping.clipping import GradientClipping
from tfloop._groups.group import ParamGroup, near_misses
from tfloop._model.paths import AddressBook, Variable, tf_variable
from tfloop._optimizer.record import GroupRecord
from tfloop._tensors.sparse import Gradient
from tfloop._update.keras_optimizer import as_keras_optimizer
from tfloop._update.slots import OptimizerState
from tfloop._update.update import GroupUpdate


class Group:
    """One row of the routing: who, by which optimizer (`None` for frozen), clipped how."""

    def __init__(
        self,
        group: ParamGroup,
        optimizer: Any,
        clipping: GradientClipping | None,
        call: str,
        *,
        fused: bool = True,
    ) -> None:
        check_clipping(clipping, call)
        self.group = group
        self.update: GroupUpdate | None = None
        self.clipper: Clipper | None = None
        if optimizer is None:
            if clipping is not None:
                raise ValueError(
                    f"`{call}` got {clipping} for a frozen group, expected none: optimizer=None "
                    "means that it is never updated. For a group that only clips otherwise, give "
                    "an optimizer too: `with_group(group, keras.optimizers.Adam(), clipping)`."
                )
            return
        self.update = GroupUpdate(as_keras_optimizer(optimizer, call), call, fused=fused)
        own = self.update.clipping
        if clipping is not None and own is not None:
            raise ValueError(
                f"`{call}` got two clippings: {clipping} and the optimizer's own {own}, expected "
                f"one. Leave one out: `keras.optimizers.{self.update.name}()`."
            )
        self.set_clipping(clipping or own)

    @property
    def clipping(self) -> GradientClipping | None:
        """How its gradients are clipped, by its own argument or by that of its optimizer."""
        return None if self.clipper is None else self.clipper.clipping

    def set_clipping(self, clipping: GradientClipping | None) -> None:
        """Clips so from now on; what the former one remembered is dropped."""
        self.clipper = None if clipping is None else Clipper(clipping)

    def twin(self, memo: dict) -> "Group":
        """One of its own with equal state."""
        twin = copy.copy(self)
        twin.update = self.update and self.update.twin(memo)
        twin.clipper = self.clipper and self.clipper.twin()
        return twin

    def move(self, old: AddressBook, new: AddressBook) -> None:
        """Goes on with a copied model, whose variables and layers are others of the same paths."""
        self.group = self.group.resolve(old.variables, old.paths_of)
        if self.update is not None:
            self.update.move({path: new.variables[path] for path in self.update.variables})

    def take_over(self, state: OptimizerState) -> None:
        """Goes on with state that was made for the variables that it serves now."""
        assert self.update is not None  # frozen groups get none
        self.update.state = state

    def place_with(self, variables: Iterable[Variable]) -> None:
        """Puts what stands beside the slots where the variables of the model are."""
        if self.clipper is not None:
            self.clipper.place_with(variables)

    def record(self, state: OptimizerState) -> GroupRecord:
        """Its state as it is written down, with slots and counters of the live one or a new."""
        assert self.update is not None  # frozen groups have none
        slots = {path: state.slots(path) for path in state.variables}
        clipping = {} if self.clipper is None else self.clipper.variables()
        counters = state.counters() | self.update.rate.variables() | clipping
        return GroupRecord(self.update.name, slots, counters)

    def clipped(
        self, share: dict[str, Gradient], variables: Mapping[str, Variable]
    ) -> tuple[dict[str, Gradient], list[tf.Tensor]]:
        """Its gradients within the bound, and what its clipping is to remember."""
        return (share, []) if self.clipper is None else self.clipper.clip(share, variables)

    def __str__(self) -> str:
        if self.update is None:
            return f"{self.group}: frozen"
        return f"{self.group}: {self.update.name}" + (f", {self.clipping}" if self.clipping else "")


def check_clipping(clipping: object, call: str) -> None:
    """Raises a TypeError for what is neither a clipping nor `None`."""
    if clipping is not None and not isinstance(clipping, GradientClipping):
        raise TypeError(
            f"`{call}` got {described(clipping)} as clipping, expected a GradientClipping or None. "
            "A number doesn't say which norm. Write `tfloop.GradientClipping.by_global_norm(1.0)`."
        )


def owners(book: AddressBook, groups: Sequence[Group], strict: bool) -> dict[str, int]:
    """The index of the last matching group for every floating-point variable.

    Args:
      book: The root's.
      groups: The fallback, which matches everything, then the others in their order.
      strict: Raise for a group that serves nothing; `False` warns.

    Returns:
      Canonical path -> index, in the order of the model.

    Raises:
      ValueError: A group matches nothing, or later groups take all it matches.
    """
    floating = book.floating()
    ways = {path: book.paths_of(path) for path in floating}
    matched = []
    for group in groups:
        bound = group.group.bind()
        matched.append([p for p, v in floating.items() if bound.matches_any(ways[p], v)])
    owner = {path: index for index, paths in enumerate(matched) for path in paths}
    for index in sorted(set(range(1, len(groups))) - set(owner.values())):
        message = (
            f"`ModuleOptimizer.build(model)` found that the group {groups[index].group} "
            f"{_why_idle(book, groups, owner, matched[index], groups[index].group)} or allow it: "
            f"`tfloop.ModuleOptimizer(..., strict=False)`.\n"
            f"{_ownership(book, owner, groups)}"
        )
        if strict:
            raise ValueError(message)
        warnings.warn(message, stacklevel=2)
    return owner


def check_no_complex(book: AddressBook, groups: Sequence[Group]) -> None:
    """Refuses complex parameters, which nothing here would update, unless a group freezes them.

    Raises:
      ValueError: There is one.
    """
    for path, variable in book.variables.items():
        if not (variable.trainable and tf.as_dtype(variable.dtype).is_complex):
            continue
        ways = book.paths_of(path)
        group = next(g for g in reversed(groups) if g.group.bind().matches_any(ways, variable))
        if group.update is not None:
            raise ValueError(
                f"`ModuleOptimizer.build(model)` found a complex parameter: got {path!r} of "
                f"{tf.as_dtype(variable.dtype).name}, expected floating ones. The rules of Keras' "
                "optimizers are made for real numbers. Keep its real and its imaginary part as two "
                "variables and join them by `tf.complex`, or freeze it: "
                f"`optim.with_group(tfloop.ParamGroup.from_path({path!r}), None)`."
            )


def check_groups_of_rates(call: str, groups: Sequence[ParamGroup], book: AddressBook) -> None:
    """Refuses a group of rates that nothing is in, most likely misspelt.

    Raises:
      ValueError: A group matches no floating-point variable.
    """
    floating = book.floating()
    for group in groups:
        bound = group.bind()
        if not any(bound.matches_any(book.paths_of(path), v) for path, v in floating.items()):
            raise ValueError(
                f"`{call}` found that the group {group} of its rates matches nothing: got 0 "
                f"floating-point variables of {book.description}, expected at least one. "
                f"{_likely_cause(group, book)} or allow it: `ModuleOptimizer(..., strict=False)`."
            )


def _why_idle(
    book: AddressBook,
    groups: Sequence[Group],
    owner: dict[str, int],
    matched: list[str],
    group: ParamGroup,
) -> str:
    """What is wrong with a group that serves nothing, its likely cause, and the fix."""
    if matched:
        takers = sorted({str(groups[owner[path]].group) for path in matched})
        return (
            f"serves nothing: got {len(matched)} variables that it matches, {listed(matched)}, all "
            f"taken by later groups ({', '.join(takers)}), expected at least one left. The last "
            "matching group wins. Declare the narrower group last: `.with_group(narrower, ...)`,"
        )
    return (
        f"matches nothing: got 0 floating-point variables of {book.description}, expected at "
        f"least one. {_likely_cause(group, book)}"
    )


def _likely_cause(group: ParamGroup, book: AddressBook) -> str:
    close = near_misses(group, book.floating())
    if close:
        return f"Did you mean {listed(close)}? Correct it,"
    if group.needs_variables:
        return (
            "Its variables or layers belong to another model, its function says no to all, or no "
            "parameter has such a rank. "
            "Look at the paths: `tfloop.named_parameters(model)`,"
        )
    return "Look at the paths: `tfloop.named_parameters(model)`,"


def was_parameter(book: AddressBook, path: str) -> bool:
    """Is it frozen now, but made to be trained (unlike BatchNorm's statistics)?"""
    return tf_variable(book.variables[path]).trainable


def _ownership(book: AddressBook, owner: dict[str, int], groups: Sequence[Group]) -> str:
    """Who owns what, a line for each group: for error messages."""
    table = []
    for index, group in enumerate(groups):
        paths = [path for path in owner if owner[path] == index and was_parameter(book, path)]
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        served = ", ".join(paths[:3]) + more
        table.append([str(group), str(len(paths)), served or "nothing"])
    return table_text(("group", "variables", "paths"), table)

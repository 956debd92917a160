"""The groups put together for one root: who serves what, their state, the counts of all.

Everything that a step finds ready, and what follows the model when that changes. Which group
serves a parameter is decided in `routing`, the order of a step in `step`; how state is written
down, and checked before it is taken over, is `record`'s business.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfloop._clipping.clipping import GradientClipping
from tfloop._gradients.scaling import LossScaler
from tfloop._groups.group import ParamGroup
from tfloop._model.paths import AddressBook, address_book, root_key
from tfloop._optimizer import record
from tfloop._optimizer.checks import STEP, check_born_on_replicas
from tfloop._optimizer.nonfinite import Alarm
from tfloop._optimizer.routing import Group, check_groups_of_rates, check_no_complex, owners
from tfloop._replicas import placement, seeds
from tfloop._replicas.reduction import Reduction
from tfloop._tensors.sparse import Gradient
from tfloop._tracing import traces
from tfloop._update.slots import OptimizerState


class Assembly:
    """What a `ModuleOptimizer` has under its public face; a trace depends on this.

    Args:
      fallback: The group of all parameters that no other takes.
      reduction: How the gradients of replicas become one.
      scaler: The optimizer's, or `None`.
      on_nonfinite: What becomes of an update with a gradient that isn't finite.
      strict: Is a group refused that serves nothing?

    Attributes:
      alarm: Says where gradients weren't finite, where that is to raise.
      groups: The fallback, then the others in the order of their declaration.
      owner: Canonical path -> index of the group that serves it.
      model: The root, or `None` before `prepare`.
      book: The root's, likewise.
      pending: A restored state that waits for the root, or for values of variables.
      iterations: The steps in which anything was updated.
      skipped: The steps that were left out.
      version: Grows with each change of the routing; `routing` is the same as a variable.
      lock: Held while the routing changes and while a step runs.
      stepped_in: The thread of the last step outside of a trace, which nothing else can see.
      is_new_copy: May it still go on with a copy of the model?
    """

    def __init__(
        self,
        fallback: Group,
        reduction: Reduction,
        *,
        scaler: LossScaler | None,
        on_nonfinite: str | None,
        strict: bool,
    ) -> None:
        self.reduction = reduction
        self.scaler = scaler
        self.on_nonfinite = on_nonfinite
        self.alarm = Alarm() if on_nonfinite == "raise" else None
        self.strict = strict
        self.groups = [fallback]
        self.owner: dict[str, int] = {}
        self.model: Any = None
        self.book: AddressBook | None = None
        self.pending: bytes | None = None
        self.version = 0
        self.lock = threading.RLock()
        self.stepped_in: threading.Thread | None = None
        self.is_new_copy = False
        self._checked_rates: Any = None
        counter = {"dtype": tf.int64, "trainable": False}
        self.iterations, self.skipped, self.routing = traces.eagerly(
            lambda: [
                tf.Variable(0, name=n, **counter) for n in ("iterations", "skipped", "routing")
            ]
        )

    def fingerprint(self) -> object:
        """What a trace bakes in; see `traces`."""
        return [self.version, *[g.update.rate.changes for g in self.groups if g.update]]

    @property
    def skips(self) -> bool:
        """Is an update left out where a gradient isn't finite? XLA drops what raises."""
        return self.on_nonfinite is not None

    def refresh(self) -> None:
        """Asks the functions given as rates, for the compiled step that comes next.

        Raises:
          tf.errors.InvalidArgumentError: What the step before has met, if that couldn't.
        """
        if self.alarm is not None:
            self.alarm.ring()
        for group in self.groups:
            if group.update is not None:
                group.update.rate.refresh()

    def prepare(self, model: Any, call: str) -> AddressBook:
        """Builds for the root, or checks that it is ours and follows what has changed in it.

        Raises:
          ValueError: It is another root, or as `routing.owners`.
        """
        key = root_key(model, call)
        book = address_book(model, call)
        with self.lock:  # no replica waits for another in here
            if self.book is not None and key != self.book.key:
                if not (self.is_new_copy and self.book.is_like(book)):
                    raise ValueError(_why_another_root(call, self.book, book))
                traces.eagerly(lambda: self._move(book))
            if book is not self.book or self._lacks_state(book):
                check_born_on_replicas(call, book.parameters())
                traces.eagerly(lambda: self._build(model, book, self.groups))
        traces.depends_on(book)
        traces.depends_on(self)
        return book

    def add(self, group: Group) -> None:
        """Takes over one group more, at once where there is a root; changes nothing if it raises.

        Raises:
          ValueError: As `routing.owners`.
        """
        groups = [*self.groups, group]
        with self.lock:
            if self.book is None:
                self.groups = groups
            else:
                book, model = self.book, self.model
                traces.eagerly(lambda: self._build(model, book, groups))

    def set_clipping(self, clipping: GradientClipping | None) -> None:
        """Clips the fallback's gradients so from now on."""
        fallback = self.groups[0]
        fallback.set_clipping(clipping)
        if self.book is not None:
            fallback.place_with(self.book.variables.values())
        self._mark_changed()

    def served(self, paths: Iterable[str]) -> list[str]:
        """Those of some paths that a group updates, and that aren't frozen now."""
        assert self.book is not None  # `prepare` has found it
        trainable = self.book.parameters()
        return [p for p in paths if p in trainable and self.groups[self.owner[p]].update]

    def shares(self, grads: Mapping[str, Gradient]) -> list[tuple[Group, dict[str, Gradient]]]:
        """The groups that take part, each with the gradients of what it serves."""
        shares: dict[int, dict[str, Gradient]] = {}
        for path, grad in grads.items():
            shares.setdefault(self.owner[path], {})[path] = grad
        return [(self.groups[index], share) for index, share in shares.items()]

    def check_groups_of_rates(self, groups: Sequence[ParamGroup], book: AddressBook) -> None:
        """Refuses a group of rates that no parameter is in, most likely misspelt; once for each."""
        seen = (book, groups)
        if not self.strict or seen == self._checked_rates:
            return
        check_groups_of_rates(STEP, groups, book)
        self._checked_rates = seen

    def records(
        self, states: list[tuple[Group, OptimizerState]] | None = None
    ) -> list[record.GroupRecord]:
        """The live state, or one that is about to be, as `record` writes and restores it."""
        if states is None:
            states = [(group, group.update.state) for group in self.groups if group.update]
        groups = [group.record(state) for group, state in states if state.variables]
        counters = {"iterations": self.iterations, "skipped": self.skipped}
        if self.scaler is not None:
            counters |= self.scaler.variables()
        return [*groups, record.GroupRecord("ModuleOptimizer", {}, counters)]

    def first_records(self, model: Any) -> tuple[list[record.GroupRecord], dict[int, Any]]:
        """The state that this would begin with for a root; it isn't built by this.

        Returns:
          The records, and id of a variable -> the restored value that waits for it.
        """
        book = address_book(model)
        _, states = traces.eagerly(lambda: self._with_states(book, self.groups))
        waiting = self._restored(states)
        return self.records(states), {id(variable): value for variable, value in waiting}

    def become(self, other: "Assembly", memo: dict) -> None:
        """Takes over copies of another's groups, rates and state.

        It goes on with the same root, or with a copy of that: its first step decides.
        """
        self.pending = other.pending
        self.groups = [group.twin(memo) for group in other.groups]
        if other.book is not None:
            self._build(other.model, other.book, self.groups)
            self.is_new_copy = True
            if id(other.model) in memo:
                self.prepare(memo[id(other.model)], "ModuleOptimizer.build(model)")
        self.iterations.assign(other.iterations)
        self.skipped.assign(other.skipped)

    def _move(self, book: AddressBook) -> None:
        """Leaves the root for a copy of it; `_build` does the rest."""
        assert self.book is not None  # or there is nothing to leave
        for group in self.groups:
            group.move(self.book, book)

    def _lacks_state(self, book: AddressBook) -> bool:
        """Has a parameter no slots yet, or the value by now that they wait for?"""
        updates = ((path, self.groups[self.owner[path]].update) for path in book.parameters())
        if any(update and path not in update.variables for path, update in updates):
            return True
        return any(group.update and group.update.state.can_begin() for group in self.groups)

    def _build(self, model: Any, book: AddressBook, groups: list[Group]) -> None:
        """Routes and makes state; changes nothing before all checks have passed."""
        check_no_complex(book, groups)
        owner, states = self._with_states(book, groups)
        restored = self._restored(states)
        for group, state in states:
            group.take_over(state)
        for variable, value in restored:
            variable.assign(value)
        if not any(state.waiting for _, state in states):
            self.pending = None  # else it is needed once more
        self._place_with(list(book.variables.values()), groups)
        self.model, self.book, self.owner, self.groups = model, book, owner, groups
        self._mark_changed()

    def _with_states(
        self, book: AddressBook, groups: list[Group]
    ) -> tuple[dict[str, int], list[tuple[Group, OptimizerState]]]:
        """Who owns which path, and state for all; changes nothing."""
        owner = owners(book, groups, self.strict)
        trainable = book.parameters()
        states = []
        for index, group in enumerate(groups):
            if group.update is None:
                continue
            served = {
                path: book.variables[path]
                for path, owned_by in owner.items()
                if owned_by == index and (path in trainable or path in group.update.variables)
            }
            states.append((group, group.update.state.for_variables(served)))
        return owner, states

    def _restored(
        self, states: list[tuple[Group, OptimizerState]]
    ) -> list[tuple[tf.Variable, Any]]:
        """Pairs of a variable of these and the value that waits for it."""
        if self.pending is None:
            return []
        return record.assignments(record.parse(self.pending), self.records(states))

    def _place_with(self, variables: list[Any], groups: list[Group]) -> None:
        """Puts what stands beside the slots where the variables of the model are."""
        for name in ("iterations", "skipped", "routing"):
            setattr(
                self,
                name,
                placement.placed_with(getattr(self, name), variables, placement.MIRRORED),
            )
        for group in groups:
            group.place_with(variables)
        if self.scaler is not None:
            self.scaler.place_with(variables)
        if self.alarm is not None:
            self.alarm.place_with(variables)
        seeds.make_distinct(variables)

    def _mark_changed(self) -> None:
        """Makes older traces stale: ours look at the version, others at the variable."""
        self.version += 1
        traces.eagerly(lambda: self.routing.assign(self.version))


def _why_another_root(call: str, ours: AddressBook, theirs: AddressBook) -> str:
    """Names both roots, and says whether they share variables."""
    shared = [path for path, v in theirs.variables.items() if ours.path_of(v) is not None]
    relation = f"which shares {len(shared)} of its variables" if shared else "another model"
    return (
        f"`{call}` got {theirs.description}, {relation}, expected {ours.description}, which "
        "this optimizer was built with. State and paths belong to one root. Pass that root, "
        "or make another optimizer: `tfloop.ModuleOptimizer(...)`."
    )

"""`ModuleOptimizer.as_keras`: the same groups, clippings and rates inside Keras' `fit`.

What `fit`, its callbacks and `.keras` files ask of an optimizer. What an
update is stays with the `ModuleOptimizer`, which is stepped here and nothing more.
"""

import dataclasses
import functools
import warnings
from typing import Any, NamedTuple, Self

import keras
import numpy as np
import tensorflow as tf

from tfloop._backend.keras_optimizers import (
    AVERAGE,
    rate_of,
    use_iterations,
    without_missing,
)
from tfloop._checks.messages import listed
from tfloop._clipping.clipping import GradientClipping, deserialize, serialize
from tfloop._gradients.params import GradientsParams
from tfloop._gradients.scaling import LossScaler
from tfloop._groups.group import ParamGroup
from tfloop._model.paths import address_book, is_variable, root_key, unwrap
from tfloop._optimizer.optimizer import ModuleOptimizer
from tfloop._optimizer.record import GroupRecord, dump
from tfloop._replicas import contexts
from tfloop._tensors.overwritten import path_for
from tfloop._update.keras_optimizer import CLIP_ARGUMENTS

_CALL = "ModuleOptimizer.as_keras(model)"


class _Row(NamedTuple):
    """A group as it stands in a config.

    Attributes:
      members: Their paths.
      optimizer: As it was given; `None` for frozen.
      clipping: Of this group, that of the optimizer's own arguments included.
      undecayed: Members that were excluded from weight decay.
      ratio: Its rate as a multiple of the fallback's, if a callback ever set that.
    """

    members: list[str]
    optimizer: keras.optimizers.Optimizer | None
    clipping: GradientClipping | None
    undecayed: list[str]
    ratio: float | None


@dataclasses.dataclass
class _Notes:
    """What the adapter knows; an object, since Keras and TensorFlow track models and containers.

    Attributes:
      root: The model, or variables by path after loading; `None` until these are known.
      rows: The groups as they were loaded.
      places: Path and shape of each variable as they were loaded, in Keras' order.
      order: The paths of what was trained last, in Keras' order.
      ratios: Index of a group -> its rate as a multiple of the fallback's.
      is_scaled: Was the loss scaled that the next gradients come from?
    """

    root: Any = None
    rows: list[_Row] = dataclasses.field(default_factory=list)
    places: list[tuple[str, list[int]]] = dataclasses.field(default_factory=list)
    order: list[str] = dataclasses.field(default_factory=list)
    ratios: dict[int, float] = dataclasses.field(default_factory=dict)
    is_scaled: bool = False


@keras.saving.register_keras_serializable("tfloop")
class GroupedOptimizer(keras.optimizers.Optimizer):
    """A `ModuleOptimizer` as `model.compile` wants it; made by `ModuleOptimizer.as_keras`.

    An update is `optim.step(model, grads)`: each group has the rate of the optimizer that it
    was given. A variable without a gradient is untouched, with Keras' warning.

    `learning_rate` is the fallback's rate. Setting it, as `LearningRateScheduler` and
    `ReduceLROnPlateau` do, multiplies the rates of the groups by the same factor, so that they
    keep their ratio to it; a rate of 0 doesn't make them forget it. A group whose rate is a
    schedule or a function goes on with that; where the fallback's is, setting raises, as in Keras.

    Attributes:
      optim: The `ModuleOptimizer`. Its state is this one's state.
    """

    def __init__(
        self, optim: ModuleOptimizer, model: Any = None, *, name: str = "grouped_optimizer"
    ) -> None:
        """See `ModuleOptimizer.as_keras`; without a model, `build` finds the variables."""
        super().__init__(learning_rate=0.0, name=name)
        self.built: bool = False
        self._notes = _Notes()
        self._use(optim)
        if model is not None:
            self._notes.root = model = unwrap(model)
            root_key(model, _CALL)
            if getattr(model, "built", True):
                self.optim.build(model)

    def build(self, variables: list[Any]) -> None:
        """Makes all state; Keras calls it with the trainable variables.

        Raises:
          ValueError: Some of them aren't the model's; or, after loading, they aren't those that
            the routing was saved for.
        """
        if self.built:
            return
        if self._notes.root is None:
            self._notes.root = self._adopted(variables)
        self._use(self.optim.build(self._notes.root))
        self._notes.order = list(self._named(variables, variables))
        self.built = True

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Makes one update, as every Keras optimizer does."""
        if trainable_variables is None:
            book = address_book(self._notes.root, _CALL)
            trainable_variables = [book.variables[path] for path in self._notes.order]
        if not self.built:
            self.build(list(trainable_variables))
        if len(grads):
            self._notes.order = list(self._named(trainable_variables, trainable_variables))
            found, variables = without_missing(self, grads, trainable_variables)
            self.optim.step(None, self._notes.root, self._unscaled(self._named(variables, found)))

    def scale_loss(self, loss: Any) -> Any:
        """The loss times the scale of the optimizer's scaler, if it has one."""
        scaler = self.optim.scaler
        self._notes.is_scaled = scaler is not None
        return loss if scaler is None else loss * tf.cast(scaler.scale, loss.dtype)

    @property
    def learning_rate(self) -> Any:
        """The fallback's rate: a variable, or what its schedule gives now."""
        update: Any = self.optim._assembly.groups[0].update  # the fallback is never frozen
        rate = rate_of(update.given)
        return rate if is_variable(rate) else update.own_rate()

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        updates = enumerate(group.update for group in self.optim._assembly.groups)
        given = {number: update.given for number, update in updates if update is not None}
        rates = {n: g.learning_rate for n, g in given.items() if is_variable(rate_of(g))}
        if 0 in rates and float(rates[0].numpy()) > 0.0:
            base = float(rates[0].numpy())
            self._notes.ratios.update({n: float(r.numpy()) / base for n, r in rates.items()})
        given[0].learning_rate = value  # raises where it is a schedule
        base = float(np.asarray(self.learning_rate))
        for number in rates.keys() - {0}:
            given[number].learning_rate = base * self._notes.ratios.get(number, 1.0)

    def take_over(self, other: "GroupedOptimizer") -> None:
        """Keeps the ratios of rates that another has noted."""
        self._notes.ratios.update(other._notes.ratios)

    @property
    def variables(self) -> list[Any]:
        """All state: slots, counts and rates."""
        return [v for record in self._records() for v in record.variables().values()]

    def set_weights(self, weights: list[Any]) -> None:
        """Assigns what `variables` lists."""
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def finalize_variable_values(self, var_list: list[Any]) -> None:
        """Puts the moving averages into the variables of groups that keep them."""
        for path, variable in self._named(var_list, var_list).items():
            average = self.optim.state(path).get(AVERAGE)
            if average is not None:
                variable.assign(average)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Refuses: it belongs to the optimizer of a group."""
        raise RuntimeError(
            "`exclude_from_weight_decay(...)` of a grouped optimizer has no effect: got a call on "
            "the adapter, expected one on an optimizer before it was given to a group. Or give "
            "these variables a group: `optim.with_group(group, AdamW(weight_decay=0.0))`."
        )

    def get_config(self) -> dict[str, Any]:
        """The routing as it came out for this model: paths, optimizers, clippings.

        Raises:
          ValueError: The model isn't built, so nothing is routed yet.
        """
        notes = self._notes
        rows, places = (notes.rows, notes.places) if notes.root is None else self._rows()
        return {
            "name": self.name,
            "variables": [[path, list(shape)] for path, shape in places],
            "groups": [_row_config(row) for row in rows],
            **_options(self.optim),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Self:
        """What `get_config` wrote; `build` then finds the variables by their order."""
        rows = [_row_of(row, custom_objects) for row in config["groups"]]
        made = cls(_optimizer_of(rows, config), name=config["name"])
        made._notes = _Notes(
            rows=rows,
            places=[(path, list(shape)) for path, shape in config["variables"]],
            ratios={n: row.ratio for n, row in enumerate(rows) if row.ratio is not None},
        )
        return made

    def save_own_variables(self, store: Any) -> None:
        """Writes the state by path, for `.keras` and `.weights.h5` files."""
        if self.optim.root is not None:  # which may have stepped before `fit` was called
            store["state"] = np.frombuffer(dump(self._records()), np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Takes over a state by path; before `build` it is kept until then.

        Raises:
          ValueError: It is that of other groups, or of another model.
        """
        if "state" in store.keys():
            self.optim.deserialize(np.asarray(store["state"]).tobytes())
        elif len(store.keys()):
            warnings.warn(
                f"The optimizer's state isn't loaded: got {len(store.keys())} variables of another "
                "kind of optimizer, expected the record of a tfloop ModuleOptimizer.",
                stacklevel=2,
            )

    def _use(self, optim: ModuleOptimizer) -> None:
        self.optim = optim
        use_iterations(self, optim.iterations)

    def _unscaled(self, grads: dict[str, Any]) -> GradientsParams:
        """The gradients as `step` wants them: without the scale, and as means of replicas."""
        found, scaler = GradientsParams(grads), self.optim.scaler
        if scaler is not None and self._notes.is_scaled:
            # Not where Keras' LossScaleOptimizer is around this one: it scales by itself.
            found, self._notes.is_scaled = found.map(scaler.unscaled), False
        replicas, reduction = contexts.count(), self.optim._assembly.reduction
        if replicas == 1:
            return found
        if not reduction.sends:
            raise ValueError(
                f"`{_CALL}` got reduction=None with {replicas} replicas, expected 'mean' or 'sum': "
                "`fit` leaves it to the optimizer to reduce. Leave it out: "
                "`tfloop.ModuleOptimizer(optimizer)`."
            )
        # Keras has divided the losses, so that a sum is their mean.
        return found.scale(replicas) if reduction.weighs else found

    def _adopted(self, variables: list[Any]) -> dict[str, Any]:
        """A root of the variables of a loaded model, under the paths of the saved one."""
        notes = self._notes
        saved = [tuple(shape) for _, shape in notes.places]
        found = [tuple(variable.shape) for variable in variables]
        if saved != found:
            raise ValueError(
                "`load_model` can't route the variables of the model: got the shapes "
                f"{listed(found)}, expected {listed(saved)}. The model, or what is trainable in "
                "it, isn't what it was when it was saved. Load without the optimizer and make it "
                "again: `load_model(path, compile=False)`, then `optim.as_keras(model)`."
            )
        named = dict(zip([path for path, _ in notes.places], variables, strict=True))
        for row in notes.rows:
            if row.undecayed and row.optimizer is not None:
                row.optimizer.exclude_from_weight_decay([named[path] for path in row.undecayed])
        pending = self.optim.serialize()
        self._use(
            _optimizer_of(notes.rows, _options(self.optim))
        )  # whose copies know the exclusions
        self.optim.deserialize(pending)
        tree: dict[str, Any] = {}
        for path, variable in named.items():
            *parents, last = path.split(".")
            branch = functools.reduce(lambda at, name: at.setdefault(name, {}), parents, tree)
            branch[last] = variable
        return tree

    def _named(self, variables: Any, values: Any) -> dict[str, Any]:
        """Path -> value, for variables and what belongs to each."""
        book = address_book(self._notes.root, _CALL)
        paths = [book.path_of(variable) for variable in variables]
        unknown = [v.path for v, path in zip(variables, paths, strict=True) if path is None]
        if unknown:
            raise ValueError(
                f"`{_CALL}` was compiled into another model: got the "
                f"variables {listed(unknown)}, expected those of {book.description}. Make it for "
                "the model that is compiled: `model.compile(optim.as_keras(model), ...)`."
            )
        keys = map(path_for, paths, variables)  # type: ignore[arg-type]
        return dict(zip(keys, values, strict=True))

    def _served(self) -> list[str]:
        """The paths of what `fit` trains now, in Keras' order."""
        model = self._notes.root
        if isinstance(model, keras.Model):
            return list(self._named(model.trainable_variables, model.trainable_variables))
        return self._notes.order or list(address_book(model, _CALL).parameters())

    def _records(self) -> list[GroupRecord]:
        """The state of what `fit` trains; that of parameters frozen since stays behind."""
        if self.optim.root is None:
            return []
        served = set(self._served())
        found = []
        for record in self.optim._assembly.records():
            slots = {path: slots for path, slots in record.slots.items() if path in served}
            if slots or not record.slots:
                found.append(GroupRecord(record.optimizer, slots, record.counters))
        return found

    def _rows(self) -> tuple[list[_Row], list[tuple[str, list[int]]]]:
        """The groups by their members, and all members with their shapes."""
        optim = self.optim.build(self._notes.root)
        book = address_book(self._notes.root, _CALL)
        served = self._served()
        rows = []
        for number, group in enumerate(optim._assembly.groups):
            members = [path for path in served if optim._assembly.owner[path] == number]
            update = group.update
            undecayed = [
                p for p in members if update is not None and update.state.decay_of(p) is None
            ]
            if members or number == 0:
                given = None if update is None else update.given
                ratio = self._notes.ratios.get(number)
                rows.append(_Row(members, given, group.clipping, undecayed, ratio))
        return rows, [(path, list(book.variables[path].shape)) for path in served]


def _options(optim: ModuleOptimizer) -> dict[str, Any]:
    """What an optimizer was given besides its groups."""
    scaler = optim.scaler and [float(optim.scaler.scale.numpy()), optim.scaler._growth_interval]
    return {"reduction": optim.reduction, "on_nonfinite": optim.on_nonfinite, "scaler": scaler}


def _optimizer_of(rows: list[_Row], options: dict[str, Any]) -> ModuleOptimizer:
    fallback, *groups = rows
    optim = ModuleOptimizer(
        fallback.optimizer,
        clipping=fallback.clipping,
        reduction=options["reduction"],
        skip_nonfinite=options.get("skip_nonfinite", False),  # as older files have it
        on_nonfinite=options.get("on_nonfinite"),
        scaler=options["scaler"] and _scaler_of(*options["scaler"]),
    )
    for row in groups:
        optim.with_group(ParamGroup.from_path(*row.members), row.optimizer, row.clipping)
    return optim


def _scaler_of(scale: float, growth_interval: int | None) -> LossScaler:
    return LossScaler.fixed(scale) if not growth_interval else LossScaler(scale, growth_interval)


def _row_config(row: _Row) -> dict[str, Any]:
    optimizer = None
    if row.optimizer is not None:
        optimizer = keras.optimizers.serialize(row.optimizer)
        optimizer["config"].update(dict.fromkeys(CLIP_ARGUMENTS))  # they are in `clipping`
    return row._asdict() | {"optimizer": optimizer, "clipping": serialize(row.clipping)}


def _row_of(config: dict[str, Any], custom_objects: Any) -> _Row:
    optimizer, clipping = config["optimizer"], config["clipping"]
    if optimizer is not None:
        optimizer = keras.optimizers.deserialize(optimizer, custom_objects=custom_objects)
    clipping = deserialize(clipping, custom_objects)
    return _Row(**(config | {"optimizer": optimizer, "clipping": clipping}))

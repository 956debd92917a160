"""A compiled step goes where its names lead now, by whatever route Python finds them."""

import copy
import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfloop

VALUE = 1.0
HOLDER = types.SimpleNamespace(value=1.0)
TABLE = {"value": 1.0, "nested": [HOLDER]}


def helper():
    return deeper()


def deeper():
    return tf.constant(VALUE)


class Base:
    offset = 0.0


class Callable(Base):
    factor = 1.0

    def __init__(self):
        self.value = 1.0

    def __call__(self):
        return tf.constant(self.value * self.factor)

    @property
    def doubled(self):
        return 2.0 * self.value

    def plain(self):
        return tf.constant(self.value)

    def shifted(self):
        return self.plain() + self.offset


class Empty:
    value = 1.0


EMPTY = Empty()


CALLABLE = Callable()


def nested():
    def inner():
        return [tf.constant(VALUE) for _ in range(1)][0]

    return (lambda: inner())()


def by_default(fn=helper):
    return fn()


def closed():
    value = 1.0

    def step():
        return tf.constant(value)

    def change():
        nonlocal value
        value = 2.0

    return step, change


def bound(name, new):
    def change():
        globals()[name] = new

    return change


ROUTES = {
    "a global": (deeper, bound("VALUE", 2.0)),
    "a helper of a helper": (helper, bound("VALUE", 2.0)),
    "another helper": (helper, bound("deeper", lambda: tf.constant(2.0))),
    "a nested function": (nested, bound("VALUE", 2.0)),
    "a default": (by_default, bound("VALUE", 2.0)),
    "a partial": (functools.partial(by_default, helper), bound("VALUE", 2.0)),
    "an attribute": (lambda: tf.constant(HOLDER.value), lambda: setattr(HOLDER, "value", 2.0)),
    "getattr": (
        lambda: tf.constant(getattr(HOLDER, "value")),  # noqa: B009
        lambda: setattr(HOLDER, "value", 2.0),
    ),
    "a dict": (lambda: tf.constant(TABLE["value"]), lambda: TABLE.update(value=2.0)),
    "an object in a list": (
        lambda: tf.constant(TABLE["nested"][0].value),
        lambda: setattr(HOLDER, "value", 2.0),
    ),
    "a callable object": (CALLABLE, lambda: setattr(CALLABLE, "value", 2.0)),
    "a class attribute": (lambda: CALLABLE(), lambda: setattr(Callable, "factor", 2.0)),
    "a property": (
        lambda: tf.constant(CALLABLE.doubled / 2.0),
        lambda: setattr(CALLABLE, "value", 2.0),
    ),
    "an attribute of its own in place of the class'": (
        lambda: CALLABLE(),
        lambda: setattr(CALLABLE, "factor", 2.0),
    ),
    "the first attribute of its own": (
        lambda: tf.constant(EMPTY.value),
        lambda: setattr(EMPTY, "value", 2.0),
    ),
    "a class attribute in place of the base's": (
        CALLABLE.shifted,
        lambda: setattr(Callable, "offset", 1.0),
    ),
    "a method of its own": (
        CALLABLE.shifted,
        lambda: setattr(CALLABLE, "plain", lambda: tf.constant(2.0)),
    ),
    "an attribute that was optional": (
        lambda: tf.constant(getattr(HOLDER, "extra", 1.0)),
        lambda: setattr(HOLDER, "extra", 2.0),
    ),
    "a global in place of a builtin": (
        lambda: tf.constant(float(sum([1.0]))),
        bound("sum", lambda _: 2.0),
    ),
    "a method": (CALLABLE.plain, lambda: setattr(CALLABLE, "value", 2.0)),
    "a closure": closed(),
}


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    for name in ("VALUE", "deeper"):
        monkeypatch.setitem(globals(), name, globals()[name])
    monkeypatch.setattr(Callable, "factor", 1.0)
    HOLDER.value = CALLABLE.value = TABLE["value"] = 1.0
    yield
    for holder, name in (
        (CALLABLE, "factor"),
        (CALLABLE, "plain"),
        (Callable, "offset"),
        (EMPTY, "value"),
        (HOLDER, "extra"),
    ):
        if name in vars(holder):
            delattr(holder, name)
    globals().pop("sum", None)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_a_step_follows_a_name_by_every_route(route, jit):
    fn, change = closed() if route == "a closure" else ROUTES[route]
    step = tfloop.compile(fn, jit_compile=jit)
    assert [float(step()) for _ in range(4)] == [1.0] * 4
    assert step.trace_count == 1
    change()
    assert [float(step()) for _ in range(4)] == [2.0] * 4
    assert step.trace_count == 2


class Stage:
    """Has what it computes with in its class."""

    level = 1.0

    def scaled(self):
        return tf.constant(self.level)


class Later(Stage):
    """Inherits it."""


class Slotted:
    __slots__ = ("level",)


class Wider(Slotted):
    def __init__(self):
        self.level = 1.0
        self.other = None


def on_an_object():
    stage = Stage()
    return stage.scaled, lambda: setattr(stage, "level", 2.0)


def on_a_subclass(monkeypatch):
    stage = Later()
    return stage.scaled, lambda: monkeypatch.setattr(Later, "level", 2.0, raising=False)


def a_method_on_an_object():
    stage = Stage()
    return lambda: stage.scaled(), lambda: setattr(stage, "scaled", lambda: tf.constant(2.0))


def asked_with_a_default():
    holder = types.SimpleNamespace()
    return lambda: tf.constant(getattr(holder, "level", 1.0)), lambda: vars(holder).update(
        level=2.0
    )


def asked_whether_it_is_there():
    holder = types.SimpleNamespace(other=None)
    return (
        lambda: tf.constant(2.0 if hasattr(holder, "level") else 1.0),
        lambda: setattr(holder, "level", None),
    )


def a_slot_that_was_empty():
    holder = Slotted()
    return lambda: tf.constant(getattr(holder, "level", 1.0)), lambda: setattr(holder, "level", 2.0)


def a_slot_beside_attributes():
    holder = Wider()
    return lambda: tf.constant(holder.level), lambda: setattr(holder, "level", 2.0)


@pytest.mark.parametrize(
    "route",
    [
        on_an_object,
        on_a_subclass,
        a_method_on_an_object,
        asked_with_a_default,
        asked_whether_it_is_there,
        a_slot_that_was_empty,
        a_slot_beside_attributes,
    ],
)
def test_what_an_object_gets_hides_what_its_class_or_a_default_gave(route, monkeypatch):
    fn, change = route(monkeypatch) if route is on_a_subclass else route()
    step = tfloop.compile(fn)
    assert [float(step()) for _ in range(4)] == [1.0] * 4
    change()
    assert [float(step()) for _ in range(4)] == [2.0] * 4
    assert step.trace_count == 2


def test_what_an_object_gets_that_no_code_reads_from_it_costs_no_trace():
    stage = Stage()
    step = tfloop.compile(stage.scaled)
    for number in range(6):
        setattr(stage, f"note_{number}", step())
        stage.scalar = number
    assert step.trace_count == 1


class Noting(keras.layers.Layer):
    """Notes its own numbers under names that others have, too."""

    def call(self, x):
        self.value = self.factor = 0.0
        self.value += 3.0
        return x


@pytest.mark.parametrize("name", ["value", "factor"])
def test_what_a_layer_notes_hides_no_attribute_of_that_name_elsewhere(name):
    net, holder = keras.Sequential([Noting()]), types.SimpleNamespace(value=1.0, factor=1.0)
    step = tfloop.compile(lambda x: net(x) * holder.value * holder.factor)
    assert [float(step(tf.ones((1, 1)))[0, 0]) for _ in range(3)] == [1.0] * 3
    setattr(holder, name, 2.0)
    assert float(step(tf.ones((1, 1)))[0, 0]) == 2.0
    net.layers[0].value = 7.0  # its own, which the code sets
    step(tf.ones((1, 1)))
    assert step.trace_count == 2


class Scaled(keras.layers.Layer):
    factor = 1.0

    def call(self, x):
        return x * VALUE * self.factor


class Clipped:
    """A callable that a layer is given."""

    def __init__(self):
        self.most = 1.0

    def __call__(self, x):
        return x * self.most


CLIPPED = Clipped()
PARTS = {
    "a layer": (Scaled, lambda patch: patch.setitem(globals(), "VALUE", 2.0)),
    "the class of a layer": (Scaled, lambda patch: patch.setattr(Scaled, "factor", 2.0)),
    "a call": (Scaled, lambda patch: patch.setattr(Scaled, "call", lambda self, x: x * 2.0)),
    "a function in a layer": (
        lambda: keras.layers.Lambda(lambda x: x * VALUE),
        lambda patch: patch.setitem(globals(), "VALUE", 2.0),
    ),
    "an activation": (
        lambda: keras.layers.Activation(lambda x: x * VALUE),
        lambda patch: patch.setitem(globals(), "VALUE", 2.0),
    ),
    "a callable object in a layer": (
        lambda: keras.layers.Activation(CLIPPED),
        lambda patch: patch.setattr(CLIPPED, "most", 2.0),
    ),
}


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_the_code_of_what_a_model_is_made_of_is_followed(part, functional, monkeypatch):
    make, change = PARTS[part]
    net = keras.Sequential([keras.Input((1,)), make()])
    if functional:
        entry = keras.Input((1,))
        net = keras.Model(entry, make()(entry))
    step = tfloop.compile(lambda x: net(x))
    assert [float(step(tf.ones((1, 1)))[0, 0]) for _ in range(3)] == [1.0] * 3
    change(monkeypatch)
    assert [float(step(tf.ones((1, 1)))[0, 0]) for _ in range(3)] == [2.0] * 3
    assert step.trace_count == 2


class Strong(keras.regularizers.L2):
    """Reads nothing by itself."""


@pytest.mark.parametrize("kind", [keras.regularizers.L2, Strong])
def test_the_strength_of_a_regularizer_is_followed(kind):
    rule = kind(1.0)
    layer = keras.layers.Dense(1, kernel_initializer="ones", kernel_regularizer=rule)
    net = keras.Sequential([keras.Input((1,)), layer])

    @tfloop.compile
    def step(x):
        return tfloop.total_loss(tf.reduce_sum(net(x)) * 0.0, net)

    assert [float(step(tf.ones((1, 1)))) for _ in range(3)] == [1.0] * 3
    rule.l2 = 2.0
    assert [float(step(tf.ones((1, 1)))) for _ in range(3)] == [2.0] * 3
    assert step.trace_count == 2


def test_a_bound_that_keras_keeps_parameters_in_is_followed():
    rule = keras.constraints.MaxNorm(1.0)
    layer = keras.layers.Dense(1, use_bias=False, kernel_constraint=rule)
    net = keras.Sequential([keras.Input((1,)), layer])
    optim = tfloop.ModuleOptimizer(keras.optimizers.SGD(10.0))

    @tfloop.compile
    def step(x):
        with tfloop.Tape() as tape:
            loss = -tf.reduce_sum(net(x))
        optim.step(None, net, tfloop.GradientsParams.from_grads(tape.backward(loss), net))

    for bound in (1.0, 1.0, 1.0, 2.0, 2.0):
        rule.max_value = bound
        step(tf.ones((1, 1)))
        assert float(layer.kernel[0, 0]) == pytest.approx(bound, rel=1e-5)


def test_a_function_that_a_metric_was_given_is_followed(monkeypatch):
    metric = keras.metrics.MeanMetricWrapper(lambda y, x: (y - x) * VALUE)

    @tfloop.compile
    def step(x):
        metric.reset_state()
        metric.update_state(tf.zeros((1,)), x)
        return metric.result()

    assert [float(step(tf.ones((1,)))) for _ in range(3)] == [-1.0] * 3
    monkeypatch.setitem(globals(), "VALUE", 2.0)
    assert float(step(tf.ones((1,)))) == -2.0


def test_an_object_that_the_step_uses_is_exchanged():
    objects = types.SimpleNamespace(
        metric=keras.metrics.Mean(), loss=keras.losses.MeanSquaredError()
    )

    @tfloop.compile
    def step(x):
        objects.metric.update_state(x)
        return objects.loss([[0.0]], [[3.0]])

    for _ in range(3):
        assert float(step(1.0)) == 9.0
    objects.metric = keras.metrics.Mean()
    objects.loss = keras.losses.MeanAbsoluteError()
    assert float(step(5.0)) == 3.0
    assert float(objects.metric.result()) == 5.0


def test_what_the_code_itself_writes_is_no_new_trace():
    class Trainer:
        def __init__(self):
            self.calls = 0
            self.last = None

        @tfloop.compile
        def step(self, x):
            self.calls += 1
            self.last = x * 2.0
            return self.last

    trainer = Trainer()
    assert [float(trainer.step(float(n))) for n in range(5)] == [0.0, 2.0, 4.0, 6.0, 8.0]
    trainer.calls = 7  # as a log would
    trainer.step(1.0)
    assert trainer.step.trace_count == 1


class Log:
    """Has containers that a step notes its runs in, by each of the ways to."""

    def __init__(self):
        self.losses, self.counts, self.last, self.seen = [], {"calls": 0}, {}, set()

    def note(self, value):
        self.losses.append(float(value))
        self.losses.extend([1.0, 2.0])
        self.counts["calls"] += 1
        self.last["value"] = float(value)
        self.seen.add(float(value))


def test_containers_of_numbers_that_the_step_itself_changes_cost_no_trace():
    log, calls = Log(), []

    @tfloop.compile
    def step(x):
        tf.py_function(log.note, [x], [])
        tf.py_function(lambda x: calls.append(float(x)), [x], [])
        return x + len(TABLE["nested"])

    for number in range(8):
        assert float(step(float(number))) == number + 1.0
    assert step.trace_count == 1
    assert calls == log.losses[::3] == [*map(float, range(8))]
    assert (log.counts, log.last) == ({"calls": 8}, {"value": 7.0})


def test_models_in_a_list_that_the_step_adds_numbers_to_are_followed():
    things = [lambda x: x]

    @tfloop.compile
    def step(x):
        tf.py_function(lambda: things.append(1.0) if len(things) > 2 else None, [], [])
        return things[0](x)

    assert [float(step(2.0)) for _ in range(3)] == [2.0] * 3
    things[0] = lambda x: 2.0 * x
    assert float(step(2.0)) == 4.0


def test_other_names_cost_no_trace():
    step = tfloop.compile(lambda x: x * VALUE)
    for n in range(5):
        globals()["SOMETHING"] = n
        HOLDER.value = float(n)
        step(1.0)
    assert step.trace_count == 1


def test_a_number_that_changes_with_each_call_is_right_and_warned_of():
    step = tfloop.compile(lambda: tf.constant(VALUE))
    with pytest.warns(
        UserWarning, match=r"traced anew each time: got another `\S*VALUE` for the 5th"
    ):
        assert [float(step()) for n in range(6) if bound("VALUE", n)() is None] == [*range(6)]


def sequential(*layers):
    return keras.Sequential([keras.Input((2,)), *layers])


def trained(net):
    optim = tfloop.ModuleOptimizer("sgd")

    @tfloop.compile
    def step(x):
        with tfloop.Tape() as tape:
            loss = tf.reduce_sum(net(x) ** 2)
        grads = tfloop.GradientsParams.from_grads(tape.backward(loss), net)
        optim.step(0.1, net, grads)
        return loss

    return step


def test_a_layer_added_between_two_calls_is_run_and_trained():
    net = sequential(keras.layers.Dense(2))
    step = trained(net)
    for _ in range(3):
        step(tf.ones((1, 2)))
    net.add(keras.layers.Dense(3))
    before = net.layers[-1].kernel.numpy()
    wanted = float(tf.reduce_sum(net(tf.ones((1, 2))) ** 2))
    assert float(step(tf.ones((1, 2)))) == pytest.approx(wanted)
    assert (net.layers[-1].kernel.numpy() != before).any()
    net.pop()
    step(tf.ones((1, 2)))
    assert step.trace_count == 3


def test_a_layer_that_is_replaced_is_followed():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [keras.layers.Dense(2, kernel_initializer="ones")]

        def call(self, x):
            return self.blocks[0](x)

    net = Net()
    x = tf.ones((1, 2))
    assert float(net(x)[0, 0]) == 2.0
    step = tfloop.compile(lambda x: net(x)[0, 0])
    assert [float(step(x)) for _ in range(3)] == [2.0] * 3
    net.blocks[0] = keras.layers.Dense(2, kernel_initializer="zeros")
    assert float(step(x)) == 0.0


def test_settings_of_layers_are_followed():
    net = sequential(keras.layers.Dense(1, kernel_initializer="ones"), keras.layers.Dropout(1e-7))
    step = tfloop.compile(lambda x: tfloop.train(net)(x)[0, 0])
    x = tf.ones((1, 2))
    assert [float(step(x)) for _ in range(3)] == pytest.approx([2.0] * 3)
    net.layers[0].activation = keras.activations.relu6
    net.layers[1].rate = 0.999999
    assert float(step(x)) in (0.0, pytest.approx(2e6, rel=0.1))
    assert step.trace_count == 2


def test_evaluation_and_fit_beside_it_cost_no_trace():
    net = sequential(keras.layers.Dense(2), keras.layers.BatchNormalization())
    step = trained(net)
    step(tf.ones((1, 2)))
    net(tf.ones((3, 2)))
    net.compile("sgd", "mse")
    net.evaluate(np.ones((2, 2)), np.ones((2, 2)), verbose=0)
    net.predict(np.ones((2, 2)), verbose=0)
    net.summary(print_fn=lambda *_, **__: None)
    step(tf.ones((1, 2)))
    assert step.trace_count == 1


def test_lora_weights_beside_a_frozen_kernel_are_trained_from_the_next_call():
    layer = keras.layers.Dense(2)
    net = sequential(layer, keras.layers.Dense(1))
    layer._kernel.trainable = False
    step = trained(net)
    for _ in range(3):
        step(tf.ones((1, 2)))
    layer.enable_lora(1)
    before = layer.lora_kernel_b.numpy()
    step(tf.ones((1, 2)))
    assert (layer.lora_kernel_b.numpy() != before).any()


class Owner:
    def __init__(self, value):
        self.value = tf.Variable(value)

    @tfloop.compile
    def step(self):
        return self.value + 0.0


def test_a_shallow_copy_of_an_object_runs_its_own_step():
    one = Owner(1.0)
    one.step()
    two = copy.copy(one)
    two.value = tf.Variable(2.0)
    assert (float(one.step()), float(two.step())) == (1.0, 2.0)
    assert one.step is one.step
    assert one.step is not two.step


def test_a_step_of_an_instance_can_be_replaced_and_taken_away():
    one = Owner(1.0)
    one.step = lambda: 7.0
    assert one.step() == 7.0
    del one.step
    assert float(one.step()) == 1.0


@pytest.mark.parametrize("jit", [False, True])
def test_an_optional_argument_may_come_later(jit):
    @tfloop.compile(jit_compile=jit)
    def f(x, scale=None):
        return x if scale is None else x * scale

    assert float(f(1.0)) == 1.0
    assert [float(f(1.0, 2.0)) for _ in range(3)] == [2.0] * 3
    assert float(f(3.0, scale=2.0)) == 6.0
    assert [float(f(x=3.0)) for _ in range(3)] == [3.0] * 3
    with pytest.raises(TypeError, match="missing"):
        f()


@pytest.mark.parametrize("jit", [False, True])
def test_a_step_may_take_any_number_of_arguments(jit):
    @tfloop.compile(jit_compile=jit)
    def step(*numbers, **named):
        return tf.add_n([tf.constant(0.0), *numbers, *named.values()])

    for _ in range(4):
        assert float(step(1.0)) == 1.0
        assert float(step(1.0, 2.0)) == 3.0
        assert float(step()) == 0.0
        assert float(step(1.0, more=2.0)) == 3.0
        assert float(step(more=2.0, most=3.0)) == 5.0
        assert float(step(1.0, most=3.0)) == 4.0
    assert step.trace_count == 6
    numbers = tf.constant([1.0, 2.0])
    for rest, expected in (((), [1.0, 2.0]), ((3.0,), [4.0, 5.0])):
        assert step.run(iter(numbers), *rest, steps=2).numpy().tolist() == expected


def test_an_optional_argument_may_come_later_in_runs_and_methods():
    class Trainer:
        @tfloop.compile
        def f(self, x, scale=None):
            return x if scale is None else x * scale

    trainer, batches = Trainer(), iter([tf.constant(float(n)) for n in range(6)])
    assert trainer.f.run(batches, steps=2).numpy().tolist() == [0.0, 1.0]
    assert trainer.f.run(batches, 10.0, steps=2).numpy().tolist() == [20.0, 30.0]
    assert trainer.f.run(batches, scale=10.0, steps=2).numpy().tolist() == [40.0, 50.0]
    assert float(trainer.f(1.0)) == 1.0
    assert float(trainer.f(1.0, 2.0)) == 2.0


def test_parts_of_a_model_are_compared_once():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.stem, self.head = keras.layers.Dense(2), keras.layers.Dense(1)

        def call(self, x):
            return self.head(self.stem(x))

    net = Net()
    net(tf.ones((1, 2)))
    step = tfloop.compile(lambda x: net(x))
    step(tf.ones((1, 2)))
    assert len(step._program._watched) == 1


def test_the_only_attribute_of_a_module_is_followed():
    class Bare(tf.Module):
        def __init__(self):
            self.factor = 2.0

        def __call__(self, x):
            return self.factor * x

    bare = Bare()
    step = tfloop.compile(lambda x: bare(x))
    assert [float(step(1.0)) for _ in range(3)] == [2.0] * 3
    bare.factor = 3.0
    assert float(step(1.0)) == 3.0


def test_what_a_step_does_not_ask_for_may_come_to_its_holders():
    step = tfloop.compile(CALLABLE.shifted)
    step()
    CALLABLE.log = []
    globals()["unrelated"] = 1.0
    try:
        assert float(step()) == 1.0
        assert step.trace_count == 1
    finally:
        del CALLABLE.log, globals()["unrelated"]

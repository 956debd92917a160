"""`compile`: when it traces, and that nothing else differs from the plain function."""

import copy
import enum
import threading
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf
from optimizer_helpers import Words, assert_close, values_of

import tfloop
from tfloop import GradientsParams, ModuleLearningRate, ModuleOptimizer, ParamGroup

KERNEL, BIAS = "dense.kernel", "dense.bias"


class Scalar(tf.Module):
    def __init__(self, value=0.0):
        super().__init__()
        self.w = tf.Variable(value, name="w")


def one_step(optim, model, lr):
    optim.step(lr, model, GradientsParams({"w": tf.constant(-1.0)}))


# Forms.


def test_it_is_a_decorator_with_and_without_options_and_a_call():
    def double(x):
        """Twice."""
        return 2 * x

    @tfloop.compile
    def one(x):
        """Twice."""
        return 2 * x

    @tfloop.compile(jit_compile=True)
    def two(x):
        return 2 * x

    for step in (one, two, tfloop.compile(double), tfloop.compile(double, jit_compile=True)):
        assert float(step(4.0)) == 8.0
        assert step.trace_count == 1
    assert (one.__name__, one.__doc__) == ("one", "Twice.")
    assert tfloop.compile(one).python_function is one.python_function
    assert float(tfloop.compile(lambda x: x + 1)(1.0)) == 2.0


def outer_factory():
    @tfloop.compile
    def inner(batch: tf.Tensor, lr: float, scale=2.0):
        return batch * lr * scale

    return inner


def test_it_shows_the_function_as_it_was_written():
    step = outer_factory()
    assert repr(step) == "<CompiledStep inner(batch, lr, scale=2.0): 0 traces>"
    step(1.0, 2.0)
    jitted = tfloop.compile(Trainer(3.0).step, jit_compile=True)
    assert repr(step) == "<CompiledStep inner(batch, lr, scale=2.0): 1 trace>"
    assert repr(jitted) == "<CompiledStep step(x, *, plus=0.0), jit_compile=True: 0 traces>"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda step: step(1.0), "missing a required argument: 'lr'"),
        (lambda step: step(1.0, 1.0, 1.0, 1.0), "too many positional arguments"),
        (lambda step: step(1.0, 1.0, size=1), "an unexpected keyword argument 'size'"),
        (lambda step: step.run(iter([1.0, 1.0]), steps=2), "missing a required argument: 'lr'"),
        (lambda step: tf.function(lambda: step(1.0))(), "missing a required argument: 'lr'"),
    ],
)
def test_a_wrong_argument_is_named_beside_the_users_function(call, text):
    step = outer_factory()
    step(1.0, 1.0)
    with pytest.raises(TypeError, match=r"`inner\(batch, lr, scale=2.0\)` can't be.* " + text):
        call(step)


def test_a_type_error_in_the_step_stays_the_users():
    with pytest.raises(TypeError, match="mine"):
        tfloop.compile(lambda x: raised(TypeError("mine")))(1.0)


def raised(error):
    raise error


class Trainer:
    """A class with compiled methods, one under another name than it was defined with."""

    def __init__(self, factor):
        self.factor = factor

    @tfloop.compile
    def step(self, x, *, plus=0.0):
        return self.factor * x + plus

    def _other(self, x):
        return self.factor - x

    other = tfloop.compile(_other)

    @staticmethod
    @tfloop.compile
    def plain(x):
        return -x


def test_methods_have_a_step_for_each_instance():
    two, three = Trainer(2.0), Trainer(3.0)
    assert [float(two.step(1.0)), float(three.step(1.0, plus=4.0))] == [2.0, 7.0]
    assert [float(two.step(5.0)), float(two.other(1.0)), float(two.plain(1.0))] == [10.0, 1.0, -1.0]
    assert two.step is two.step is not three.step
    assert two.step.trace_count == 1
    assert two._other(1.0) == 1.0
    assert isinstance(Trainer.step, type(two.step))


@pytest.mark.parametrize("overridden", ["by a compiled method", "by a plain one"])
def test_a_method_that_overrides_a_compiled_one_calls_it_by_super(overridden):
    """Each class has a step of its own on an instance; none takes the place of another."""

    class Parent:
        def __init__(self, value):
            self.value = value

        @tfloop.compile
        def step(self, x):
            return x * self.value

    def step(self, x):
        return super(Child, self).step(x) + 1.0

    made = tfloop.compile(step) if overridden == "by a compiled method" else step
    Child = type("Child", (Parent,), {"step": made})  # noqa: N806
    Grandchild = type("Grandchild", (Child,), {})  # noqa: N806
    for kind in (Child, Grandchild):
        one, other = kind(2.0), kind(5.0)
        twin = copy.copy(one)
        assert [float(o.step(3.0)) for o in (one, other, twin, Parent(4.0)) * 3] == [
            7,
            16,
            7,
            12,
        ] * 3
        twin.value, deep = 3.0, copy.deepcopy(other)
        deep.value = 6.0
        assert [float(o.step(3.0)) for o in (one, twin, other, deep) * 3] == [7, 10, 16, 19] * 3
        if overridden == "by a compiled method":
            assert one.step.trace_count == 1


def test_methods_of_models_and_copies_work():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
            self(np.zeros((1, 2)))

        def call(self, x):
            return self.dense(x)

        @tfloop.compile
        def total(self, x):
            return tf.reduce_sum(self(x))

    net = Net()
    assert float(net.total(np.ones((3, 2), np.float32))) == 6.0
    assert list(tfloop.named_parameters(net)) == ["dense.kernel"]
    trainer = Trainer(2.0)
    trainer.step(1.0)
    other = copy.deepcopy(trainer)
    other.factor = 5.0
    assert [float(other.step(1.0)), float(trainer.step(1.0))] == [5.0, 2.0]


def test_callable_objects_and_partials_can_be_compiled():
    class Add:
        _lock = "mine"

        def __call__(self, x, y):
            return x + y

    assert float(tfloop.compile(Add())(1.0, 2.0)) == 3.0


class Slotted:
    __slots__ = ()

    @tfloop.compile
    def step(self):
        return 1


def a_generator():
    yield 1


async def a_coroutine():
    return 1


BAD = {
    "a number": (lambda: tfloop.compile(0.5), r"needs a function: got float 0.5, expected a step"),
    "an option by position": (lambda: tfloop.compile(True), "needs a function: got bool True"),
    "a result": (
        lambda: tfloop.compile(tf.constant(1.0)),
        "needs a function: got .*called already",
    ),
    "a text": (lambda: tfloop.compile("step"), "needs a function: got str 'step'"),
    "a list": (
        lambda: tfloop.compile([a_generator]),
        "needs a function: got an object of type list",
    ),
    "a class": (lambda: tfloop.compile(Trainer), "needs a function: got"),
    "a tf.function": (
        lambda: tfloop.compile(tf.function(lambda: 1)),
        r"needs a plain function: got a tf.function.*`tfloop.compile\(fn.python_function\)`",
    ),
    "a generator": (lambda: tfloop.compile(a_generator), "needs a function that returns: got"),
    "a coroutine": (lambda: tfloop.compile(a_coroutine), "a generator or coroutine, expected `ret"),
    "no bool": (
        lambda: tfloop.compile(jit_compile="yes"),
        r"\(jit_compile=...\)` got str 'yes', expected True or False",
    ),
    "another no bool": (lambda: tfloop.compile(a_generator, jit_compile=1), "got int 1, expected"),
    "a method without a place": (
        lambda: Slotted().step,
        r"can't keep the step 'step': got .*Slotted, which has no `__dict__`.*`self.step = tfloop",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_compiled_raises_at_once(name):
    make, message = BAD[name]
    with pytest.raises(TypeError, match="(?s)`tfloop.compile.*" + message):
        make()


# Traces.


@pytest.mark.parametrize("jit", [False, True])
def test_rates_and_last_batches_cost_at_most_two_traces(jit):
    @tfloop.compile(jit_compile=jit)
    def step(batch, lr, epoch):
        return tf.reduce_sum(batch["x"]) * lr + tf.cast(epoch, tf.float32)

    for epoch, (size, lr) in enumerate(
        zip((32, 32, 7, 32, 5, 9), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6), strict=True)
    ):
        found = step({"x": np.ones((size, 2), np.float32)}, lr, epoch)
        np.testing.assert_allclose(found, 2 * size * lr + epoch, rtol=1e-6)
    assert step.trace_count == 2


def test_numbers_of_every_kind_are_tensors_and_bools_are_python():
    class Mode(enum.IntEnum):
        TRAIN = 1

    seen = []

    @tfloop.compile
    def step(*leaves):
        seen[:] = leaves
        return [leaf for leaf in leaves if tf.is_tensor(leaf)]

    numbers = (1, 2**40, 1.5, np.float64(1.5), np.int8(3), np.float16(0.5), np.arange(3))
    found = step(*numbers, True, None, "text", Mode.TRAIN, 2**70)
    assert [t.dtype.name for t in found] == [
        *("int32", "int64", "float32", "float32", "int32", "float32", "int64")
    ]
    assert [int(t) for t in found[:2]] == [1, 2**40]
    assert seen[-5:] == [True, None, "text", Mode.TRAIN, 2**70]
    step(*numbers, False, None, "text", Mode.TRAIN, 2**70)  # a bool is a trace of its own
    assert step.trace_count == 2


def test_python_floats_are_float64_where_keras_computes_in_float64():
    keras.config.set_floatx("float64")
    try:
        assert float(tfloop.compile(lambda x: x)(0.1)) == 0.1
    finally:
        keras.config.set_floatx("float32")


def test_structures_cross_as_arguments_and_results():
    @tfloop.compile
    def step(batch, grads, rates, *, scale):
        x, (y, flag) = batch
        assert flag is True
        return {"x": x + y}, grads.scale(scale), rates, (None, "text")

    grads = GradientsParams(
        {
            "a": tf.ones(2),
            "b": tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([3, 2])),
        }
    )
    for rate in (0.5, 0.25):
        rates = ModuleLearningRate(rate).with_group(ParamGroup.from_name("a"), multiplier=0.5)
        outputs, scaled, back, rest = step(([1, 2], (3.0, True)), grads, rates, scale=rate)
        assert isinstance(scaled, GradientsParams)
        assert isinstance(scaled["b"], tf.IndexedSlices)
        np.testing.assert_array_equal(scaled["a"], [rate, rate])
        assert isinstance(back, ModuleLearningRate)
        assert float(back.rate_of(("a",))) == rate / 2
        assert rest == (None, "text")
    assert step.trace_count == 1


def test_autograph_reaches_the_users_function_and_what_it_calls():
    def halve_until_small(x):
        while x > 1.0:
            x = x / 2.0
        return x

    @tfloop.compile
    def step(x, count):
        total = tf.constant(0.0)
        for i in tf.range(count):
            if i % 2 == 0:
                total += halve_until_small(x)
        return total

    assert float(step(12.0, 5)) == 3 * 0.75
    assert float(step(0.5, 2)) == 0.5
    assert step.trace_count == 1


def test_a_step_under_a_tape_is_differentiable():
    square = tfloop.compile(lambda x: x * x)
    x = tf.constant(3.0)
    with tfloop.Tape(watch=[x]) as tape:
        y = square(x)
    assert float(tape.backward(y).wrt(x)) == 6.0


# Errors.


def test_an_error_while_tracing_shows_the_users_file_and_line():
    @tfloop.compile
    def step(x):
        scaled = 2 * x
        return tf.matmul(scaled, tf.ones((7, 7)))  # the faulty line

    with pytest.raises(ValueError, match="Dimensions must be equal") as raised:
        step(tf.ones((3, 3)))
    text = "".join(traceback.format_exception(raised.value))
    assert "test_compile.py" in text
    assert "return tf.matmul(scaled, tf.ones((7, 7)))" in text


def test_an_error_at_run_time_shows_the_users_file():
    @tfloop.compile
    def step(x):
        return tf.debugging.check_numerics(1.0 / x, "the inverse")

    with pytest.raises(tf.errors.InvalidArgumentError, match="(?s)test_compile.py.*the inverse"):
        step(0.0)


def test_an_exception_of_the_users_own_passes():
    class Mine(Exception):
        pass

    @tfloop.compile
    def step():
        raise Mine("stop")

    with pytest.raises(Mine, match="stop"):
        step()
    with pytest.raises(Mine):  # and again
        step()


# Stale exactly when it must be.


def test_nothing_but_its_own_models_makes_a_step_stale():
    model, other = Words(), Words()
    optim = ModuleOptimizer("adam").build(model)
    unrelated = ModuleOptimizer("adam").build(other)
    given = keras.optimizers.SGD(0.5)
    mine = ModuleOptimizer(given).build(Words())
    assert int(mine.iterations) == 0

    @tfloop.compile
    def step(ids):
        with tfloop.Tape() as tape:
            loss = tf.reduce_sum(tfloop.train(model)(ids))
        grads = GradientsParams.from_grads(tape.backward(loss), model)
        optim.step(0.1, model, grads)
        return loss

    ids = np.array([[1, 2]], np.int32)
    step(ids)
    other.dense.trainable = False
    unrelated.with_group(ParamGroup.from_name("bias"), "sgd")
    given.learning_rate = 0.25
    optim.build(model)
    optim.summary(model)
    step(ids)
    assert step.trace_count == 1
    model.embedding.trainable = False
    step(ids)
    assert step.trace_count == 2
    step(ids)
    assert step.trace_count == 2


@pytest.mark.parametrize("jit", [False, True])
def test_the_rate_of_the_optimizer_given_is_live(jit):
    given, model = keras.optimizers.SGD(1.0), Scalar()
    optim = ModuleOptimizer(given)

    @tfloop.compile(jit_compile=jit)
    def step():
        one_step(optim, model, None)
        return model.w + 0.0

    assert float(step()) == 1.0
    given.learning_rate = 0.5
    assert float(step()) == 1.5
    assert step.trace_count == 1
    given.learning_rate = keras.optimizers.schedules.PiecewiseConstantDecay([2], [8.0, 4.0])
    assert float(step()) == 9.5  # the third update of the group: step 2
    assert step.trace_count == 2
    given.learning_rate = keras.optimizers.schedules.PiecewiseConstantDecay([3], [2.0, 16.0])
    assert float(step()) == 11.5
    assert float(step()) == 27.5
    assert step.trace_count == 3


@pytest.mark.parametrize("jit", [False, True])
def test_a_function_as_rate_is_asked_before_every_call(jit):
    rates = {"now": 1.0}
    model = Scalar()
    optim = ModuleOptimizer(keras.optimizers.SGD(lambda: rates["now"]))

    @tfloop.compile(jit_compile=jit)
    def step():
        one_step(optim, model, None)
        return model.w + 0.0

    found = []
    for rate in (1.0, 0.5, 0.25):
        rates["now"] = rate
        found.append(float(step()))
    assert found == [1.0, 1.5, 1.75]
    assert step.trace_count == 1
    rates["now"] = float("nan")
    if not jit:
        with pytest.raises(tf.errors.InvalidArgumentError, match="a rate that is not sound"):
            step()
        assert float(model.w) == 1.75


def test_a_function_as_rate_is_asked_once_for_each_step():
    rates, model = iter([1.0, 0.5, 0.25]), Scalar()
    optim = ModuleOptimizer(keras.optimizers.SGD(lambda: tf.constant(next(rates))))
    step = tfloop.compile(lambda: one_step(optim, model, None))
    for expected in (1.0, 1.5, 1.75):
        step()
        assert float(model.w) == expected


def test_a_function_that_reads_a_variable_as_rate_stays_in_the_graph():
    rate, model = tf.Variable(1.0), Scalar()
    optim = ModuleOptimizer(keras.optimizers.SGD(lambda: rate / 2.0))
    step = tfloop.compile(lambda: one_step(optim, model, None))
    step()
    rate.assign(4.0)
    step()
    assert float(model.w) == 2.5
    assert step.trace_count == 1


def test_a_step_follows_what_a_container_holds():
    models = {"net": Scalar(1.0)}
    step = tfloop.compile(lambda: models["net"].w * 2.0)
    assert [float(step()) for _ in range(3)] == [2.0] * 3
    models["net"] = Scalar(5.0)
    assert float(step()) == 10.0
    assert step.trace_count == 2


def test_several_steps_may_share_an_optimizer():
    model = Words()
    optim = ModuleOptimizer(keras.optimizers.SGD(1.0))

    def make(path, shape):
        return tfloop.compile(
            lambda: optim.step(None, model, GradientsParams({path: tf.ones(shape)})) and None
        )

    bias, kernel = make(BIAS, (3,)), make(KERNEL, (4, 3))
    bias()
    kernel()
    optim.with_group(ParamGroup.from_name("bias"), None)
    before = values_of(model)
    bias()
    kernel()
    np.testing.assert_array_equal(model.dense.bias, before[BIAS])
    assert (bias.trace_count, kernel.trace_count) == (2, 2)


# Nested, eager, threaded.


def test_a_step_nested_in_another_follows_the_changes_of_the_outer_one():
    model = Scalar()
    optim = ModuleOptimizer(keras.optimizers.SGD(1.0))
    inner = tfloop.compile(lambda: one_step(optim, model, None))

    @tfloop.compile
    def outer():
        inner()

    inner()  # traced before the outer one
    outer()
    assert float(model.w) == 2.0
    optim.with_group(ParamGroup.all(), keras.optimizers.SGD(0.25), None)
    outer()
    inner()
    assert float(model.w) == 2.5


def test_a_step_nested_in_a_foreign_function_raises_when_it_is_too_old():
    model = Scalar()
    optim = ModuleOptimizer(keras.optimizers.SGD(1.0))
    inner = tfloop.compile(lambda: one_step(optim, model, None))
    inner()
    foreign = tf.function(lambda: inner())
    foreign()
    optim.with_group(ParamGroup.all(), keras.optimizers.SGD(0.25))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"`optim.build\(model\)`"):
        foreign()
    assert float(model.w) == 2.0
    inner()
    assert float(model.w) == 2.25


def test_a_function_of_ones_own_inside_a_step_raises_when_it_is_too_old():
    model = Scalar()
    optim = ModuleOptimizer(keras.optimizers.SGD(1.0))
    own = tf.function(lambda: one_step(optim, model, None))
    step = tfloop.compile(lambda: own())
    for _ in range(4):
        step()
    assert float(model.w) == 4.0
    optim.with_clipping(tfloop.GradientClipping.by_value(0.25))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"`optim.build\(model\)`"):
        step()
    assert float(model.w) == 4.0


def test_many_steps_are_not_taken_for_one_that_is_traced_again_and_again(caplog):
    def made(number):
        def step(x):
            return x + number

        return tfloop.compile(step)

    with caplog.at_level("WARNING", "tensorflow"):
        for number in range(6):
            made(float(number))(tf.constant(1.0))
        assert not caplog.records
        words = tfloop.compile(lambda x, words: x)
        for number in range(6):
            words(tf.constant(1.0), str(number))
        assert "triggered tf.function retracing" in caplog.text


def test_functions_can_be_run_eagerly_for_debugging():
    model = Scalar()
    optim = ModuleOptimizer(keras.optimizers.SGD(1.0))
    values = []

    @tfloop.compile
    def step(lr):
        values.append(tf.executing_eagerly() and float(lr))
        one_step(optim, model, lr)

    tf.config.run_functions_eagerly(True)
    try:
        step(0.5)
        step(0.25)
    finally:
        tf.config.run_functions_eagerly(False)
    assert values == [0.5, 0.25]
    assert step.trace_count == 0
    assert float(model.w) == 0.75
    step(0.25)
    assert step.trace_count == 1


def test_a_step_may_be_called_from_several_threads():
    model = Scalar()
    optim = ModuleOptimizer(keras.optimizers.SGD(1.0))
    step = tfloop.compile(lambda x: one_step(optim, model, None) or tf.reduce_sum(x))
    barrier, errors = threading.Barrier(4), []

    def work(size):
        try:
            barrier.wait()
            for _ in range(5):
                assert float(step(np.ones((size,), np.float32))) == size
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n + 1,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert float(model.w) == 20.0
    assert step.trace_count <= 2


@pytest.mark.parametrize("jit", [False, True])
def test_a_compiled_step_equals_the_eager_one(jit):
    def run(compiled):
        model = Words()
        optim = ModuleOptimizer(keras.optimizers.AdamW(0.01)).with_group(
            ParamGroup.from_name("bias"), keras.optimizers.SGD(0.1, momentum=0.9)
        )

        def step(ids, lr):
            with tfloop.Tape() as tape:
                loss = tf.reduce_mean(tfloop.train(model)(ids) ** 2)
            grads = GradientsParams.from_grads(tape.backward(loss), model)
            optim.step(lr, model, grads)

        step = tfloop.compile(step, jit_compile=jit) if compiled else step
        rng = np.random.default_rng(0)
        for size in (4, 4, 3):
            step(rng.integers(0, 6, (size, 2)).astype(np.int32), 0.01)
        return values_of(model)

    assert_close(run(True), run(False), 2e-6)


class Owner:
    """A step as a method that uses an attribute."""

    def __init__(self):
        self.model, self.optim = Scalar(), ModuleOptimizer("sgd")

    @tfloop.compile
    def step(self, lr):
        one_step(self.optim, self.model, lr)


def test_a_name_bound_to_another_optimizer_or_model_is_followed():
    model, optim = Scalar(), ModuleOptimizer("sgd")

    def helper(lr):
        one_step(optim, model, lr)

    @tfloop.compile
    def step(lr):
        helper(lr)

    for _ in range(3):
        step(1.0)
    old, optim = optim, ModuleOptimizer("sgd")
    for _ in range(3):
        step(1.0)
    assert (int(old.iterations), int(optim.iterations)) == (3, 3)
    assert float(model.w) == 6.0
    first, model, optim = model, Scalar(), ModuleOptimizer("sgd")
    step(1.0)
    assert (float(first.w), float(model.w)) == (6.0, 1.0)
    assert step.trace_count == 3
    owner = Owner()
    for _ in range(3):
        owner.step(1.0)
    owner.optim = ModuleOptimizer(keras.optimizers.SGD(0.5))
    owner.step(1.0)
    assert int(owner.optim.iterations) == 1
    assert float(owner.model.w) == 4.0


def test_every_trace_of_a_step_goes_on_being_followed():
    net, other = Scalar(1.0), Scalar(1.0)

    @tfloop.compile
    def step(x, deep):
        # Each trace uses a model of its own.
        return tfloop.train(net)(x) if deep else tfloop.train(other)(x)

    rate = keras.Sequential([keras.Input((1,)), keras.layers.Dropout(1e-7)])
    net, other = rate, keras.Sequential([keras.Input((1,)), keras.layers.Dropout(1e-7)])
    x = tf.ones((1, 1))
    for deep in (True, False, True, False):
        assert float(step(x, deep)[0, 0]) == pytest.approx(1.0)
    for model, deep in ((net, True), (other, False)):
        model.layers[-1].rate = 0.999999
        assert float(step(x, deep)[0, 0]) != pytest.approx(1.0)

"""Values that overwrite a variable: kept at their maximum, and never taken for gradients.

The references are Keras' own optimizers, and closed forms of `Amax`.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_every_mode

import tfloop
from tfloop import GradientClipping, GradientsAccumulator, GradientsParams, LossScaler

modes = pytest.mark.parametrize("mode", ["eager", "graph", "jit"])
LARGE, SMALL = tf.constant([[8.0], [-2.0]]), tf.constant([[2.0], [-1.0]])
W, AMAX = "amax.w", "amax.amax"


class Amax(keras.layers.Layer):
    """Multiplies by `w`, and notes the largest magnitude of its input, as a float8 layer does."""

    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(), initializer="ones")
        self.amax = self.add_weight(
            name="amax", shape=(1,), initializer="ones", overwrite_with_gradient=True
        )

    def call(self, x):
        @tf.custom_gradient
        def multiplied(x, w, amax):
            def backward(upstream):
                largest = tf.reshape(tf.reduce_max(tf.abs(x)), [1])
                return upstream * w, tf.reduce_sum(upstream * x), largest

            return x * w, backward

        return multiplied(x, tf.convert_to_tensor(self.w), tf.convert_to_tensor(self.amax))


def net():
    return keras.Sequential([keras.Input((1,)), Amax()])


def grads_of(model, x, scaler=None):
    """Of the mean: 3 for LARGE, 0.5 for SMALL."""
    with tfloop.Tape(scaler=scaler) as tape:
        loss = tf.reduce_mean(tfloop.train(model)(x))
    return GradientsParams.from_grads(tape.backward(loss), model)


def optimizer(model, **options):
    return tfloop.ModuleOptimizer(keras.optimizers.SGD(0.1), **options).build(model)


def state(model):
    layer = model.layers[0]
    return float(layer.w), float(layer.amax[0])


@modes
@pytest.mark.parametrize(("reduction", "w"), [("sum", 0.65), ("mean", 0.825)])
def test_a_window_keeps_the_largest(mode, reduction, w):
    model, window = net(), GradientsAccumulator(reduction=reduction)
    optim = optimizer(model)
    window.build(model)
    accumulate = in_every_mode(lambda x: window.accumulate(model, grads_of(model, x)))[mode]
    step = in_every_mode(lambda: optim.step(None, model, window) and None)[mode]
    accumulate(LARGE)
    accumulate(SMALL)
    step()
    np.testing.assert_allclose(state(model), (w, 8.0), rtol=1e-6)
    accumulate(SMALL)  # a window of its own knows nothing of the one before
    step()
    assert state(model)[1] == 2.0


@modes
def test_a_micro_batch_of_weight_0_has_no_value(mode):
    model, window = net(), GradientsAccumulator(reduction="mean")
    optim = optimizer(model)
    window.build(model)

    def accumulate(value, weight):
        grads = GradientsParams({W: tf.constant(1.0), AMAX: value})
        window.accumulate(model, grads, weight=weight)

    accumulate = in_every_mode(accumulate)[mode]
    step = in_every_mode(lambda: optim.step(None, model, window) and None)[mode]
    accumulate(tf.constant([np.nan]), tf.constant(0.0))
    accumulate(tf.constant([-3.0]), tf.constant(2.0))  # below the 0 that a buffer begins with
    accumulate(tf.constant([9.0]), tf.constant(0.0))
    step()
    np.testing.assert_allclose(state(model), (0.9, -3.0), rtol=1e-6)


@modes
def test_a_window_without_a_value_leaves_the_variable_as_it_is(mode):
    model, window = net(), GradientsAccumulator(reduction="mean")
    optim = optimizer(model)
    window.build(model)

    def whole(read):
        window.accumulate(model, GradientsParams({W: tf.constant(1.0)}))
        optim.step(None, model, window.grads() if read else window)

    in_every_mode(lambda: whole(False))[mode]()
    in_every_mode(lambda: whole(True))[mode]()
    np.testing.assert_allclose(state(model), (0.8, 1.0), rtol=1e-6)


def test_a_window_is_saved_and_restored_with_its_values(tmp_path):
    model, window = net(), GradientsAccumulator(reduction="mean")
    optim = optimizer(model)
    window.accumulate(model, grads_of(model, LARGE))
    checkpoint = tfloop.Checkpoint(tmp_path, model=model, optim=optim, window=window)
    checkpoint.save(step=1)
    window.reset()
    checkpoint.restore()
    window.accumulate(model, grads_of(model, SMALL))
    optim.step(None, model, window)
    np.testing.assert_allclose(state(model), (0.825, 8.0), rtol=1e-6)


@modes
@pytest.mark.parametrize("num", [2, 3])  # 3 pieces of 2, 1 and 1 rows would be 2 and 2 here
def test_pieces_keep_the_largest(mode, num):
    model = net()
    optim = optimizer(model)

    def step(x):
        grads, _ = tfloop.microbatch(lambda x: (grads_of(model, x), None), x, num=num)
        optim.step(None, model, grads)

    in_every_mode(step)[mode](tf.concat([SMALL, LARGE], 0))
    np.testing.assert_allclose(state(model), (0.825, 8.0), rtol=1e-6)


@modes
def test_a_piece_of_weight_0_has_no_value(mode):
    model = net()
    optim = optimizer(model)

    def step(x):
        grads, _ = tfloop.microbatch(
            lambda x: (grads_of(model, x), None), x, num=2, weight=lambda x: x[0, 0] - 2.0
        )
        optim.step(None, model, grads)

    in_every_mode(step)[mode](tf.concat([-SMALL + 4.0, LARGE], 0))  # 2 and 5, then 8 and -2
    assert state(model)[1] == 8.0
    in_every_mode(step)[mode](tf.constant([[2.0], [50.0], [3.0], [1.0]]))
    assert state(model)[1] == 3.0


@modes
def test_a_scaler_neither_unscales_nor_clips_it(mode):
    model = net()
    clipping = GradientClipping.by_global_norm(1.0)
    optim = optimizer(model, scaler=LossScaler(1000.0), clipping=clipping)
    step = in_every_mode(lambda x: optim.step(None, model, grads_of(model, x, optim.scaler)) and 0)
    step[mode](LARGE)
    np.testing.assert_allclose(state(model), (0.9, 8.0), rtol=1e-5)


def test_the_variable_itself_is_asked_what_its_gradient_is():
    model = net()
    optim = optimizer(model, scaler=LossScaler(1024.0))
    with tfloop.Tape(scaler=optim.scaler) as tape:
        loss = tf.reduce_mean(model(LARGE))
    grads = tape.backward(loss, wrt=model)
    assert float(grads.wrt(model.layers[0].amax)[0]) == 8.0
    assert float(grads.wrt(model.layers[0].w)) == 3.0


def test_a_value_that_is_not_finite_skips_the_update_as_in_keras():
    model, twin = net(), net()
    optim = optimizer(model, scaler=LossScaler(1024.0))
    given = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optim.step(None, model, GradientsParams({W: tf.constant(1.0), AMAX: tf.constant([np.inf])}))
    given.apply([tf.constant(1024.0), tf.constant([np.inf])], twin.trainable_variables)
    assert state(model) == state(twin) == (1.0, 1.0)


class Half(keras.constraints.Constraint):
    def __call__(self, value):
        return value * 0.0 + 0.5


def test_no_constraint_and_no_decay_touches_it():
    model, twin = net(), net()
    for layer in (model.layers[0], twin.layers[0]):
        layer.amax.constraint = layer.w.constraint = Half()
    optim = tfloop.ModuleOptimizer(keras.optimizers.SGD(0.1, weight_decay=0.5))
    optim.step(None, model, grads_of(model, LARGE))
    given = keras.optimizers.SGD(0.1, weight_decay=0.5)
    given.apply([tf.constant(3.0), tf.constant([8.0])], twin.trainable_variables)
    assert state(model) == state(twin) == (0.5, 8.0)


def test_a_raw_variable_may_say_it_too():
    root = tf.Module()
    root.amax = tf.Variable([1.0])
    root.amax.overwrite_with_gradient = True
    optim = tfloop.ModuleOptimizer(keras.optimizers.SGD(0.1))
    optim.step(None, root, GradientsParams({"amax": tf.constant([8.0])}))
    assert float(root.amax[0]) == 8.0


@modes
def test_the_algebra_of_gradients_leaves_values_alone(mode):
    model = net()

    def run():
        large, small = grads_of(model, LARGE), grads_of(model, SMALL)
        return {
            "scale": large.scale(2.0),
            "map": large.map(tf.zeros_like),
            "merge": small.merge(large),
            "merge back": large.merge(small),
            "cond": tf.cond(large.all_finite(), lambda: large.scale(2.0), lambda: small),
            "loop": tf.while_loop(
                lambda n, _: n < 3, lambda n, g: (n + 1, g.scale(2.0)), (tf.constant(0), small)
            )[1],
        }, (large.dot(small), large.global_norm())

    made, scalars = in_every_mode(run)[mode]()
    found = {name: (float(grads[W]), float(grads[AMAX][0])) for name, grads in made.items()}
    assert found == {
        "scale": (6.0, 8.0),
        "map": (0.0, 8.0),
        "merge": (3.5, 8.0),
        "merge back": (3.5, 8.0),
        "cond": (6.0, 8.0),
        "loop": (4.0, 2.0),
    }
    assert [float(scalar) for scalar in scalars] == [1.5, 3.0]
    # They are still known on the other side of a trace.
    assert float(made["scale"].scale(2.0)[AMAX][0]) == 8.0


@pytest.mark.parametrize("scaled", [False, True])
def test_fit_leaves_values_alone(scaled):
    def fitted(optimizer):
        model.compile(optimizer, loss="mse")
        model.fit(LARGE, tf.zeros((2, 1)), epochs=2, verbose=0)
        return state(model)

    model = net()
    optim = tfloop.ModuleOptimizer(
        keras.optimizers.SGD(0.01), scaler=LossScaler(64.0) if scaled else None
    )
    found = fitted(optim.as_keras(model))
    model = net()
    np.testing.assert_allclose(found, fitted(keras.optimizers.SGD(0.01)), rtol=1e-6)


class TestFloat8:
    """Keras' own layer; in eager mode its gradients fail with Keras alone, too."""

    BATCHES = tf.fill((16, 4), 8.0), tf.fill((16, 4), 2.0)

    def model(self):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(16)])
        model.layers[0].quantize("float8")
        return model

    def by_keras(self, given, batches):
        """Scales and largest magnitudes after plain Keras."""
        model = self.model()
        given.build(model.trainable_variables)
        scale = getattr(given, "scale_loss", lambda loss: loss)

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = scale(tf.reduce_mean(model(x, training=True) ** 2))
            grads = tape.gradient(loss, model.trainable_variables)
            given.apply(grads, model.trainable_variables)

        for x in batches:
            step(x)
        return self.values(model)

    def values(self, model):
        named = tfloop.named_parameters(model)
        return {p: v.numpy() for p, v in named.items() if v.overwrite_with_gradient}

    def grads(self, model, x, scaler=None):
        with tfloop.Tape(scaler=scaler) as tape:
            loss = tf.reduce_mean(tfloop.train(model)(x) ** 2)
        return GradientsParams.from_grads(tape.backward(loss), model)

    @pytest.mark.parametrize("way", ["sum", "mean", "microbatch"])
    def test_pieces_of_a_batch_equal_keras_accumulation(self, way):
        given = keras.optimizers.SGD(0.0, gradient_accumulation_steps=2)
        expected = self.by_keras(given, self.BATCHES * 2)
        model = self.model()
        optim = tfloop.ModuleOptimizer(keras.optimizers.SGD(0.0))
        window = GradientsAccumulator(reduction="sum" if way == "microbatch" else way)

        @tfloop.compile
        def step(pieces):
            if way == "microbatch":
                fn = lambda x: (self.grads(model, x), None)  # noqa: E731
                grads, _ = tfloop.microbatch(fn, tf.concat(pieces, 0), num=2)
                optim.step(None, model, grads)
            else:
                for x in pieces:
                    window.accumulate(model, self.grads(model, x))
                optim.step(None, model, window)

        for _ in range(2):
            step(self.BATCHES)
        found = self.values(model)
        assert set(found) == set(expected)
        assert found["dense.inputs_amax_history"].max() == 8.0
        for path, value in expected.items():
            np.testing.assert_array_equal(found[path], value, err_msg=path)

    def test_a_scaler_equals_that_of_keras(self):
        given = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0))
        expected = self.by_keras(given, self.BATCHES)
        model = self.model()
        optim = tfloop.ModuleOptimizer(keras.optimizers.SGD(0.0), scaler=LossScaler(2.0**15))

        @tfloop.compile
        def step(x):
            optim.step(None, model, self.grads(model, x, optim.scaler))

        for x in self.BATCHES:
            step(x)
        for path, value in self.values(model).items():
            np.testing.assert_array_equal(value, expected[path], err_msg=path)

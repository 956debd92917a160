"""Each piece alone: a plain loop with one piece replaced does what the plain loop does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfloop

layers = keras.layers
STEPS, RATE = 5, 1e-2
rng = np.random.default_rng(0)
X = rng.normal(size=(STEPS * 8, 4)).astype("float32")
Y = rng.integers(0, 3, STEPS * 8)
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, len(X), 8)]
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def a_model():
    """With a layer that runs otherwise in training, moves statistics and draws random numbers."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, "relu", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.5, seed=3),
            layers.Dense(3),
        ]
    )


def plain_loss(model, x, y):
    return cross_entropy(y, model(x, training=True)) + tf.add_n(model.losses)


def plain_step(model, adam):
    """The step that is there: a tape, one Keras optimizer, a `tf.function`."""

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = plain_loss(model, x, y)
        grads = tape.gradient(loss, model.trainable_variables)
        adam.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    return step


def plain_loop(epochs=1):
    model = a_model()
    step = plain_step(model, keras.optimizers.Adam(RATE))
    losses = [float(step(x, y)) for _ in range(epochs) for x, y in BATCHES]
    return losses, values(model)


def values(model):
    return {path: v.numpy() for path, v in tfloop.named_variables(model).items()}


@pytest.fixture(scope="module")
def plain():
    return plain_loop()


def assert_equal(got, wanted):
    losses, state = got
    np.testing.assert_allclose(losses, wanted[0], rtol=1e-6)
    assert list(state) == list(wanted[1])
    for path, value in wanted[1].items():
        np.testing.assert_allclose(state[path], value, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("form", ["a list", "pairs", "by path"])
def test_only_the_optimizer(plain, form):
    model, optim = a_model(), tfloop.ModuleOptimizer(keras.optimizers.Adam(RATE))

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = plain_loss(model, x, y)
        if form == "by path":
            named = {path: v.value for path, v in tfloop.named_parameters(model).items()}
            grads = tape.gradient(loss, named)
        else:
            grads = tape.gradient(loss, model.trainable_variables)
        if form == "pairs":
            grads = zip(grads, model.trainable_variables, strict=True)
        optim.step(model, tfloop.GradientsParams.from_grads(grads, model))
        return loss

    assert_equal(([float(step(x, y)) for x, y in BATCHES], values(model)), plain)


def test_only_the_tape(plain):
    model, adam = a_model(), keras.optimizers.Adam(RATE)

    @tf.function
    def step(x, y):
        with tfloop.Tape() as tape:
            loss = plain_loss(model, x, y)
        grads = tape.backward(loss, model)
        named = tfloop.named_parameters(model)
        adam.apply_gradients([(grad, named[path]) for path, grad in grads.items()])
        return loss

    assert_equal(([float(step(x, y)) for x, y in BATCHES], values(model)), plain)


def test_only_compile(plain):
    model, adam = a_model(), keras.optimizers.Adam(RATE)
    adam.build(model.trainable_variables)

    @tfloop.compile
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = plain_loss(model, x, y)
        grads = tape.gradient(loss, model.trainable_variables)
        adam.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    assert_equal(([float(step(x, y)) for x, y in BATCHES], values(model)), plain)
    assert step.trace_count == 1


def test_only_the_accumulator(plain):
    # Windows of one batch, so that the plain loop is the reference; then two of unequal rows, whose
    # mean over the samples is the gradient of the whole batch.
    model, adam = a_model(), keras.optimizers.Adam(RATE)
    window = tfloop.GradientsAccumulator(reduction="mean")

    def gradients(x, y, loss_of):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        grads = tape.gradient(loss, model.trainable_variables)
        return loss, tfloop.GradientsParams.from_grads(grads, model)

    @tf.function
    def micro_step(x, y):
        loss, grads = gradients(x, y, plain_loss)
        window.accumulate(model, grads, weight=tf.shape(y)[0])
        return loss

    def update():
        named = tfloop.named_parameters(model)
        adam.apply_gradients([(grad, named[path]) for path, grad in window.grads().items()])

    losses = []
    for x, y in BATCHES:
        losses.append(float(micro_step(x, y)))
        update()
    assert_equal((losses, values(model)), plain)

    def without_dropout(model, x, y):
        return cross_entropy(y, model(x, training=False))

    x, y = BATCHES[0]
    for part in (slice(0, 2), slice(2, None)):
        _, grads = gradients(x[part], y[part], without_dropout)
        window.accumulate(model, grads, weight=len(y[part]))
    _, whole = gradients(x, y, without_dropout)
    for path, grad in window.grads().items():
        np.testing.assert_allclose(grad, whole[path], rtol=1e-5, atol=1e-6, err_msg=path)


def test_only_train_and_valid(plain):
    net, adam = a_model(), keras.optimizers.Adam(RATE)
    model = tfloop.train(net)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, model(x)) + tf.add_n(model.losses)
        grads = tape.gradient(loss, model.trainable_variables)
        adam.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    losses = []
    for x, y in BATCHES:
        losses.append(float(step(x, y)))
        before = values(net)
        np.testing.assert_array_equal(model.valid()(x), net(x, training=False))
        for path, value in values(net).items():
            np.testing.assert_array_equal(value, before[path], err_msg=path)
    assert_equal((losses, values(net)), plain)


def test_only_checkpoint(plain, tmp_path):
    # Killed after each step: what goes on is another process' objects, restored.
    losses, model = [], None
    for done, (x, y) in enumerate(BATCHES):
        model, adam = a_model(), keras.optimizers.Adam(RATE)
        adam.build(model.trainable_variables)
        checkpoint = tfloop.Checkpoint(tmp_path, model=model, adam=adam)
        assert (checkpoint.restore() or 0) == done
        with tf.GradientTape() as tape:
            loss = plain_loss(model, x, y)
        grads = tape.gradient(loss, model.trainable_variables)
        adam.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        losses.append(float(loss))
        checkpoint.save(done + 1)
    assert_equal((losses, values(model)), plain)


def test_only_the_data_loader(plain):
    model = a_model()
    step = plain_step(model, keras.optimizers.Adam(RATE))
    loader = tfloop.DataLoader((X, Y), batch_size=8)
    assert_equal(([float(step(x, y)) for x, y in loader], values(model)), plain)


def test_all_of_them_together(plain):
    net = a_model()
    model, optim = tfloop.train(net), tfloop.ModuleOptimizer(keras.optimizers.Adam(RATE))

    @tfloop.compile
    def step(batch):
        x, y = batch
        with tfloop.Tape() as tape:
            loss = tfloop.total_loss(cross_entropy(y, model(x)), model)
        optim.step(model, tape.backward(loss, model))
        return loss

    losses = [float(step(batch)) for batch in tfloop.DataLoader((X, Y), batch_size=8)]
    assert_equal((losses, values(net)), plain)

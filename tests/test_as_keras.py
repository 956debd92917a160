"""`as_keras`: `fit` makes the updates of the hand loop, and its callbacks and files work."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import message, read, values
from processes import run

import tfloop

# Keras 3.15 copies variables in a way that NumPy 2 will drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X = np.sin(np.arange(40 * 3, dtype="float32")).reshape(40, 3)
Y = np.stack([X.sum(1), X[:, 0] - X[:, 2]], 1)
LOSS = keras.losses.MeanSquaredError()


def net(**options) -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(6, "tanh", name="stem"),
            layers.Dense(5, "tanh", name="body", **options),
            layers.Dense(2, name="head"),
        ]
    )


def grouped() -> tfloop.ModuleOptimizer:
    """A frozen stem, SGD for the head, Adam for the bias of the body, AdamW for the rest."""
    optim = tfloop.ModuleOptimizer(
        keras.optimizers.AdamW(0.02, weight_decay=0.1),
        clipping=tfloop.GradientClipping.by_global_norm(0.05),
    )
    optim.with_group(tfloop.ParamGroup.from_name("stem"), None)
    optim.with_group(
        tfloop.ParamGroup.from_name("head"),
        keras.optimizers.SGD(0.1, momentum=0.9),
        tfloop.GradientClipping.by_norm(0.5),
    )
    return optim.with_group(tfloop.ParamGroup.from_path("body.bias"), keras.optimizers.Adam(0.01))


def hand_loop(model, optim, epochs=2, batch_size=8):
    """The loop that `fit` stands for, without shuffling."""

    @tfloop.compile
    def step(x, y):
        with tfloop.Tape() as tape:
            loss = LOSS(y, tfloop.train(model)(x))
        grads = tfloop.GradientsParams.from_grads(tape.backward(loss), model)
        optim.step(None, model, grads)

    for _ in range(epochs):
        for start in range(0, len(X), batch_size):
            step(X[start : start + batch_size], Y[start : start + batch_size])


def fit(model, *, epochs=2, **options):
    return model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options)


def compiled(model, optim, **options):
    model.compile(optimizer=optim.as_keras(model), loss="mse", **options)
    return model


def assert_equal(got, wanted, atol=1e-6):
    got, wanted = values(got), values(wanted)
    assert list(got) == list(wanted)
    for path, value in wanted.items():
        np.testing.assert_allclose(got[path], value, rtol=0, atol=atol, err_msg=path)


@pytest.fixture(scope="module")
def by_hand():
    """A model and its optimizer after two epochs of the hand loop."""
    model, optim = net(), grouped()
    hand_loop(model, optim)
    return model, optim


@pytest.mark.parametrize(
    "options",
    [{}, {"jit_compile": True}, {"run_eagerly": True}, {"steps_per_execution": 3}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_fit_equals_the_hand_loop(options, by_hand):
    ours, optim = net(), grouped()
    theirs, other = by_hand
    stem = read(ours.layers[0].kernel)
    fit(compiled(ours, optim, **options))
    assert_equal(ours, theirs)
    assert int(ours.optimizer.iterations) == int(optim.iterations) == int(other.iterations) == 10
    np.testing.assert_array_equal(read(ours.layers[0].kernel), stem)
    np.testing.assert_allclose(
        optim.state("head.kernel")["momentums"], other.state("head.kernel")["momentums"], atol=1e-6
    )


def test_one_group_is_the_keras_optimizer_itself():
    ours, theirs = net(), net()
    fit(compiled(ours, tfloop.ModuleOptimizer(keras.optimizers.Adam(0.02))))
    theirs.compile(keras.optimizers.Adam(0.02), "mse")
    fit(theirs)
    assert_equal(ours, theirs)


def test_fit_goes_on_where_a_hand_loop_stopped(by_hand):
    ours, optim = net(), grouped()
    hand_loop(ours, optim, epochs=1)
    fit(compiled(ours, optim), epochs=1)
    assert_equal(ours, by_hand[0])


def test_a_model_that_fit_builds():
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(2, name="head")])
    optim = tfloop.ModuleOptimizer(keras.optimizers.SGD(0.1))
    optim.with_group(tfloop.ParamGroup.from_name("head"), None)
    with pytest.raises(ValueError, match="needs a built model"):
        optim.as_keras(model).get_config()
    fit(compiled(model, optim))
    assert int(optim.iterations) == 10
    assert np.all(read(model.layers[1].bias) == 0.0)


class TwoOfOneName(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(3, name="fc")
        self.second = keras.layers.Dense(2, name="fc")

    def call(self, x):
        return self.second(self.first(x))


def test_variables_with_one_keras_path_are_told_apart():
    def built():
        keras.utils.set_random_seed(2)
        model = TwoOfOneName()
        model(X)
        optim = tfloop.ModuleOptimizer(keras.optimizers.Adam(0.05))
        optim.with_group(tfloop.ParamGroup.from_name("second"), keras.optimizers.SGD(0.01))
        return model, optim

    (ours, optim), (theirs, other) = built(), built()
    assert len({v.path for v in ours.trainable_variables}) < 4
    fit(compiled(ours, optim))
    hand_loop(theirs, other)
    assert_equal(ours, theirs)


def test_a_model_inside_the_root():
    model, other = net(), net()
    temperature = tf.Variable(1.0)
    optim = tfloop.ModuleOptimizer(keras.optimizers.SGD(0.1))
    optim.with_group(tfloop.ParamGroup.from_name("net.head"), None)
    root = {"net": model, "temperature": temperature}
    model.compile(optim.as_keras(root), "mse")
    fit(model)
    assert float(temperature) == 1.0
    np.testing.assert_array_equal(read(model.layers[2].kernel), read(other.layers[2].kernel))


def test_setting_the_rate_keeps_the_ratios_of_the_groups():
    model, optim = net(), grouped()
    adapter = optim.as_keras(model)
    rates = lambda: [  # noqa: E731
        float(g.update.given.learning_rate) for g in optim._assembly.groups if g.update is not None
    ]
    assert float(adapter.learning_rate) == pytest.approx(0.02)
    adapter.learning_rate = 0.002
    assert rates() == pytest.approx([0.002, 0.01, 0.001])
    adapter.learning_rate = 0.0
    assert rates() == [0.0, 0.0, 0.0]
    adapter.learning_rate = 0.04
    assert rates() == pytest.approx([0.04, 0.2, 0.02])


def test_one_optimizer_given_twice_is_set_once():
    sgd = keras.optimizers.SGD(0.1)
    optim = tfloop.ModuleOptimizer(sgd).with_group(tfloop.ParamGroup.from_name("head"), sgd)
    optim.as_keras(net()).learning_rate = 0.01
    assert float(sgd.learning_rate) == pytest.approx(0.01)


def test_a_scheduled_fallback_refuses_to_be_set_and_a_scheduled_group_goes_on():
    decay = keras.optimizers.schedules.PolynomialDecay(0.1, 10, 0.0)
    model = net()
    adapter = tfloop.ModuleOptimizer(keras.optimizers.SGD(decay)).as_keras(model)
    assert float(adapter.learning_rate) == pytest.approx(0.1)
    model.compile(adapter, "mse")
    fit(model, epochs=1)
    assert float(adapter.learning_rate) == pytest.approx(0.05)
    with pytest.raises(TypeError, match="learning rate is not settable"):
        adapter.learning_rate = 0.1
    optim = tfloop.ModuleOptimizer(keras.optimizers.SGD(0.1))
    optim.with_group(tfloop.ParamGroup.from_name("head"), keras.optimizers.SGD(decay))
    adapter = optim.as_keras(net())
    adapter.learning_rate = 0.01
    assert optim._assembly.groups[1].update.given._learning_rate is decay


def test_callbacks_set_the_rate_and_the_next_epoch_uses_it():
    ours, theirs = net(), net()
    optim, other = grouped(), grouped()
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.02 * 0.5**epoch)
    history = fit(compiled(ours, optim), callbacks=[schedule], epochs=3)
    assert history.history["learning_rate"] == pytest.approx([0.02, 0.01, 0.005])
    loop = other.as_keras(theirs)
    for epoch in range(3):
        loop.learning_rate = 0.02 * 0.5**epoch
        hand_loop(theirs, other, epochs=1)
    assert_equal(ours, theirs)


def test_reduce_on_plateau_reduces_every_group():
    optim = grouped()
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=1e9)
    fit(compiled(net(), optim), callbacks=[plateau], epochs=2)
    rates = [
        float(g.update.given.learning_rate) for g in optim._assembly.groups if g.update is not None
    ]
    assert rates == pytest.approx([0.002, 0.01, 0.001])


def test_a_saved_model_goes_on_exactly(tmp_path):
    whole, part = net(), net()
    fit(compiled(whole, grouped()), epochs=4)
    compiled(part, grouped())
    path = str(tmp_path / "best.keras")
    fit(part, callbacks=[keras.callbacks.ModelCheckpoint(path)])
    loaded = keras.models.load_model(path)
    assert int(loaded.optimizer.iterations) == 10
    fit(loaded)
    assert_equal(loaded, whole)
    table = repr(loaded.optimizer.optim)
    assert "from_path('stem.bias', 'stem.kernel'): frozen" in table
    assert "AdamW, GradientClipping.by_global_norm(0.05)" in table


def test_a_loaded_model_is_saved_again_and_copied(tmp_path):
    model = fit(compiled(net(), grouped())).model
    model.save(tmp_path / "first.keras")
    again = keras.models.load_model(tmp_path / "first.keras")
    again.save(tmp_path / "second.keras")
    second = keras.models.load_model(tmp_path / "second.keras")
    fit(model), fit(second)
    assert_equal(second, model)


def test_weights_files_hold_the_state(tmp_path):
    whole = fit(compiled(net(), grouped())).model
    whole.save_weights(tmp_path / "run.weights.h5")
    other = compiled(net(), grouped())
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "run.weights.h5")
    fit(whole), fit(other)
    assert_equal(other, whole)


def test_the_state_of_another_optimizer_is_left_out_with_a_warning(tmp_path):
    plain = net()
    plain.compile("adam", "mse")
    fit(plain)
    plain.save_weights(tmp_path / "adam.weights.h5")
    model = compiled(net(), grouped())
    model.optimizer.build(model.trainable_variables)
    with pytest.warns(UserWarning, match="another kind of optimizer"):
        model.load_weights(tmp_path / "adam.weights.h5")
    np.testing.assert_array_equal(read(model.layers[0].kernel), read(plain.layers[0].kernel))


def test_a_state_of_other_groups_raises(tmp_path):
    fit(compiled(net(), grouped())).model.save_weights(tmp_path / "run.weights.h5")
    other = compiled(net(), tfloop.ModuleOptimizer("sgd"))
    other.optimizer.build(other.trainable_variables)
    with pytest.raises(ValueError, match="restoring a ModuleOptimizer"):
        other.load_weights(tmp_path / "run.weights.h5")


def test_a_layer_frozen_after_training_is_saved_frozen(tmp_path):
    model = compiled(net(), tfloop.ModuleOptimizer(keras.optimizers.Adam(0.01)))
    fit(model)
    model.layers[0].trainable = False
    compiled(model, model.optimizer.optim)
    fit(model)
    model.save(tmp_path / "frozen.keras")
    loaded = keras.models.load_model(tmp_path / "frozen.keras")
    fit(model), fit(loaded)
    assert_equal(loaded, model)


def test_exclusions_from_decay_and_clip_arguments_are_saved(tmp_path):
    def optimizer(model):
        adamw = keras.optimizers.AdamW(0.02, weight_decay=0.5, global_clipnorm=0.1)
        adamw.exclude_from_weight_decay([model.layers[1].kernel, model.layers[2].bias])
        return tfloop.ModuleOptimizer(adamw)

    model = net()
    compiled(model, optimizer(model)).save(tmp_path / "new.keras")
    loaded = keras.models.load_model(tmp_path / "new.keras")
    fit(model), fit(loaded)
    assert_equal(loaded, model)


def test_a_file_for_other_variables_raises():
    config = compiled(net(), grouped()).optimizer.get_config()
    adapter = type(grouped().as_keras(net())).from_config(config)
    with pytest.raises(ValueError, match=message("can't route", "(3, 6)", "compile=False")):
        adapter.build(net().trainable_variables[1:])


def test_moving_averages_end_up_in_the_model():
    def optim():
        averaged = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
        optim = tfloop.ModuleOptimizer(averaged)
        return optim.with_group(tfloop.ParamGroup.from_name("head"), keras.optimizers.SGD(0.1))

    ours, theirs = net(), net()
    fit(compiled(ours, made := optim()))
    hand_loop(theirs, other := optim())
    average = other.state("stem.kernel")["model_variables_moving_average"]
    np.testing.assert_allclose(read(ours.layers[0].kernel), average, atol=1e-6)
    np.testing.assert_allclose(
        read(ours.layers[2].kernel), read(theirs.layers[2].kernel), atol=1e-6
    )
    assert int(made.iterations) == 10


def test_mixed_float16_is_scaled_by_keras(tmp_path):
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optim = tfloop.ModuleOptimizer(keras.optimizers.SGD(0.1))
        optim.with_group(tfloop.ParamGroup.from_name("head"), keras.optimizers.Adam(0.01))
        model = compiled(net(), optim)
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        fit(model)
        assert int(model.optimizer.iterations) == int(optim.iterations) == 10
        plain = net()
        plain.compile(keras.optimizers.SGD(0.1), "mse")
        fit(plain)
        np.testing.assert_allclose(
            read(model.layers[0].bias), read(plain.layers[0].bias), atol=0.05
        )
        before = read(model.layers[0].kernel)
        model.fit(np.full_like(X, np.inf), Y, verbose=0)  # not finite: nothing may move
        np.testing.assert_array_equal(read(model.layers[0].kernel), before)
        assert int(optim.iterations) == 10
        model.save(tmp_path / "scaled.keras")
        loaded = keras.models.load_model(tmp_path / "scaled.keras")
        assert int(loaded.optimizer.iterations) == 10
        fit(model), fit(loaded)
        assert_equal(loaded, model)
    finally:
        keras.config.set_dtype_policy(policy)


def test_sparse_gradients_of_an_embedding():
    def built():
        keras.utils.set_random_seed(3)
        layers = keras.layers
        model = keras.Sequential([keras.Input((3,)), layers.Embedding(7, 4), layers.Flatten()])
        model.add(layers.Dense(2))
        return model

    ids = (np.arange(24) * 3 % 5).reshape(8, 3)
    ours, theirs = built(), built()
    ours.compile(tfloop.ModuleOptimizer(keras.optimizers.SGD(0.1)).as_keras(ours), "mse")
    theirs.compile(keras.optimizers.SGD(0.1), "mse")
    for model in (ours, theirs):
        model.fit(ids, Y[:8], epochs=2, shuffle=False, verbose=0)
    assert_equal(ours, theirs)


def test_a_variable_without_gradient_stays_with_the_warning_of_keras():
    class Half(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.idle = keras.layers.Dense(2), keras.layers.Dense(2)

        def build(self, shape):
            self.used.build(shape)
            self.idle.build(shape)

        def call(self, x):
            return self.used(x)

    model = Half()
    model(X)
    before = read(model.idle.kernel)
    compiled(model, tfloop.ModuleOptimizer(keras.optimizers.AdamW(0.1, weight_decay=0.5)))
    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        fit(model)
    np.testing.assert_array_equal(read(model.idle.kernel), before)


def test_what_lists_the_state_finds_it(capsys):
    model = fit(compiled(net(), grouped())).model
    model.summary()
    assert "Optimizer params" in capsys.readouterr().out
    adapter = model.optimizer
    weights = [np.asarray(variable) for variable in adapter.variables]
    adapter.set_weights([weight * 0 for weight in weights])
    assert int(adapter.iterations) == 0
    adapter.set_weights(weights)
    assert int(adapter.iterations) == 10


def test_a_tf_checkpoint_of_the_model_holds_the_state(tmp_path):
    whole = fit(compiled(net(), grouped())).model
    saved = tf.train.Checkpoint(model=whole).save(str(tmp_path / "model"))
    other = compiled(net(), grouped())
    other.optimizer.build(other.trainable_variables)
    tf.train.Checkpoint(model=other).restore(saved)
    fit(whole), fit(other)
    assert_equal(other, whole)


def test_backup_and_restore_goes_on_where_fit_was_stopped(tmp_path):
    whole, killed, back = (compiled(net(), grouped()) for _ in range(3))
    fit(whole, epochs=3)

    def kill(epoch, logs):
        if epoch == 1:
            raise KeyboardInterrupt

    backup = [keras.callbacks.BackupAndRestore(str(tmp_path)) for _ in range(2)]
    stop = keras.callbacks.LambdaCallback(on_epoch_begin=kill)
    with pytest.raises(KeyboardInterrupt):
        fit(killed, epochs=3, callbacks=[backup[0], stop])
    fit(back, epochs=3, callbacks=[backup[1]])
    assert int(back.optimizer.iterations) == 15
    assert_equal(back, whole)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_scaler_of_the_optimizer_scales_the_losses_of_fit(jit_compile, tmp_path):
    def optim(scaler=None):
        made = tfloop.ModuleOptimizer(keras.optimizers.SGD(0.1), scaler=scaler)
        clipping = tfloop.GradientClipping.by_norm(0.1)
        return made.with_group(tfloop.ParamGroup.from_name("head"), "sgd", clipping)

    ours, theirs = net(), net()
    scaler = tfloop.LossScaler(64.0, growth_interval=4)
    fit(compiled(ours, scaled := optim(scaler), jit_compile=jit_compile))
    fit(compiled(theirs, optim()))
    assert_equal(ours, theirs)
    assert float(scaler.scale) == 256.0  # doubled twice in 10 updates
    ours.fit(np.full_like(X, np.inf), Y, batch_size=8, epochs=1, verbose=0)
    assert_equal(ours, theirs)
    assert int(scaled.skipped) == 5
    assert float(scaler.scale) == 8.0
    ours.save(tmp_path / "scaled.keras")
    loaded = keras.models.load_model(tmp_path / "scaled.keras").optimizer.optim
    assert float(loaded.scaler.scale) == 8.0


def test_the_example_learns_and_goes_on_with_its_groups():
    done = run("examples/keras_fit.py", "--quick")
    assert done.returncode == 0, done.stderr
    best, later = map(float, re.findall(r"accuracy (\d+\.\d) %", done.stdout))
    assert min(best, later) > 90.0
    assert re.search(r"^head\.kernel .* norm 1 +0\.009 +0\.05", done.stdout, re.M)


def test_wrong_uses_raise():
    optim = grouped()
    with pytest.raises(TypeError, match="as_keras"):
        optim.as_keras(3)
    model = net()
    adapter = optim.as_keras(model)
    with pytest.raises(RuntimeError, match="has no effect"):
        adapter.exclude_from_weight_decay(var_names=["bias"])
    other = net()
    other.compile(adapter, "mse")
    with pytest.raises(ValueError, match=message("compiled into another model", "stem/kernel")):
        fit(other)
    with pytest.raises(ValueError, match="another model"):
        optim.as_keras(other)

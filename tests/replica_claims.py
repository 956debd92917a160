"""Claims about several replicas, run by `test_replicas.py` in a process of their own.

    python tests/replica_claims.py 2 FOLDER [CLAIM ...]

parts the CPU into so many devices and prints a line for each claim that holds. A second strategy in
one process could meet the collectives of the first, so all claims share one.
"""

import collections
import copy
import os
import re
import sys
import threading
import time
import traceback

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf
from since import MUON, RENORM, SCHEDULE_FREE, has

import tfloop
from tfloop import GradientClipping, GradientsAccumulator, GradientsParams, ModuleOptimizer

ONE = tf.distribute.get_strategy()
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 20, size=(200, 3)).astype("int32")
NUMBERS = RNG.normal(size=(200, 5)).astype("float32")
TARGETS = RNG.normal(size=(200, 1)).astype("float32")
SIZES = [16, 16, 7, 1, 3]  # 1 and 3 leave replicas without a sample
CLIPPINGS = {
    "none": None,
    "by_value": GradientClipping.by_value(0.01),
    "by_norm": GradientClipping.by_norm(0.1),
    "by_global_norm": GradientClipping.by_global_norm(0.5),
    "adaptive": tfloop.AdaptiveGradientClipping(0.02),
}


def components(variable):
    """What each replica has of a variable."""
    variable = variable._value if isinstance(variable, keras.Variable) else variable
    return [part.numpy() for part in variable.values]


def assert_alike(optim, model):
    """Parameters, slots and counters are the same on every replica, bit for bit."""
    variables = dict(tfloop.named_parameters(model))
    for group in optim._assembly.records():
        named = group.variables()
        named.pop("/learning_rate", None)  # the user's own variable, made outside
        variables |= {f"{group.optimizer}/{key}": v for key, v in named.items()}
    assert len(variables) > 3
    for path, variable in variables.items():
        first, *others = components(variable)
        assert others, path
        for other in others:
            np.testing.assert_array_equal(first, other, err_msg=path)


def mixed_model():
    """Sparse and dense parameters."""
    keras.utils.set_random_seed(1)
    ids, numbers = keras.Input((3,), dtype="int32"), keras.Input((5,))
    words = keras.layers.Flatten()(keras.layers.Embedding(20, 4)(ids))
    hidden = keras.layers.Dense(8, "tanh")(keras.layers.Concatenate()([words, numbers]))
    return keras.Model([ids, numbers], keras.layers.Dense(1)(hidden))


def trained(strategy, clipping=None, window=None, updates=20, **options):
    """Losses and parameters after some updates on batches of all sizes, two groups."""
    with strategy.scope():
        model = mixed_model()
    view = tfloop.train(model)
    optim = ModuleOptimizer(keras.optimizers.AdamW(weight_decay=0.1), clipping=clipping, **options)
    words = tfloop.ParamGroup.from_name("embedding")
    optim.with_group(words, keras.optimizers.SGD(momentum=0.9), clipping)

    @tfloop.compile(strategy=strategy)
    def step(batch, lr):
        ids, numbers, targets = batch
        with tfloop.Tape(scaler=optim.scaler) as tape:
            loss = tf.reduce_mean((view([ids, numbers]) - targets) ** 2)
        grads = GradientsParams.from_grads(tape.backward(loss), view)
        if window is None:
            optim.step(lr, view, grads)
        else:
            window.accumulate(view, grads)
        return loss, tf.shape(ids)[0], ids

    @tfloop.compile(strategy=strategy)
    def update():
        optim.step(0.05, view, window)

    losses, begin = [], 0
    for number in range(updates if window is None else 3 * updates):
        size = SIZES[number % 5]
        batch = tuple(tf.constant(array[begin : begin + size]) for array in (IDS, NUMBERS, TARGETS))
        loss, count, ids = step(batch, 0.05)
        assert int(count) == size
        np.testing.assert_array_equal(ids, batch[0])
        losses.append(float(loss))
        if window is not None and number % 3 == 2:
            update()
            assert_window_is_empty(window)
        begin = (begin + size) % 150
    if strategy is not ONE:
        assert_alike(optim, model)
    assert int(optim.iterations.numpy()) == updates
    return losses, {path: v.numpy() for path, v in tfloop.named_parameters(model).items()}


def assert_window_is_empty(window):
    assert int(window.count.numpy()) == 0
    assert float(window.weight.numpy()) == 0.0


def assert_equal_runs(run, other):
    np.testing.assert_allclose(run[0], other[0], rtol=1e-5, atol=1e-5)
    for path, value in run[1].items():
        scale = max(np.linalg.norm(other[1][path]), 1.0)
        assert np.linalg.norm(value - other[1][path]) <= 2e-6 * scale, path


def claim_replicas_equal_one_device_with_every_clipping(strategy, folder):
    # What comes after the reduction, the kind of clipping, knows nothing of the number of replicas.
    kinds = CLIPPINGS if strategy.num_replicas_in_sync == 2 else ("by_norm", "by_global_norm")
    for kind in kinds:
        assert_equal_runs(trained(strategy, CLIPPINGS[kind]), trained(ONE, CLIPPINGS[kind]))


class ByLastNorm(GradientClipping):
    """Bounds the global norm by that of the update before."""

    def initial_state(self):
        return {"norm": 1.0}

    def clip(self, grads, parameters=(), state=None):
        norm, bound = tf.linalg.global_norm(grads), state["norm"]
        state["norm"] = norm
        return [tf.convert_to_tensor(grad) * tf.minimum(1.0, bound / norm) for grad in grads]


def claim_a_clipping_that_remembers_is_alike_on_all_replicas(strategy, folder):
    assert_equal_runs(trained(strategy, ByLastNorm()), trained(ONE, ByLastNorm()))
    with strategy.scope():
        model = mixed_model()
    optim = ModuleOptimizer("sgd", clipping=ByLastNorm()).build(model)
    (*_, norm) = optim._assembly.records()[0].variables().values()
    assert components(norm) == [1.0] * strategy.num_replicas_in_sync


def claim_accumulation_on_replicas_equals_one_device(strategy, folder):
    for reduction, kind in (("mean", "none"), ("mean", "by_global_norm"), ("sum", "none")):
        runs = [
            trained(where, CLIPPINGS[kind], GradientsAccumulator(reduction=reduction), 10)
            for where in (strategy, ONE)
        ]
        assert_equal_runs(*runs)


def claim_a_scaler_and_a_guard_change_nothing_while_all_is_finite(strategy, folder):
    plain = trained(ONE, updates=5)  # as on the replicas, says the first claim
    assert_equal_runs(trained(strategy, updates=5, scaler=tfloop.LossScaler(2.0**10)), plain)
    assert_equal_runs(trained(strategy, updates=5, skip_nonfinite=True), plain)


class Weight(tf.Module):
    """One scalar weight."""

    def __init__(self):
        super().__init__()
        self.w = tf.Variable(0.0)

    def __call__(self, x):
        return self.w * x


def per_replica(strategy, values):
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )


def applied(strategy, optim, model, gradients, mode, **options):
    """One step by hand with a gradient for each replica."""

    def on_replica(grad, weight):
        chosen = {key: weight for key in options}
        optim.step(1.0, model, GradientsParams({"w": grad}), **chosen)

    def run():
        weights = per_replica(strategy, next(iter(options.values()), [1.0] * len(gradients)))
        strategy.run(on_replica, (per_replica(strategy, gradients), weights))

    (tf.function(run) if mode == "graph" else run)()
    (value,) = {float(part) for part in components(model.w)}
    return value


def squares_step(strategy, net, optim):
    """A compiled step for what needs no more: the mean of the squares of what a network gives."""

    @tfloop.compile(strategy=strategy)
    def step(x):
        with tfloop.Tape() as tape:
            loss = tf.reduce_mean(net(x) ** 2)
        optim.step(0.1, net, GradientsParams.from_grads(tape.backward(loss), net))
        return loss

    return step


def weight_in(strategy):
    with strategy.scope():
        return Weight()


def claim_gradients_are_reduced_before_they_are_clipped(strategy, folder):
    # Case 12: replicas that clip by themselves would add up to 0.
    n = strategy.num_replicas_in_sync
    for mode in ("eager", "graph"):
        model = weight_in(strategy)
        optim = ModuleOptimizer("sgd", clipping=GradientClipping.by_value(1.0), reduction="sum")
        value = applied(strategy, optim, model, [3.0, -3.5] + [0.0] * (n - 2), mode)
        assert value == 0.5, value


def claim_reductions_are_what_they_say(strategy, folder):
    n = strategy.num_replicas_in_sync
    rest = [0.0] * (n - 2)
    for mode in ("eager", "graph"):
        for options, weights, expected in (
            ({}, None, -4.0 / n),
            ({"reduction": "sum"}, None, -4.0),
            ({}, [3.0, 1.0, *rest], -(3 * 1.0 + 1 * 3.0) / 4),
            ({}, [0.0, 2.0, *rest], -3.0),
        ):
            model = weight_in(strategy)
            extra = {} if weights is None else {"weight": weights}
            grads = [1.0, 3.0, *rest]
            value = applied(
                strategy, ModuleOptimizer("sgd", **options), model, grads, mode, **extra
            )
            np.testing.assert_allclose(value, expected, rtol=1e-6)


def claim_a_replica_of_weight_0_may_have_nan(strategy, folder):
    n = strategy.num_replicas_in_sync
    model = weight_in(strategy)
    grads, weights = [2.0, float("nan")] + [2.0] * (n - 2), [1.0, 0.0] + [1.0] * (n - 2)
    optim = ModuleOptimizer("sgd")
    assert applied(strategy, optim, model, grads, "graph", weight=weights) == -2.0


class Amax(keras.layers.Layer):
    """Notes the largest magnitude of its input in the place of a gradient, as float8 layers do."""

    def build(self, shape):
        self.amax = self.add_weight(
            name="amax", shape=(1,), initializer="ones", overwrite_with_gradient=True
        )

    def call(self, x):
        @tf.custom_gradient
        def noted(x, amax):
            return x + 0.0, lambda upstream: (upstream, tf.reshape(tf.reduce_max(tf.abs(x)), [1]))

        return noted(x, tf.convert_to_tensor(self.amax))


def claim_values_that_overwrite_are_the_largest_of_all_replicas(strategy, folder):
    replicas = strategy.num_replicas_in_sync
    inputs = tf.constant([[8.0], *[[2.0]] * (replicas - 1)])  # a row for each replica

    def ran(name, **options):
        with strategy.scope():
            net = keras.Sequential([keras.Input((1,)), Amax(), keras.layers.Dense(1)])
        optim = ModuleOptimizer(keras.optimizers.SGD(0.1), **options)
        window = GradientsAccumulator(reduction=name) if name in ("sum", "mean") else None
        view = tfloop.train(net)

        @tfloop.compile(strategy=strategy)
        def step(x):
            with tfloop.Tape() as tape:
                loss = tf.reduce_mean(view(x))
            grads = GradientsParams.from_grads(tape.backward(loss), view)
            if name == "by hand":
                grads = grads.reduce()
            if window is None:
                optim.step(None, view, grads)
            else:
                window.accumulate(view, grads)

        @tfloop.compile(strategy=strategy)
        def update():
            optim.step(None, view, window)

        def largest():
            first, *others = components(net.layers[0].amax)
            assert all(other == first for other in others)
            return float(first[0])

        if window is None:
            for x in (inputs, inputs[::-1], 3.0 * inputs[:1]):  # the last leaves replicas idle
                step(x)
                assert largest() == float(tf.reduce_max(x))
            return
        for _ in range(2):
            step(0.5 * inputs)
            step(inputs[::-1])
            update()
            assert largest() == 8.0
            net.layers[0].amax.assign([1.0])
        step(inputs)
        checkpoint = tfloop.Checkpoint(f"{folder}/largest_{name}", model=net, window=window)
        checkpoint.save(step=1)
        window.reset()
        step(9.0 * inputs)
        checkpoint.restore()
        update()
        assert largest() == 8.0
        step(0.25 * inputs)
        update()
        assert largest() == 2.0

    ran("mean of gradients")
    ran("sum of gradients", reduction="sum")
    ran("by hand", reduction=None)
    ran("mean")
    ran("sum")


def claim_weights_that_sum_to_0_raise(strategy, folder):
    for mode, error in (("eager", ValueError), ("graph", tf.errors.InvalidArgumentError)):
        model, optim = weight_in(strategy), ModuleOptimizer("sgd")
        n = strategy.num_replicas_in_sync
        with pytest.raises(error, match="weights that sum to 0"):
            applied(strategy, optim, model, [1.0] * n, mode, weight=[0.0] * n)
        assert components(model.w) == [0.0] * n


def claim_gradients_can_be_reduced_by_hand(strategy, folder):
    n = strategy.num_replicas_in_sync
    model = weight_in(strategy)
    optim = ModuleOptimizer("sgd", reduction=None)

    def on_replica(grad):
        grads = GradientsParams({"w": grad}).reduce()
        optim.step(1.0, model, grads.scale(2.0))

    grads = per_replica(strategy, [float(i) for i in range(n)])
    tf.function(lambda: strategy.run(on_replica, (grads,)))()
    assert components(model.w) == [-2.0 * (n - 1) / 2] * n


def claim_what_is_not_finite_on_one_replica_skips_all(strategy, folder):
    # Case 21.
    n = strategy.num_replicas_in_sync
    for mode, bad in (("eager", float("inf")), ("graph", float("nan"))):
        with strategy.scope():
            root = {"a": Weight(), "b": Weight()}
        scaler = tfloop.LossScaler(2.0**15, growth_interval=2)
        optim = ModuleOptimizer("adam", scaler=scaler)
        optim.with_group(tfloop.ParamGroup.from_name("b"), keras.optimizers.SGD(momentum=0.9))

        def on_replica(grad, optim=optim, root=root):
            optim.step(0.1, root, GradientsParams({"a.w": grad, "b.w": tf.constant(1.0)}))

        def step(values, on_replica=on_replica):
            return strategy.run(on_replica, (per_replica(strategy, values),))

        step = tf.function(step) if mode == "graph" else step
        step([1.0] * n)

        def state(optim=optim, root=root):
            found = dict(tfloop.named_parameters(root))
            for group in optim._assembly.records()[:-1]:
                found |= {f"{group.optimizer}/{k}": v for k, v in group.variables().items()}
            return {key: v.numpy() for key, v in found.items()}

        before = state()
        step([1.0] * (n - 1) + [bad])
        after = state()
        for key, value in before.items():
            np.testing.assert_array_equal(value, after[key], err_msg=key)
        assert_alike(optim, root)
        assert float(optim.scaler.scale.numpy()) == 2.0**14
        assert int(optim.skipped.numpy()) == 1
        assert int(optim.iterations.numpy()) == 1
        step([1.0] * n)
        step([2.0] * n)
        assert float(optim.scaler.scale.numpy()) == 2.0**15
        assert_alike(optim, root)
        moved = {key: value for key, value in state().items() if "learning_rate" not in key}
        assert all((value != before[key]).any() for key, value in moved.items())


def claim_a_gradient_that_is_not_finite_is_told_with_its_replica(strategy, folder):
    with strategy.scope():
        net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="only")])
    optim = ModuleOptimizer("sgd", on_nonfinite="raise")
    step = squares_step(strategy, net, optim)
    step(tf.ones((4, 1)))
    before = [value.copy() for value in net.get_weights()]
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        step(tf.constant([[1.0], [1.0], [1.0], [np.inf]]))
    # TensorFlow gives that of the replica which fails first.
    found = r"`only.bias`.*\[2 2 0 1\] \[1\]|from another replica.*\[0 2 0 1\] \[0\]"
    assert re.search(f"(?s){found}", str(caught.value)), caught.value
    for value, expected in zip(net.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, expected)


def claim_one_collective_for_dense_gradients_and_none_for_micro_steps(strategy, folder):
    # Case 6.
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        layers = [keras.layers.Dense(4, "tanh") for _ in range(3)]
        model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.BatchNormalization()])
    window = GradientsAccumulator(reduction="mean")
    optim = ModuleOptimizer("adam", skip_nonfinite=True)

    @tf.function
    def micro(batch):
        def on_replica(x):
            with tfloop.Tape() as tape:
                loss = tf.reduce_mean(model(x, training=True) ** 2)
            window.accumulate(model, GradientsParams.from_grads(tape.backward(loss), model), 3)

        strategy.run(on_replica, (batch,))

    @tf.function
    def update():
        strategy.run(lambda: optim.step(0.1, model, window))

    batch = per_replica(strategy, [np.ones((2, 3), "float32")] * n)
    for _ in range(4):
        micro(batch)
    update()
    assert collectives(micro.get_concrete_function(batch)) == {}
    assert collectives(update.get_concrete_function()) == {"CollectiveReduceV2": n}
    assert int(optim.iterations.numpy()) == 1
    assert_alike(optim, model)
    assert_window_is_empty(window)


def collectives(concrete):
    graph = concrete.graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return dict(collections.Counter(n.op for n in nodes if n.op.startswith("Collective")))


def claim_what_got_nothing_on_any_replica_stays_untouched(strategy, folder):
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        root = {name: Weight() for name in "abc"}
    optim, window = ModuleOptimizer(keras.optimizers.Adam()), GradientsAccumulator()
    optim.build(root)
    window.build(root)

    def on_replica(grad):
        window.accumulate(root, GradientsParams({"a.w": grad}))

    def only_b(grad):
        window.accumulate(root, GradientsParams({"b.w": grad}))

    ones = per_replica(strategy, [1.0] * n)
    tf.function(lambda: strategy.run(on_replica, (ones,)))()

    def update_on_replica():
        optim.step(0.1, root, window)

    update = tf.function(lambda: strategy.run(update_on_replica))
    update()
    tf.function(lambda: strategy.run(only_b, (ones,)))()
    update()
    values = {name: components(part.w) for name, part in root.items()}
    assert len(set(values["a"])) == 1
    assert values["a"][0] != 0.0
    assert values["b"][0] != 0.0
    assert values["c"] == [0.0] * n
    assert float(optim.state("c.w")["momentums"]) == 0.0
    assert float(optim.state("a.w")["momentums"]) != 0.0


def claim_parameters_that_are_made_in_the_step_are_refused(strategy, folder):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1, use_bias=False, name="late")])
    step = squares_step(strategy, model, ModuleOptimizer("sgd"))
    with pytest.raises(ValueError, match="got 'late.kernel' without values, expected a built"):
        step(tf.ones((strategy.num_replicas_in_sync, 3)))


def claim_what_is_made_outside_of_the_scope_is_right_or_refused(strategy, folder):
    # Case 24: an optimizer and an accumulator made outside work.
    n = strategy.num_replicas_in_sync
    outside = keras.optimizers.Adam(0.1)
    optim, window = ModuleOptimizer(outside), GradientsAccumulator()
    model = weight_in(strategy)

    def on_replica(grad):
        window.accumulate(model, GradientsParams({"w": grad}))
        optim.step(None, model, window)

    for mode in ("eager", "graph"):
        run = lambda: strategy.run(on_replica, (per_replica(strategy, range_of(n)),))  # noqa: E731
        (tf.function(run) if mode == "graph" else run)()
        assert_alike_scalars(optim, model)
    plain = Weight()
    for call in (
        lambda: strategy.run(
            lambda: ModuleOptimizer("sgd").step(
                1.0, plain, GradientsParams({"w": tf.constant(1.0)})
            )
        ),
        lambda: strategy.run(
            lambda: GradientsAccumulator().accumulate(
                plain, GradientsParams({"w": tf.constant(1.0)})
            )
        ),
    ):
        with pytest.raises(
            RuntimeError, match=r"wasn't made in this .*`with strategy.scope\(\): m"
        ):
            call()
    assert float(plain.w) == 0.0


def range_of(n):
    return [float(i) for i in range(n)]


def assert_alike_scalars(optim, model):
    for group in optim._assembly.records():
        for key, variable in group.variables().items():
            if key != "/learning_rate":  # the user's own, outside
                assert len(set(map(float, components(variable)))) == 1, key
    assert len(set(map(float, components(model.w)))) == 1


def claim_a_step_outside_of_replicas_or_under_a_condition_raises(strategy, folder):
    model, optim = weight_in(strategy), ModuleOptimizer("sgd")
    grads = lambda: GradientsParams({"w": tf.constant(1.0)})  # noqa: E731
    optim.build(model)

    def in_scope():
        with strategy.scope():
            optim.step(1.0, model, grads())

    def keyed():
        with tfloop.Tape() as tape:
            loss = model(tf.constant(2.0))
        return GradientsParams.from_grads(tape.backward(loss), model)

    def conditional():
        def on_replica():
            def yes():
                optim.step(1.0, model, grads())
                return tf.constant(0)

            tf.cond(model.w < 1.0, yes, lambda: tf.constant(0))

        tf.function(lambda: strategy.run(on_replica))()

    for call, words in (
        (in_scope, "outside of the replicas"),
        (keyed, "from_grads.*outside of the replicas"),
        (lambda: optim.step(1.0, model, grads()), "outside of the replicas"),
        (lambda: tf.function(lambda: optim.step(1.0, model, grads()))(), "outside of the replic"),
        (conditional, "decide between them in Python"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()
    assert set(components(model.w)) == {0.0}


def claim_masks_differ_and_statistics_become_one(strategy, folder):
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(4),
                keras.layers.BatchNormalization(momentum=0.5),
            ]
        )
    view = tfloop.train(model)
    drop, norm = model.layers[0], model.layers[-1]
    optim = ModuleOptimizer("sgd").build(model)

    @tfloop.compile(strategy=strategy)
    def step(x):
        with tfloop.Tape() as tape:
            loss = tf.reduce_mean(view(x) ** 2)
        optim.step(0.0, view, GradientsParams.from_grads(tape.backward(loss), view))
        return drop(tf.ones((1, 64)), training=True)

    masks = step(tf.random.normal((4 * n, 64), seed=1)).numpy()
    assert len({mask.tobytes() for mask in masks}) == n
    for variable in (norm.moving_mean, norm.moving_variance):
        first, *others = components(variable)
        assert all((first == other).all() for other in others)
    assert (components(norm.moving_mean)[0] != 0).all()
    step(tf.random.normal((1, 64), seed=1))  # leaves replicas without a sample
    assert np.isfinite(components(norm.moving_mean)).all()
    assert np.isfinite(components(model.layers[1].kernel)).all()

    checkpoint = tfloop.Checkpoint(f"{folder}/masks", model=model)
    checkpoint.save(1)
    after = [step(tf.ones((n, 64))).numpy() for _ in range(2)]
    checkpoint.restore()
    again = [step(tf.ones((n, 64))).numpy() for _ in range(2)]
    np.testing.assert_array_equal(after, again)
    assert len({mask.tobytes() for mask in again[0]}) == n


def claim_checkpoints_go_from_one_replica_to_many_and_back(strategy, folder):
    def parts(where, steps, restore=None):
        with where.scope():
            model = mixed_model()
        optim, window = ModuleOptimizer(keras.optimizers.Adam()), GradientsAccumulator()
        name = f"{folder}/moves"
        checkpoint = tfloop.Checkpoint(name, model=model, optim=optim, window=window)
        if restore:
            assert checkpoint.restore() == restore

        @tfloop.compile(strategy=where)
        def micro(batch):
            ids, numbers, targets = batch
            with tfloop.Tape() as tape:
                loss = tf.reduce_mean((model([ids, numbers]) - targets) ** 2)
            window.accumulate(model, GradientsParams.from_grads(tape.backward(loss), model))

        @tfloop.compile(strategy=where)
        def update(lr):
            optim.step(lr, model, window)

        for number in steps:
            begin = 8 * number
            batch = tuple(tf.constant(a[begin : begin + 8]) for a in (IDS, NUMBERS, TARGETS))
            micro(batch)
            if number % 2:
                update(0.01)
        checkpoint.save(steps[-1] + 1)
        return {path: v.numpy() for path, v in tfloop.named_parameters(model).items()}

    whole = parts(ONE, range(9))
    parts(ONE, range(3))  # ends in the middle of a window
    parts(strategy, range(3, 6), restore=3)
    moved = parts(ONE, range(6, 9), restore=6)
    for path, value in whole.items():
        np.testing.assert_allclose(moved[path], value, rtol=2e-5, atol=2e-6, err_msg=path)


def claim_every_optimizer_of_keras_keeps_replicas_equal(strategy, folder):
    for name in (
        *("SGD", "Adam", "AdamW", "RMSprop", "Nadam", "Lion", "Adagrad", "Adamax", "Ftrl"),
        *("Adadelta", "Lamb", "Adafactor"),
        *(["ScheduleFreeAdamW"] if has(SCHEDULE_FREE) else []),
        *(["Muon"] if has(MUON) else []),
    ):
        options = {"use_ema": True, "ema_overwrite_frequency": 2} if name == "Adam" else {}
        results = []
        for where in (strategy, ONE):
            with where.scope():
                model = mixed_model()
            optim = ModuleOptimizer(getattr(keras.optimizers, name)(**options))

            @tfloop.compile(strategy=where)
            def step(batch, optim=optim, model=model):
                ids, numbers, targets = batch
                with tfloop.Tape() as tape:
                    loss = tf.reduce_mean((model([ids, numbers]) - targets) ** 2)
                optim.step(0.01, model, GradientsParams.from_grads(tape.backward(loss), model))

            for begin in (0, 8, 16):
                step(tuple(tf.constant(a[begin : begin + 8]) for a in (IDS, NUMBERS, TARGETS)))
            results.append({p: v.numpy() for p, v in tfloop.named_parameters(model).items()})
            if where is strategy:
                assert_alike(optim, model)
        for path, value in results[0].items():
            error = np.linalg.norm(value - results[1][path])
            assert error <= 2e-5 * max(np.linalg.norm(value), 1), (name, path, error)


def claim_distributed_data_sets_and_short_batches_equal_one_device(strategy, folder):
    # Case 23: 7 samples in batches of 4.
    def run(where, batches, distributed):
        with where.scope():
            model = mixed_model()
        optim = ModuleOptimizer("sgd")

        @tfloop.compile(strategy=where)
        def step(batch):
            ids, numbers, targets = batch
            with tfloop.Tape() as tape:
                loss = tf.reduce_mean((model([ids, numbers]) - targets) ** 2)
            optim.step(0.1, model, GradientsParams.from_grads(tape.backward(loss), model))
            return loss

        losses = [float(step(batch)) for batch in batches]
        return losses, {p: v.numpy() for p, v in tfloop.named_parameters(model).items()}

    arrays = (IDS[:7], NUMBERS[:7], TARGETS[:7])
    loader = tfloop.DataLoader(arrays, batch_size=4)
    one = run(ONE, loader, False)
    assert_equal_runs(run(strategy, loader, False), one)
    spread = strategy.experimental_distribute_dataset(loader.as_dataset())
    assert_equal_runs(run(strategy, spread, True), one)


def claim_losses_of_keras_are_means_of_the_rows(strategy, folder):
    def run(where):
        with where.scope():
            model = mixed_model()
        optim, squares = ModuleOptimizer("sgd"), keras.losses.MeanSquaredError()

        @tfloop.compile(strategy=where)
        def step(batch):
            ids, numbers, targets = batch
            with tfloop.Tape() as tape:
                loss = squares(targets, model([ids, numbers]))
            optim.step(0.1, model, GradientsParams.from_grads(tape.backward(loss), model))
            return loss

        losses = []
        for size in (7, 1, 7, 3, 1):
            batch = tuple(tf.constant(array[:size]) for array in (IDS, NUMBERS, TARGETS))
            losses.append(float(step(batch)))
        return losses, {p: v.numpy() for p, v in tfloop.named_parameters(model).items()}

    assert_equal_runs(run(strategy), run(ONE))
    # Elsewhere they are Keras' own, for its sum over replicas.
    one = tf.ones((2, 1))
    means = strategy.run(lambda: keras.losses.MeanSquaredError()(one, 0.0 * one))
    means = [float(mean) for mean in strategy.experimental_local_results(means)]
    assert means == [1 / strategy.num_replicas_in_sync] * strategy.num_replicas_in_sync


def claim_the_same_devices_are_the_same_strategy(strategy, folder):
    assert tfloop.strategy(f"cpu:{strategy.num_replicas_in_sync}") is strategy


def claim_a_part_inside_the_replica_can_be_jitted(strategy, folder):
    with strategy.scope():
        model = mixed_model()
    optim = ModuleOptimizer("adam")

    @tf.function(jit_compile=True)
    def gradients(ids, numbers, targets):
        with tfloop.Tape() as tape:
            loss = tf.reduce_mean((model([ids, numbers]) - targets) ** 2)
        return loss, GradientsParams.from_grads(tape.backward(loss), model)

    @tfloop.compile(strategy=strategy)
    def step(batch):
        loss, grads = gradients(*batch)
        optim.step(0.1, model, grads)
        return loss

    batch = tuple(tf.constant(array[:8]) for array in (IDS, NUMBERS, TARGETS))
    losses = [float(step(batch)) for _ in range(3)]
    assert losses[2] < losses[0]
    assert_alike(optim, model)
    with pytest.raises(ValueError, match="XLA can't compile around replicas"):
        tfloop.compile(lambda x: x, strategy=strategy, jit_compile=True)


def claim_results_come_back_as_one(strategy, folder):
    n = strategy.num_replicas_in_sync

    @tfloop.compile(strategy=strategy)
    def step(batch, scale):
        x = batch["x"]
        return {
            "mean": scale * tf.reduce_mean(x),
            "half": tf.reduce_mean(tf.cast(x, tf.float16)),
            "count": tf.shape(x)[0],
            "rows": 2 * x,
            "nested": (tf.reduce_max(x) > 2.0, None, 1),
        }

    x = tf.range(7.0)
    found = step({"x": x}, 2.0)
    np.testing.assert_allclose(found["mean"], 2 * x.numpy().mean(), rtol=1e-6)
    assert found["half"].dtype == tf.float16
    assert int(found["count"]) == 7
    np.testing.assert_array_equal(found["rows"], 2 * x)
    assert found["nested"][0].shape == (n,)
    assert found["nested"][1] is None
    assert int(found["nested"][2]) == n
    found = step({"x": tf.range(1.0)}, 2.0)  # all but one replica without a sample
    assert float(found["mean"]) == 0.0
    found = step({"x": tf.range(0.0)}, 2.0)  # no sample at all
    assert np.isnan(found["mean"])
    total = tfloop.compile(lambda batch: tf.reduce_sum(batch), strategy=strategy)
    assert float(total(tf.range(0.0))) == 0.0
    fresh = tfloop.compile(lambda batch: batch, strategy=strategy)
    for call, error, words in (
        (
            lambda: fresh((tf.constant([1.0]), tf.constant(1.0))),
            ValueError,
            "one common leading axis",
        ),
        (lambda: step({"x": tf.ragged.constant([[1]])}, 1.0), TypeError, "expected dense tensors"),
        (
            lambda: tfloop.compile(lambda *, batch: batch, strategy=strategy)(batch=x),
            TypeError,
            "needs its batch as first argument",
        ),
        (
            lambda: tfloop.compile(lambda b: GradientsParams({"w": b}), strategy=strategy)(x),
            TypeError,
            "can't put gradients of replicas together",
        ),
    ):
        with pytest.raises(error, match=words):
            call()


def claim_every_form_of_call_is_the_run_of_one_device(strategy, folder):
    rows = 3 * strategy.num_replicas_in_sync
    x, y, squares = NUMBERS[:rows], TARGETS[:rows], keras.losses.MeanSquaredError()

    def run(where, form):
        """Losses, parameters and Keras' own count of the loss after three steps."""
        with where.scope():
            keras.utils.set_random_seed(1)
            net = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
            net.compile(loss=squares)
            mean, error = keras.metrics.Mean(), keras.metrics.MeanSquaredError()
            net.compute_loss(x, y, net(x))  # makes Keras' tracker
            net.reset_metrics()
        optim, window = ModuleOptimizer("sgd"), GradientsAccumulator()

        def learn(batch, lr):
            with tfloop.Tape() as tape:
                loss = net.compute_loss(batch[0], batch[1], net(batch[0]))
                loss += 0.1 * squares(batch[1], net(batch[0]))
            grads = GradientsParams.from_grads(tape.backward(loss), net)
            if form == "accumulated":
                window.accumulate(net, grads)
                optim.step(lr, net, window)
            else:
                optim.step(lr, net, grads)
            mean.update_state(squares(batch[1], net(batch[0])))
            return loss

        def by_replica(lr):
            if where is ONE:
                return learn((x, y), lr)
            begin = 3 * tf.distribute.get_replica_context().replica_id_in_sync_group
            part = tuple(tf.constant(array)[begin : begin + 3] for array in (x, y))
            return learn(part, lr)

        @tfloop.compile(strategy=where)
        def step(batch, lr):
            return learn(batch, lr)

        compiled = lambda fn: tfloop.compile(fn, strategy=where)  # noqa: E731
        captured = compiled(lambda lr: learn((x, y), lr))
        on_flag = compiled(lambda flag: learn((x, y), 0.1))
        on_nothing = compiled(lambda: learn((x, y), 0.1))
        on_numbers = compiled(lambda numbers: learn((x, y), numbers["lr"]))
        on_parts = compiled(by_replica)
        measured = compiled(lambda batch: (error.update_state(batch[1], net(batch[0])), None)[1])
        distributed = (x, y)
        if where is not ONE:
            data = tf.data.Dataset.from_tensors(distributed).unbatch().batch(rows)
            distributed = next(iter(where.experimental_distribute_dataset(data)))
        calls = {
            "batch": lambda: step((x, y), 0.1),
            "accumulated": lambda: step((x, y), 0.1),
            "batch by name": lambda: step(lr=0.1, batch=(x, y)),
            "distributed": lambda: step(distributed, 0.1),
            "a number": lambda: captured(0.1),
            "a number by name": lambda: captured(lr=0.1),
            "a flag": lambda: on_flag(True),
            "nothing": lambda: on_nothing(),
            "a structure of numbers": lambda: on_numbers({"lr": 0.1}),
            "parts of its own": lambda: on_parts(0.1),
            "metrics alone": lambda: (measured((x, y)), 0.0)[1],
        }
        losses = [float(calls[form]()) for _ in range(3)]
        if where is not ONE:
            assert len({part.tobytes() for part in components(net.layers[0].kernel)}) == 1
        shown = [float(m.result()) for m in (mean, error)]
        shown += [float(value) for value in net.get_metrics_result().values()]
        return [*losses, *shown], {"kernel": net.layers[0].kernel.numpy()}

    forms = ("batch", "accumulated", "batch by name", "distributed", "a number")
    forms += ("a number by name", "a flag", "nothing", "a structure of numbers")
    one = run(ONE, "batch")  # where all of these are the same call
    for form in (*forms, "parts of its own"):
        assert_equal_runs(run(strategy, form), one)
    assert_equal_runs(run(strategy, "metrics alone"), run(ONE, "metrics alone"))


class Running(keras.layers.Layer):
    """Keeps a mean of its input as a user's layer may, and other things that no mean is."""

    def build(self, shape):
        options = {"trainable": False, "initializer": "zeros"}
        self.mean = self.add_weight(shape=shape[1:], name="mean", **options)
        self.twice = self.add_weight(shape=(), name="twice", dtype="float64", **options)
        self.most = self.add_weight(
            name="most", trainable=False, initializer=lambda *_, **__: -np.inf
        )
        self.third = self.add_weight(
            name="third", trainable=False, initializer=lambda *_, **__: 1 / 3
        )
        self.calls = self.add_weight(shape=(), name="calls", dtype="int32", **options)
        self.last = self.add_weight(shape=(), name="last", aggregation="mean", **options)

    def call(self, x, training=None):
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(x, 0))
            self.twice.assign(self.twice + 0.1)
            self.third.assign(self.third * 1.0)
            self.calls.assign(self.calls + 1)
            self.last.assign(tf.reduce_mean(x))
        return x - self.mean


def claim_all_state_that_layers_move_becomes_one(strategy, folder):
    n = strategy.num_replicas_in_sync
    x = NUMBERS[: 2 * n + 1]  # uneven rows

    def run(where, how):
        keras.utils.set_random_seed(3)
        renorm = {"renorm": True, "renorm_momentum": 0.5} if has(RENORM) else {}
        with where.scope():
            layers = [
                Running(),
                keras.layers.SpectralNormalization(keras.layers.Dense(4)),
                keras.layers.BatchNormalization(momentum=0.5, **renorm),
            ]
            net = keras.Sequential([keras.Input((5,)), *layers])
        reduction = None if how == "reduced by hand" else "mean"
        optim = ModuleOptimizer(keras.optimizers.SGD(), reduction=reduction)

        def learn(x):
            with tfloop.Tape() as tape:
                loss = tf.reduce_mean(net(x, training=True) ** 2)
            grads = GradientsParams.from_grads(tape.backward(loss), net)
            optim.step(0.1, net, grads.reduce() if reduction is None else grads)

        if how == "eager":
            tf.config.run_functions_eagerly(True)
        try:
            tfloop.compile(learn, strategy=where)(tf.constant(x))
        finally:
            tf.config.run_functions_eagerly(False)
        return net

    for how in ("graph", "eager", "reduced by hand"):
        net, one = run(strategy, how), run(ONE, how)
        for path, variable in tfloop.named_variables(net).items():
            if not path.endswith("seed_generator_state"):
                assert len({part.tobytes() for part in components(variable)}) == 1, path
        running, alone = net.layers[0], one.layers[0]
        np.testing.assert_allclose(running.mean.numpy(), alone.mean.numpy(), rtol=1e-6)
        for name in ("twice", "most", "third", "calls"):
            kept, expected = (getattr(layer, name).numpy() for layer in (running, alone))
            assert kept.tobytes() == expected.tobytes(), name
        u = net.layers[1].vector_u
        np.testing.assert_allclose(u.numpy(), one.layers[1].vector_u.numpy(), rtol=1e-5)


def claim_what_is_of_samples_stays_with_its_replica(strategy, folder):
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        layers = [keras.layers.LSTM(3, stateful=True), keras.layers.Dense(1)]
        net = keras.Sequential([keras.Input(batch_shape=(1, 2, 5)), *layers])
    optim = ModuleOptimizer("sgd")
    step = squares_step(strategy, net, optim)
    x = tf.constant(NUMBERS[: 2 * n].reshape(n, 2, 5))
    step(x)
    for state in layers[0].states:
        assert len({part.tobytes() for part in components(state)}) == n
    checkpoint = tfloop.Checkpoint(f"{folder}/stateful", net=net, optim=optim)
    checkpoint.save(1)
    went_on = [float(step(x)) for _ in range(2)], [components(s) for s in layers[0].states]
    checkpoint.restore()
    again = [float(step(x)) for _ in range(2)], [components(s) for s in layers[0].states]
    np.testing.assert_equal(again, went_on)


def claim_a_sum_over_replicas_takes_means_of_shares_and_no_sums_of_them(strategy, folder):
    model = weight_in(strategy)
    optim = ModuleOptimizer(keras.optimizers.SGD(), reduction="sum").build(model)
    windows = {how: GradientsAccumulator(reduction=how).build(model) for how in ("sum", "mean")}
    weight = tfloop.named_parameters(model)["w"]
    before = float(weight.numpy())

    def step(how):
        @tfloop.compile(strategy=strategy)
        def run(batch):
            windows[how].accumulate(model, GradientsParams({"w": tf.reduce_mean(batch)}))
            optim.step(1.0, model, windows[how])

        return run

    with pytest.raises(ValueError, match="shares are parts of a mean"):
        step("sum")(tf.fill([4], 2.0))
    step("mean")(tf.fill([4], 2.0))
    moved = before - float(weight.numpy())
    np.testing.assert_allclose(moved, 2.0 * strategy.num_replicas_in_sync, rtol=1e-6)


def claim_an_empty_window_raises_on_every_replica(strategy, folder):
    n = strategy.num_replicas_in_sync
    model = weight_in(strategy)
    optim, window = ModuleOptimizer("sgd").build(model), GradientsAccumulator().build(model)
    summing, ones = ModuleOptimizer("sgd", reduction="sum"), [1.0, *[0.0] * (n - 1)]

    def empty(_):
        optim.step(0.1, model, window)

    def unbuilt(_):
        optim.step(0.1, model, GradientsAccumulator())

    def without_weight(_):
        nothing = GradientsAccumulator(reduction="mean")
        nothing.accumulate(model, GradientsParams({"w": tf.constant(1.0)}), weight=0.0)
        summing.step(0.1, model, nothing)

    def reduced(_):
        GradientsParams({"w": tf.constant(1.0)}).reduce(weight=0.0)["w"]

    def on_one(first):
        if first:
            window.accumulate(model, GradientsParams({"w": tf.constant(1.0)}))
        optim.step(1.0, model, window)

    def run(on_replica):
        strategy.run(on_replica, (per_replica(strategy, ones),))

    for call, error, words in (
        (empty, RuntimeError, "found an empty window"),
        (unbuilt, RuntimeError, "found an empty window"),
        (without_weight, ValueError, "weights that sum to 0"),
        (reduced, ValueError, "weights that sum to 0"),
    ):
        with pytest.raises(error, match=words):
            run(call)
    for call, words in (
        (empty, "found an empty window"),
        (without_weight, "weights sum to 0"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            tf.function(lambda call=call: run(call))()
    assert components(model.w) == [0.0] * n
    run(on_one)  # one replica has something, so there is something
    np.testing.assert_allclose(components(model.w), [-1.0 / n] * n)


def claim_gradients_reduced_by_hand_weigh_rows(strategy, folder):
    # Three rows on two replicas are no two halves.
    rows = strategy.num_replicas_in_sync + 1

    def run(where):
        with where.scope():
            keras.utils.set_random_seed(0)
            net = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        optim = ModuleOptimizer("sgd", reduction=None)

        @tfloop.compile(strategy=where)
        def step(x):
            with tfloop.Tape() as tape:
                loss = tf.reduce_mean(net(x) ** 2)
            grads = GradientsParams.from_grads(tape.backward(loss), net).reduce()
            optim.step(0.1, net, grads)
            return loss

        losses = [float(step(tf.constant(NUMBERS[:rows]))) for _ in range(3)]
        return losses, {p: v.numpy() for p, v in tfloop.named_parameters(net).items()}

    assert_equal_runs(run(strategy), run(ONE))


def claim_a_checkpoint_in_mid_window_keeps_what_each_replica_has(strategy, folder):
    n = strategy.num_replicas_in_sync

    class Run:
        def __init__(self, where, how):
            with where.scope():
                keras.utils.set_random_seed(2)
                layers = [
                    keras.layers.Dense(4),
                    keras.layers.Dropout(0.5),
                    keras.layers.BatchNormalization(momentum=0.5),
                    keras.layers.Dense(1),
                ]
                self.net = net = keras.Sequential([keras.Input((5,)), *layers])
                self.mean = mean = keras.metrics.Mean()
                self.seen = seen = tf.Variable(
                    0,
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.SUM,
                )
            self.optim, self.window = optim, window = (
                ModuleOptimizer("adam"),
                GradientsAccumulator(reduction=how),
            )

            @tfloop.compile(strategy=where)
            def micro(x):
                with tfloop.Tape() as tape:
                    loss = tf.reduce_mean(net(x, training=True) ** 2)
                window.accumulate(net, GradientsParams.from_grads(tape.backward(loss), net))
                mean.update_state(loss)
                seen.assign_add(tf.shape(x)[0])

            @tfloop.compile(strategy=where)
            def update():
                optim.step(0.1, net, window)

            self.micro, self.update = micro, update
            objects = {"net": net, "optim": optim, "window": window, "mean": mean, "seen": seen}
            self.checkpoint = tfloop.Checkpoint(f"{folder}/window-{how}-{n}", **objects)

        def finish(self):
            for begin in (3, 6):
                self.micro(tf.constant(NUMBERS[begin : begin + 2 * n + 1]))
                self.update()
            held = [*self.net.variables, self.mean.total, self.mean.count, self.seen]
            held += [v for g in self.optim._assembly.records() for v in g.variables().values()]
            return [v.numpy() for v in held], [
                components(v) for v in tfloop.named_variables(self.net).values()
            ]

    for how in ("mean", "sum"):
        first = Run(strategy, how)
        for begin in (0, 1):
            first.micro(tf.constant(NUMBERS[begin : begin + 2 * n + 1]))
        first.checkpoint.save(1)
        norm = first.net.layers[2].moving_mean
        apart = components(norm)
        assert len({part.tobytes() for part in apart}) == n
        went_on, second = first.finish(), Run(strategy, how)
        second.checkpoint.restore()
        np.testing.assert_equal(second.finish(), went_on)
        one = Run(ONE, how)  # on another number of replicas
        assert one.checkpoint.restore() == 1
        found = one.net.layers[2].moving_mean.numpy()
        np.testing.assert_allclose(found, np.mean(apart, 0), rtol=1e-6)
        assert int(one.seen.numpy()) == 2 * (2 * n + 1)
    # And from one device to many: whole numbers aren't rounded, seeds are told apart.
    one.checkpoint.save(2)
    many = Run(strategy, how)
    assert many.checkpoint.restore() == 2
    assert int(many.seen.numpy()) == 2 * (2 * n + 1)
    assert len({part.tobytes() for part in components(many.net.layers[2].moving_mean)}) == 1
    seeds = components(many.net.layers[1].seed_generator.state)
    assert len({seed.tobytes() for seed in seeds}) == n


def claim_threads_that_run_replicas_take_turns_in_building_and_applying(strategy, folder):
    with strategy.scope():
        net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    optim, window = ModuleOptimizer("adam"), GradientsAccumulator()
    turns, errors = threading.Lock(), []

    def grads():
        named = tfloop.named_parameters(net)
        return GradientsParams({path: tf.ones(v.shape) for path, v in named.items()})

    def eager():
        window.accumulate(net, grads())
        optim.step(0.1, net, grads())

    compiled = tfloop.compile(lambda: optim.step(0.1, net, grads()) and None, strategy=strategy)

    def work(number):
        try:
            with turns:  # the collectives of two runs may not overlap
                strategy.run(eager) if number % 2 else compiled()
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a deadlock"
    assert not errors, errors
    assert optim.iterations.numpy() == 4
    assert window.count.numpy() == 2
    assert_alike(optim, net)


def claim_copies_of_what_replicas_hold_go_their_own_way(strategy, folder):
    with strategy.scope():
        net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    optim, window = ModuleOptimizer("adam", scaler=tfloop.LossScaler()), GradientsAccumulator()

    def grads(value):
        named = tfloop.named_parameters(net)
        return GradientsParams({path: value * tf.ones(v.shape) for path, v in named.items()})

    def begin():
        optim.step(0.1, net, grads(1.0))
        window.accumulate(net, grads(2.0))

    strategy.run(begin)
    weights = net.get_weights()
    other, copied = copy.deepcopy((optim, window))
    assert other.serialize() == optim.serialize()
    results = []
    for one, its in ((optim, window), (other, copied)):
        net.set_weights(weights)
        strategy.run(lambda one=one, its=its: one.step(0.1, net, its))
        results.append([*net.get_weights(), one.serialize()])
        assert_alike(one, net)
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert copied.count.numpy() == window.count.numpy() == 0


def main(number, folder, *names):
    strategy = tfloop.strategy(f"cpu:{number}")
    assert strategy.num_replicas_in_sync == int(number)
    for name in names or [name for name in globals() if name.startswith("claim_")]:
        begin = time.process_time()
        try:
            globals()[name](strategy, folder)
        except BaseException:
            print("FAILED", name, flush=True)
            traceback.print_exc()
        else:
            print("ok", name, flush=True)
            print(f"{name}: {time.process_time() - begin:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What people report about accumulation and about resuming, each with the value that is right."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from resumable import build_run, everything, run_on

import tfloop
from tfloop import GradientsAccumulator, GradientsParams, ModuleOptimizer, ParamGroup

MODES = ("eager", "graph", "jit")
RULES = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
}


def compiled(mode):
    """The decorator of a mode; eager leaves the function as it is."""
    return (lambda fn: fn) if mode == "eager" else tfloop.compile(jit_compile=mode == "jit")


def scalar(value=1.0):
    """A net of one weight, whose updates can be done in the head."""
    net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    net.layers[0].kernel.assign([[value]])
    return net, net.layers[0].kernel


def gradient(value, path="dense.kernel"):
    return GradientsParams({path: tf.reshape(value, (1, 1))})


class Words(keras.Model):
    """An embedding with repeated rows, a tied one, and dense layers."""

    def __init__(self, dtype):
        super().__init__(dtype=dtype)
        self.words = keras.layers.Embedding(7, 4, dtype=dtype)
        self.table = keras.layers.Embedding(9, 4, dtype=dtype)
        self.dense = keras.layers.Dense(4, activation="tanh", dtype=dtype)

    def call(self, ids):
        x = keras.ops.mean(self.words(ids % 7) + self.table(ids), axis=1)
        return keras.ops.matmul(self.dense(x), keras.ops.transpose(self.table.embeddings))


def nets(dtype):
    keras.utils.set_random_seed(3)
    found = {name: Words(dtype) for name in RULES}
    for net in found.values():
        net(tf.zeros((1, 5), tf.int32))
    return found


def batches(count=20, rows=12):
    rng = np.random.default_rng(0)
    return [
        (tf.constant(rng.integers(0, 9, (rows, 5))), tf.constant(rng.integers(0, 9, rows)))
        for _ in range(count)
    ]


def gradients(root, ids, targets):
    """Of the mean over the samples, summed over the nets."""
    with tfloop.Tape() as tape:
        loss = tf.add_n(
            [
                tf.reduce_mean(keras.ops.sparse_categorical_crossentropy(targets, net(ids), True))
                for net in root.values()
            ]
        )
    return GradientsParams.from_grads(tape.backward(loss), root)


def optimizer(clippings):
    """A rule for each net, in groups of their own."""
    optim = ModuleOptimizer(RULES["sgd"](), clipping=clippings["sgd"])
    for name in list(RULES)[1:]:
        optim.with_group(ParamGroup.from_name(name), RULES[name](), clippings[name])
    return optim


def clippings(root, kind):
    """For each net: no clipping, or one at the very norm that gradients have, where slips show."""
    grads = gradients(root, *batches(1)[0])
    kinds = {
        "none": None,
        "norm": tfloop.GradientClipping.by_norm(float(tf.norm(grads["adam.dense.kernel"]))),
        "global": tfloop.GradientClipping.by_global_norm(
            float(grads.global_norm(ParamGroup.from_name("adam")))
        ),
    }
    order = ["none", "norm", "global", "norm"] if kind == "mixed" else [kind] * 4
    return {name: kinds[each] for name, each in zip(RULES, order, strict=True)}


def trained_whole(root, mode, clippings):
    optim = optimizer(clippings)

    @compiled(mode)
    def step(ids, targets):
        optim.step(None, root, gradients(root, ids, targets))

    for batch in batches():
        step(*batch)
    return optim


def trained_in_pieces(root, mode, clippings, sizes):
    optim, window = optimizer(clippings), GradientsAccumulator(reduction="mean")

    @compiled(mode)
    def micro(ids, targets):
        window.accumulate(root, gradients(root, ids, targets), weight=tf.shape(ids)[0])

    @compiled(mode)
    def update():
        optim.step(None, root, window)

    for ids, targets in batches():
        for piece in zip(tf.split(ids, sizes), tf.split(targets, sizes), strict=True):
            micro(*piece)
        update()
    return optim


@pytest.mark.parametrize(
    ("mode", "kind", "sizes"),
    [
        ("graph", "global", [5, 4, 3]),  # mixed in a graph: below, in float64
        ("eager", "mixed", [5, 4, 3]),
        ("jit", "mixed", [4, 4, 4]),  # each size would be compiled anew
    ],
)
def test_case_01_micro_batches_equal_the_large_batch(mode, kind, sizes):
    whole, pieces = nets("float32"), nets("float32")
    limits = clippings(whole, kind)
    one = trained_whole(whole, mode, limits)
    other = trained_in_pieces(pieces, mode, limits, sizes)
    assert int(one.iterations) == int(other.iterations) == 20
    before = tfloop.named_parameters(nets("float32"))
    for (path, expected), found in zip(
        tfloop.named_parameters(whole).items(),
        tfloop.named_parameters(pieces).values(),
        strict=True,
    ):
        expected, found = expected.numpy(), found.numpy()
        assert np.linalg.norm(found - expected) <= 2e-6 * np.linalg.norm(expected), path
        assert not np.array_equal(expected, before[path].numpy()), path


def test_case_01_micro_batches_equal_the_large_batch_to_ten_digits_in_float64():
    whole, pieces = nets("float64"), nets("float64")
    limits = clippings(whole, "mixed")
    trained_whole(whole, "graph", limits)
    trained_in_pieces(pieces, "graph", limits, [5, 4, 3])
    found = tfloop.named_parameters(pieces)
    for path, expected in tfloop.named_parameters(whole).items():
        assert expected.dtype == "float64"
        np.testing.assert_allclose(
            found[path].numpy(), expected.numpy(), rtol=0, atol=1e-10, err_msg=path
        )


@pytest.mark.parametrize("mode", MODES)
def test_case_02_the_moving_average_moves_once_per_update(mode):
    net, _ = scalar(1.0)
    optim = ModuleOptimizer(keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5))
    window = GradientsAccumulator(reduction="mean")

    @compiled(mode)
    def micro():
        window.accumulate(net, gradient(1.0))

    @compiled(mode)
    def update():
        optim.step(None, net, window)

    for _ in range(3):
        micro()
        micro()
        update()
    # 0.5, then half of it and 0, then half of that and -0.5.
    assert float(optim.state("dense.kernel")["model_variables_moving_average"][0, 0]) == -0.125


@pytest.mark.parametrize("mode", MODES)
def test_case_03_a_schedule_counts_updates(mode):
    net, kernel = scalar(0.0)
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.25])
    optim = ModuleOptimizer(keras.optimizers.SGD(schedule))
    window = GradientsAccumulator()

    @compiled(mode)
    def micro():
        window.accumulate(net, gradient(0.25))

    @compiled(mode)
    def update():
        optim.step(None, net, window)

    seen = []
    for _ in range(2):
        for _ in range(4):
            micro()
        update()
        seen.append(float(kernel[0, 0]))
    assert seen == [-1.0, -1.25]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # Samples of 10 and 70, of 20 and 100 tokens: the mean over all, not the mean of means.
        ([(1.0, 4), (2.0, 4), (8.0, 2)], 2.8),
        ([(1.0, 10), (12.0, 100)], 11.0),
    ],
)
def test_case_04_the_mean_is_over_samples_or_tokens(mode, parts, expected):
    net, kernel = scalar(0.0)
    optim, window = ModuleOptimizer("sgd"), GradientsAccumulator(reduction="mean")

    @compiled(mode)
    def micro(value, weight):
        window.accumulate(net, gradient(value), weight=weight)

    @compiled(mode)
    def update():
        optim.step(1.0, net, window)

    for part in parts:
        micro(*part)
    update()
    assert float(kernel[0, 0]) == pytest.approx(-expected, abs=1e-6)


@pytest.mark.parametrize("mode", ["eager", "graph"])  # XLA drops the assert
def test_case_04_weights_that_sum_to_0_raise(mode):
    net, kernel = scalar(0.5)
    optim, window = ModuleOptimizer("sgd"), GradientsAccumulator(reduction="mean")

    @compiled(mode)
    def update():
        optim.step(1.0, net, window)

    window.accumulate(net, gradient(1.0), weight=0)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="weights.* sum to 0"):
        update()
    assert float(kernel[0, 0]) == 0.5
    assert int(window.count) == 1


@pytest.mark.parametrize("mode", MODES)
def test_case_05_a_partial_window_divides_by_what_was_added(mode):
    net, kernel = scalar(0.0)
    optim, window = ModuleOptimizer("sgd"), GradientsAccumulator(reduction="mean")

    @compiled(mode)
    def micro(value):
        window.accumulate(net, gradient(value))

    @compiled(mode)
    def update():
        optim.step(1.0, net, window)

    for _ in range(2):  # two epochs: nothing leaks from one into the other
        kernel.assign([[0.0]])
        seen = []
        for number in range(1, 8):
            micro(float(number))
            if number % 3 == 0:
                update()
                seen.append(float(kernel[0, 0]))
        if int(window.count):
            update()
        assert [*seen, float(kernel[0, 0])] == [-2.0, -7.0, -14.0]
    assert int(optim.iterations) == 6


@pytest.mark.parametrize("mode", MODES)
def test_case_07_a_micro_step_touches_no_optimizer(mode):
    net, kernel = scalar(1.0)
    optim, window = ModuleOptimizer("adam"), GradientsAccumulator()
    optim.step(0.1, net, gradient(1.0))

    def everything():
        counts = [group.counters["iterations"] for group in optim._assembly.records()]
        state = [*optim.state("dense.kernel").values(), *counts, kernel]
        return np.concatenate([np.ravel(value.numpy()) for value in state])

    @compiled(mode)
    def micro():
        window.accumulate(net, gradient(5.0))

    before = everything()
    for _ in range(3):
        micro()
        np.testing.assert_array_equal(everything(), before)
    optim.step(0.1, net, window)
    assert not np.array_equal(everything(), before)


@pytest.mark.parametrize("mode", ["graph", "jit"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "mixed_float16", "mixed_bfloat16"])
def test_case_08_sixteen_bit_gradients_are_summed_in_float32(dtype, mode):
    net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, dtype=dtype)])
    window = GradientsAccumulator()
    kernel = tfloop.named_parameters(net)["dense.kernel"]

    @compiled(mode)
    def additions():
        for _ in tf.range(4096):
            grads = GradientsParams({"dense.kernel": tf.ones((1, 1), kernel.dtype)})
            window.accumulate(net, grads)

    additions()
    total = window.grads()["dense.kernel"]
    assert (total.dtype, float(total[0, 0])) == (tf.float32, 4096.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_case_09_rows_and_dense_tensors_add_up_to_the_dense_sum(mode, reduction):
    net = keras.Sequential([keras.Input((2,)), keras.layers.Embedding(4, 2)])
    window = GradientsAccumulator(reduction=reduction)
    rows = tf.IndexedSlices(tf.constant([[1.0, 2], [3, 4], [5, 6]]), tf.constant([1, 1, 3]))
    more = tf.IndexedSlices(tf.constant([[10.0, 10]]), tf.constant([3]))
    dense = tf.ones((4, 2))

    @compiled(mode)
    def micro():
        for grad in (rows, more, dense):
            window.accumulate(net, GradientsParams({"embedding.embeddings": grad}))

    micro()
    expected = np.array([[1.0, 1], [5, 7], [1, 1], [16, 17]])
    count = 3 if reduction == "mean" else 1
    np.testing.assert_allclose(window.grads()["embedding.embeddings"], expected / count, rtol=1e-6)


def test_case_33_a_checkpoint_of_several_optimizers_holds_every_variable_they_own(tmp_path):
    net = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(3, name="a"), keras.layers.Dense(2, name="b")]
    )
    first = ModuleOptimizer("adam").with_group(
        ParamGroup.from_name("b"), keras.optimizers.SGD(momentum=0.9)
    )
    second = ModuleOptimizer(keras.optimizers.RMSprop(centered=True, momentum=0.5))
    first.build(net)
    second.build(net)
    path = tfloop.Checkpoint(tmp_path, first=first, second=second).save(0)
    stored = [key for key, _ in tf.train.list_variables(path) if key.startswith("values/")]
    # Slots: Adam 2 for each of a, momentum 1 for each of b, and 3 each; counts and rates of
    # 2 groups and 1 group, and two totals for each optimizer.
    assert len(stored) == 2 * 2 + 2 * 1 + 4 * 3 + 2 * 3 + 2 * 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run that is never stopped, with a checkpoint at each micro-step."""
    objects, micro, update = build_run()
    checkpoint = tfloop.Checkpoint(tmp_path_factory.mktemp("run"), max_to_keep=None, **objects)
    seen, paths = [], []

    def each(step, x):
        seen.append(x.numpy().tobytes())
        paths.append(checkpoint.save(step))

    run_on(objects, micro, update, 0, each=each)
    return everything(objects), seen, paths


@pytest.fixture(scope="module")
def resumed():
    """The objects of another process, so to speak: made anew, with other values in them."""
    objects, micro, update = build_run()
    run_on(objects, micro, update, 0, epochs=1)
    return objects, micro, update


def test_case_34_a_run_restored_at_any_micro_step_ends_bit_equal(undisturbed, resumed):
    expected, _, paths = undisturbed
    objects, micro, update = resumed
    checkpoint = tfloop.Checkpoint("unused", **objects)
    assert len(paths) == 15  # 3 epochs of 5 micro-batches, in windows of 3
    for number, path in enumerate(paths, start=1):
        step = checkpoint.restore(path)
        assert step == number
        # The checkpoint lies before the update that the third micro-batch brings.
        if int(objects["window"].count) == 3:
            update()
        run_on(objects, micro, update, step)
        assert everything(objects) == expected, f"resumed at micro-step {number}"


def test_case_34_a_run_restored_into_objects_not_built_ends_bit_equal(undisturbed):
    expected, _, paths = undisturbed
    objects, micro, update = build_run()
    assert tfloop.Checkpoint("unused", **objects).restore(paths[6]) == 7
    run_on(objects, micro, update, 7)
    assert everything(objects) == expected


def test_case_35_the_middle_of_a_shuffled_epoch_gives_the_same_batches_in_order(
    undisturbed, resumed
):
    _, batches_seen, paths = undisturbed
    objects, _, _ = resumed
    checkpoint = tfloop.Checkpoint("unused", **objects)
    for number, path in enumerate(paths, start=1):
        checkpoint.restore(path)
        left = [x.numpy().tobytes() for x, _ in objects["loader"]]
        end = -(-number // 5) * 5
        assert left == batches_seen[number:end]


@pytest.mark.parametrize("mode", MODES)
def test_case_36_dropout_masks_go_on_after_a_restore(mode, tmp_path):
    net = keras.Sequential([keras.Input((50,)), keras.layers.Dropout(0.5, seed=1)])
    checkpoint = tfloop.Checkpoint(tmp_path, net=net)

    @compiled(mode)
    def mask():
        return tfloop.train(net)(tf.ones((1, 50)))

    mask()
    checkpoint.save(1)
    following = [mask().numpy() for _ in range(2)]
    checkpoint.restore()
    np.testing.assert_array_equal([mask().numpy() for _ in range(2)], following)
    assert not np.array_equal(*following)

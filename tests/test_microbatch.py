"""`microbatch`: pieces of a batch in one graph loop, merged as the whole."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfloop
from tfloop import GradientsAccumulator, GradientsParams, ModuleOptimizer, microbatch

MODES = ("eager", "graph", "jit")
OPEN = [tf.TensorSpec([None, 5], tf.int64), tf.TensorSpec([None], tf.int64)]
Batch = collections.namedtuple("Batch", ["x", "extra"])


def compiled(mode, signature=None):
    if mode == "eager":
        return lambda fn: fn
    return tf.function(jit_compile=mode == "jit", input_signature=signature)


class Words(keras.Model):
    """An embedding, whose gradient is sparse, a tied one, and a dense layer."""

    def __init__(self):
        super().__init__()
        self.words = keras.layers.Embedding(9, 4)
        self.table = keras.layers.Embedding(9, 4)
        self.dense = keras.layers.Dense(4, activation="tanh")

    def call(self, ids):
        x = self.dense(keras.ops.mean(self.words(ids) + self.table(ids), axis=1))
        return keras.ops.matmul(x, keras.ops.transpose(self.table.embeddings))


@pytest.fixture(scope="module")
def words():
    keras.utils.set_random_seed(0)
    net = Words()
    net(tf.zeros((1, 5), tf.int32))
    return net


def sentences(rows):
    rng = np.random.default_rng(rows)
    return tf.constant(rng.integers(0, 9, (rows, 5))), tf.constant(rng.integers(0, 9, rows))


def step_of(net):
    def fn(piece):
        ids, targets = piece
        with tfloop.Tape() as tape:
            each = keras.ops.sparse_categorical_crossentropy(targets, net(ids), from_logits=True)
            loss = tf.reduce_mean(each)
        return GradientsParams.from_grads(tape.backward(loss), net), {"loss": loss, "each": each}

    return fn


def assert_same(grads, expected, tolerance=2e-6):
    assert set(grads) == set(expected)
    for path, grad in expected.items():
        grad, found = tf.convert_to_tensor(grad), tf.convert_to_tensor(grads[path])
        assert float(tf.norm(found - grad)) <= tolerance * float(tf.norm(grad)), path


@pytest.mark.filterwarnings("ignore:Converting sparse IndexedSlices")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_size", ["static", "open"])
def test_pieces_equal_the_whole_batch_and_the_accumulator(words, mode, batch_size):
    fn = step_of(words)
    signature = OPEN if batch_size == "open" else None

    @compiled(mode, signature)
    def pieces(ids, targets):
        return microbatch(fn, (ids, targets), num=3)

    every = mode == "eager" or (mode, batch_size) == ("graph", "open")  # others trace each size
    for rows in (9, 8, 7, 4, 2, 1) if every else (9, 8):
        ids, targets = sentences(rows)
        size = -(-rows // 3)
        whole, outputs = fn((ids, targets))
        grads, found = pieces(ids, targets)
        assert_same(grads, whole)
        np.testing.assert_allclose(found["each"], outputs["each"], rtol=1e-5)
        sizes = [min(size, rows - begin) for begin in range(0, rows, size)]
        assert found["loss"].shape == (len(sizes),)
        means = [tf.reduce_mean(part) for part in tf.split(outputs["each"], sizes)]
        np.testing.assert_allclose(found["loss"], means, rtol=1e-5)
        window = GradientsAccumulator(reduction="mean")
        for piece in zip(tf.split(ids, sizes), tf.split(targets, sizes), strict=True):
            window.accumulate(words, fn(piece)[0], weight=len(piece[0]))
        assert_same(grads, window.grads())


@pytest.mark.parametrize(
    ("rows", "num", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (5, 4, [2, 2, 1]), (3, 5, [1, 1, 1]), (7, 1, [7]), (9, 4, [3, 3, 3])],
)
@pytest.mark.parametrize("mode", MODES)
def test_there_are_at_most_num_pieces_and_none_is_empty(rows, num, sizes, mode):
    net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

    def fn(x):
        return ones(net), tf.cast(tf.shape(x)[0], tf.float32)

    for signature in (None, [tf.TensorSpec([None, 1])]):
        _, found = compiled(mode, signature)(lambda x: microbatch(fn, x, num=num))(
            tf.ones((rows, 1))
        )
        assert found.numpy().tolist() == sizes


def ones(net):
    return GradientsParams({p: tf.ones(v.shape) for p, v in tfloop.named_parameters(net).items()})


def test_a_trace_is_one_loop_of_one_piece_at_a_time_and_traces_fn_once(words):
    calls = []

    def fn(piece):
        calls.append(tuple(piece[0].shape))
        return step_of(words)(piece)

    def pieces(ids, targets):
        return microbatch(fn, (ids, targets), num=8)

    # Where all pieces have one size it is known; a rest makes the leading axis open.
    for rows, shape in ((64, (8, 5)), (61, (None, 5))):
        calls.clear()
        operations = (
            tf.function(pieces).get_concrete_function(*sentences(rows)).graph.get_operations()
        )
        loops = [op for op in operations if op.type in ("While", "StatelessWhile")]
        # More than one at a time would hold the activations of as many pieces.
        assert [op.get_attr("parallel_iterations") for op in loops] == [1]
        assert calls == [shape]


def test_no_activation_of_the_whole_batch_is_ever_made():
    width, rows = 24, 64
    net = keras.Sequential(
        [keras.Input((3,)), *(keras.layers.Dense(width, activation="relu") for _ in range(2))]
    )

    def fn(x):
        with tfloop.Tape() as tape:
            loss = tf.reduce_mean(net(x) ** 2)
        return GradientsParams.from_grads(tape.backward(loss), net), loss

    def activations(num):
        step = tf.function(lambda x: dict(microbatch(fn, x, num=num)[0]))
        graph = step.get_concrete_function(tf.TensorSpec([rows, 3])).graph.as_graph_def(
            add_shapes=True
        )
        nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
        shapes = [s for n in nodes for s in n.attr["_output_shapes"].list.shape]
        return {s.dim[0].size for s in shapes if len(s.dim) == 2 and s.dim[1].size == width} - {
            3,
            width,
        }  # these two are the weights'

    assert activations(1) == {rows}
    assert activations(8) == {rows // 8}


@pytest.mark.parametrize("mode", MODES)
def test_pieces_are_weighed_by_tokens(mode):
    def fn(piece):
        tokens = tf.reduce_sum(piece["mask"])
        mean = tf.reduce_sum(piece["x"] * piece["mask"]) / tokens
        return GradientsParams({"dense.kernel": tf.reshape(mean, (1, 1))}), tokens

    batch = {
        "x": tf.constant([[1.0, 2, 3], [4, 5, 6], [7, 8, 9], [9, 9, 9], [3, 2, 1]]),
        "mask": tf.constant([[1.0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1]]),
    }
    grads, tokens = compiled(mode)(
        lambda b: microbatch(fn, b, num=3, weight=lambda piece: tf.reduce_sum(piece["mask"]))
    )(batch)
    # The second piece has no token, and its mean over nothing, 0 / 0, no say.
    np.testing.assert_array_equal(tokens, [3.0, 0.0, 3.0])
    np.testing.assert_allclose(grads["dense.kernel"], [[(1 + 2 + 4 + 3 + 2 + 1) / 6]], rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_sparse_gradients_stay_sparse_and_train_as_dense_ones(words, mode):
    fn = step_of(words)
    ids, targets = sentences(7)
    grads, _ = compiled(mode)(lambda *batch: microbatch(fn, batch, num=3))(ids, targets)
    rows = grads["words.embeddings"]
    assert isinstance(rows, tf.IndexedSlices)
    assert rows.values.shape == (7 * 5, 4)
    window = GradientsAccumulator()
    window.accumulate(words, grads)
    whole, _ = fn((ids, targets))
    expected = np.zeros((9, 4))
    np.add.at(expected, whole["words.embeddings"].indices, whole["words.embeddings"].values)
    np.testing.assert_allclose(window.grads()["words.embeddings"], expected, atol=1e-6)


def test_rows_made_by_hand_need_no_dense_shape():
    net = keras.Sequential([keras.Input((1,)), keras.layers.Embedding(4, 2)])

    def fn(ids):
        rows = tf.shape(ids)[0]
        values = tf.ones((rows, 2)) / tf.cast(rows, tf.float32)
        return GradientsParams({"embedding.embeddings": tf.IndexedSlices(values, ids[:, 0])}), None

    @tf.function
    def step(ids):
        grads, nothing = microbatch(fn, ids, num=2)
        assert nothing is None
        window.accumulate(net, grads)

    window = GradientsAccumulator()
    step(tf.constant([[0], [2], [2]]))
    expected = [[1 / 3] * 2, [0, 0], [2 / 3] * 2, [0, 0]]
    np.testing.assert_allclose(window.grads()["embedding.embeddings"], expected, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_batches_and_outputs_may_be_structures(mode):
    net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

    def fn(piece):
        assert type(piece).__name__ == "Batch"
        outputs = {"pair": (piece.x[:, 0] * 2, [piece.extra["ids"]]), "none": None, "one": 3.0}
        return ones(net), outputs

    batch = Batch(tf.reshape(tf.range(10.0), (5, 2)), {"ids": tf.range(5)})
    _, found = compiled(mode)(lambda x, ids: microbatch(fn, Batch(x, {"ids": ids}), num=2))(
        batch.x, batch.extra["ids"]
    )
    assert found["none"] is None
    np.testing.assert_array_equal(found["pair"][0], [0, 4, 8, 12, 16])
    np.testing.assert_array_equal(found["pair"][1][0], [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(found["one"], [3.0, 3.0])


# In Keras 3.16 a recurrent layer says that it ends a mask.
@pytest.mark.filterwarnings("ignore:Layer 'gru.* was passed an input with a mask")
@pytest.mark.parametrize("signature", [None, [tf.TensorSpec([None, 3], tf.int32)]])
@pytest.mark.parametrize("mode", MODES)
def test_masks_of_keras_are_cut_and_put_together(mode, signature):
    embed, gru = (
        keras.layers.Embedding(5, 4, mask_zero=True),
        keras.layers.GRU(2, return_sequences=True),
    )
    ids = tf.constant([[1, 2, 0], [2, 0, 0], [3, 4, 1]])
    expected = gru(embed(ids))
    rest = keras.layers.GRU(2)
    rest(expected)

    def fn(piece):
        with tfloop.Tape() as tape:
            loss = tf.reduce_mean(gru(piece))
        return GradientsParams.from_grads(tape.backward(loss), gru), gru(piece)

    @compiled(mode, signature)
    def run(ids):
        _, outputs = microbatch(fn, embed(ids), num=2)
        return outputs, rest(outputs)

    outputs, read = run(ids)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(read, rest(expected), rtol=1e-5, atol=1e-7)


def test_arrays_are_taken_as_tensors():
    net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    _, found = microbatch(lambda x: (ones(net), x), np.arange(5.0), num=2)
    np.testing.assert_array_equal(found, np.arange(5.0))


def test_outputs_of_different_lengths_are_put_side_by_side():
    net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

    def fn(x):
        return ones(net), tf.boolean_mask(x, x > 2)

    for mode in ("eager", "graph"):
        _, found = compiled(mode)(lambda x: microbatch(fn, x, num=3))(tf.range(7.0))
        np.testing.assert_array_equal(found, [3, 4, 5, 6])


@pytest.mark.parametrize("mode", ["graph", "jit"])
def test_autograph_reaches_the_functions(mode):
    net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

    def fn(x):
        if tf.reduce_sum(x) > 5:
            total = tf.constant(1.0)
        else:
            total = tf.constant(-1.0)
        return ones(net), total

    def weight(x):
        if tf.reduce_sum(x) > 5:
            return tf.constant(3.0)
        else:
            return tf.constant(1.0)

    @compiled(mode)
    def step(x):
        return microbatch(fn, x, num=2, weight=weight)[1]

    np.testing.assert_array_equal(step(tf.range(4.0)), [-1.0, -1.0])
    np.testing.assert_array_equal(step(tf.range(5.0)), [-1.0, 1.0])


def test_eager_pieces_may_reach_different_parameters():
    rows = tf.IndexedSlices(tf.ones((1, 1)), tf.constant([1]), tf.constant([2, 1]))

    def fn(x):
        number = int(x[0])
        grads = {"e.embeddings": rows if number else tf.ones((2, 1))}
        if number == 1:
            grads["other"] = tf.constant(3.0)
        return GradientsParams(grads), None

    grads, _ = microbatch(fn, tf.range(3), num=3)
    np.testing.assert_allclose(grads["e.embeddings"], [[1 / 3], [1.0]])
    np.testing.assert_allclose(grads["other"], 1.0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_sums_are_in_float32_or_in_float64(dtype, mode):
    def fn(x):
        return GradientsParams({"w": tf.fill((2,), tf.cast(300.0, dtype))}), tf.cast(x[0], dtype)

    grads, outputs = compiled(mode)(lambda x: microbatch(fn, x, num=300))(tf.ones((300,)))
    assert grads["w"].dtype == ("float64" if dtype == "float64" else "float32")
    assert outputs.dtype == dtype
    # 300 times 300 is more than float16 holds, and a step that bfloat16 doesn't see.
    np.testing.assert_array_equal(grads["w"], [300.0, 300.0])


@pytest.mark.parametrize("mode", MODES)
def test_statistics_and_masks_move_per_piece(mode):
    net = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dropout(0.5, seed=1),
            keras.layers.Dense(1),
        ]
    )
    net.layers[0].moving_mean.assign([8.0, 8.0])
    seed = net.layers[1].seed_generator.state

    def fn(x):
        with tfloop.Tape() as tape:
            loss = tf.reduce_mean(tfloop.train(net)(x))
        return GradientsParams.from_grads(tape.backward(loss), net), loss

    before = int(seed[1])
    compiled(mode)(lambda x: microbatch(fn, x, num=3)[1])(tf.zeros((6, 2)))
    np.testing.assert_array_equal(net.layers[0].moving_mean, [1.0, 1.0])
    first = int(seed[1]) - before
    compiled(mode)(lambda x: microbatch(fn, x, num=1)[1])(tf.zeros((6, 2)))
    assert first == 3 * (int(seed[1]) - before - first)


def test_a_compiled_step_with_pieces_trains_as_one_with_the_batch():
    def trained(num):
        keras.utils.set_random_seed(1)
        net, optim = Words(), ModuleOptimizer("adam", clipping=tfloop.GradientClipping.by_norm(0.1))
        net(tf.zeros((1, 5), tf.int32))
        fn = step_of(net)

        @tfloop.compile
        def step(ids, targets):
            batch = (ids, targets)
            grads, outputs = microbatch(fn, batch, num=num) if num else fn(batch)
            optim.step(0.01, net, grads)
            return outputs

        for rows in (9, 8, 5):
            step(*sentences(rows))
        assert step.trace_count <= 2
        return tfloop.named_parameters(net)

    whole = trained(None)
    for path, variable in trained(4).items():
        expected = whole[path].numpy()
        error = np.linalg.norm(variable.numpy() - expected)
        assert error <= 2e-6 * np.linalg.norm(expected), path


def test_a_layer_frozen_later_is_left_out_of_compiled_pieces():
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    optim = ModuleOptimizer("sgd")

    def fn(x):
        with tfloop.Tape() as tape:
            loss = tf.reduce_mean(net(x))
        return GradientsParams.from_grads(tape.backward(loss), net), loss

    @tfloop.compile
    def step(x):
        optim.step(1.0, net, microbatch(fn, x, num=2)[0])

    step(tf.ones((4, 2)))
    net.layers[0].trainable = False
    before = {path: v.numpy() for path, v in tfloop.named_variables(net).items()}
    step(tf.ones((4, 2)))
    moved = [
        path
        for path, v in tfloop.named_variables(net).items()
        if not np.array_equal(v.numpy(), before[path])
    ]
    assert moved == ["dense_1.kernel", "dense_1.bias"]


# Bad input.


def plain(x):
    return GradientsParams({"w": tf.ones((2,))}), None


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: microbatch(plain, tf.ones(4), num=0), ValueError, "got 0, expected an int of"),
        (lambda: microbatch(plain, tf.ones(4), num=2.0), TypeError, "float 2.0"),
        (lambda: microbatch(plain, tf.ones(4), num=True), TypeError, "bool True"),
        (lambda: microbatch(plain, tf.constant(4.0), num=2), ValueError, r"got the shapes \(\)"),
        (lambda: microbatch(plain, tf.ones((0, 3)), num=2), ValueError, "empty batch: 0 rows"),
        (
            lambda: microbatch(plain, (tf.ones(4), tf.ones((3, 1))), num=2),
            ValueError,
            r"common leading axis: got the shapes \(4,\), \(3, 1\)",
        ),
        (lambda: microbatch(plain, {}, num=2), TypeError, "needs a batch of tensors"),
        (lambda: microbatch(plain, (tf.ones(4), "x"), num=2), TypeError, "got str 'x' in it"),
        (lambda: microbatch(plain, (tf.ones(4), None), num=2), TypeError, "got None in it"),
        (
            lambda: microbatch(plain, tf.ragged.constant([[1.0], [2.0, 3.0]]), num=2),
            TypeError,
            "RaggedTensor in it",
        ),
        (
            lambda: microbatch(lambda x: plain(x)[0], tf.ones(4), num=2),
            TypeError,
            r"returns \(GradientsParams, outputs\)",
        ),
        (lambda: microbatch(lambda x: None, tf.ones(4), num=2), TypeError, "got None. End it"),
        (
            lambda: microbatch(lambda x: ({"w": x}, x), tf.ones(4), num=2),
            TypeError,
            "an object of type tuple",
        ),
        (
            lambda: microbatch(plain, tf.ones(4), num=2, weight=lambda x: x),
            ValueError,
            r"a weight of shape \(2,\), expected a scalar",
        ),
        (
            lambda: microbatch(plain, tf.ones(4), num=2, weight=lambda x: "many"),
            TypeError,
            "got str 'many' as weight",
        ),
        (
            lambda: microbatch(plain, tf.ones(4), num=2, weight=lambda x: -1),
            ValueError,
            "the weight -1.0",
        ),
        (
            lambda: microbatch(
                lambda x: (plain(x)[0], tf.ragged.constant([[1.0]])), tf.ones(4), num=2
            ),
            TypeError,
            "RaggedTensor among the outputs, expected dense tensors",
        ),
    ],
)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_bad_input_raises_and_says_how_to_mend_it(call, error, match, mode):
    with pytest.raises(error, match=match):
        compiled(mode)(lambda: call() and None)()


def test_gradients_that_were_used_before_raise():
    grads = plain(None)[0]
    with pytest.raises(RuntimeError, match=r"consumed.*grads.copy\(\)"):
        microbatch(lambda x: (grads, x), tf.ones(4), num=2)


def test_weights_that_sum_to_0_raise():
    with pytest.raises(ValueError, match="can't take the mean: the weights of all pieces sum to 0"):
        microbatch(plain, tf.ones(4), num=2, weight=lambda x: 0)


@pytest.mark.parametrize(
    ("weight", "match"),
    [(0.0, "weights of all pieces sum to 0"), (-1.0, "negative or not finite")],
)
def test_bad_weights_raise_when_a_trace_runs(weight, match):
    step = tf.function(lambda x, w: dict(microbatch(plain, x, num=2, weight=lambda x: w)[0]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=match):
        step(tf.ones(4), tf.constant(weight))


def test_under_xla_which_drops_asserts_weights_that_sum_to_0_give_zeros():
    step = tf.function(
        lambda x, w: dict(microbatch(plain, x, num=2, weight=lambda x: w)[0]), jit_compile=True
    )
    np.testing.assert_array_equal(step(tf.ones(4), tf.constant(0.0))["w"], [0.0, 0.0])


@pytest.mark.parametrize("lengths", [(0, 0), (4, 5), (5, 4)])
def test_open_batches_that_are_empty_or_differ_in_length_raise_when_they_run(lengths):
    for static in (None, lengths[0] or None):
        signature = [tf.TensorSpec([static]), tf.TensorSpec([None])]
        step = tf.function(
            lambda x, y: dict(microbatch(plain, (x, y), num=2)[0]), input_signature=signature
        )
        with pytest.raises(tf.errors.InvalidArgumentError, match="empty batch, or parts of diff"):
            step(*(tf.ones(length) for length in lengths))


def test_a_gradient_of_hidden_shape_raises_in_a_trace():
    def fn(x):
        return GradientsParams({"w": tf.numpy_function(lambda: np.ones(2, "f"), [], "float32")}), x

    with pytest.raises(ValueError, match="gradient of shape <unknown> for 'w', expected the var"):
        tf.function(lambda x: dict(microbatch(fn, x, num=2)[0]))(tf.ones(4))

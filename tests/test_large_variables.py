"""Large variables on a CPU are updated by XLA, in one pass: the same values, for each rule."""

import keras
import pytest
import tensorflow as tf
from optimizer_helpers import (
    ELEMENTWISE,
    OPTIMIZERS,
    RATE,
    Words,
    assert_close,
    gradient_table,
    row_of,
    run_keras,
    run_tfloop,
    values_of,
)

import tfloop
from tfloop import GradientsAccumulator, GradientsParams, ModuleOptimizer
from tfloop._update import cell_update

EMBEDDINGS = "embedding.embeddings"


@pytest.fixture
def all_are_large(monkeypatch):
    if cell_update._LARGE == 2**62:
        pytest.skip("every fast path is off")
    monkeypatch.setattr(cell_update, "_LARGE", 1)


def compiled_by_xla(fn, *args):
    """How many of the functions that `fn` calls in its graph are for XLA."""
    library = tf.function(fn).get_concrete_function(*args).graph.as_graph_def().library
    return sum(function.attr["_XlaMustCompile"].b for function in library.function)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_each_rule_equals_keras(all_are_large, name):
    rate = float(OPTIMIZERS[name]().learning_rate.numpy())
    reference, model = Words(), Words()
    table = gradient_table(model)
    expected = run_keras([(OPTIMIZERS[name](), list(table))], reference, table, "graph")
    optim = ModuleOptimizer(OPTIMIZERS[name]())
    assert_close(run_tfloop(optim, model, table, "graph", rate), expected)


@pytest.mark.parametrize("rows", [4, None])
def test_rows_are_summed_whether_their_number_is_known_or_not(all_are_large, rows):
    reference, model = Words(), Words()
    optim, plain = ModuleOptimizer("adam").build(model), keras.optimizers.Adam()
    plain.build([reference.embedding.embeddings])
    values, ids = tf.TensorSpec((rows, 4)), tf.TensorSpec((rows,), tf.int32)

    @tf.function(input_signature=[values, ids])
    def step(values, ids):
        grad = tf.IndexedSlices(values, ids, tf.constant([6, 4]))
        optim.step(RATE, model, GradientsParams({EMBEDDINGS: grad}))

    for ids in ([0, 2, 2, 5], [1, 1, 1, 4]):
        values = tf.random.stateless_normal((4, 4), ids[:2])
        step(values, tf.constant(ids))
        grad = tf.IndexedSlices(values, tf.constant(ids), tf.constant([6, 4]))
        plain.learning_rate = RATE
        plain.apply([tf.convert_to_tensor(grad)])
    assert_close(
        {EMBEDDINGS: model.embedding.embeddings.numpy()},
        {EMBEDDINGS: reference.embedding.embeddings.numpy()},
    )


def test_averages_decay_and_constraints_are_those_of_the_plain_way(monkeypatch):
    ends = []
    for large in (1, 2**62):
        monkeypatch.setattr(cell_update, "_LARGE", large)
        model = Words()
        model.dense.kernel.constraint = keras.constraints.MaxNorm(0.5)
        optim = ModuleOptimizer(keras.optimizers.AdamW(RATE, weight_decay=0.1, use_ema=True))
        ends.append(run_tfloop(optim, model, gradient_table(model, 9), "graph", steps=9))
        for path in list(ends[-1]):
            average = optim.state(path)["model_variables_moving_average"]
            ends[-1][f"average of {path}"] = average.numpy()
    assert_close(*ends)


def test_a_window_updates_what_it_has_a_gradient_of(all_are_large):
    reference, model = Words(), Words()
    table = gradient_table(model, 6)
    del table["dense.bias"]
    optim, window = ModuleOptimizer("adam").build(model), GradientsAccumulator(reduction="sum")

    @tfloop.compile
    def step(i):
        window.accumulate(model, GradientsParams(row_of(table, i)))
        optim.step(RATE, model, window)

    for i in range(6):
        step(tf.constant(i))
    plain = keras.optimizers.Adam(RATE)
    expected = run_keras([(plain, list(table))], reference, table, "graph", 6)
    assert_close(values_of(model), expected)


def test_only_large_variables_of_rules_that_gain_go_this_way():
    if cell_update._LARGE == 2**62:
        pytest.skip("every fast path is off")
    large, small = tf.Variable(tf.zeros((3 * 2**20,))), tf.Variable(tf.zeros((2**21,)))
    grads = {"large": tf.ones_like(large), "small": tf.ones_like(small)}

    def functions(optimizer, **options):
        root = tf.Module()
        root.large, root.small = large, small
        optim = ModuleOptimizer(optimizer, **options).build(root)
        step = lambda lr: optim.step(lr, root, GradientsParams(grads)) and None  # noqa: E731
        return compiled_by_xla(step, tf.constant(0.1))

    assert functions("adam") == 1
    assert functions("adam", fused=False) == 0
    assert functions("sgd") == 0  # one pass as it is
    assert functions(keras.optimizers.Lamb()) == 0  # a norm of the whole variable


def test_an_eager_step_and_one_that_is_for_xla_run_the_rule_as_it_is(all_are_large, monkeypatch):
    def refused(*args):
        raise AssertionError("went through XLA by itself")

    monkeypatch.setattr(cell_update.CellUpdate, "_update_by_xla", refused)
    model = Words()
    optim = ModuleOptimizer("adam")
    grads = row_of(gradient_table(model, 1), 0)
    optim.step(RATE, model, GradientsParams(grads))
    compiled = tfloop.compile(lambda lr: optim.step(lr, model, GradientsParams(grads)) and None)
    with pytest.raises(AssertionError, match="by itself"):
        compiled(RATE)
    jitted = tfloop.compile(compiled, jit_compile=True)
    jitted(RATE)
    assert int(optim.iterations) == 2

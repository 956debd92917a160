"""Several replicas, on logical CPU devices in processes of their own."""

import ast

import keras
import numpy as np
import pytest
import tensorflow as tf
from processes import ROOT, run

import tfloop

SCRIPT = ROOT / "tests" / "replica_claims.py"
CLAIMS = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("claim_")
]


# What depends on how many replicas there are, for the count that takes longer.
ON_FOUR = [
    "claim_replicas_equal_one_device_with_every_clipping",
    "claim_accumulation_on_replicas_equals_one_device",
    "claim_what_is_not_finite_on_one_replica_skips_all",
    "claim_one_collective_for_dense_gradients_and_none_for_micro_steps",
    "claim_masks_differ_and_statistics_become_one",
    "claim_distributed_data_sets_and_short_batches_equal_one_device",
]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    return run("-W", "error", str(SCRIPT), "2", str(tmp_path_factory.mktemp("two")), *CLAIMS)


@pytest.fixture(scope="module")
def on_four(tmp_path_factory):
    return run("-W", "error", str(SCRIPT), "4", str(tmp_path_factory.mktemp("four")), *ON_FOUR)


@pytest.mark.parametrize("claim", CLAIMS)
def test_two_replicas(on_two, claim):
    assert f"ok {claim}\n" in on_two.stdout, on_two.stderr[-6000:]


@pytest.mark.thorough
@pytest.mark.parametrize("claim", ON_FOUR)
def test_four_replicas(on_four, claim):
    assert f"ok {claim}\n" in on_four.stdout, on_four.stderr[-6000:]


def test_a_step_for_a_tpu_has_static_shapes_and_is_jitted_inside_the_replica():
    """What a TPU asks for, on the CPU: no TPU has run this."""
    strategy = tf.distribute.OneDeviceStrategy("/CPU:0")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(22, 3)).astype("float32")
    ends, sizes = [], []
    for where in ("replica", "plain"):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            layers = [keras.layers.Dense(4, "tanh"), keras.layers.LayerNormalization()]
            model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
        view = tfloop.train(model)
        optim = tfloop.ModuleOptimizer(keras.optimizers.Adam(), skip_nonfinite=True)
        optim.with_group(tfloop.ParamGroup.from_name("bias"), keras.optimizers.SGD(momentum=0.9))
        window = tfloop.GradientsAccumulator(reduction="mean")
        optim.build(model)
        window.build(model)

        def micro(batch, view=view, window=window):
            sizes.append(batch.shape[0])
            with tfloop.Tape() as tape:
                loss = tf.reduce_mean(view(batch) ** 2)
            grads = tfloop.GradientsParams.from_grads(tape.backward(loss), view)
            window.accumulate(view, grads, weight=batch.shape[0])
            return loss

        def update(lr, view=view, window=window, optim=optim):
            optim.step(lr, view, window)

        if where == "replica":
            jitted = [tf.function(fn, jit_compile=True) for fn in (micro, update)]
            on_replica = [lambda v, fn=fn: strategy.run(fn, (v,)) for fn in jitted]
            micro, update = (tf.function(fn) for fn in on_replica)
        loader = tfloop.DataLoader(x, batch_size=4, shuffle=0, drop_last=True)
        for number, batch in enumerate(loader):
            micro(batch)
            if number % 2:
                update(tf.constant(0.1))
        ends.append([v.numpy() for v in model.variables])
        assert int(optim.iterations.numpy()) == 2
    assert set(sizes) == {4}
    for one, other in zip(*ends, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)

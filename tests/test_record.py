"""Saving an optimizer's state by path: exact continuation, and refusals that change nothing."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from optimizer_helpers import (
    KINDS,
    OPTIMIZERS,
    RATE,
    Many,
    Words,
    assert_equal,
    gradient_table,
    row_of,
    values_of,
)

import tfloop
from tfloop import GradientsParams, ModuleOptimizer, ParamGroup
from tfloop._optimizer import record

EMBEDDINGS, KERNEL, BIAS = "embedding.embeddings", "dense.kernel", "dense.bias"
NAME = ParamGroup.from_name


def train(optim, model, start=0, steps=3):
    table = gradient_table(model, 6)
    for i in range(start, start + steps):
        optim.step(RATE, model, GradientsParams(row_of(table, i)))


def everything(optim, model):
    state = {path: optim.state(path) for path in tfloop.named_parameters(model)}
    flat = {f"{path}/{name}": slot for path, slots in state.items() for name, slot in slots.items()}
    counts = [group.update.state.counters() for group in optim._assembly.groups if group.update]
    flat |= {f"{n}/{name}": c for n, named in enumerate(counts) for name, c in named.items()}
    return values_of(model) | flat | {"iterations": optim.iterations.numpy()}


def save(directory, optim, model):
    variables = {str(n): v.value for n, v in enumerate(model.weights)}
    return tf.train.Checkpoint(optim=optim, model=variables).write(str(directory / "saved"))


def restore(path, optim, model):
    variables = {str(n): v.value for n, v in enumerate(model.weights)}
    return tf.train.Checkpoint(optim=optim, model=variables).read(path)


@pytest.mark.parametrize(
    ("make_model", "name", "deferred"),
    [
        *((Words, name, False) for name in OPTIMIZERS),
        *((Many, name, False) for name in KINDS),
        *((Words, name, True) for name in KINDS),
    ],
)
def test_a_restored_run_continues_bit_for_bit(make_model, name, deferred, tmp_path):
    def make():
        given = OPTIMIZERS[name]()
        given.use_ema = True
        return ModuleOptimizer(given).with_group(NAME("bias"), keras.optimizers.Nadam())

    model, other = make_model(), make_model()
    optim, fresh = make(), make()
    train(optim, model)
    path = save(tmp_path, optim, model)
    if not deferred:
        fresh.build(other)
    restore(path, fresh, other).assert_consumed()
    train(optim, model, 3)
    train(fresh, other, 3)
    assert_equal(everything(fresh, other), everything(optim, model))
    assert int(fresh.iterations) == 6


def test_the_order_of_the_groups_does_not_matter(tmp_path):
    adam, sgd = keras.optimizers.Adam, keras.optimizers.SGD
    model, other = Words(), Words()
    optim = ModuleOptimizer(adam()).with_group(NAME("bias"), sgd(momentum=0.9))
    optim.with_group(NAME("embedding"), adam(amsgrad=True))
    train(optim, model)
    path = save(tmp_path, optim, model)
    fresh = ModuleOptimizer(adam(amsgrad=True)).with_group(NAME("kernel"), adam())
    fresh.with_group(ParamGroup.from_path(BIAS), sgd(momentum=0.9))
    restore(path, fresh, other)
    train(optim, model, 3)
    train(fresh, other, 3)
    assert_equal(values_of(other), values_of(model))
    for name in tfloop.named_parameters(model):
        assert_equal(fresh.state(name), optim.state(name))


@pytest.mark.parametrize("make_model", [Words, Many])
def test_a_group_may_be_split_since(make_model, tmp_path):
    model, other = make_model(), make_model()
    optim = ModuleOptimizer("adam")
    train(optim, model)
    path = save(tmp_path, optim, model)
    fresh = ModuleOptimizer("adam").with_group(NAME("bias"), "adam")
    restore(path, fresh, other)
    train(optim, model, 3)
    train(fresh, other, 3)
    assert_equal(values_of(other), values_of(model))


def test_a_second_model_in_one_process_takes_the_record(tmp_path):
    # Keras names the second model's layers otherwise; paths don't change.
    model = Words()
    optim = ModuleOptimizer("adam")
    train(optim, model)
    path = save(tmp_path, optim, model)
    other = Words()
    fresh = ModuleOptimizer("adam").build(other)
    restore(path, fresh, other)
    assert_equal(everything(fresh, other), everything(optim, model))


def test_a_live_trace_survives_a_restore(tmp_path):
    model = Words()
    optim = ModuleOptimizer("adam")
    compiled = tfloop.compile(
        lambda grads: optim.step(RATE, model, GradientsParams(grads)) and None
    )
    foreign = tf.function(lambda grads: optim.step(RATE, model, GradientsParams(grads)) and None)
    table = gradient_table(model, 3, sparse=False)
    compiled(row_of(table, 0))
    foreign(row_of(table, 0))
    path = save(tmp_path, optim, model)
    compiled(row_of(table, 1))
    foreign(row_of(table, 2))
    expected = everything(optim, model)
    restore(path, optim, model)
    compiled(row_of(table, 1))
    foreign(row_of(table, 2))
    assert_equal(everything(optim, model), expected)
    assert compiled.trace_count == 1


def test_saving_again_before_the_first_step_keeps_what_was_restored(tmp_path):
    model, other = Words(), Words()
    optim = ModuleOptimizer("adam")
    train(optim, model)
    path = save(tmp_path, optim, model)
    between = ModuleOptimizer("adam")
    restore(path, between, other)
    path = save(tmp_path, between, other)
    fresh = ModuleOptimizer("adam")
    restore(path, fresh, other)
    fresh.build(other)
    assert_equal(everything(fresh, other), everything(optim, model))


def test_an_unbuilt_optimizer_saves_nothing(tmp_path):
    model = Words()
    path = save(tmp_path, ModuleOptimizer("adam"), model)
    fresh = ModuleOptimizer("adam")
    restore(path, fresh, model)
    fresh.build(model)
    assert int(fresh.iterations) == 0
    with pytest.raises(
        ValueError, match="got 0 bytes that are no record.*wasn't built when it was"
    ):
        restore(path, fresh, model)


def test_short_dtypes_and_scalars_round_trip():
    model = Words("bfloat16")
    optim = ModuleOptimizer("adafactor")
    train(optim, model, steps=2)
    state = optim.serialize()
    before = everything(optim, model)
    train(optim, model, 2, 1)
    optim.deserialize(state)
    found = everything(optim, model)
    assert_equal(
        {k: v for k, v in found.items() if "/" in k},
        {k: v for k, v in before.items() if "/" in k},
    )


# Refusals.


def adam(**options):
    return ModuleOptimizer(keras.optimizers.Adam(**options))


def a_root(shape=(4, 3), dtype="float32", **more):
    """A root of loose variables."""
    kernel = tf.Variable(tf.ones(shape, dtype), name="kernel")
    return {"kernel": kernel, "bias": tf.Variable(tf.zeros(3)), **more}


def with_a_frozen_layer():
    layer = keras.layers.Dense(3)
    layer.build((None, 4))
    layer.trainable = False
    return {"kernel": layer.kernel, "bias": tf.Variable(tf.zeros(3))}


OTHERS = {
    "another optimizer": (
        a_root,
        lambda: ModuleOptimizer("rmsprop"),
        r"got the state of Adam for 'kernel', 'bias', expected that of RMSprop.*"
        r"`keras.optimizers.Adam\(...\)`",
    ),
    "a derived optimizer": (a_root, lambda: ModuleOptimizer("adamw"), "expected that of AdamW"),
    "another one for a group": (
        a_root,
        lambda: adam().with_group(NAME("bias"), "sgd"),
        "got the state of Adam for 'bias', expected that of SGD",
    ),
    "more slots": (
        a_root,
        lambda: adam(amsgrad=True),
        "other slots in the state of Adam: got none of 'bias/velocity_hats', 'kernel/",
    ),
    "averages": (a_root, lambda: adam(use_ema=True), "got none of 'bias/model_variables_moving"),
    "a parameter more": (
        lambda: a_root(extra=tf.Variable(1.0)),
        adam,
        "other parameters in the state: got none of 'extra', expected",
    ),
    "a frozen parameter": (
        with_a_frozen_layer,
        adam,
        "got unknown 'kernel', expected.*or what is frozen, was changed",
    ),
    "a frozen group": (
        a_root,
        lambda: adam().with_group(NAME("bias"), None),
        "got unknown 'bias', expected those of the model",
    ),
    "another shape": (
        lambda: a_root((4, 5)),
        adam,
        r"got 'kernel/momentums' with shape \(4, 3\) and dtype float32, expected \(4, 5\)",
    ),
    "another dtype": (
        lambda: a_root(dtype="float64"),
        adam,
        r"dtype float32, expected \(4, 3\) and float64",
    ),
}


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_a_state_that_does_not_fit_raises_before_anything_changes(name, deferred):
    make_root, make, message = OTHERS[name]
    root, optim = a_root(), adam()
    optim.step(RATE, root, GradientsParams({"kernel": tf.ones((4, 3)), "bias": tf.ones(3)}))
    state, other, fresh = optim.serialize(), make_root(), make()
    message = "(?s)`restoring a ModuleOptimizer` .*" + message
    if deferred:
        fresh.deserialize(state)
        before = values_of(other)
        for _ in range(2):  # what was restored isn't forgotten: nothing starts afresh in silence
            with pytest.raises(ValueError, match=message):
                fresh.build(other)
        assert_equal(values_of(other), before)
        assert fresh.root is None
    else:
        fresh.build(other)
        before = everything(fresh, other)
        with pytest.raises(ValueError, match=message):
            fresh.deserialize(state)
        assert_equal(everything(fresh, other), before)


def test_groups_that_counted_apart_cannot_be_one():
    model, other = Words(), Words()
    optim = ModuleOptimizer("adam").with_group(NAME("bias"), "adam")
    train(optim, model)
    optim.step(RATE, model, GradientsParams({BIAS: tf.ones(3)}))
    fresh = ModuleOptimizer("adam").build(other)
    before = everything(fresh, other)
    with pytest.raises(
        ValueError, match="comes from 2 groups, expected one: their counts of steps"
    ):
        fresh.deserialize(optim.serialize())
    assert_equal(everything(fresh, other), before)


def newer(state):
    head, body = state.split(b"\n", 1)
    return b"\n".join([json.dumps(json.loads(head) | {"format": 2}).encode(), body])


def renamed(state):
    return state.replace(b'"dense.bias"', b'"dense.bia2"').replace(b"dense.bias/", b"dense.bia2/")


DAMAGES = {
    "cut short": (lambda s: s[:-5], r"state damaged: got \d+ bytes of values, expected \d+.*older"),
    "cut in the head": (lambda s: s[:40], "got 40 bytes that are no record of an optimizer"),
    "too long": (lambda s: s + b"xy", "state damaged: got"),
    "not ours": (
        lambda s: b"hello",
        "got 5 bytes that are no record of an optimizer, expected one",
    ),
    "other json": (lambda s: b"[1]\n", "that are no record"),
    "json without groups": (lambda s: b'{"format": 1}\n', "that are no record"),
    "newer": (newer, "got a state of format 2, expected 1. A newer tfloop wrote it.*pip install"),
    "a path renamed": (
        renamed,
        "got none of 'dense.bias' and got unknown 'dense.bia2', expected those of the model",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_state_raises_before_anything_changes(name):
    damage, message = DAMAGES[name]
    model = Words()
    optim = ModuleOptimizer("adam")
    train(optim, model)
    state = damage(optim.serialize())
    train(optim, model, 3, 1)
    before = everything(optim, model)
    with pytest.raises(ValueError, match=message):
        optim.deserialize(state)
    assert_equal(everything(optim, model), before)
    if name != "a path renamed":  # for that the model must be known
        with pytest.raises(ValueError, match=message):
            ModuleOptimizer("adam").deserialize(state)


def test_a_record_is_one_line_of_json_and_raw_values():
    model = Words()
    optim = ModuleOptimizer(keras.optimizers.SGD(momentum=0.9))
    train(optim, model, steps=1)
    head, body = optim.serialize().split(b"\n", 1)
    groups = json.loads(head)["groups"]
    assert [group["optimizer"] for group in groups] == ["SGD", "ModuleOptimizer"]
    assert groups[0]["members"] == [EMBEDDINGS, KERNEL, BIAS]
    assert groups[0]["entries"][0] == ["embedding.embeddings/momentums", "float32", [6, 4]]
    assert groups[1]["entries"] == [[f"/{n}", "int64", []] for n in ("iterations", "skipped")]
    sizes = [np.dtype(d).itemsize * int(np.prod(s)) for g in groups for _, d, s in g["entries"]]
    assert sum(sizes) == len(body)


def test_load_assigns_what_dump_wrote():
    source, target = tf.Variable([1.0, 2.0]), tf.Variable([0.0, 0.0])
    records = [record.GroupRecord("SGD", {"a/b": {"momentums": source}}, {})]
    record.load(
        record.dump(records), [record.GroupRecord("SGD", {"a/b": {"momentums": target}}, {})]
    )
    np.testing.assert_array_equal(target, [1.0, 2.0])

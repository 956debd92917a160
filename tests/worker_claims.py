"""Claims about two workers, run by `test_multi_worker.py`, one process for each of them.

    TF_CONFIG=... python tests/worker_claims.py FOLDER

prints a line for each claim that holds, with a digest of what all workers must have alike.
"""

import hashlib
import os
import sys
import time
import traceback

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf
from replica_claims import (
    CLIPPINGS,
    IDS,
    NUMBERS,
    ONE,
    TARGETS,
    assert_equal_runs,
    mixed_model,
    squares_step,
)

import tfloop
from tfloop import GradientsAccumulator, GradientsParams, ModuleOptimizer

SIZES = [16, 16, 7, 1]  # uneven, and 1 leaves a worker without a sample


def rank(strategy):
    return strategy.cluster_resolver.task_id


def batches(updates):
    """Global batches of all sizes, the same on every worker."""
    begin = 0
    for number in range(updates):
        size = SIZES[number % len(SIZES)]
        yield tuple(tf.constant(array[begin : begin + size]) for array in (IDS, NUMBERS, TARGETS))
        begin += size


def state_of(optim, model):
    """Parameters, slots and counters, as arrays."""
    variables = dict(tfloop.named_variables(model))
    for group in optim._assembly.records():
        variables |= {f"{group.optimizer}/{key}": v for key, v in group.variables().items()}
    return {key: variable.numpy() for key, variable in variables.items()}


def digest(arrays):
    """Tells workers apart that differ in a bit."""
    joined = b"".join(key.encode() + arrays[key].tobytes() for key in sorted(arrays))
    return hashlib.sha256(joined).hexdigest()[:16]


class Run:
    """A model with sparse and dense parameters in two groups, and its steps."""

    def __init__(self, strategy, clipping=None, window=None):
        with strategy.scope():
            self.model = model = mixed_model()
        self.optim = optim = ModuleOptimizer(
            keras.optimizers.AdamW(weight_decay=0.1), clipping=clipping
        )
        words = tfloop.ParamGroup.from_name("embedding")
        optim.with_group(words, keras.optimizers.SGD(momentum=0.9), clipping)

        @tfloop.compile(strategy=strategy)
        def step(batch, lr):
            ids, numbers, targets = batch
            with tfloop.Tape() as tape:
                loss = tf.reduce_mean((model([ids, numbers]) - targets) ** 2)
            grads = GradientsParams.from_grads(tape.backward(loss), model)
            if window is None:
                optim.step(lr, model, grads)
            else:
                window.accumulate(model, grads)
            return loss, tf.shape(ids)[0]

        @tfloop.compile(strategy=strategy)
        def update(lr):
            optim.step(lr, model, window)

        self.step, self.update = step, update

    def parameters(self):
        return {path: v.numpy() for path, v in tfloop.named_parameters(self.model).items()}


def trained(strategy, clipping=None, reduction=None, updates=10):
    """Losses and parameters after some updates, and the digest of all state."""
    window = None if reduction is None else GradientsAccumulator(reduction=reduction)
    run = Run(strategy, clipping, window)
    losses = []
    for number, batch in enumerate(batches(updates if window is None else 2 * updates)):
        loss, count = run.step(batch, 0.05)
        assert int(count) == len(batch[0])
        losses.append(float(loss))
        if window is not None and number % 2:
            run.update(0.05)
            assert int(window.count.numpy()) == 0
    assert int(run.optim.iterations.numpy()) == updates
    return (losses, run.parameters()), digest(state_of(run.optim, run.model))


def compared(strategy, *options):
    """The digest of a run on all workers, after the first has compared it with one device."""
    ours, found = trained(strategy, *options)
    if rank(strategy) == 0:
        assert_equal_runs(ours, trained(ONE, *options)[0])
    return found


def claim_workers_equal_one_device(strategy, folder):
    return compared(strategy, CLIPPINGS["by_global_norm"])


def claim_accumulation_on_workers_equals_one_device(strategy, folder):
    return compared(strategy, CLIPPINGS["by_global_norm"], "mean")


def dense_steps(strategy, optimizer="adam", **options):
    """One layer, its optimizer and its step, for what needs no more."""
    with strategy.scope():
        net = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        net.set_weights([NUMBERS[0][:, None], NUMBERS[1][:1]])
    optim = ModuleOptimizer(optimizer, **options)
    return net, optim, squares_step(strategy, net, optim)


def windowed(strategy, net, optim, how):
    """An accumulator for a model, a step that adds to it, and one that uses it."""
    window = GradientsAccumulator(reduction=how)

    def micro(x):
        with tfloop.Tape() as tape:
            loss = tf.reduce_mean(net(x) ** 2)
        window.accumulate(net, GradientsParams.from_grads(tape.backward(loss), net))
        return loss

    def update(lr):
        optim.step(lr, net, window)

    return window, *(tfloop.compile(each, strategy=strategy) for each in (micro, update))


def claim_a_distributed_data_set_equals_the_batches_on_every_worker(strategy, folder):
    data = tf.data.Dataset.from_tensor_slices(NUMBERS[:39]).batch(16)
    runs = []
    for batches in (strategy.experimental_distribute_dataset(data), data):
        net, optim, _ = dense_steps(strategy, "sgd")  # Adam's first step forgets all weights
        _, micro, update = windowed(strategy, net, optim, "sum")
        losses = [float(micro(x)) for x in batches]
        update(0.1)
        runs.append((losses, dict(enumerate(net.get_weights()))))
    assert len(runs[0][0]) == 3  # 16, 16 and 7 rows
    assert_equal_runs(*runs)


def claim_many_steps_in_one_call_equal_as_many_calls(strategy, folder):
    loader = tfloop.DataLoader(NUMBERS[:28], batch_size=8)  # three whole batches and a short one
    one, _, step = dense_steps(strategy)
    losses = [float(step(x)) for x in loader]
    many, _, step = dense_steps(strategy)
    batches = iter(loader)
    stacked = [step.run(batches, steps=3).numpy(), step.run(batches, steps=3).numpy()]
    runs = [
        (found, dict(enumerate(net.get_weights())))
        for found, net in ((losses, one), (np.concatenate(stacked), many))
    ]
    assert_equal_runs(*runs)
    return digest({str(key): value for key, value in runs[1][1].items()})


def claim_what_is_not_finite_on_one_worker_skips_all(strategy, folder):
    net, optim, step = dense_steps(strategy, skip_nonfinite=True)
    good, bad = NUMBERS[:4].copy(), NUMBERS[:4].copy()
    bad[3] = np.inf  # a row of the second worker
    step(tf.constant(good))
    before = state_of(optim, net)
    step(tf.constant(bad))
    after = state_of(optim, net)
    changed = {key for key in before if (before[key] != after[key]).any()}
    assert changed == {"ModuleOptimizer//skipped"}, changed
    step(tf.constant(good))
    assert int(optim.iterations.numpy()) == 2
    return digest(state_of(optim, net))


def claim_masks_differ_and_statistics_become_one(strategy, folder):
    layers = keras.layers
    with strategy.scope():
        net = keras.Sequential(
            [keras.Input((8,)), layers.Dense(4), layers.BatchNormalization(momentum=0.5)]
        )
        drop = layers.Dropout(0.5)
    root = {"net": net, "drop": drop}
    optim = ModuleOptimizer("sgd").build(root)

    @tfloop.compile(strategy=strategy)
    def step(x):
        with tfloop.Tape() as tape:
            loss = tf.reduce_mean(net(x, training=True) ** 2)
        optim.step(0.1, root, GradientsParams.from_grads(tape.backward(loss), root))
        return drop(tf.ones((1, 64)), training=True)

    mask = step(tf.constant(NUMBERS[:64].reshape(40, 8))).numpy()
    masks = strategy.gather(
        strategy.experimental_distribute_values_from_function(lambda _: mask), 0
    )
    assert len({each.numpy().tobytes() for each in masks}) == 2
    statistics = {path: v.numpy() for path, v in tfloop.named_variables(net).items()}
    assert (statistics["batch_normalization.moving_mean"] != 0).all()
    return digest(statistics)


def claim_a_checkpoint_in_the_middle_of_a_window_is_whole(strategy, folder):
    return "".join(resumed(strategy, f"{folder}/{how}", how) for how in ("mean", "sum"))


def resumed(strategy, folder, how):
    """The digest of a run that was saved in mid-window, and equals the one that goes on."""
    ends = []
    for restored in (False, True):
        with strategy.scope():
            mean = keras.metrics.Mean()
        net, optim, _ = dense_steps(strategy)
        window, micro, update = windowed(strategy, net, optim, how)
        checkpoint = tfloop.Checkpoint(folder, window=window, net=net, mean=mean, optim=optim)
        x = tf.constant(NUMBERS[:6])
        if restored:
            assert checkpoint.restore() == 3
        else:
            strategy.run(mean.update_state, (rank(strategy),))
            micro(x)
            update(0.1)
            micro(x + 1.0)
            with strategy.scope():  # where the first alone must not make variables
                path = checkpoint.save(3)
            assert path == checkpoint.latest == f"{folder}/tfloop-1"
        assert float(mean.result()) == 0.5
        assert int(window.count.numpy()) == 1
        micro(x)
        update(0.1)
        ends.append(state_of(optim, net))
    for key, value in ends[0].items():  # sums that were put together add up in another order
        np.testing.assert_allclose(ends[1][key], value, rtol=1e-6, atol=1e-6, err_msg=key)
    return "".join(map(digest, ends))


def claim_statistics_in_mid_window_are_restored_on_each_worker(strategy, folder):
    ends = []
    for restored in (False, True):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            layers = [keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(1)]
            net = keras.Sequential([keras.Input((5,)), *layers])
        optim = ModuleOptimizer("sgd")
        window, _, update = windowed(strategy, net, optim, "sum")

        def micro(x, net=net, window=window):
            with tfloop.Tape() as tape:
                loss = tf.reduce_mean(net(x, training=True) ** 2)
            window.accumulate(net, GradientsParams.from_grads(tape.backward(loss), net))

        micro = tfloop.compile(micro, strategy=strategy)
        checkpoint = tfloop.Checkpoint(f"{folder}/statistics", net=net, optim=optim, window=window)
        if restored:
            assert checkpoint.restore() == 1
        else:
            micro(tf.constant(NUMBERS[:7]))
            checkpoint.save(1)
        (mean,) = strategy.experimental_local_results(layers[0].moving_mean.value)
        apart = strategy.gather(
            strategy.experimental_distribute_values_from_function(lambda _, m=mean: m[None]), 0
        ).numpy()
        assert (apart[0] != apart[1]).all()
        micro(tf.constant(NUMBERS[7:12]))
        update(0.1)
        ends.append(state_of(optim, net) | {"apart": apart})
    for key, value in ends[0].items():
        np.testing.assert_array_equal(ends[1][key], value, err_msg=key)
    return digest(ends[0])


def claim_a_save_behind_the_loop_is_there_for_all_after_wait_or_raises_for_all(strategy, folder):
    net, _, step = dense_steps(strategy)
    behind = f"{folder}/behind"
    checkpoint = tfloop.Checkpoint(behind, model=net)
    saved = [value.copy() for value in net.get_weights()]
    path = checkpoint.save(1, blocking=False)
    step(tf.ones((4, 5)))
    assert (net.get_weights()[0] != saved[0]).any()
    checkpoint.wait()
    assert checkpoint.latest == path == f"{behind}/tfloop-1"
    assert checkpoint.restore() == 1
    for value, expected in zip(net.get_weights(), saved, strict=True):
        np.testing.assert_array_equal(value, expected)
    step(tf.ones((4, 5)))
    net.get_weights()  # which waits for the other worker, who may still be reading there
    if rank(strategy) == 0:
        os.rename(behind, f"{behind}-away")
        with open(behind, "w"):
            pass  # where no folder can be
    checkpoint.save(2, blocking=False)
    with pytest.raises((OSError, tf.errors.OpError)):
        checkpoint.wait()
    checkpoint.wait()  # has said it once
    return digest({str(n): value for n, value in enumerate(saved)})


def claim_folders_that_are_not_shared_raise_everywhere(strategy, folder):
    net, _, _ = dense_steps(strategy)
    own = f"{folder}/own{rank(strategy)}"
    checkpoint = tfloop.Checkpoint(own, model=net)
    if rank(strategy) == 0:
        assert checkpoint.save(1) == f"{own}/tfloop-1"
    else:
        with pytest.raises(FileNotFoundError, match="no checkpoint from the first worker"):
            checkpoint.save(1)
    with pytest.raises(FileNotFoundError, match=r"got the numbers 1, 0, expected one"):
        checkpoint.restore()


def claim_a_save_that_fails_on_the_first_worker_raises_everywhere(strategy, folder):
    net, _, _ = dense_steps(strategy)
    file = f"{folder}/file{rank(strategy)}"
    with open(file, "w"):
        pass
    checkpoint = tfloop.Checkpoint(f"{file}/below", model=net)
    with pytest.raises((OSError, tf.errors.OpError)):
        checkpoint.save(1)
    assert checkpoint.latest is None


def main(folder):
    strategy = tfloop.strategy("multi_worker")
    assert strategy.num_replicas_in_sync == 2
    for name, claim in list(globals().items()):
        if name.startswith("claim_"):
            begin = time.perf_counter()
            try:
                found = claim(strategy, folder)
            except BaseException:
                print("FAILED", name, flush=True)
                traceback.print_exc()
                sys.exit(1)  # the others would wait for this one in vain
            else:
                print("ok", name, found, flush=True)
                print(f"{name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])

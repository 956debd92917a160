"""Train over several hosts, so that a killed worker costs the steps since the last checkpoint.

Every worker runs this same program. Each draws the same batches, all rows of them, and works on
its share; gradients are averaged once per update, so the result is that of one process on whole
batches. Every worker calls `Checkpoint.save` and `restore`; the first one writes.

Two workers and a single process on this host, to compare:

    python examples/multi_worker.py --local_workers 2 --quick

On real hosts, on each the same command with its own index, and a folder that all of them see:

    export TF_CONFIG='{"cluster": {"worker": ["10.0.0.1:12345", "10.0.0.2:12345"]},
                       "task": {"type": "worker", "index": 0}}'
    python examples/multi_worker.py --workdir /shared/run

When a worker dies, the others stop with an error. Start all of them again, with the same commands.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import tfloop

_EPOCHS = flags.DEFINE_integer("epochs", 20, "Epochs of training.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 128, "Rows of all workers.", lower_bound=1)
_LR = flags.DEFINE_float("lr", 1e-2, "Learning rate.", lower_bound=0.0)
_WORKDIR = flags.DEFINE_string("workdir", None, "A folder that all workers see, to resume from.")
_SAVE_EVERY = flags.DEFINE_integer("save_every", 20, "Steps between checkpoints.", lower_bound=1)
_LOG_EVERY = flags.DEFINE_integer("log_every", 50, "Steps between lines.", lower_bound=1)
_QUICK = flags.DEFINE_bool("quick", False, "A few epochs, to see that everything works.")
_LOCAL_WORKERS = flags.DEFINE_integer(
    "local_workers", 0, "Start so many workers on this host, and a single process after them."
)

_TRAINED = 1437  # of 1797 digits; the rest is for the test


def load() -> tuple[np.ndarray, np.ndarray]:
    """The real 8x8 digits: (1797, 64) pixels from 0 to 1, labels from 0 to 9."""
    digits = load_digits()
    return (digits.data / 16.0).astype("float32"), digits.target.astype("int32")


def build_model() -> keras.Model:
    """Two layers, which see the same whatever the number of workers: no dropout, no BatchNorm."""
    layers = [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    return keras.Sequential(layers)


def train(strategy: tf.distribute.Strategy, chief: bool) -> None:
    """Trains on this worker's share, from the last checkpoint on if there is one."""
    tfloop.seed(0, deterministic=True)  # so that a resumed run ends as an undisturbed one
    with strategy.scope():
        net = build_model()
    model = tfloop.train(net)
    clipping = tfloop.GradientClipping.by_global_norm(1.0)
    optim = tfloop.ModuleOptimizer(keras.optimizers.AdamW(weight_decay=0.01), clipping=clipping)

    # Whole batches, in the same order on every worker; the step takes this worker's rows.
    images, labels = load()
    loader = tfloop.DataLoader(
        (images[:_TRAINED], labels[:_TRAINED]), batch_size=_BATCH_SIZE.value, shuffle=0
    )
    tests = tfloop.DataLoader((images[_TRAINED:], labels[_TRAINED:]), batch_size=_BATCH_SIZE.value)

    @tfloop.compile(strategy=strategy)
    def train_step(batch, lr):
        inputs, targets = batch
        with tfloop.Tape() as tape:
            loss = tf.reduce_mean(cross_entropy(targets, model(inputs)))
        optim.step(lr, model, tape.backward(loss, model))
        return loss  # comes back as the mean over the rows of all workers

    @tfloop.compile(strategy=strategy)
    def test_step(batch):
        inputs, targets = batch
        logits = model.valid()(inputs)
        hits = tf.cast(tf.argmax(logits, axis=-1, output_type=tf.int32) == targets, tf.int32)
        # Whole numbers come back as sums.
        return tf.reduce_mean(cross_entropy(targets, logits)), tf.reduce_sum(hits)

    step, checkpoint = 0, None
    if _WORKDIR.value:
        checkpoint = tfloop.Checkpoint(_WORKDIR.value, net=net, optim=optim, loader=loader)
        step = checkpoint.restore() or 0
        if chief and step:
            print(f"resumed at step {step}", flush=True)

    last = (4 if _QUICK.value else _EPOCHS.value) * len(loader)
    while step < last:
        for batch in loader:
            loss = train_step(batch, _LR.value)
            step += 1
            if chief and step % _LOG_EVERY.value == 0:
                print(f"step {step}  loss {float(loss):.4f}", flush=True)
            if checkpoint and (step % _SAVE_EVERY.value == 0 or step == last):
                checkpoint.save(step)

    losses, hits = zip(*map(test_step, tests), strict=True)
    rows = [len(targets) for _, targets in tests]
    if chief:
        loss, accuracy = np.average(losses, weights=rows), sum(map(int, hits)) / sum(rows)
        print(f"test loss {loss:.4f}  accuracy {100 * accuracy:.2f} %", flush=True)


def cross_entropy(targets: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """For each row."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)


def launch(number: int) -> None:
    """Starts this program as several workers on this host, and then as a single process."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            # Any free port, kept from others as long as the workers run: they may bind it all the
            # same, as this socket doesn't listen.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("localhost", 0))
        hosts = [f"localhost:{each.getsockname()[1]}" for each in sockets]
        tasks = [{"type": "worker", "index": rank} for rank in range(number)]
        print(f"{number} workers, each on its share of {_BATCH_SIZE.value} rows:", flush=True)
        start_and_wait([json.dumps({"cluster": {"worker": hosts}, "task": t}) for t in tasks])
    print("a single process:", flush=True)
    start_and_wait([None], "--workdir=")  # whose state is its own


def start_and_wait(configs: list[str | None], *more: str) -> None:
    """One process for each TF_CONFIG; if one fails, the others are ended too."""
    command = [sys.executable, __file__, *sys.argv[1:], "--local_workers=0", *more]
    processes = []
    try:
        for config in configs:
            environment = {"TF_CPP_MIN_LOG_LEVEL": "2"} | os.environ
            if config is not None:
                environment["TF_CONFIG"] = config
            processes.append(subprocess.Popen(command, env=environment))
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                raise SystemExit("A worker has failed; see above.")
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(_: list[str]) -> None:
    """Starts workers, or is one."""
    if _LOCAL_WORKERS.value:
        launch(_LOCAL_WORKERS.value)
        return
    tf.get_logger().setLevel("WARNING")  # each collective is news to it
    hosts = os.environ.get("TF_CONFIG")
    # Before anything else of TensorFlow: it waits here until all workers are there.
    strategy = tfloop.strategy("multi_worker" if hosts else "cpu")
    train(strategy, chief=not hosts or json.loads(hosts)["task"]["index"] == 0)


if __name__ == "__main__":
    app.run(main)

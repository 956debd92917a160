import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from processes import run

import tfloop


def draws():
    return (
        random.random(),
        np.random.rand(),
        float(tf.random.uniform([])),
        float(keras.random.uniform([])),
        keras.layers.Dense(3)(np.ones((1, 2), np.float32)).numpy().tolist(),
        keras.layers.Dropout(0.5)(np.ones((1, 64)), training=True).numpy().tolist(),
    )


def test_the_same_seed_gives_the_same_draws_everywhere():
    tfloop.seed(42)
    first = draws()
    assert draws() != first
    tfloop.seed(42)
    assert draws() == first
    tfloop.seed(43)
    assert draws() != first


def test_the_ends_of_the_range_are_seeds():
    for n in (0, 2**32 - 1, np.int64(7)):
        tfloop.seed(n)


@pytest.mark.parametrize("wrong", [True, 1.0, "42", None])
def test_what_is_no_int_raises(wrong):
    with pytest.raises(TypeError, match=r"`seed\(n\)` takes no such `n`.*Pass `tfloop.seed\(42\)`"):
        tfloop.seed(wrong)


def test_what_is_out_of_range_raises():
    with pytest.raises(ValueError, match="got -1, expected an int of at least 0"):
        tfloop.seed(-1)
    with pytest.raises(
        ValueError, match=r"got 4294967298, expected at most 2\*\*32 - 1.*seed\(2\)"
    ):
        tfloop.seed(2**32 + 2)


def test_deterministic_turns_on_deterministic_kernels():
    # In a process of its own: the switch can't be turned back.
    program = (
        "import tensorflow as tf, tfloop\n"
        "tfloop.seed(1, deterministic=True)\n"
        "tf.random.uniform([])\n"
        "tfloop.seed(1)\n"
        "from tensorflow.python.framework import config\n"
        "assert config.is_op_determinism_enabled()\n"
    )
    done = run("-c", program)
    assert done.returncode == 0, done.stderr


def test_after_the_import_the_cpu_can_still_be_split():
    program = "import tfloop; assert tfloop.strategy('cpu:2').num_replicas_in_sync == 2"
    done = run("-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("gpu:9", ValueError, "finds too few GPUs: got 0, expected at least 9"),
        ("tpu", ValueError, "finds no TPU: got ValueError .*`TPU_NAME=local` on a TPU host"),
        ("multi_worker", ValueError, "needs the hosts: got no TF_CONFIG in the environment"),
        ("abacus", ValueError, "knows no such devices: got str 'abacus', expected one of 'auto'"),
        ("tpu:2", ValueError, "knows no such devices: got str 'tpu:2'"),
        ("cpu:0", ValueError, "takes no such `number`: got 0, expected an int of at least 1"),
        ("cpu:999", ValueError, "part the CPU too often: got 999, expected at most 16.*'cpu:2'"),
        ("cpu:two", TypeError, "takes no such `number`: got str 'two'"),
        (2, TypeError, "knows no such devices: got int 2"),
        ("cpu:3", RuntimeError, "can't part the CPU any more: TensorFlow has already been used"),
    ],
)
def test_devices_that_are_not_there_are_refused(monkeypatch, name, error, words):
    tf.constant(0)  # from here on the devices are fixed
    for variable in ("TF_CONFIG", "TPU_NAME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(error, match=words):
        tfloop.strategy(name)

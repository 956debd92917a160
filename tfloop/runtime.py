"""What holds for the whole process: the seed, and the devices.

Nothing here knows models, data or optimizers.
"""

import functools
import os

import keras
import tensorflow as tf

from tfloop._checks.arguments import whole_number
from tfloop._checks.messages import described, listed

_LARGEST = 2**32 - 1  # NumPy takes no larger one.
_MOST_CPU_PARTS = 16  # Tracing a step takes as many times as long, before the first one runs.


def seed(n: int, *, deterministic: bool = False) -> None:
    """Seeds Python, NumPy, TensorFlow and Keras; call it before the model is made.

    Two runs of one program on one machine are then equal: initial weights, dropout masks,
    shuffles. They are equal bit for bit as long as the number of threads, the oneDNN flag and
    jit stay as they are, which measurement says and no TensorFlow document promises; another
    number of threads adds up in another order. A restart in the middle of a run is
    `Checkpoint`'s matter: the seed state of the model's layers is saved with it.

    Args:
      n: From 0 to 2**32 - 1.
      deterministic: Also chooses deterministic kernels, more slowly, for the rest of the
        process. Random TensorFlow ops without a seed, and max pooling's gradient under jit,
        then raise.

    Raises:
      TypeError: `n` isn't an int.
      ValueError: `n` is out of range.

    Example:
      >>> import keras
      >>> import tfloop
      >>> tfloop.seed(42)
      >>> first = keras.random.normal((3,))
      >>> tfloop.seed(42)
      >>> bool((keras.random.normal((3,)) == first).numpy().all())
      True
    """
    n = whole_number("seed(n)", "n", n, least=0, fix="tfloop.seed(42)")
    if n > _LARGEST:
        raise ValueError(
            f"`seed(n)` takes no such `n`: got {n}, expected at most 2**32 - 1. NumPy's seed has "
            f"32 bits. Pass `tfloop.seed({n % (_LARGEST + 1)})`."
        )
    keras.utils.set_random_seed(n)
    if deterministic:
        tf.config.experimental.enable_op_determinism()


def strategy(name: str = "auto") -> tf.distribute.Strategy:
    """The devices to train on, as a `tf.distribute` strategy.

    Build models in its scope and give it to `tfloop.compile(strategy=...)`; on one device both
    change nothing. Call it at the start of a program, before TensorFlow has made a tensor.

    Args:
      name: `"auto"`: several hosts where `TF_CONFIG` names them, else the TPU, all GPUs, or the
        CPU. `"cpu"`; `"cpu:2"`, which parts the CPU into 2 devices to try replicas on, at most 16;
        `"gpu"`, all of them; `"gpu:2"`, the first 2; `"tpu"`; `"multi_worker"`, the hosts of
        `TF_CONFIG`.

    Returns:
      TensorFlow's default strategy for the CPU or for one device of a kind that it would choose by
      itself; a MirroredStrategy, TPUStrategy or MultiWorkerMirroredStrategy for more. The same
      devices are the same MirroredStrategy. Nothing of GPUs and TPUs was run by the authors.

    Raises:
      ValueError: Another name, a device that this machine hasn't got, or too many parts.
      RuntimeError: The CPU is to be split, and TensorFlow has already been used.
      TypeError: `name` isn't a string.

    Example:
      >>> import tfloop
      >>> tfloop.strategy("cpu").num_replicas_in_sync
      1
    """
    call = f"strategy({name!r})"
    kind, _, number = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not isinstance(name, str) or kind not in _KINDS or (number and kind not in ("cpu", "gpu")):
        error = ValueError if isinstance(name, str) else TypeError
        raise error(
            f"`{call}` knows no such devices: got {described(name)}, expected one of "
            f"{listed(_KINDS)}, or a number of them as in 'cpu:2'. Write `tfloop.strategy('auto')`."
        )
    count = whole_number(call, "number", _as_int(number), least=1, fix="gpu:2") if number else None
    hosts = "TF_CONFIG" in os.environ
    gpus = [device.name.partition("e:")[2] for device in tf.config.list_physical_devices("GPU")]
    if kind == "auto":
        if hosts:
            kind = "multi_worker"
        elif "TPU_NAME" in os.environ or tf.config.list_physical_devices("TPU"):
            kind = "tpu"
        else:
            kind = "gpu" if gpus else "cpu"
    if kind == "multi_worker":
        if not hosts:
            raise ValueError(
                f"`{call}` needs the hosts: got no TF_CONFIG in the environment, expected JSON "
                "that names all workers and this one. "
                "See the commands in `examples/multi_worker.py`."
            )
        return tf.distribute.MultiWorkerMirroredStrategy()
    if kind == "tpu":
        return _tpu(call)
    if kind == "gpu":
        if len(gpus) < (count or 1):
            raise ValueError(
                f"`{call}` finds too few GPUs: got {len(gpus)}, expected at least {count or 1}. "
                "TensorFlow sees none without its CUDA libraries: "
                "`pip install 'tensorflow[and-cuda]'`. Or train here: `tfloop.strategy('cpu')`."
            )
        chosen = gpus[:count]
        if len(chosen) == 1:
            return tf.distribute.OneDeviceStrategy(chosen[0])
        return _mirrored(tuple(chosen))
    return _cpu(call, count, beside_gpus=bool(gpus))


_KINDS = ("auto", "cpu", "gpu", "tpu", "multi_worker")


def _as_int(number: str) -> int | str:
    return int(number) if number.isdecimal() else number


def _cpu(call: str, count: int | None, *, beside_gpus: bool) -> tf.distribute.Strategy:
    if count is not None and count > _MOST_CPU_PARTS:
        raise ValueError(
            f"`{call}` would part the CPU too often: got {count}, expected at most "
            f"{_MOST_CPU_PARTS}. Each part is a copy of the model and traces the step anew, and "
            "none makes it faster. Two show what replicas do: `tfloop.strategy('cpu:2')`."
        )
    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = tf.config.get_logical_device_configuration(cpu) or [None]
    if count is not None and len(parts) != count:
        try:
            parts = [tf.config.LogicalDeviceConfiguration()] * count
            tf.config.set_logical_device_configuration(cpu, parts)
        except RuntimeError as error:
            raise RuntimeError(
                f"`{call}` can't part the CPU any more: TensorFlow has already been used, expected "
                "to be asked first. Devices are fixed with the first tensor. Call it at the start "
                f"of the program: `strategy = tfloop.{call}`."
            ) from error
    if len(parts) > 1:
        devices = [f"CPU:{number}" for number in range(len(parts))]
        return _mirrored(tuple(devices))
    if beside_gpus:
        return tf.distribute.OneDeviceStrategy("/CPU:0")
    return tf.distribute.get_strategy()


# Kept: the collectives of two strategies over the same devices would meet each other.
@functools.cache
def _mirrored(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(list(devices))


def _tpu(call: str) -> tf.distribute.Strategy:
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver()
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, tf.errors.OpError, OSError) as error:
        raise ValueError(
            f"`{call}` finds no TPU: got {type(error).__name__} ({error}), expected one that "
            "TensorFlow can reach. Name it in the environment, `TPU_NAME=local` on a TPU host. Or "
            "train here: `tfloop.strategy('cpu')`."
        ) from error
    return tf.distribute.TPUStrategy(resolver)

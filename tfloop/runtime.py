"""What holds for the whole process: the seed.

Nothing here knows models, data or optimizers.
"""

import keras
import tensorflow as tf

from tfloop._arguments import whole_number

_LARGEST = 2**32 - 1  # NumPy takes no larger one.


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

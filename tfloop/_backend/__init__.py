"""Everything private of other libraries: each use is a function that says what it means to us.

No other room reads a private name of Keras, TensorFlow or Sonnet. Where a version lacks one, the
function gives the right value in another way, or raises what `versions` words; it never goes on
with a wrong one. `keras_optimizers`, `keras_layers`, `keras_variables`, `keras_tensors` and
`keras_losses` know Keras; `tf_keras`, `tensorflow` and `sonnet` what they are named after.
`tests/test_backend.py` and `tests/test_tf_keras.py` say of each name that it is still there and
still means this.

Importing it decides about TensorFlow's `log` and checks the versions, so it comes first.
"""

from tfloop._backend import log as log  # noqa: I001 - before TensorFlow

import keras
import tensorflow as tf

from tfloop._backend import versions

versions.check({"tensorflow": tf.__version__, "keras": keras.__version__})

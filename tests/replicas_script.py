"""Run by `test_gradients.py` in a process of its own: gradients on two devices.

Prints a word for each claim that holds.
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import tfloop
from tfloop import GradientsParams, Tape
from tfloop._tracing import traces

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def build():
    return keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(4, 2, embeddings_initializer="ones"),
            keras.layers.Flatten(),
            keras.layers.Dense(1, kernel_initializer="ones"),
        ]
    )


with strategy.scope():
    model = build()
paths = ["embedding.embeddings", "dense.kernel", "dense.bias"]
assert list(tfloop.named_parameters(model)) == paths
noted = []


def gradients(ids):
    assert tf.distribute.get_replica_context() is not None
    assert list(tfloop.named_parameters(model)) == paths
    with Tape() as tape:
        loss = tf.reduce_sum(tfloop.train(model)(ids))
    return GradientsParams.from_grads(tape.backward(loss), model)


def each(context):
    return tf.constant([[1, 1]]) + 2 * context.replica_id_in_sync_group


@tf.function
def run(ids):
    with traces.recording() as found:
        grads = strategy.run(gradients, (ids,))
    noted.append(len(found))
    return grads


ids = strategy.experimental_distribute_values_from_function(each)
grads = run(ids)
assert type(grads) is GradientsParams
assert list(grads) == paths
print("paths")

parts = strategy.experimental_local_results(grads["embedding.embeddings"])
dense = [tf.convert_to_tensor(part).numpy() for part in parts]
np.testing.assert_array_equal(dense[0], [[0, 0], [2, 2], [0, 0], [0, 0]])
np.testing.assert_array_equal(dense[1], [[0, 0], [0, 0], [0, 0], [2, 2]])
print("result")


@tf.function
def norms(grads):
    return strategy.run(lambda grads: (grads.scale(2.0), grads.global_norm()), (grads,))


doubled, norm = norms(grads)
assert type(doubled) is GradientsParams
np.testing.assert_allclose(
    [float(part) for part in strategy.experimental_local_results(norm)],
    [np.sqrt(8 + 4 + 1)] * 2,
    rtol=1e-6,
)
print("argument")


def update(grads):
    """By hand: the sum over replicas, applied on each."""
    context = tf.distribute.get_replica_context()
    for path, variable in tfloop.named_parameters(model).items():
        total = context.all_reduce("SUM", tf.convert_to_tensor(grads[path]))
        variable.assign_sub(0.5 * total)


tf.function(lambda grads: strategy.run(update, (grads,)))(grads)
table = model.layers[0].embeddings.value
for part in strategy.experimental_local_results(table):
    np.testing.assert_array_equal(part.numpy(), [[1, 1], [0, 0], [1, 1], [0, 0]])
print("update")

assert noted
assert noted[0] >= 1  # the replicas' threads have told the trace around them
print("notes")

plain = build()
plain.layers[0].trainable = False
copied = tfloop.to_device(plain, "CPU:1")
assert all(v.value.device.endswith("CPU:1") for v in copied.variables)
assert all(v.value.device.endswith("CPU:0") for v in plain.variables)
assert list(tfloop.named_parameters(copied)) == paths[1:]
with Tape() as tape:
    loss = tf.reduce_sum(copied(tf.constant([[1, 2]])))
grads = GradientsParams.from_grads(tape.backward(loss), copied).to_device("CPU:0")
assert all(grad.device.endswith("CPU:0") for grad in grads.values())
tfloop.ModuleOptimizer(keras.optimizers.SGD()).step(1.0, plain, grads)
np.testing.assert_array_equal(plain.layers[2].kernel.numpy(), np.zeros((4, 1)))
np.testing.assert_array_equal(copied.layers[2].kernel.numpy(), np.ones((4, 1)))
print("to_device")

view = tfloop.to_device(tfloop.valid(plain), "CPU:1")
assert not view.training
assert view.module.layers[2].kernel.value.device.endswith("CPU:1")
print("to_device-views")

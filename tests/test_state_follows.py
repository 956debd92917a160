"""State belongs to variables: it follows them to new paths, and a rate that was set is saved."""

import keras
import tensorflow as tf

from tfloop import GradientsParams, ModuleOptimizer, named_parameters


def ones(model):
    return GradientsParams({path: tf.ones(v.shape) for path, v in named_parameters(model).items()})


def test_momenta_follow_their_variables_when_a_layer_is_put_in_before_them():
    last = keras.layers.Dense(3)
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), last])
    optim = ModuleOptimizer(keras.optimizers.SGD(momentum=0.9))
    optim.step(0.5, net, ones(net))
    assert named_parameters(net)["dense_1.kernel"] is last.kernel
    net.pop()
    net.add(keras.layers.Dense(3))
    net.add(last)
    optim.build(net)
    assert named_parameters(net)["dense_2.kernel"] is last.kernel
    assert optim.state("dense_2.kernel")["momentums"].numpy().tolist() == [[-0.5] * 3] * 3
    assert optim.state("dense_1.kernel")["momentums"].numpy().tolist() == [[0.0] * 3] * 3


def test_a_rate_that_was_set_on_the_given_optimizer_is_restored(tmp_path):
    def run():
        keras.utils.set_random_seed(0)
        net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        given = keras.optimizers.SGD(1.0)
        return net, given, ModuleOptimizer(given)

    net, given, optim = run()
    optim.step(None, net, ones(net))
    given.learning_rate = 0.25
    path = tf.train.Checkpoint(optim=optim).write(str(tmp_path / "state"))
    net, given, optim = run()
    optim.build(net)
    tf.train.Checkpoint(optim=optim).restore(path)
    assert float(given.learning_rate) == 0.25

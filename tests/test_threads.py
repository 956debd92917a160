"""Several threads at once: state is made once, and no eager update, count or window is lost."""

import contextlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfloop
from tfloop import GradientsAccumulator, GradientsParams, ModuleOptimizer

THREADS = 8


def at_once(work):
    """Runs `work(number)` in threads that begin together; raises what one of them raised."""
    barrier, errors = threading.Barrier(THREADS), []

    def target(number):
        barrier.wait()
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=target, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a deadlock"
    if errors:
        raise errors[0]


def a_net():
    hidden = [keras.layers.Dense(3, kernel_initializer="ones") for _ in range(4)]
    return keras.Sequential([keras.Input((3,)), *hidden])


def ones(model):
    named = tfloop.named_parameters(model)
    return GradientsParams({path: tf.ones(variable.shape) for path, variable in named.items()})


@pytest.mark.parametrize("fused", [True, False])
def test_the_first_step_of_one_optimizer_in_all_threads_counts_each(fused):
    net, twin = a_net(), a_net()
    optim, reference = (
        ModuleOptimizer(keras.optimizers.Adam(0.1), fused=fused),
        ModuleOptimizer(keras.optimizers.Adam(0.1), fused=fused),
    )
    at_once(lambda _: optim.step(None, net, ones(net)))
    for _ in range(THREADS):
        reference.step(None, twin, ones(twin))
    assert int(optim.iterations) == THREADS
    for ours, theirs in zip(net.weights, twin.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert optim.serialize() == reference.serialize()


def test_every_micro_batch_and_every_step_of_a_schedule_is_counted():
    net, window = a_net(), GradientsAccumulator()
    scheduler = tfloop.ModuleLrScheduler(keras.optimizers.schedules.PolynomialDecay(8.0, 8, 0.0))
    rates = []

    def work(_):
        window.accumulate(net, ones(net))
        rates.append(float(scheduler.step().base))

    at_once(work)
    assert int(window.count) == THREADS
    assert float(window.grads()["dense.bias"][0]) == THREADS
    assert sorted(rates) == [float(n) for n in range(1, THREADS + 1)]


def test_compiled_steps_that_all_threads_trace_first_build_once():
    nets = [a_net() for _ in range(2)]
    optims = [ModuleOptimizer(keras.optimizers.SGD(), fused=n == 0) for n in range(2)]

    def work(number):
        net, optim = nets[number % 2], optims[number % 2]
        step = tfloop.compile(lambda: optim.step(0.0, net, ones(net)) and None)
        step()
        step()

    at_once(work)
    for optim in optims:
        assert int(optim.iterations) > 0
        optim.step(1.0, optim.root, ones(optim.root))  # no trace left its rate behind


def test_a_thread_that_builds_in_a_trace_does_not_wait_for_one_that_steps():
    net, other = a_net(), a_net()
    optim, window = ModuleOptimizer("adam"), GradientsAccumulator()
    compiled = tfloop.compile(lambda: window.accumulate(other, ones(other)))

    def work(number):
        if number % 2:
            optim.step(0.1, net, ones(net))
        else:
            compiled()

    at_once(work)
    assert int(optim.iterations) == THREADS // 2


def test_one_compiled_step_that_all_threads_call_first_builds_once():
    net = a_net()
    optim = ModuleOptimizer("adam")
    step = tfloop.compile(lambda rate: optim.step(rate, net, ones(net)) and None)
    at_once(lambda _: step(0.0))
    assert 0 < int(optim.iterations) <= THREADS  # as those of plain functions, runs overlap
    assert step.trace_count <= 2 * THREADS
    before = int(optim.iterations)
    step(0.0)
    assert int(optim.iterations) == before + 1


def test_no_micro_batch_is_lost_between_a_step_and_the_emptying_of_its_window():
    net, window = a_net(), GradientsAccumulator()
    optim = ModuleOptimizer(keras.optimizers.SGD(1.0))
    window.accumulate(net, ones(net))
    kernel = net.layers[0].kernel
    first = kernel.numpy()

    def work(number):
        window.accumulate(net, ones(net))
        if number % 2:
            with contextlib.suppress(RuntimeError):  # another thread has used the window
                optim.step(1.0, net, window)

    at_once(work)
    if int(window.count):
        optim.step(1.0, net, window)
    np.testing.assert_array_equal(first - kernel.numpy(), np.full((3, 3), THREADS + 1.0))

"""`Checkpoint` beside a loop that goes on: saves behind it, other threads, other processes."""

import gc
import multiprocessing
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfloop
from tfloop import Checkpoint, GradientsParams, ModuleOptimizer
from tfloop._checkpoint import files
from tfloop._compile import turns


class Held:
    """Keeps the writer from writing until it is let go, and counts how many write at once."""

    def __init__(self, monkeypatch):
        self.free, self.at_once, self.most = threading.Event(), 0, 0
        write = tf.raw_ops.SaveV2

        def held(**arguments):
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            assert self.free.wait(60)
            self.at_once -= 1
            return write(**arguments)

        monkeypatch.setattr(tf.raw_ops, "SaveV2", held)


@pytest.fixture
def held(monkeypatch):
    return Held(monkeypatch)


def state_of(net, optim):
    found = dict(tfloop.named_variables(net))
    for number, group in enumerate(optim._assembly.records()):
        found |= {f"{number}/{key}": variable for key, variable in group.variables().items()}
    return {path: variable.numpy() for path, variable in found.items()}


def words():
    """A net with a sparse gradient, a dense one, and statistics."""
    layers = [keras.layers.Embedding(50, 4), keras.layers.Flatten()]
    layers += [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])


@pytest.mark.parametrize("way", ["eager", "compiled", "jitted"])
def test_a_save_behind_the_loop_holds_what_was_when_it_was_called(way, held, tmp_path):
    net, optim = words(), ModuleOptimizer("adam")
    model = tfloop.train(net)
    checkpoint = Checkpoint(tmp_path, net=net, optim=optim)

    def step(ids):
        with tfloop.Tape() as tape:
            loss = tf.reduce_mean(model(ids) ** 2)
        optim.step(0.1, net, GradientsParams.from_grads(tape.backward(loss), net))
        return loss

    if way != "eager":
        step = tfloop.compile(step, jit_compile=way == "jitted")
    ids = tf.constant([[1, 2, 3], [3, 4, 1]])
    for _ in range(3):
        step(ids)
    expected = state_of(net, optim)
    path = checkpoint.save(3, blocking=False)
    for _ in range(3):  # while nothing is written yet
        step(ids)
    assert checkpoint.latest is None
    moved = state_of(net, optim)
    assert all(
        (moved[key] != expected[key]).any() for key in ("embedding.embeddings", "dense.bias")
    )
    held.free.set()
    checkpoint.wait()
    assert checkpoint.latest == path
    assert checkpoint.restore() == 3
    found = state_of(net, optim)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_one_save_at_most_is_written_at_a_time_and_restore_waits_for_it(held, tmp_path):
    number = tf.Variable(1)
    checkpoint = Checkpoint(tmp_path, number=number)
    checkpoint.save(1, blocking=False)
    number.assign(2)
    threading.Timer(0.2, held.free.set).start()
    checkpoint.save(2, blocking=False)
    assert held.free.is_set()  # or the second didn't wait for the first
    number.assign(3)
    assert checkpoint.restore() == 2
    assert int(number) == 2
    assert held.most == 1


@pytest.mark.parametrize("call", ["save", "wait", "restore"])
def test_an_error_behind_the_loop_is_raised_once_by_the_next_call(call, tmp_path, monkeypatch):
    number = tf.Variable(1)
    checkpoint = Checkpoint(tmp_path, number=number)
    checkpoint.save(1)
    calls = {
        "save": lambda: checkpoint.save(3),
        "wait": checkpoint.wait,
        "restore": checkpoint.restore,
    }
    with monkeypatch.context() as patch:
        patch.setattr(tf.raw_ops, "SaveV2", lambda **_: 1 / 0)
        checkpoint.save(2, blocking=False)
        with pytest.raises(ZeroDivisionError):
            calls[call]()
    calls[call]()
    assert checkpoint.restore() == (3 if call == "save" else 1)


def test_an_error_that_nobody_asks_for_is_printed(tmp_path, monkeypatch, capsys):
    checkpoint = Checkpoint(tmp_path, number=tf.Variable(1))
    monkeypatch.setattr(tf.raw_ops, "SaveV2", lambda **_: 1 / 0)
    checkpoint.save(1, blocking=False)
    checkpoint._behind._thread.join()
    del checkpoint
    gc.collect()
    assert "a checkpoint was not written" in (printed := capsys.readouterr().err)
    assert "ZeroDivisionError" in printed


# Other threads.


def in_a_thread(work):
    """Runs it in another thread, and gives what it raised."""
    raised = []

    def target():
        try:
            work()
        except Exception as error:  # noqa: BLE001 - it is the result
            raised.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(60)
    return raised[0] if raised else None


def test_another_thread_than_the_loops_is_refused(tmp_path):
    checkpoint = Checkpoint(tmp_path, number=tf.Variable(1))
    for call in (lambda: checkpoint.save(1), checkpoint.restore, checkpoint.wait):
        error = in_a_thread(call)
        assert isinstance(error, RuntimeError)
        assert "expected one thread for all" in str(error)
    assert checkpoint.latest is None
    made = []
    assert in_a_thread(lambda: made.append(Checkpoint(tmp_path, number=tf.Variable(1)))) is None
    made[0].save(1)  # that thread is gone


def test_steps_by_hand_in_another_thread_are_refused(tmp_path):
    net, optim = words(), ModuleOptimizer("sgd")
    checkpoint = Checkpoint(tmp_path, net=net, optim=optim)
    done, over = threading.Event(), threading.Event()

    @tf.function
    def step():
        grads = GradientsParams({"dense.bias": tf.ones(1)})
        optim.step(0.1, net, grads)

    def loop():
        step()
        done.set()
        over.wait(60)

    thread = threading.Thread(target=loop, name="the loop")
    thread.start()
    assert done.wait(60)
    with pytest.raises(RuntimeError, match="optimizer, of 'the loop', expected one thread"):
        checkpoint.save(1)
    over.set()
    thread.join()
    checkpoint.save(1)


def test_a_save_beside_compiled_steps_of_another_thread_is_whole(tmp_path):
    first, last = tf.Variable(0), tf.Variable(0)
    work = tf.random.uniform((300, 300), seed=1)
    over = threading.Event()

    @tfloop.compile
    def step():
        first.assign_add(1)
        product = work
        for _ in range(10):
            product = product @ work / 100.0
        with tf.control_dependencies([product]):
            last.assign_add(1)

    def loop():
        while not over.is_set():
            step()

    checkpoint = Checkpoint(tmp_path, max_to_keep=None, first=first, last=last)
    step()
    thread = threading.Thread(target=loop)
    thread.start()
    try:
        paths = [checkpoint.save(n, blocking=n % 2 == 0) for n in range(10)]
        checkpoint.wait()
    finally:
        over.set()
        thread.join()
    seen = []
    for path in paths:
        checkpoint.restore(path)
        assert int(first) == int(last)
        seen.append(int(first))
    assert len(set(seen)) > 1


def test_in_the_middle_of_a_step_or_of_a_save_it_is_refused(tmp_path, monkeypatch):
    checkpoint = Checkpoint(tmp_path, number=tf.Variable(1))
    with turns.STEPS, pytest.raises(RuntimeError, match="in the middle of a step"):
        checkpoint.save(1)
    write = files.write

    def interrupted(*args, **kwargs):
        with pytest.raises(RuntimeError, match="inside another call .* a signal handler"):
            checkpoint.save(2)
        return write(*args, **kwargs)

    monkeypatch.setattr(files, "write", interrupted)
    path = checkpoint.save(1)
    assert checkpoint.latest == path


def test_a_step_that_does_not_end_is_given_up_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(turns, "_PATIENCE", 0.1)
    steps, inside, over = turns.Turns(), threading.Event(), threading.Event()

    def endless():
        with steps:
            inside.set()
            over.wait(60)

    thread = threading.Thread(target=endless)
    thread.start()
    assert inside.wait(60)
    with pytest.raises(RuntimeError, match="one that has run for"), steps.alone("save"):
        pass
    with steps:
        over.set()
    thread.join()
    with steps.alone("save"):
        pass


# Other processes.


def save_once(directory, sender):
    try:
        sender.send(Checkpoint(directory, number=tf.Variable(7)).save(7))
    except RuntimeError as error:
        sender.send(str(error))


def test_another_process_cant_write_in_the_folder_of_a_run_that_is_alive(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tfloop"])

    def elsewhere():
        receiver, sender = context.Pipe()
        process = context.Process(target=save_once, args=(tmp_path, sender))
        process.start()
        found = receiver.recv()
        process.join()
        return found

    checkpoint = Checkpoint(tmp_path, number=tf.Variable(1))
    path = checkpoint.save(1)
    assert "in which another process writes checkpoints" in elsewhere()
    assert checkpoint.latest == path
    Checkpoint(tmp_path, number=tf.Variable(2)).save(2)  # of this one
    checkpoint.wait()
    del checkpoint
    gc.collect()
    assert elsewhere().endswith("tfloop-3")


# When, and which stay.


def test_the_first_at_or_after_each_multiple_stays(tmp_path):
    number = tf.Variable(0)
    steps = [3, 10, 12, 19, 31, 32, 39, 40, 41]
    for step in steps:  # a new object each time, as after a restart
        number.assign(step)
        Checkpoint(tmp_path, max_to_keep=1, keep_every=10, number=number).save(step)
    kept = []
    for path in files.written(str(tmp_path)):
        kept.append(Checkpoint(tmp_path, number=number).restore(path))
        assert int(number) == kept[-1]
    assert kept == [10, 31, 40, 41]


def test_a_save_is_due_when_the_seconds_have_passed(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    checkpoint = Checkpoint(tmp_path, every_seconds=60, number=tf.Variable(0))
    found = []
    for seconds in (30, 30, 59, 1):
        clock[0] += seconds
        found.append(checkpoint.due())
        if found[-1]:
            checkpoint.save(1)
    assert found == [False, True, False, True]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda d: Checkpoint(d, n=tf.Variable(0)).due(), RuntimeError, "no clock: got every_sec"),
        (lambda d: Checkpoint(d, every_seconds=0, n=tf.Variable(0)), ValueError, "got 0, expected"),
        (lambda d: Checkpoint(d, every_seconds="1", n=tf.Variable(0)), TypeError, "got str '1'"),
        (lambda d: Checkpoint(d, keep_every=0, n=tf.Variable(0)), ValueError, "`keep_every`: got"),
    ],
)
def test_bad_input_raises_and_says_how_to_mend_it(call, error, match, tmp_path):
    with pytest.raises(error, match=match):
        call(tmp_path)


# A part.


def parts():
    layers = [keras.layers.Dense(2, name=name) for name in ("encoder", "head")]
    return keras.Sequential([keras.Input((2,)), *layers])


def test_a_group_of_a_model_is_restored_alone(tmp_path):
    net, optim = parts(), ModuleOptimizer("adam")
    optim.build(net)
    Checkpoint(tmp_path, net=net, optim=optim, epoch=tf.Variable(3)).save(5)
    saved = {path: v.numpy() for path, v in tfloop.named_variables(net).items()}
    other = parts()
    wider = keras.layers.Dense(3, name="head")
    other = keras.Sequential([keras.Input((2,)), other.layers[0], wider])
    before = wider.kernel.numpy()
    group = tfloop.ParamGroup.from_name("encoder")
    checkpoint = Checkpoint(tmp_path, net=other, epoch=(epoch := tf.Variable(9)))
    assert checkpoint.restore(group=group) == 5
    np.testing.assert_array_equal(other.layers[0].kernel, saved["encoder.kernel"])
    np.testing.assert_array_equal(wider.kernel, before)
    assert int(epoch) == 9
    with pytest.raises(ValueError, match=r"got shape \(2, 2\) .* for 'head.kernel'"):
        checkpoint.restore(group=tfloop.ParamGroup.from_name("head"))
    with pytest.raises(ValueError, match="nothing to take over: got .*'encoder.kernel'"):
        checkpoint.restore(group=tfloop.ParamGroup.from_name("decoder"))
    with pytest.raises(TypeError, match="needs a ParamGroup"):
        checkpoint.restore(group="encoder")
    # The encoder alone, under the path that it had in the whole.
    encoder = parts().layers[0]
    assert Checkpoint(tmp_path, net={"encoder": encoder}).restore(strict=False) == 5
    np.testing.assert_array_equal(encoder.kernel, saved["encoder.kernel"])

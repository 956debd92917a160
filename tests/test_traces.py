"""What a trace depends on is noted, by whoever makes it; state is made outside of it."""

import threading

import pytest
import tensorflow as tf
from processes import SILENCE

from tfloop._tracing import traces


class State:
    def __init__(self):
        self.version = 0

    def fingerprint(self):
        return self.version


def recorded(fn, **options):
    """What is noted while `fn` is traced."""
    found = []

    def step(*args):
        with traces.recording() as noted:
            fn(*args)
            found.append(dict(noted))
        return tf.constant(0)

    tf.function(step, **options)()
    return list(found[0].values())


def test_what_a_trace_reads_is_noted_once():
    state, other = State(), State()

    def step():
        traces.depends_on(state)
        traces.depends_on(other)
        traces.depends_on(state)

    assert recorded(step) == [state, other]
    assert recorded(step, jit_compile=True) == [state, other]


def test_nothing_is_noted_outside_a_watched_trace():
    state = State()
    traces.depends_on(state)
    assert not traces.is_recorded()
    foreign = []

    @tf.function
    def step():
        traces.depends_on(state)
        foreign.append(traces.is_recorded())

    step()
    assert foreign == [False]


def test_only_the_watched_trace_itself_is_checked_before_each_call():
    found = {}

    def step():
        found["itself"] = traces.is_current()

        @tf.function
        def own():
            found["a function of the user's"] = traces.is_current()

        own()

    recorded(step)
    assert found == {"itself": True, "a function of the user's": False}
    assert not traces.is_current()


def test_graphs_inside_the_trace_belong_to_it():
    state, inner_states = State(), [State() for _ in range(3)]

    def step():
        @tf.function
        def inner():
            traces.depends_on(inner_states[0])
            return tf.constant(1.0)

        def branch():
            traces.depends_on(inner_states[1])
            return inner()

        def body(i):
            traces.depends_on(inner_states[2])
            return i + 1

        tf.cond(tf.constant(True), branch, lambda: tf.constant(0.0))
        tf.while_loop(lambda i: i < 2, body, [tf.constant(0)])
        traces.depends_on(state)

    assert set(map(id, recorded(step))) == {id(s) for s in (state, *inner_states)}


def test_a_recorder_inside_another_notes_for_both():
    state = State()
    inner_found = []

    def step():
        @tf.function
        def inner():
            with traces.recording() as noted:
                traces.depends_on(state)
                inner_found.append(dict(noted))
            return tf.constant(0)

        inner()
        assert traces.is_recorded()

    assert recorded(step) == [state]
    assert list(inner_found[0].values()) == [state]


def test_replica_threads_note_for_the_trace_they_belong_to():
    """A strategy traces its replicas in threads of their own, in the same graph."""
    state = State()

    def step():
        graph = tf.compat.v1.get_default_graph()

        def replica():
            with graph.as_default():
                traces.depends_on(state)

        thread = threading.Thread(target=replica)
        thread.start()
        thread.join()

    assert recorded(step) == [state]


def test_traces_in_other_threads_are_kept_apart():
    state, inside, done = State(), threading.Event(), threading.Event()

    def slow():
        inside.set()
        assert done.wait(SILENCE)

    found = []
    thread = threading.Thread(target=lambda: found.append(recorded(slow)))
    thread.start()
    assert inside.wait(SILENCE)
    assert not traces.is_recorded()
    assert recorded(lambda: traces.depends_on(state)) == [state]
    done.set()
    thread.join()
    assert found == [[]]


def test_a_recorder_ends_with_its_block_even_if_that_raises():
    @tf.function
    def step():
        try:
            with traces.recording():
                raise KeyError("x")
        except KeyError:
            pass
        assert not traces.is_recorded()

    step()


def test_steps_within_steps_work_while_functions_run_eagerly():
    state = State()
    with traces.recording() as outer:
        with traces.recording():
            traces.depends_on(state)
        traces.depends_on(state)
    assert outer == {}
    with traces.recording():
        pass


def test_variables_can_be_made_on_every_trace():
    made = []

    @tf.function
    def step(x):
        made.append(traces.eagerly(lambda: tf.Variable(1.0)))
        return made[-1] + x

    assert float(step(tf.constant(1.0))) == 2.0
    assert [float(v) for v in step(tf.constant([1.0, 2.0]))] == [2.0, 3.0]
    jitted = tf.function(step.python_function, jit_compile=True)
    assert float(jitted(tf.constant(1.0))) == 2.0
    assert len(made) >= 3
    assert all(isinstance(v, tf.Variable) for v in made)


def test_eager_code_runs_where_it_is():
    here = []
    assert traces.eagerly(lambda: here.append(threading.current_thread()) or 5) == 5
    assert here == [threading.current_thread()]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_what_is_raised_outside_the_trace_arrives_inside(error):
    def fail():
        raise error

    @tf.function
    def step():
        traces.eagerly(fail)

    with pytest.raises(type(error)):
        step()


def test_autograph_stays_out_of_functions_that_say_so():
    @traces.not_converted
    def ours(x):
        """Ours."""
        return "converted" if not isinstance(x, tf.Tensor) else bool(x.shape.rank == 0)

    def python_condition(x):
        return 1 if x > 0 else 2  # a tensor has no truth value unless autograph converts

    assert ours.__doc__ == "Ours."
    assert ours.__name__ == "ours"
    assert ours(tf.constant(1.0))
    assert int(tf.function(python_condition)(tf.constant(1.0))) == 1
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(traces.not_converted(python_condition))(tf.constant(1.0))

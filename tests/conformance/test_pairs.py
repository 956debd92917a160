"""Programs times ways: what a step holds, and how it is run, never shows in a number.

A part of the pairs is run, in which every program and every way occurs: one of 14, or one of four
with TFLOOP_TEST_ALL=1, or all with TFLOOP_TEST_PAIRS=1. A pair that can't work is a row of one of
the tables below; nothing is left out in silence.
"""

import json
import os
from pathlib import Path

import pytest
import tensorflow as tf
from elsewhere import error_said
from processes import run
from programs import PROGRAMS
from ways import WAYS, check, play_first_half

ELSEWHERE = Path(__file__).with_name("elsewhere.py")
JIT = ("jit", "several_steps_a_call_by_jit")
RUN = ("several_steps_a_call", "several_steps_a_call_by_jit")
EVERY_WAY = [way.name for way in WAYS.values() if way.takes(PROGRAMS["complex_parameters"])]
UNKNOWN = (JIT, tf.errors.InvalidArgumentError, "unsupported operations")
# Pairs that must raise: program, ways, error, a part of its message.
CANT = [
    # What XLA hasn't got.
    ("random_gamma_poisson_and_truncated", *UNKNOWN),
    ("random_numbers_of_numpy", *UNKNOWN),
    ("python_is_called", *UNKNOWN),
    ("python_gives_a_number", *UNKNOWN),
    ("printing", *UNKNOWN),
    ("mutable_table", *UNKNOWN),
    ("static_table", *UNKNOWN),
    ("lookups_and_hashes_of_keras", *UNKNOWN),
    ("queue", *UNKNOWN),
    ("summaries", *UNKNOWN),
    ("sparse_tensors", *UNKNOWN),
    ("resource_made_in_the_step", JIT, tf.errors.InvalidArgumentError, "TensorListGetItem"),
    (
        "variables_of_open_shape",
        JIT,
        tf.errors.InvalidArgumentError,
        "cannot be changed after initialization",
    ),
    ("strings", JIT, tf.errors.InvalidArgumentError, "unsupported"),
    # A step that raises ends the call, and with it the others in it.
    ("assert_that_fails_later", RUN[:1], tf.errors.InvalidArgumentError, "too far"),
    # Nor is a number that isn't finite what this program is about there.
    (
        "steps_that_are_not_finite_are_skipped",
        ["with_numerics_checked"],
        tf.errors.InvalidArgumentError,
        "CheckNumerics",
    ),
    # Results of several steps come as one stack.
    ("dtypes_that_change", RUN, tf.errors.InvalidArgumentError, "Pack"),
    # A batch for replicas has rows.
    ("named_tuples", ["one_replica"], ValueError, "one common leading axis"),
    ("lists_in_tuples_in_lists", ["one_replica"], ValueError, "one common leading axis"),
    ("ragged_tensors", ["one_replica"], TypeError, "expected dense tensors"),
    ("sparse_tensors", ["one_replica"], TypeError, "expected dense tensors"),
    ("arguments_by_name", ["one_replica"], TypeError, "needs its batch as first argument"),
    # TensorFlow gives variables that are born in a replica's trace no values, nor does Keras.
    (
        "moving_averages_of_a_model_without_input",
        ["two_replicas", "two_replicas_without_a_batch"],
        ValueError,
        "expected a built model",
    ),
    # A step in a function of its own inside a replica; replicas can't wait for each other there.
    (
        "nested_step_that_trains",
        ["two_replicas", "two_replicas_without_a_batch"],
        RuntimeError,
        "expected the replica's own code",
    ),
    # TensorFlow's own function makes a NaN, which is never used.
    (
        "recompute_grad",
        ["with_numerics_checked"],
        tf.errors.InvalidArgumentError,
        "CheckNumerics",
    ),
    # Keras' rules are made for real numbers.
    ("complex_parameters", EVERY_WAY, ValueError, "found a complex parameter"),
]
# Pairs that aren't run: program, ways, why.
DEADLY = [
    ("text_vectorization", JIT, "TensorFlow ends the process: XLA, a text among the constants"),
]
# Pairs in which only shapes are compared: program, ways, why.
XLA_DRAWS = (JIT, "XLA has a generator of its own, and the loop by hand is never the same either")
BY_CHANCE = [
    ("random_normal_by_the_global_seed", *XLA_DRAWS),
    ("random_uniform_by_a_seed_of_its_own", *XLA_DRAWS),
    ("random_scalar_alone", *XLA_DRAWS),
    ("random_integers_and_shuffles", *XLA_DRAWS),
    ("random_categorical", *XLA_DRAWS),
    ("random_in_a_nested_function", *XLA_DRAWS),
    ("random_in_a_while_loop", *XLA_DRAWS),
    ("random_in_a_branch", *XLA_DRAWS),
    ("random_in_map_fn", *XLA_DRAWS),
    ("random_flips_of_images", *XLA_DRAWS),
    ("dropout_of_tensorflow", *XLA_DRAWS),
    ("dropout_of_tensorflow_with_a_seed", *XLA_DRAWS),
    ("dropout_of_tensorflow_in_a_loss", *XLA_DRAWS),
]
# One of so many pairs is run; each program has more ways than that.
PART, MORE = 14, 4
NTH = int(os.environ.get("TFLOOP_TEST_PAIRS", MORE if os.environ.get("TFLOOP_TEST_ALL") else PART))


def pairs():
    """Every pair that there is, and whether it is in the part."""
    for number, program in enumerate(PROGRAMS.values()):
        possible = [way for way in WAYS.values() if way.takes(program)]
        for place, way in enumerate(possible):
            yield program, way, (number + place) % NTH == 0


def listed(table, program, way):
    rows = [row for row in table if program.name == row[0] and way.name in row[1]]
    return rows[0] if rows else None


CHOSEN = [(p, w) for p, w, part in pairs() if part and not listed(DEADLY, p, w)]
# The first name of an id is what its pairs share: the references of a program, or a process.
IDS = [f"{w.name}-{p.name}" if w.process else f"{p.name}-{w.name}" for p, w in CHOSEN]


def there(way, folder, names):
    """Runs programs in another process; program -> what it said."""
    done = run("-W", "error", str(ELSEWHERE), way.name, folder, *names)
    lines = [line[5:] for line in done.stdout.splitlines() if line.startswith("PAIR ")]
    found = {said["program"]: said for said in map(json.loads, lines)}
    lost = {"error": "Lost", "text": done.stderr[-2000:], "traceback": done.stderr[-6000:]}
    return {name: found.get(name, lost) for name in names}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """way -> program -> what was said; each way is run once, when it is first asked for."""
    said = {}

    def ask(way):
        if way.name not in said:
            folder = str(tmp_path_factory.mktemp(way.name))
            programs, fell = [p for p, w in CHOSEN if w is way], {}
            if way.process == "restored":
                for program in programs:
                    try:
                        play_first_half(program, folder)
                    except Exception as error:
                        fell[program.name] = error_said(error)
            names = [p.name for p in programs if p.name not in fell]
            said[way.name] = fell | there(way, folder, names)
        return said[way.name]

    return ask


@pytest.mark.parametrize(("program", "way"), CHOSEN, ids=IDS)
def test_a_program_does_what_the_loop_by_hand_does(program, way, elsewhere):
    row = listed(CANT, program, way)
    if way.process is not None:
        said = elsewhere(way)[program.name]
        if row is None:
            assert said["error"] is None, said["traceback"]
        else:
            assert (said["error"], row[3] in said["text"]) == (row[2].__name__, True), said
    elif row is None:
        check(program, way, by_chance=bool(listed(BY_CHANCE, program, way)))
    else:
        with pytest.raises(row[2], match=row[3]):
            way.play(program)


def test_every_program_and_every_way_occurs_in_the_part():
    part = [(p.name, w.name) for p, w, part in pairs() if part and not listed(DEADLY, p, w)]
    assert {p for p, _ in part} == set(PROGRAMS)
    assert {w for _, w in part} == set(WAYS)


def test_the_tables_hold_no_row_that_means_nothing():
    there_are = {(p.name, w.name) for p, w, _ in pairs()}
    for name, ways, *_ in [*CANT, *DEADLY, *BY_CHANCE]:
        assert {(name, way) for way in ways} <= there_are, name

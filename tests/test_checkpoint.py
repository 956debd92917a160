"""`Checkpoint`: what is saved, what is refused, and that nothing ever is half done."""

import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from processes import SILENCE
from resumable import build_run, everything, run_on
from since import SCHEDULE_FREE, since

import tfloop
from tfloop import (
    Checkpoint,
    DataLoader,
    GradientsAccumulator,
    GradientsParams,
    ModuleOptimizer,
    ParamGroup,
)

KILLS = 20 if os.environ.get("TFLOOP_TEST_ALL") else 3


def dense(*units, inputs=2):
    layers = [keras.layers.Dense(each) for each in units or (2,)]
    return keras.Sequential([keras.Input((inputs,)), *layers])


def trained(net, optim=None, **groups):
    """An optimizer that has made a step of ones."""
    optim = optim or ModuleOptimizer("adam")
    for name, rule in groups.items():
        optim.with_group(ParamGroup.from_name(name), rule)
    optim.step(0.1, net, ones(net))
    return optim


def ones(net):
    return GradientsParams({p: tf.ones(v.shape) for p, v in tfloop.named_parameters(net).items()})


def values(net):
    return {path: v.numpy().tobytes() for path, v in tfloop.named_variables(net).items()}


def state(optim):
    """Every variable of an optimizer by what it belongs to."""
    return {
        f"{group.optimizer}/{key}": v.numpy().tobytes()
        for group in optim._assembly.records()
        for key, v in group.variables().items()
    }


class Numbers(tf.Module):
    """A small thing that has variables."""

    def __init__(self, value=0.0):
        super().__init__()
        self.a = tf.Variable(tf.fill((3,), float(value)))
        self.b = tf.Variable(tf.fill((2, 2), int(value)))

    def set(self, value):
        self.a.assign(tf.fill((3,), float(value)))
        self.b.assign(tf.fill((2, 2), int(value)))

    def get(self):
        found = {float(x) for x in [*self.a.numpy(), *self.b.numpy().ravel()]}
        return found.pop() if len(found) == 1 else f"mixed: {found}"


# What is saved.


def test_a_checkpoint_holds_the_values_by_path_in_tensorflows_format(tmp_path):
    net = dense()
    path = Checkpoint(tmp_path, net=net).save(0)
    key = "values/net/dense..kernel/.ATTRIBUTES/VARIABLE_VALUE"
    stored = tf.train.load_variable(path, key)
    np.testing.assert_array_equal(stored, net.layers[0].kernel)
    assert tf.train.latest_checkpoint(str(tmp_path)) == path


def test_everything_that_has_state_comes_back(tmp_path):
    def make(value):
        keras.utils.set_random_seed(int(value))
        net = keras.Sequential(
            [
                keras.Input((2,)),
                keras.layers.Dense(2),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
            ]
        )
        tfloop.train(net)(tf.fill((3, 2), value))
        objects = {
            "net": net,
            "optim": trained(net, dense=keras.optimizers.SGD(value, momentum=0.9)),
            "window": GradientsAccumulator(reduction="mean"),
            "rates": tfloop.ModuleLrScheduler(0.1),
            "plateau": tfloop.schedulers.Plateau(0.1, factor=0.5, patience=1),
            "metric": keras.metrics.SparseCategoricalAccuracy(),
            "epoch": tf.Variable(int(value), dtype=tf.int64),
            "seed": keras.random.SeedGenerator(int(value)).state,
            "nets": {"a": Numbers(value), "scale": tf.Variable(value)},
            "list": [Numbers(value), tf.Variable([value] * 4)],
            "module": Numbers(value),
            "loader": DataLoader(np.arange(10), batch_size=3, shuffle=1),
        }
        objects["optim"].step(0.1, net, ones(net).scale(value))
        objects["window"].accumulate(net, ones(net).scale(value), weight=value)
        for _ in range(int(value)):
            objects["rates"].step()
            objects["plateau"].update(value)
            objects["metric"].update_state([1, 0], [[0.1, 0.9], [0.1, 0.9]])
        iterator = iter(objects["loader"])
        for _ in range(int(value)):
            next(iterator)
        return objects

    def told(objects):
        plain = {"window", "optim", "loader", "metric", "seed", "epoch"}
        found = {n: values(t) for n, t in objects.items() if n not in plain}
        found["optim"] = state(objects["optim"])
        found["window"] = {k: v.numpy().tobytes() for k, v in objects["window"].state().items()}
        found["loader"] = objects["loader"].serialize()
        found["metric"] = [v.numpy().tobytes() for v in objects["metric"].variables]
        found["seed"], found["epoch"] = (objects[n].numpy().tobytes() for n in ("seed", "epoch"))
        return found

    first, second = make(2.0), make(3.0)
    checkpoint = Checkpoint(tmp_path, **first)
    checkpoint.save(41)
    before = told(first)
    assert before.keys() == first.keys()
    assert not [name for name, other in told(second).items() if before[name] == other]
    assert Checkpoint(tmp_path, **second).restore() == 41
    assert told(second) == before


def test_a_variable_that_two_objects_share_comes_back_for_both(tmp_path):
    net = dense(2, 2)
    Checkpoint(tmp_path, net=net, head=net.layers[1], again=net).save(0)
    expected = values(net)
    new = {"net": dense(2, 2), "head": dense(2).layers[0], "again": dense(2, 2)}
    Checkpoint(tmp_path, **new).restore()
    assert values(new["net"]) == values(new["again"]) == expected
    assert values(new["head"])["kernel"] == expected["dense_1.kernel"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes_are_kept(dtype, tmp_path):
    def make():
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, dtype=dtype)])

    net, new = make(), make()
    Checkpoint(tmp_path, net=net).save(0)
    Checkpoint(tmp_path, net=new).restore()
    assert values(new) == values(net)


def variables_of_all_kinds():
    """Of every kind that a variable can have, with values that a detour would spoil."""
    numbers = {
        **{name: [1.5, -2.0] for name in ("bfloat16", "float16", "float32", "float64")},
        **{name: [1.5, -2.0] for name in ("float8_e4m3fn", "float8_e5m2")},
        **{name: [1, 100] for name in ("int8", "uint8", "int16", "uint16", "uint32", "int64")},
        **{"complex64": [1 - 2j], "complex128": [0.1j], "bool": [True, False]},
    }
    found = {name: tf.cast(tf.constant(value), name) for name, value in numbers.items()}
    found |= {f"{name}/scalar": value[0] for name, value in found.items()}
    found |= {"text": tf.constant(["a", "\0b\0"]), "one text": tf.constant(b"a\0")}
    found |= {"odd": tf.constant([-0.0, np.nan, -np.inf, 1e-45]), "no text": tf.constant("")}
    found |= {"nothing": tf.zeros((0, 3)), "no texts": tf.zeros((0,), tf.string)}
    found = {name: tf.Variable(value) for name, value in found.items()}
    for name, shape in {"float32": [None], "text": [None], "nothing": [None, None]}.items():
        found[f"{name}/open"] = tf.Variable(found[name].value(), shape=shape)
    return found


class Held(tf.Module):
    """A model of them."""

    def __init__(self):
        super().__init__()
        self.held = variables_of_all_kinds()


def emptied(variables):
    """Other values of the same kinds."""
    for variable in variables.values():
        shape = [1 if size is None else size for size in variable.shape]
        text = variable.dtype == tf.string
        variable.assign(tf.fill(shape, "") if text else tf.cast(tf.zeros(shape), variable.dtype))
    return variables


def bits(variables):
    return {
        name: [v.shape, np.asarray(v.numpy(), object).tolist(), v.dtype]
        for name, v in variables.items()
    }


def restored_elsewhere(directory, result):
    held = Held()
    emptied(held.held)
    variables = emptied(variables_of_all_kinds())
    Checkpoint(directory, held=held, **variables).restore()
    with open(result, "w") as file:
        file.write(repr([bits(held.held), bits(variables)]))


def test_every_kind_of_variable_comes_back_in_another_process(tmp_path, started):
    held, variables = Held(), variables_of_all_kinds()
    expected = repr([bits(held.held), bits(variables)])
    checkpoint = Checkpoint(tmp_path / "run", held=held, **variables)
    checkpoint.save(0)
    emptied(held.held), emptied(variables)
    assert repr([bits(held.held), bits(variables)]) != expected
    checkpoint.restore()
    assert repr([bits(held.held), bits(variables)]) == expected
    folders = str(tmp_path / "run"), str(tmp_path / "result")
    assert exit_code(started(restored_elsewhere, *folders)) == 0
    assert (tmp_path / "result").read_text() == expected


def test_an_open_shape_takes_what_it_may_hold_and_nothing_else(tmp_path):
    live = tf.Variable([1.0], shape=[None])
    Checkpoint(tmp_path, v=tf.Variable([1.0, 2.0])).save(0)
    Checkpoint(tmp_path, v=live).restore()
    np.testing.assert_array_equal(live, [1.0, 2.0])
    Checkpoint(tmp_path, v=tf.Variable([[1.0]])).save(0)
    with pytest.raises(ValueError, match=r"got shape \(1, 1\) .*expected \(None,\)"):
        Checkpoint(tmp_path, v=live).restore()


def test_views_and_models_are_one(tmp_path):
    net, new = dense(), dense()
    Checkpoint(tmp_path, net=tfloop.train(net), optim=trained(net)).save(0)
    Checkpoint(tmp_path, net=tfloop.valid(new), optim=ModuleOptimizer("adam")).restore()
    assert values(new) == values(net)


def test_a_model_built_again_and_groups_in_another_order_restore_exactly(tmp_path):
    def make(order):
        net = dense(2, 2, 2)
        groups = {
            "dense": keras.optimizers.SGD(momentum=0.9),
            "dense_1": keras.optimizers.RMSprop(),
        }
        return net, trained(net, **{name: groups[name] for name in order})

    net, optim = make(["dense", "dense_1"])
    optim.step(0.1, net, ones(net).scale(3.0))
    Checkpoint(tmp_path, net=net, optim=optim).save(0)
    keras.backend.clear_session()
    dense(2)  # names are numbered on
    new, other = make(["dense_1", "dense"])
    assert state(other) != state(optim)
    Checkpoint(tmp_path, net=new, optim=other).restore()
    assert values(new) == values(net)
    assert state(other) == state(optim)


@pytest.mark.parametrize(
    "step", [7, np.int64(7), tf.constant(7), tf.Variable(7, dtype=tf.int64), np.array(7)]
)
def test_the_step_comes_back_as_an_int(step, tmp_path):
    checkpoint = Checkpoint(tmp_path, numbers=Numbers())
    checkpoint.save(step)
    found = checkpoint.restore()
    assert (found, type(found)) == (7, int)


def test_nothing_to_restore_is_none(tmp_path):
    checkpoint = Checkpoint(tmp_path / "not" / "there", numbers=Numbers())
    assert checkpoint.latest is None
    assert checkpoint.restore() is None


def test_the_newest_are_kept_and_any_of_them_restores(tmp_path):
    numbers = Numbers()
    checkpoint = Checkpoint(tmp_path, max_to_keep=2, numbers=numbers)
    paths = []
    for value in range(4):
        numbers.set(value)
        paths.append(checkpoint.save(10 * value))
    assert sorted(os.listdir(tmp_path)) == [
        "checkpoint",
        *(f"tfloop-{n}.{kind}" for n in (3, 4) for kind in ("data-00000-of-00001", "index")),
    ]
    assert checkpoint.latest == paths[-1]
    assert (checkpoint.restore(paths[2]), numbers.get()) == (20, 2.0)
    assert (checkpoint.restore(), numbers.get()) == (30, 3.0)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*tfloop-1'.*'.*tfloop-4', "):
        checkpoint.restore(paths[0])


def test_none_keeps_all_and_a_new_object_counts_on(tmp_path):
    for value in range(5):
        Checkpoint(tmp_path, max_to_keep=None, numbers=Numbers(value)).save(0)
    names = {f"tfloop-{n}.index" for n in range(1, 6)}
    assert {name for name in os.listdir(tmp_path) if name.endswith("index")} == names


def test_files_of_others_in_the_directory_are_left_alone(tmp_path):
    numbers = Numbers()
    mine = [tmp_path / name for name in ("ckpt-1.index", "tfloop-x.index", "notes.txt")]
    for path in mine:
        path.write_text("mine")
    checkpoint = Checkpoint(tmp_path, max_to_keep=1, numbers=numbers)
    checkpoint.save(0)
    checkpoint.save(1)
    assert [path.read_text() for path in mine] == ["mine"] * 3


def test_a_directory_can_be_moved_and_hold_any_characters(tmp_path):
    numbers = Numbers(5.0)
    Checkpoint(tmp_path / "a [1]*?", numbers=numbers).save(3)
    os.rename(tmp_path / "a [1]*?", tmp_path / "b")
    numbers.set(0)
    assert Checkpoint(tmp_path / "b", numbers=numbers).restore() == 3
    assert numbers.get() == 5.0
    assert tf.train.latest_checkpoint(str(tmp_path / "b")) == str(tmp_path / "b" / "tfloop-1")


def test_other_file_systems_of_tensorflow_work():
    numbers = Numbers(5.0)
    checkpoint = Checkpoint("ram://run/checkpoints", max_to_keep=1, numbers=numbers)
    for step in (1, 2):
        checkpoint.save(step)
    numbers.set(0)
    assert (checkpoint.restore(), numbers.get()) == (2, 5.0)


def test_compiled_steps_go_on_with_the_restored_values(tmp_path):
    net, optim = dense(), ModuleOptimizer("adam")
    step = tfloop.compile(lambda: optim.step(0.1, net, ones(net)) and None)
    step()
    checkpoint = Checkpoint(tmp_path, net=net, optim=optim)
    checkpoint.save(1)
    step()
    expected = values(net), state(optim)
    checkpoint.restore()
    step()
    assert (values(net), state(optim)) == expected
    assert step.trace_count == 1


def test_its_text_says_what_it_saves_and_where(tmp_path):
    assert repr(Checkpoint(tmp_path, a=Numbers(), b=Numbers())) == f"Checkpoint('{tmp_path}': a, b)"


# Optimizers and accumulators that aren't built yet.


def test_an_optimizer_not_built_is_built_for_the_one_object_that_can_be_its_root(tmp_path):
    net, optim = dense(), ModuleOptimizer("adam")
    objects = {
        "rates": tfloop.ModuleLrScheduler(tfloop.schedulers.Plateau(0.1)),
        "epoch": tf.Variable(1.0),
    }
    Checkpoint(tmp_path, net=net, optim=optim, again=tfloop.train(net), **objects).save(0)
    assert optim.root is None  # saving only looks
    new, other = dense(), ModuleOptimizer("adam")
    Checkpoint(tmp_path, net=new, optim=other, again=new, **objects).restore()
    assert other.root is new


@pytest.mark.parametrize(
    "how", ["adam", pytest.param("schedule free", marks=since(SCHEDULE_FREE)), "restored"]
)
def test_saving_changes_nothing_in_the_run(how, tmp_path):
    def run(directory):
        keras.utils.set_random_seed(0)
        net = dense()
        given = keras.optimizers.ScheduleFreeAdamW(0.1) if how == "schedule free" else "adam"
        optim, window = ModuleOptimizer(given), GradientsAccumulator()
        if how == "restored":
            optim.deserialize(trained(dense()).serialize())
        if directory is not None:
            checkpoint = Checkpoint(directory, net=net, optim=optim, window=window)
            checkpoint.save(0)
            assert optim.root is window.root is None
        for variable in net.variables:  # as the weights of another model are loaded
            variable.assign(variable + 1.0)
        for step in range(3):
            window.accumulate(net, ones(net))
            if directory is not None:
                checkpoint.save(step)
            optim.step(0.1, net, window)
        return values(net) | state(optim)

    saved = run(tmp_path)
    assert saved == run(None)
    assert len(saved) > 5
    if how == "restored":  # the state that waited was saved
        net, optim = dense(), ModuleOptimizer("adam")
        late = ModuleOptimizer("adam")
        late.deserialize(trained(net, optim).serialize())
        Checkpoint(tmp_path / "late", net=net, optim=late).save(0)
        other = ModuleOptimizer("adam")
        Checkpoint(tmp_path / "late", net=dense(), optim=other).restore()
        assert state(other) == state(optim)


def test_an_optimizer_not_built_with_two_objects_or_none_for_a_root_raises(tmp_path):
    net, ema = dense(), dense()
    checkpoint = Checkpoint(tmp_path, net=net, ema=ema, optim=ModuleOptimizer("adam"))
    with pytest.raises(ValueError, match=r"build 'optim': got 2 .*'net', 'ema'.*optim.build\(mod"):
        checkpoint.save(0)
    with pytest.raises(ValueError, match="build 'optim': got 0 objects .*, none, expected one"):
        Checkpoint(tmp_path, optim=ModuleOptimizer("adam")).save(0)
    assert os.listdir(tmp_path) == []


def test_restoring_builds_for_the_root_that_the_record_names(tmp_path):
    gan = {"g": dense(3), "d": dense(1)}
    optims = {"g_optim": trained(gan["g"]), "d_optim": trained(gan["d"])}
    windows = {"g_window": GradientsAccumulator(), "d_window": GradientsAccumulator()}
    windows["d_window"].accumulate(gan["d"], ones(gan["d"]))
    Checkpoint(tmp_path, **gan, **optims, **windows).save(0)
    new = {"g": dense(3), "d": dense(1)}
    others = {"g_optim": ModuleOptimizer("adam"), "d_optim": ModuleOptimizer("adam")}
    empty = {"g_window": GradientsAccumulator(), "d_window": GradientsAccumulator()}
    Checkpoint(tmp_path, **new, **others, **empty).restore()
    for name in ("g", "d"):
        assert others[f"{name}_optim"].root is new[name]
        assert state(others[f"{name}_optim"]) == state(optims[f"{name}_optim"])
    # An empty window belongs to any root.
    assert [empty[name].root for name in empty] == [None, new["d"]]
    np.testing.assert_array_equal(empty["d_window"].grads()["dense.bias"], [1.0])


def test_an_optimizer_of_a_dict_of_models_is_restored_for_that_dict(tmp_path):
    nets = {"a": dense(), "b": dense()}
    optim = trained(nets)
    Checkpoint(tmp_path, nets=nets, optim=optim).save(0)
    new, other = {"a": dense(), "b": dense()}, ModuleOptimizer("adam")
    Checkpoint(tmp_path, nets=new, optim=other).restore()
    assert state(other) == state(optim)
    with pytest.raises(ValueError, match="0 objects that can be its root, none"):
        Checkpoint(tmp_path, optim=ModuleOptimizer("adam")).restore(strict=False)


def test_a_record_that_names_two_roots_raises(tmp_path):
    net = dense()
    Checkpoint(tmp_path, net=net, same=net, optim=trained(net)).save(0)
    objects = {"net": dense(), "same": dense(), "optim": ModuleOptimizer("adam")}
    before = values(objects["net"])
    with pytest.raises(ValueError, match="got 2 objects that can be its root, 'net', 'same'"):
        Checkpoint(tmp_path, **objects).restore()
    assert values(objects["net"]) == before


@pytest.mark.parametrize("built", [True, False])
def test_a_window_that_was_empty_or_not_built_empties_the_one_that_is_there(built, tmp_path):
    net, window = dense(), GradientsAccumulator()
    if built:
        window.build(net)
    checkpoint = Checkpoint(tmp_path, net=net, window=window)
    checkpoint.save(0)
    window.accumulate(net, ones(net))
    checkpoint.restore()
    assert int(window.count) == 0
    window.accumulate(net, ones(net))
    np.testing.assert_array_equal(window.grads()["dense.bias"], [1.0, 1.0])


# What doesn't fit.


def refused(tmp_path, saved, live, match, strict=True, error=ValueError):
    """Restoring raises, and changes nothing."""
    path = Checkpoint(tmp_path, **saved).save(0)
    nets = [thing for thing in live.values() if isinstance(thing, (keras.Model, tf.Module))]
    optims = [thing for thing in live.values() if isinstance(thing, ModuleOptimizer)]
    windows = [thing for thing in live.values() if isinstance(thing, GradientsAccumulator)]

    def everything_there():
        held = [{k: v.numpy().tobytes() for k, v in w.state().items()} for w in windows]
        return [values(net) for net in nets], [state(optim) for optim in optims], held

    before = everything_there()
    with pytest.raises(error, match=match):
        Checkpoint(tmp_path, **live).restore(path, strict=strict)
    assert everything_there() == before


def test_missing_and_extra_objects_raise_and_are_named(tmp_path):
    net = dense()
    refused(
        tmp_path,
        {"net": net, "a": Numbers(1)},
        {"net": dense(), "b": Numbers(2)},
        r"got 'net', 'a', expected 'net', 'b'; missing there 'b', unknown here 'a'.*strict=False",
    )
    refused(tmp_path, {"a": Numbers(1)}, {"b": Numbers(2)}, "missing there 'b'", strict=False)


def test_missing_and_extra_paths_raise_and_are_named(tmp_path):
    refused(tmp_path, {"net": dense(2)}, {"net": dense(2, 2)}, "missing .*'dense_1.kernel', 'de")
    refused(tmp_path, {"net": dense(2, 2)}, {"net": dense(2)}, "unknown here 'dense_1.kernel'")
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="x")])
    for strict in (True, False):  # another model's: nothing in common
        refused(tmp_path, {"net": dense()}, {"net": other}, "missing .*'x.kernel', 'x.b", strict)


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_or_dtype_raises_and_is_named(strict, tmp_path):
    match = r"restore 'net': got shape \(2, 3\) and dtype float32 for 'dense.kernel', .*\(2, 2\)"
    refused(tmp_path, {"net": dense(3)}, {"net": dense(2)}, match, strict)
    wide = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, dtype="float64")])
    refused(tmp_path, {"net": dense()}, {"net": wide}, "float32 for .* float64", strict)
    saved, live = {"v": tf.Variable(1)}, {"v": tf.Variable(1.0)}
    refused(tmp_path, saved, live, r"restore 'v': got shape \(\) and dtype int32 for 'value'")


def test_exchanged_names_raise(tmp_path):
    net = dense()
    saved = {"one": net, "other": trained(net)}
    new = dense()
    refused(
        tmp_path,
        saved,
        {"one": trained(new), "other": new},
        "restore 'o.*: got a .*, expected a .*names were exchanged",
    )


def test_another_optimizer_or_another_set_of_parameters_raises(tmp_path):
    net, new = dense(2, 2), dense(2, 2)
    saved = {"optim": trained(net)}
    refused(tmp_path, saved, {"optim": trained(new, ModuleOptimizer("sgd"))}, "'optim': .*Adam")
    rule = keras.optimizers.Adam(amsgrad=True)
    refused(tmp_path, saved, {"optim": trained(new, ModuleOptimizer(rule))}, "velocity_hat")
    refused(tmp_path, saved, {"optim": trained(dense(2))}, "'optim': .*'dense_1.kernel'")
    wide = trained(dense(2, 3))
    refused(tmp_path, saved, {"optim": wide}, r"'optim': .*dense_1.kernel")


def test_another_window_raises(tmp_path):
    def held(net, reduction="sum"):
        window = GradientsAccumulator(reduction=reduction)
        window.accumulate(net, ones(net))
        return {"window": window}

    saved = held(dense(2, 2))
    refused(tmp_path, saved, held(dense(2, 2), "mean"), "'window': .*reduction='sum', expected 'm")
    refused(tmp_path, saved, held(dense(2)), "'window': .*sums for 'dense_1.kernel', 'dense_1.b")
    refused(tmp_path, saved, held(dense(2, 3)), r"'window': .*shape \(2, 2\) .*'dense_1.kernel'")


def test_a_loader_that_would_give_other_batches_raises_and_nothing_is_changed(tmp_path):
    def make(value, batch_size):
        loaders = [
            DataLoader(np.arange(10), batch_size=size, shuffle=1) for size in (2, batch_size)
        ]
        for loader in loaders:
            next(iter(loader))
        return {"numbers": Numbers(value), "first": loaders[0], "second": loaders[1]}

    checkpoint = Checkpoint(tmp_path, **make(1, 3))
    checkpoint.save(0)
    live = make(2, 4)
    next(iter(live["first"]))
    places = [live[name].serialize() for name in ("first", "second")]
    with pytest.raises(ValueError, match="can't resume in the middle of an epoch"):
        Checkpoint(tmp_path, **live).restore()
    assert live["numbers"].get() == 2.0
    assert [live[name].serialize() for name in ("first", "second")] == places


def test_not_strict_takes_what_both_have_and_leaves_the_rest_alone(tmp_path):
    net = dense(2, 3)
    checkpoint = Checkpoint(tmp_path, net=net, gone=Numbers(1), numbers=Numbers(2))
    checkpoint.save(5)
    longer = dense(2, 3, 4)
    live = {"net": longer, "new": Numbers(3), "numbers": Numbers(4)}
    before, expected = values(longer), values(net)
    assert Checkpoint(tmp_path, **live).restore(strict=False) == 5
    assert values(longer) == before | expected
    assert (live["new"].get(), live["numbers"].get()) == (3.0, 2.0)
    shorter = dense(2)
    assert Checkpoint(tmp_path, net=shorter).restore(strict=False) == 5
    assert values(shorter) == {path: expected[path] for path in ("dense.kernel", "dense.bias")}


# Damaged files.


@pytest.fixture
def two_saves(tmp_path):
    """Two checkpoints, of 1 and 2, and a thing that holds 3."""
    numbers = Numbers(1)
    checkpoint = Checkpoint(tmp_path, numbers=numbers)
    paths = [checkpoint.save(1)]
    numbers.set(2)
    paths.append(checkpoint.save(2))
    numbers.set(3)
    return checkpoint, numbers, paths


@pytest.mark.parametrize("suffix", ["index", "data-00000-of-00001"])
def test_files_cut_short_raise_and_older_ones_restore(suffix, two_saves):
    checkpoint, numbers, paths = two_saves
    with open(f"{paths[1]}.{suffix}", "rb") as file:
        whole = file.read()
    for size in range(0, len(whole), 13):
        with open(f"{paths[1]}.{suffix}", "wb") as file:
            file.write(whole[:size])
        with pytest.raises(
            ValueError, match=r"tfloop-2': got damaged files, .*one of '.*tfloop-1'"
        ):
            checkpoint.restore()
        assert numbers.get() == 3.0
    assert (checkpoint.restore(paths[0]), numbers.get()) == (1, 1.0)


def test_a_changed_byte_of_the_data_raises(two_saves):
    checkpoint, numbers, paths = two_saves
    with open(f"{paths[1]}.data-00000-of-00001", "rb") as file:
        whole = bytearray(file.read())
    for place in range(0, len(whole), 17):
        whole[place] ^= 1
        with open(f"{paths[1]}.data-00000-of-00001", "wb") as file:
            file.write(whole)
        with pytest.raises(ValueError, match="got damaged files"):
            checkpoint.restore()
        assert numbers.get() == 3.0
        whole[place] ^= 1


def test_a_damaged_checkpoint_without_another_says_so(tmp_path):
    checkpoint = tfloop.Checkpoint(tmp_path, net=dense())
    data = f"{checkpoint.save(1)}.data-00000-of-00001"
    os.truncate(data, os.path.getsize(data) // 2)
    with pytest.raises(ValueError, match="There is no other. Begin again, in another folder"):
        checkpoint.restore()


def test_lost_data_raises(two_saves):
    checkpoint, numbers, paths = two_saves
    os.remove(f"{paths[1]}.data-00000-of-00001")
    with pytest.raises(ValueError, match="got damaged files"):
        checkpoint.restore()
    assert numbers.get() == 3.0


@pytest.mark.parametrize(
    ("manifest", "match"),
    [
        (json.dumps({"format": 2, "objects": "unheard of"}), "got format 2 at .*, expected 1. A n"),
        (json.dumps({"step": 1}), "got format None"),
        ("{", "got damaged files"),
        (
            json.dumps({"format": 1, "places": {"numbers": {"a": ["numbers", "a"]}}}),
            "got damaged files",
        ),
    ],
)
def test_a_newer_format_or_an_unreadable_manifest_raises(manifest, match, tmp_path):
    numbers = Numbers(3)
    tf.train.Checkpoint(manifest=tf.Variable(manifest)).write(str(tmp_path / "tfloop-1"))
    with pytest.raises(ValueError, match=match):
        Checkpoint(tmp_path, numbers=numbers).restore()
    assert numbers.get() == 3.0


def test_a_checkpoint_that_tfloop_did_not_write_raises(tmp_path):
    path = tf.train.Checkpoint(net=dense()).save(str(tmp_path / "mine"))
    with pytest.raises(ValueError, match="got format None .*not tfloop, wrote it"):
        Checkpoint(tmp_path, net=dense()).restore(path)


# Nothing is ever half done.

WRITERS = [
    (tf.io.gfile, "makedirs"),
    (tf.io.gfile, "rename"),
    (tf.io.gfile, "remove"),
    (tf.io.gfile, "rmtree"),
    (tf.io.gfile, "GFile"),
    (tf.raw_ops, "SaveV2"),
    (os, "fsync"),
]


@contextlib.contextmanager
def before_each_write(monkeypatch, action):
    """Runs `action(number)` before each call that `save` makes to change the directory."""
    count = 0

    def watched(original):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            action(count)
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, name in WRITERS:
            patch.setattr(owner, name, watched(getattr(owner, name)))
        yield


def old_and_new(directory):
    """A directory with checkpoints of 1 and 2, and the object that saves 3 as the next."""
    numbers = Numbers()
    checkpoint = Checkpoint(directory, max_to_keep=2, numbers=numbers)
    for value in (1, 2, 3):
        numbers.set(value)
        if value < 3:
            checkpoint.save(value)
    return checkpoint


def told(directory):
    """What a restore gives, after a check that an older one gives its own."""
    numbers = Numbers()
    checkpoint = Checkpoint(directory, max_to_keep=2, numbers=numbers)
    step = checkpoint.restore()
    assert numbers.get() == step
    return step


def assert_tidy(directory, newest):
    """The next save leaves two checkpoints and nothing else."""
    numbers = Numbers(9)
    Checkpoint(directory, max_to_keep=2, numbers=numbers).save(9)
    assert told(directory) == 9
    names = set(os.listdir(directory))
    assert len(names) == 5, names
    paths = sorted(name for name in names if name.endswith("index"))
    before = str(directory / paths[0].removesuffix(".index"))
    assert Checkpoint(directory, numbers=numbers).restore(before) == newest


@pytest.mark.parametrize("blocking", [True, False])
def test_a_process_killed_between_any_two_writes_leaves_the_old_or_the_new(
    blocking, tmp_path, monkeypatch
):
    checkpoint = old_and_new(tmp_path / "run")

    def photograph(number):
        shutil.copytree(tmp_path / "run", tmp_path / f"at {number:03}")

    with before_each_write(monkeypatch, photograph):
        checkpoint.save(3, blocking=blocking)
        checkpoint.wait()
    pictures = sorted(path for path in tmp_path.iterdir() if path.name.startswith("at"))
    steps = [told(path) for path in pictures]
    # There is one instant before which it is the old one and after which it is the new one.
    assert len(steps) > 8
    assert steps == sorted(steps)
    assert set(steps) == {2, 3}
    for path, step in zip(pictures, steps, strict=True):
        assert_tidy(path, step)


@pytest.mark.parametrize("blocking", [True, False])
def test_an_error_at_any_write_leaves_the_old_or_the_new(blocking, tmp_path, monkeypatch):
    number, finished = 0, False
    while not finished:
        number += 1
        directory = tmp_path / str(number)
        checkpoint = old_and_new(directory)

        def fail(count, number=number):
            if count == number:
                raise OSError("disk")

        with before_each_write(monkeypatch, fail):
            told_of = None
            try:
                checkpoint.save(3, blocking=blocking)
                checkpoint.wait()
            except OSError as error:
                told_of = error
        finished = told_of is None
        assert finished or str(told_of) == "disk"  # no other that follows from it
        step = told(directory)
        assert step in (2, 3)
        assert_tidy(directory, step)
    assert number > 8


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path):
    checkpoint = old_and_new(tmp_path)
    draft = tmp_path / ".tfloop-draft" / "tfloop-3_temp"
    draft.mkdir(parents=True)
    (draft / "part-00000-of-00001.data").write_bytes(b"half")
    (tmp_path / "tfloop-3.data-00000-of-00001").write_bytes(b"whole, but without its index")
    (tmp_path / "tfloop-1.index").unlink()  # killed while the oldest was removed
    assert told(tmp_path) == 2
    checkpoint.save(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint",
        *(f"tfloop-{n}.{kind}" for n in (2, 3) for kind in ("data-00000-of-00001", "index")),
    ]


def test_a_disk_that_fills_up_loses_no_checkpoint(tmp_path):
    large = tf.Variable(tf.zeros(200_000))
    checkpoint = Checkpoint(tmp_path, max_to_keep=1, large=large)
    path = checkpoint.save(1)
    large.assign(tf.ones(200_000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        with pytest.raises(tf.errors.OpError):
            checkpoint.save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint.latest == path
    assert not (tmp_path / ".tfloop-draft").exists()  # the disk has its room again
    assert checkpoint.restore() == 1
    np.testing.assert_array_equal(large, np.zeros(200_000))
    checkpoint.save(2)


COPY = 64_000_000


def most_memory(action):
    """How far the memory of this process rises above what it is now, in copies of `COPY` bytes."""

    def status(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    action()
    return (status("VmHWM") - before) / COPY


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="asks Linux")
def test_a_save_holds_no_copy_and_one_behind_the_loop_or_a_restore_holds_one(tmp_path):
    large = tf.Variable(tf.ones(COPY // 4))
    checkpoint = Checkpoint(tmp_path, large=large)

    def behind():
        checkpoint.save(2, blocking=False)
        large.assign_add(one)
        checkpoint.wait()

    one = tf.ones(large.shape)
    assert most_memory(lambda: checkpoint.save(1)) < 0.5
    # Together, as what is freed may stay with the process: neither may hold two.
    assert most_memory(lambda: behind() or checkpoint.restore()) < 1.5
    np.testing.assert_array_equal(large, one)


# Killed for good.


def killed_within(seconds):
    """Ends this process at a moment before that, wherever it is then.

    The kernel does it: a parent that waits and kills may come late on a busy machine.
    """
    signal.setitimer(signal.ITIMER_REAL, max(1e-6, random.SystemRandom().uniform(0, seconds)))


def run_to_the_end(directory, result, steps=None, seconds=0.0):
    """What a process does: take a run up where it was left, saving at each micro-step.

    It is killed within `seconds` after so many `steps`.
    """
    tfloop.seed(11, deterministic=True)
    objects, micro, update = build_run()
    begin, each = 0, None
    if directory is not None:
        checkpoint = Checkpoint(directory, **objects)
        begin = checkpoint.restore() or 0
        if int(objects["window"].count) == 3:
            update()

        def each(step, _):
            checkpoint.save(step)
            if step - begin == steps:
                killed_within(seconds)

    if steps == 0:
        killed_within(seconds)
    run_on(objects, micro, update, begin, epochs=10, each=each)
    np.savez(result, **everything(objects))


def save_without_end(directory):
    """What another process does: the same number everywhere, and the next one."""
    large = tf.Variable(tf.zeros(1_000_000))
    checkpoint = Checkpoint(directory, max_to_keep=2, large=large)
    step = begin = checkpoint.restore() or 0
    while True:
        step += 1
        large.assign(tf.fill(large.shape, float(step)))
        checkpoint.save(step, blocking=(step - begin) % 2 == 1)
        if step == begin + 1:
            killed_within(0.5)


@pytest.fixture(scope="module")
def started():
    """Starts a function in a process that has imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tfloop"])

    def start(target, *args):
        process = context.Process(daemon=True, target=target, args=args)
        process.start()
        return process

    return start


def exit_code(process):
    process.join(SILENCE)
    return process.exitcode


def test_a_process_killed_in_the_middle_of_large_files_leaves_a_whole_checkpoint(tmp_path, started):
    large, last = tf.Variable(tf.zeros(1_000_000)), 0
    checkpoint = Checkpoint(tmp_path, max_to_keep=2, large=large)
    for _ in range(KILLS):
        assert exit_code(started(save_without_end, tmp_path)) == -signal.SIGALRM
        step = checkpoint.restore()
        assert set(np.unique(large)) == {step}
        assert step > last
        last = step
    checkpoint.save(0)
    checkpoint.save(0)
    assert len(os.listdir(tmp_path)) == 5


def test_a_run_killed_at_random_instants_ends_bit_equal_with_one_left_alone(tmp_path, started):
    directory = tmp_path / "run"
    results = [tmp_path / "alone.npz", tmp_path / "killed.npz"]
    alone = started(run_to_the_end, None, results[0])
    codes = []
    while codes.count(-signal.SIGALRM) < KILLS and 0 not in codes:
        steps = random.randint(0, 30 // KILLS)  # of 50
        codes.append(exit_code(started(run_to_the_end, directory, results[1], steps, 0.2 / KILLS)))
    assert codes[0] == -signal.SIGALRM
    assert set(codes) <= {-signal.SIGALRM, 0}  # the last ones may find nothing left to do
    if 0 not in codes:
        assert exit_code(started(run_to_the_end, directory, results[1])) == 0
    assert exit_code(alone) == 0
    with np.load(results[0]) as expected, np.load(results[1]) as found:
        assert sorted(expected) == sorted(found)
        wrong = [key for key in expected if expected[key].item() != found[key].item()]
    assert not wrong
    assert len(os.listdir(directory)) == 7


# Bad input.


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda d: Checkpoint(d), ValueError, r"nothing to save: got no objects.*model=model"),
        (lambda d: Checkpoint(d, max_to_keep=0, n=Numbers()), ValueError, "max_to_keep`: got 0"),
        (
            lambda d: Checkpoint(d, max_to_keep=2.5, n=Numbers()),
            TypeError,
            "float 2.5, expected an",
        ),
        (lambda d: Checkpoint(d, epoch=3), TypeError, r"Checkpoint\(epoch=...\)` .*tf.Variable\(0"),
        (lambda d: Checkpoint(d, model=None), TypeError, "no state that can be saved: got None"),
        (
            lambda d: Checkpoint(d, optim=keras.optimizers.Adam()),
            TypeError,
            r"tfloop.ModuleOptimizer\(optimizer\)",
        ),
        (lambda d: Checkpoint(d, g=keras.random.SeedGenerator(1)), TypeError, "generator.state"),
        (lambda d: Checkpoint(d, nets=[Numbers(), 3]), TypeError, r"Checkpoint\(nets=...\)`"),
        (lambda d: Checkpoint(d, nets={"m": keras.metrics.Mean()}), TypeError, "needs a model"),
        (lambda d: Checkpoint(d, n=Numbers()).save(-1), ValueError, "`step`: got -1, expected an"),
        (lambda d: Checkpoint(d, n=Numbers()).save(1.5), TypeError, "float 1.5"),
        (lambda d: Checkpoint(d, n=Numbers()).save("last"), TypeError, "str 'last'"),
        (lambda d: Checkpoint(d, n=Numbers()).save(tf.constant(1.0)), TypeError, "`step`"),
        (lambda d: Checkpoint(d, n=Numbers()).save(True), TypeError, "bool True"),
        (
            lambda d: Checkpoint(d, n=keras.layers.Dense(2)).save(0),
            ValueError,
            r"Checkpoint.save\(step\)` needs a built model",
        ),
        (
            lambda d: Checkpoint(d, n=Numbers()).restore(d / "ckpt-3"),
            FileNotFoundError,
            "found no checkpoint at .*ckpt-3': expected the path that `save` gave",
        ),
    ],
)
def test_bad_input_raises_and_says_how_to_mend_it(call, error, match, tmp_path):
    with pytest.raises(error, match=match):
        call(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_model_not_built_is_refused_by_restore(tmp_path):
    Checkpoint(tmp_path, net=dense()).save(0)
    with pytest.raises(ValueError, match=r"Checkpoint.restore\(\)` needs a built model"):
        Checkpoint(tmp_path, net=keras.Sequential([keras.layers.Dense(2)])).restore()


@pytest.mark.parametrize("call", [lambda c: c.save(1), lambda c: c.restore()])
def test_in_a_trace_it_raises(call, tmp_path):
    checkpoint = Checkpoint(tmp_path, numbers=Numbers())
    with pytest.raises(RuntimeError, match="was called in a trace: got a graph, expected eager"):
        tf.function(lambda: call(checkpoint) and None)()


def test_a_built_keras_optimizer_is_saved_by_the_order_of_its_variables(tmp_path):
    def built(kind, units=2):
        layer = keras.layers.Dense(units)
        layer.build((None, 3))
        optimizer = kind(0.1)
        optimizer.build(layer.trainable_variables)
        return optimizer

    saved = built(keras.optimizers.Adam)
    for number, variable in enumerate(saved.variables):
        variable.assign(tf.cast(tf.fill(variable.shape, number), variable.dtype))
    Checkpoint(tmp_path, adam=saved).save(3)
    fresh = built(keras.optimizers.Adam)  # Keras numbers its layer on
    assert Checkpoint(tmp_path, adam=fresh).restore() == 3
    for one, other in zip(fresh.variables, saved.variables, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="got a Adam, expected a SGD"):
        Checkpoint(tmp_path, adam=built(keras.optimizers.SGD)).restore()
    with pytest.raises(ValueError, match=r"got shape \(3, 2\).*expected \(3, 4\)"):
        Checkpoint(tmp_path, adam=built(keras.optimizers.Adam, 4)).restore()
    grouped = ModuleOptimizer("adam").as_keras(keras.Sequential([keras.Input((3,))]))
    with pytest.raises(TypeError, match=r"no state.*`tfloop.ModuleOptimizer\(optimizer\)` steps"):
        Checkpoint(tmp_path, adam=grouped)

"""GradientsParams: a model's share, the algebra, what it crosses, consumption, refusals."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import ZOO, fill, in_every_mode, loss_of, message, rows, tokens
from processes import run

import tfloop
from tfloop import GradientsParams, ParamGroup, Tape, named_parameters

A, B = tf.constant([[1.0, -2.0]]), tf.constant([2.0])
SPARSE = tf.IndexedSlices(
    tf.constant([[1.0], [2.0], [4.0]]), tf.constant([1, 0, 1]), tf.constant([3, 1])
)
SPARSE_DENSE = [[2.0], [5.0], [0.0]]


def sample():
    return GradientsParams({"a.kernel": A, "a.bias": B, "table": SPARSE})


def backward(model, x=None, case=None):
    with Tape() as tape:
        y = case.call(model, x) if case else model(rows(4, 3) if x is None else x)
        loss = loss_of(y)
    return tape.backward(loss)


def dense(grads):
    return {path: tf.convert_to_tensor(grad).numpy() for path, grad in grads.items()}


def assert_same(got, wanted):
    assert list(got) == list(wanted)
    for path in wanted:
        np.testing.assert_allclose(dense(got)[path], dense(wanted)[path], rtol=1e-6, err_msg=path)


class TestShareOfABackwardPass:
    @pytest.mark.parametrize(
        "name", ["sequential", "dict_root", "module_tree", "keras_holding_module", "embedding"]
    )
    def test_each_parameter_has_its_own_gradient(self, name):
        case = ZOO[name]
        model, x = case.build(), case.x()
        fill(model)
        grads = GradientsParams.from_grads(backward(model, x, case), model)
        named = named_parameters(model)
        assert list(grads) == list(named)
        with tf.GradientTape() as tape:
            loss = loss_of(case.call(model, x))
        sources = [getattr(v, "_value", v) for v in named.values()]
        assert_same(grads, dict(zip(named, tape.gradient(loss, sources), strict=True)))

    def test_burn_a_copy_has_the_same_paths_so_its_gradients_apply_here(self):
        model = ZOO["sequential"].build()
        replica = keras.models.clone_model(model)
        tfloop.blend(replica, model)
        mine = GradientsParams.from_grads(backward(model), model)
        theirs = GradientsParams.from_grads(backward(replica), replica)
        assert len(mine) == len(theirs) == 6
        assert_same(theirs, mine)

    def test_one_pass_feeds_two_models(self):
        g, d = ZOO["sequential"].build(), ZOO["sequential"].build()
        with Tape() as tape:
            loss = loss_of(g(rows(4, 3))) + 2.0 * loss_of(d(rows(4, 3)))
        grads = tape.backward(loss)
        share = GradientsParams.from_grads(grads, g)
        optim = tfloop.ModuleOptimizer(keras.optimizers.SGD())
        optim.step(0.1, g, share)
        other = GradientsParams.from_grads(grads, d)
        both = GradientsParams.from_grads(grads, {"g": g, "d": d})
        assert list(both) == [f"g.{p}" for p in share] + [f"d.{p}" for p in other]
        np.testing.assert_array_equal(both["d.dense.kernel"], other["dense.kernel"])
        assert len(share) == len(other) == 6

    def test_what_the_loss_doesnt_reach_is_absent_and_listed(self):
        model = ZOO["functional"].build()
        with Tape() as tape:
            outputs = model(rows(4, 3))
            loss = loss_of(outputs[1])
        grads = GradientsParams.from_grads(tape.backward(loss), model)
        assert list(grads) == ["dense_1.kernel", "dense_1.bias"]
        assert "dense.kernel" not in grads
        assert grads.get("dense.kernel") is None
        assert grads.missing(model) == [
            "dense.kernel",
            "dense.bias",
            "dense_2.kernel",
            "dense_2.bias",
        ]

    def test_a_parameter_is_present_under_any_of_its_paths(self):
        model = ZOO["shared_layers"].build()
        grads = GradientsParams.from_grads(backward(model), model)
        grads.register("again.kernel", grads.remove("left.shared.kernel"))
        assert grads.missing(model) == []

    def test_a_group_or_a_list_of_paths_takes_a_part(self):
        model = ZOO["shared_layers"].build()
        grads = backward(model)

        def share(group):
            return list(GradientsParams.from_grads(grads, model, group))

        assert share(ParamGroup.from_name("own") & ParamGroup.from_name("kernel")) == [
            "left.own.kernel",
            "right.own.kernel",
        ]
        assert share(ParamGroup.from_name("again")) == ["left.shared.kernel", "left.shared.bias"]
        assert share(ParamGroup.from_layers(model.right)) == [
            "left.shared.kernel",
            "left.shared.bias",
            "right.own.kernel",
            "right.own.bias",
        ]
        assert share(["right.own.bias", "again.kernel"]) == [
            "right.own.bias",
            "left.shared.kernel",
        ]
        assert share(p for p in ["left.own.bias"]) == ["left.own.bias"]

    def test_frozen_parameters_have_no_share(self):
        model = ZOO["sequential"].build()
        grads = backward(model)
        model.layers[0].trainable = False
        assert len(GradientsParams.from_grads(grads, model)) == 4
        chosen = GradientsParams.from_grads(grads, model, ["dense.kernel", "head.bias"])
        assert list(chosen) == ["head.bias"]

    def test_an_unfrozen_variable_that_the_tape_overlooked_is_named(self):
        model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()])
        moving = model.layers[0].moving_mean
        moving.trainable = True
        grads = backward(model)
        parts = ("'batch_normalization.moving_mean'", "Tape(watch=[model])")
        with pytest.raises(ValueError, match=message("from_grads(grads, model, group)", *parts)):
            GradientsParams.from_grads(grads, model)
        with Tape(watch=[model]) as tape:
            loss = loss_of(model(rows(4, 3)))
        grads = GradientsParams.from_grads(tape.backward(loss), model)
        assert "batch_normalization.moving_mean" in grads
        with Tape() as tape:
            loss = loss_of(model(rows(4, 3)))
        asked = tape.backward(loss, wrt=[model.layers[0].gamma])
        assert list(GradientsParams.from_grads(asked, model)) == ["batch_normalization.gamma"]

    def test_a_layer_that_was_made_frozen_is_watched_once_unfrozen(self):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, trainable=False)])
        model.layers[0].trainable = True
        assert len(GradientsParams.from_grads(backward(model), model)) == 2

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_short_variables_have_gradients_in_float32(self, dtype):
        policy = keras.DTypePolicy(dtype)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype=policy)])
        assert model.layers[0].kernel.dtype == dtype
        grads = GradientsParams.from_grads(backward(model), model)
        assert {grad.dtype for grad in grads.values()} == {tf.float32}

    def test_float64_stays_float64(self):
        layer = keras.layers.Dense(2, dtype="float64")
        layer(rows(1, 3))
        grads = GradientsParams.from_grads(backward(layer, tf.cast(rows(4, 3), tf.float64)), layer)
        assert {grad.dtype for grad in grads.values()} == {tf.float64}
        assert grads.global_norm().dtype == tf.float64

    def test_a_lookup_gives_rows(self):
        model = ZOO["embedding"].build()
        grads = GradientsParams.from_grads(backward(model, tokens(4, 3)), model)
        assert isinstance(grads["table.embeddings"], tf.IndexedSlices)


class TestMapping:
    def test_it_reads_like_a_mapping(self):
        grads = sample()
        assert list(grads) == list(grads.keys()) == ["a.kernel", "a.bias", "table"]
        assert len(grads) == 3
        assert "a.bias" in grads
        assert "b" not in grads
        assert grads["a.bias"] is B
        assert [g is w for g, w in zip(grads.values(), [A, B, SPARSE], strict=True)] == [True] * 3
        assert dict(grads.items())["table"] is SPARSE
        assert grads.get("b") is None
        assert grads.get("b", 3) == 3
        assert GradientsParams([("x", A)])["x"] is A
        assert len(GradientsParams()) == 0

    def test_register_replaces_and_remove_gives_back(self):
        grads = sample()
        grads.register("a.bias", tf.constant([7.0]))
        assert float(grads["a.bias"][0]) == 7.0
        grads.register("new", np.ones((2, 2), np.float32))
        assert isinstance(grads.remove("new"), tf.Tensor)
        assert float(grads.remove("a.bias")[0]) == 7.0
        assert list(grads) == ["a.kernel", "table"]
        with pytest.raises(TypeError, match="does not support item assignment"):
            grads["new"] = A

    def test_a_copy_is_independent_of_its_original(self):
        grads = sample()
        for other in (grads.copy(), copy.copy(grads), GradientsParams(grads)):
            other.remove("a.bias")
            assert len(grads) == 3
            assert len(other) == 2

    def test_equality_is_identity(self):
        grads = sample()
        assert grads == grads
        assert grads != sample()
        assert len({grads, sample()}) == 2

    def test_repr_shows_path_shape_dtype_and_sparse(self):
        assert repr(sample()).splitlines() == [
            "GradientsParams(3 gradients",
            "  a.kernel  (1, 2) float32",
            "  a.bias    (1,) float32",
            "  table     (3, 1) float32, sparse",
            ")",
        ]
        grads = sample()
        grads._consume("step")
        assert "3 gradients, consumed by step" in repr(grads)
        assert repr(GradientsParams()) == "GradientsParams(0 gradients\n)"

    def test_a_subclass_stays_one(self):
        class Named(GradientsParams):
            pass

        grads = Named(sample())
        for result in (
            grads.copy(),
            grads.scale(2.0),
            grads.map(tf.abs),
            grads.merge(sample()),
            grads.select(ParamGroup.all()),
            grads.to_device("CPU:0"),
            tf.nest.map_structure(tf.identity, grads, expand_composites=True),
            tf.function(lambda g: g)(grads),
        ):
            assert type(result) is Named


class TestAlgebra:
    @pytest.mark.parametrize("mode", ["eager", "graph", "jit"])
    def test_values_in_every_mode(self, mode):
        def everything(grads, other):
            return {
                "merge": grads.merge(other),
                "scale": grads.scale(-2.0),
                "map": grads.map(lambda g: tf.abs(g) + 1.0),
                "select": grads.select(ParamGroup.from_name("a")),
                "norms": [
                    grads.global_norm(),
                    grads.global_norm(ParamGroup.from_path("table")),
                    grads.global_norm(ParamGroup.from_path("nothing")),
                    grads.dot(other),
                ],
                "finite": grads.all_finite(),
            }

        other = GradientsParams({"a.kernel": 3.0 * A, "table": SPARSE, "z": B})
        got = in_every_mode(everything)[mode](sample(), other)
        assert_same(
            got["merge"],
            {"a.kernel": 4.0 * A, "a.bias": B, "table": 2.0 * np.array(SPARSE_DENSE), "z": B},
        )
        assert isinstance(got["merge"]["table"], tf.IndexedSlices)
        assert_same(
            got["scale"],
            {"a.kernel": -2.0 * A, "a.bias": -2.0 * B, "table": -2.0 * np.array(SPARSE_DENSE)},
        )
        assert isinstance(got["scale"]["table"], tf.IndexedSlices)
        assert_same(
            got["map"],
            {"a.kernel": [[2.0, 3.0]], "a.bias": [3.0], "table": [[3.0], [6.0], [1.0]]},
        )
        assert_same(got["select"], {"a.kernel": A, "a.bias": B})
        norms = [5.0 + 4.0 + 29.0, 29.0, 0.0]
        np.testing.assert_allclose(got["norms"], [*np.sqrt(norms), 3.0 * 5.0 + 29.0], rtol=1e-6)
        assert bool(got["finite"])

    def test_merge_over_a_shared_trunk_equals_one_pass_over_the_sum(self):
        model = ZOO["functional"].build()
        fill(model)

        def losses():
            outputs = model(rows(4, 3))
            return loss_of(outputs[0]), loss_of(outputs[1])

        with Tape(persistent=True) as tape:
            one, other = losses()
        parts = [GradientsParams.from_grads(tape.backward(loss), model) for loss in (one, other)]
        with Tape() as tape:
            total = sum(losses())
        wanted = GradientsParams.from_grads(tape.backward(total), model)
        assert len(parts[1]) < len(parts[0]) == len(wanted)
        assert_same(parts[0].merge(parts[1]), wanted)
        assert len(parts[0]) == 6  # merging consumes nothing

    def test_factors_arent_rounded_in_float64(self):
        grads = GradientsParams({"a": tf.constant([1.0, 3.0], tf.float64)})
        np.testing.assert_array_equal(grads.scale(0.1)["a"], [0.1, 3.0 * 0.1])
        for factor in (tf.constant(0.5), np.float32(0.5), tf.Variable(0.5), 1):
            assert grads.scale(factor)["a"].dtype == tf.float64

    def test_norms_and_products_of_nothing_are_zero(self):
        empty = GradientsParams()
        assert float(empty.global_norm()) == 0.0
        assert float(empty.dot(sample())) == float(sample().dot(empty)) == 0.0
        assert bool(empty.all_finite())

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_what_isnt_finite_is_seen_and_never_becomes_zero(self, bad):
        grads = GradientsParams({"a": tf.constant([1.0, bad]), "b": B})
        assert not bool(grads.all_finite())
        assert not np.isfinite(grads.global_norm())
        assert np.isfinite(grads.global_norm(ParamGroup.from_path("b")))

    def test_a_large_float16_gradient_has_a_finite_norm(self):
        grads = GradientsParams({"a": tf.fill([4], tf.constant(6e4, tf.float16))})
        assert float(grads.global_norm()) == pytest.approx(1.2e5, rel=1e-3)

    def test_groups_of_identity_need_the_model_and_see_tied_paths(self):
        model = ZOO["shared_layers"].build()
        grads = GradientsParams.from_grads(backward(model), model)
        layer = ParamGroup.from_layers(model.again)
        tied = ["left.shared.kernel", "left.shared.bias"]
        assert list(grads.select(layer, model)) == tied
        assert list(grads.select(ParamGroup.from_name("again"), model)) == tied
        assert list(grads.select(ParamGroup.from_name("again"))) == []
        assert float(grads.global_norm(layer, model)) == pytest.approx(
            float(grads.select(ParamGroup.from_path(*tied)).global_norm())
        )
        everything = grads.select(layer, model).merge(grads.select(~layer, tfloop.train(model)))
        assert set(everything) == set(grads)

    def test_gradients_go_to_a_device(self):
        moved = sample().to_device("CPU:0")
        assert_same(moved, sample())
        assert all(
            "CPU:0" in part.device for part in tf.nest.flatten(moved, expand_composites=True)
        )
        traced = tf.function(lambda g: g.to_device("CPU:0"))(sample())
        assert_same(traced, sample())


class TestCrossing:
    """One mapping and nothing else: so TensorFlow takes it apart and puts it together again."""

    def test_a_function_takes_and_gives_it_without_a_second_trace(self):
        traces = []

        @tf.function
        def double(grads):
            traces.append(type(grads))
            return grads.scale(2.0), {"again": grads}

        for _ in range(3):
            doubled, again = double(sample())
        assert traces == [GradientsParams]
        assert type(doubled) is type(again["again"]) is GradientsParams
        assert isinstance(doubled["table"], tf.IndexedSlices)
        assert_same(again["again"], sample())

    @pytest.mark.parametrize("mode", ["graph", "jit"])
    def test_branches_and_loops_carry_it(self, mode):
        def branches(grads, flag):
            return tf.cond(flag, lambda: grads.scale(2.0), lambda: grads.scale(0.5))

        def loop(grads, flag):
            total = grads
            for _ in tf.range(2):
                total = total.merge(grads) if flag is None else total.scale(2.0)
            return total

        without_rows = GradientsParams({"a.kernel": A, "a.bias": B})
        for flag, factor in ((True, 2.0), (False, 0.5)):
            got = in_every_mode(branches)[mode](sample(), tf.constant(flag))
            assert type(got) is GradientsParams
            assert_same(got, sample().scale(factor))
        got = in_every_mode(loop)[mode](without_rows, tf.constant(True))
        assert type(got) is GradientsParams
        assert_same(got, without_rows.scale(4.0))

    def test_a_while_loop_carries_rows_of_one_shape(self):
        @tf.function
        def loop(grads):
            return tf.while_loop(
                lambda i, grads: i < 3, lambda i, grads: (i + 1, grads.scale(2.0)), (0, grads)
            )[1]

        assert_same(loop(sample()), sample().scale(8.0))

    def test_nest_takes_it_apart_and_keeps_the_order(self):
        grads = GradientsParams({"b": B, "a": A})
        assert [t.shape for t in tf.nest.flatten(grads)] == [(1, 2), (1,)]
        again = tf.nest.pack_sequence_as(grads, tf.nest.flatten(grads))
        assert type(again) is GradientsParams
        assert list(again) == ["b", "a"]
        tf.nest.assert_same_structure(grads, again)

    def test_an_argument_may_be_changed_only_as_a_copy(self):
        @tf.function
        def drop(grads):
            grads = grads.copy()
            grads.remove("a.bias")
            return grads

        assert list(drop(sample())) == ["a.kernel", "table"]

        @tf.function
        def mutate(grads):
            grads.remove("a.bias")
            return grads

        with pytest.raises(ValueError, match="should not modify its Python input arguments"):
            mutate(sample())

    def test_a_whole_step_may_be_cut_in_two_functions(self):
        model = ZOO["embedding"].build()
        twin = ZOO["embedding"].build()
        tfloop.blend(twin, model)
        optims = [tfloop.ModuleOptimizer(keras.optimizers.Adam()) for _ in range(2)]

        @tf.function
        def gradients():
            return GradientsParams.from_grads(backward(model, tokens(4, 3)), model)

        @tf.function
        def update(grads):
            optims[0].step(0.1, model, grads)

        for _ in range(2):
            update(gradients())
            grads = GradientsParams.from_grads(backward(twin, tokens(4, 3)), twin)
            optims[1].step(0.1, twin, grads)
        for path, variable in named_parameters(model).items():
            np.testing.assert_allclose(
                variable.numpy(), named_parameters(twin)[path].numpy(), atol=1e-6
            )

    def test_replicas_pass_it_on(self):
        """In a process of its own, which has two devices."""
        done = run("-W", "error", "tests/replicas_script.py")
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.split() == [
            "paths",
            "result",
            "argument",
            "update",
            "notes",
            "to_device",
            "to_device-views",
        ]


class TestConsumption:
    @pytest.mark.parametrize(
        ("call", "use"),
        [
            ("grads.merge(other)", lambda g: g.merge(sample())),
            ("grads.merge(other)", lambda g: sample().merge(g)),
            ("grads.dot(other)", lambda g: sample().dot(g)),
            ("grads.select(group, model)", lambda g: g.select(ParamGroup.all())),
            ("grads.scale(factor)", lambda g: g.scale(2.0)),
            ("grads.map(fn)", lambda g: g.map(tf.abs)),
            ("grads.to_device(device)", lambda g: g.to_device("CPU:0")),
            ("grads.global_norm(group, model)", lambda g: g.global_norm()),
            ("grads.all_finite()", lambda g: g.all_finite()),
            ("grads.register(path, grad)", lambda g: g.register("x", A)),
            ("grads.remove(path)", lambda g: g.remove("a.bias")),
            ("another step", lambda g: g._consume("another step")),
        ],
    )
    def test_consumed_gradients_refuse_algebra_and_name_copy(self, call, use):
        grads = sample()
        grads._consume("ModuleOptimizer.step(lr, model, grads)")
        parts = (
            f"`{call}` can't use these gradients again: got some that",
            "`ModuleOptimizer.step(lr, model, grads)` has consumed",
            "`grads.copy()`",
        )
        with pytest.raises(RuntimeError, match=message(*parts)):
            use(grads)
        assert len(grads) == 3  # and nothing has changed

    def test_consumed_gradients_can_still_be_read_and_copied(self):
        grads = sample()
        assert list(grads._consume("step")) == list(grads)
        assert grads["a.bias"] is B
        assert [g is w for g, w in zip(grads.values(), [A, B, SPARSE], strict=True)] == [True] * 3
        assert len(grads.copy().scale(1.0)) == 3
        assert list(GradientsParams(grads).map(tf.abs)) == list(grads)

    def test_step_and_accumulate_consume(self):
        model = ZOO["sequential"].build()
        grads = GradientsParams.from_grads(backward(model), model)
        spare = grads.copy()
        optim = tfloop.ModuleOptimizer(keras.optimizers.SGD())
        optim.step(0.1, model, grads)
        for use in (
            lambda: optim.step(0.1, model, grads),
            lambda: tfloop.GradientsAccumulator().accumulate(model, grads),
        ):
            with pytest.raises(RuntimeError, match=message("has consumed", "grads.copy()")):
                use()
        tfloop.GradientsAccumulator().accumulate(model, spare)
        with pytest.raises(RuntimeError, match=message("accumulate(model, grads)", "has consumed")):
            optim.step(0.1, model, spare)

    def test_the_mark_is_made_once_per_trace(self):
        model = ZOO["sequential"].build()
        optim = tfloop.ModuleOptimizer(keras.optimizers.SGD()).build(model)

        @tf.function
        def once(grads):
            optim.step(0.1, model, grads)

        @tf.function
        def twice(grads):
            optim.step(0.1, model, grads)
            optim.step(0.1, model, grads)

        grads = GradientsParams.from_grads(backward(model), model)
        for _ in range(2):
            once(grads)  # each call has a container of its own
        assert len(grads.scale(1.0)) == 6
        with pytest.raises(RuntimeError, match="has consumed"):
            twice(grads)


MODEL = ZOO["sequential"].build()
OTHER = ZOO["sequential"].build()


def detached():
    model = ZOO["sequential"].build()
    x = tf.constant(2.0)
    with Tape(watch=[x]) as tape:
        loss = x * loss_of(tf.stop_gradient(model(rows(4, 3))))
    return model, tape.backward(loss)


def frozen():
    model = ZOO["sequential"].build()
    grads = backward(model)
    model.trainable = False
    return model, grads


FROM_GRADS = "`GradientsParams.from_grads(grads, model, group)`"


@pytest.mark.parametrize(
    ("kind", "act", "parts"),
    [
        (TypeError, lambda: GradientsParams.from_grads({}, MODEL), ("got dict()", "Tape")),
        (TypeError, lambda: GradientsParams.from_grads(None, MODEL), ("got None",)),
        (ValueError, lambda: GradientsParams.from_grads(sample(), MODEL), ("path: 'a.kernel'",)),
        (
            ValueError,
            lambda: GradientsParams.from_grads(backward(MODEL), OTHER),
            ("got a backward pass of other variables", "with tfloop.Tape() as tape"),
        ),
        (
            ValueError,
            lambda: GradientsParams.from_grads(*detached()[::-1]),
            ("depends on none of the 6 parameters", "'dense.kernel'", "`tfloop.train(model)(x)`"),
        ),
        (
            ValueError,
            lambda: GradientsParams.from_grads(*frozen()[::-1]),
            ("frozen now", "`model.trainable = True`"),
        ),
        (
            ValueError,
            lambda: GradientsParams.from_grads(
                backward(MODEL), MODEL, ParamGroup.from_name("encoder")
            ),
            ("got the group from_name('encoder')", "and 1 more", "too narrow"),
        ),
        (
            ValueError,
            lambda: GradientsParams.from_grads(backward(MODEL), MODEL, []),
            ("got the group []",),
        ),
        (
            TypeError,
            lambda: GradientsParams.from_grads(backward(MODEL), MODEL, "dense"),
            ("got str 'dense'", "`['dense']`"),
        ),
        (
            TypeError,
            lambda: GradientsParams.from_grads(backward(MODEL), MODEL, 3),
            ("got int 3", "expected a ParamGroup or a list"),
        ),
        (
            ValueError,
            lambda: GradientsParams.from_grads(backward(MODEL), MODEL, ["head.kernal"]),
            (
                "got an unknown path: 'head.kernal', expected a path of",
                "Did you mean 'head.kernel'",
            ),
        ),
        (
            ValueError,
            lambda: GradientsParams.from_grads(backward(MODEL), MODEL, [MODEL.layers[0].kernel]),
            ("got an unknown path: <",),
        ),
        (TypeError, lambda: GradientsParams.from_grads(backward(MODEL), 3), ("got int 3",)),
    ],
)
def test_a_share_that_cant_be_taken_says_why(kind, act, parts):
    with pytest.raises(kind, match=message(FROM_GRADS, *parts)):
        act()


@pytest.mark.parametrize(
    ("kind", "act", "parts"),
    [
        (TypeError, lambda: GradientsParams(backward(MODEL)), ("(mapping)", "from_grads")),
        (KeyError, lambda: sample()["a.kernal"], ("grads[path]", "'a.kernal'", "'a.kernel'")),
        (KeyError, lambda: sample().remove("bias"), ("grads[path]", "grads.get(path)")),
        (KeyError, lambda: GradientsParams()["a"], ("expected one of none",)),
        (TypeError, lambda: sample().register("x", None), ("'x'", "got None", "grads.remove")),
        (TypeError, lambda: sample().register("x", "y"), ("got str 'y'",)),
        (TypeError, lambda: sample().register("x", 3), ("got int 3",)),
        (TypeError, lambda: sample().register("x", True), ("got bool True",)),
        (TypeError, lambda: sample().register("x", [1.0]), ("an object of type list",)),
        (
            TypeError,
            lambda: sample().register("x", tf.constant([1])),
            ("got dtype int32", "tf.cast(grad, tf.float32)"),
        ),
        (
            TypeError,
            lambda: sample().register("x", tf.IndexedSlices(tf.constant([[1]]), tf.constant([0]))),
            ("got dtype int32",),
        ),
        (TypeError, lambda: sample().register(3, A), ("no such path: got int 3", "named_param")),
        (TypeError, lambda: sample().register(MODEL.layers[0].kernel, A), ("no such path",)),
        (TypeError, lambda: sample().merge({"a": A}), ("grads.merge(other)", "got dict(a)")),
        (TypeError, lambda: sample().merge(backward(MODEL)), ("type Gradients", "from_grads")),
        (TypeError, lambda: sample().dot(None), ("grads.dot(other)", "got None")),
        (
            ValueError,
            lambda: sample().merge(GradientsParams({"a.bias": A})),
            ("one shape for 'a.bias': got (1, 2), expected (1,)", "print(grads)"),
        ),
        (
            ValueError,
            lambda: sample().dot(GradientsParams({"table": A})),
            ("grads.dot(other)", "for 'table': got (1, 2), expected (3, 1)"),
        ),
        (ValueError, lambda: sample().scale(tf.ones(2)), ("got the shape (2,), expected ()",)),
        (TypeError, lambda: sample().scale("x"), ("got str 'x'", "arithmetic over the mapping")),
        (TypeError, lambda: sample().scale(None), ("grads.scale(factor)", "got None")),
        (TypeError, lambda: sample().scale(True), ("got bool True",)),
        (TypeError, lambda: sample().scale({"a": 1.0}), ("got dict(a)",)),
        (TypeError, lambda: sample().map(lambda g: None), ("grads.map(fn)", "'a.kernel'", "None")),
        (
            ValueError,
            lambda: sample().map(lambda g: tf.concat([g, g], 0)),
            ("grads.map(fn)", "for 'a.kernel': got (2, 2), expected (1, 2)"),
        ),
        (TypeError, lambda: sample().map(tf.size), ("got dtype int32",)),
        (TypeError, lambda: sample().select("a"), ("grads.select", "ParamGroup.from_name('a')")),
        (TypeError, lambda: sample().global_norm(["a"]), ("grads.global_norm", "ParamGroup")),
        (
            ValueError,
            lambda: sample().select(ParamGroup.from_layers(MODEL.layers[0])),
            ("grads.select(group, model)", "needs the model: got None", "looks at variables"),
        ),
        (
            ValueError,
            lambda: sample().global_norm(ParamGroup.from_predicate(lambda path, v: True)),
            ("grads.global_norm(group, model)", "needs the model"),
        ),
        (
            ValueError,
            lambda: sample().select(ParamGroup.all(), MODEL),
            (
                "the gradient of an unknown path: 'a.kernel', expected a path of",
                "Key it by this one",
            ),
        ),
        (ValueError, lambda: sample().select(ParamGroup.all(), keras.layers.Dense(1)), ("built",)),
        (TypeError, lambda: sample().missing(3), ("grads.missing(model)", "got int 3")),
        (TypeError, lambda: GradientsParams({"a": None}).scale(1.0), ("'a'", "got None")),
        (TypeError, lambda: GradientsParams({"a": None})._consume("step"), ("`step`", "None")),
        (
            ValueError,
            lambda: GradientsParams({"t": tf.IndexedSlices(A, [0])}).map(tf.abs),
            ("can't be made dense", "rows of shape (1, 2)"),
        ),
    ],
)
def test_what_makes_no_sense_is_refused(kind, act, parts):
    with pytest.raises(kind, match=message(*parts)):
        act()


@pytest.mark.parametrize(
    ("kind", "grads", "parts"),
    [
        (ValueError, {}, ("needs a gradient: got none", "'dense.kernel'", "and 1 more")),
        (
            ValueError,
            {"dens.kernel": A},
            ("unknown path: 'dens.kernel', expected", "Did you mean 'dense.kernel'"),
        ),
        (ValueError, {"head.bias": A}, ("for 'head.bias': got the shape (1, 2), expected (2,)",)),
        (TypeError, {"head.bias": None}, ("for 'head.bias': got None",)),
        (TypeError, {"head.bias": tf.constant([1, 2])}, ("got dtype int32",)),
        (TypeError, {"head.bias": "x"}, ("got str 'x'",)),
    ],
)
def test_a_step_compares_gradients_with_the_variables(kind, grads, parts):
    before = {path: v.numpy() for path, v in named_parameters(MODEL).items()}
    optim = tfloop.ModuleOptimizer(keras.optimizers.SGD())
    with pytest.raises(kind, match=message("ModuleOptimizer.step(lr, model, grads)", *parts)):
        optim.step(0.1, MODEL, GradientsParams(grads))
    for path, variable in named_parameters(MODEL).items():
        np.testing.assert_array_equal(variable.numpy(), before[path])


def test_two_gradients_for_a_tied_variable_are_refused():
    model = ZOO["shared_layers"].build()
    grads = GradientsParams.from_grads(backward(model), model)
    grads.register("again.kernel", grads["left.shared.kernel"])
    optim = tfloop.ModuleOptimizer(keras.optimizers.SGD())
    parts = ("two gradients for one variable: 'again.kernel'", "'left.shared.kernel'", "merge")
    with pytest.raises(ValueError, match=message(*parts)):
        optim.step(0.1, model, grads)


def test_a_gradient_under_another_path_updates_the_tied_variable_once():
    model = ZOO["shared_layers"].build()
    kernel = model.again.kernel
    kernel.assign(tf.zeros((3, 3)))
    grads = GradientsParams({"right.shared.kernel": tf.ones((3, 3))})
    tfloop.ModuleOptimizer(keras.optimizers.SGD()).step(0.5, model, grads)
    np.testing.assert_array_equal(kernel.numpy(), np.full((3, 3), -0.5))

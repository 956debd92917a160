"""The tape: what it watches, what it gives, several passes, second order, and its refusals."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import ZOO, Affine, fill, in_every_mode, loss_of, message, rows, tokens

import tfloop
from tfloop import Gradients, GradientsParams, Tape, named_parameters, total_loss

layers = keras.layers
modes = pytest.mark.parametrize("mode", ["eager", "graph", "jit"])


def close(got, wanted, rtol=1e-6):
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=rtol, atol=1e-7)


class TestWhatATapeSees:
    @modes
    def test_every_variable_that_the_block_read_is_a_source(self, mode):
        w, b, unused = tf.Variable(3.0), keras.Variable(1.0), tf.Variable(0.0)

        def step(x):
            with Tape() as tape:
                loss = w * w * x + b
            grads = tape.backward(loss)
            return grads.wrt(w), grads.wrt(b), len(grads)

        dw, db, count = in_every_mode(step)[mode](tf.constant(2.0))
        assert (float(dw), float(db), int(count)) == (12.0, 1.0, 2)
        with Tape() as tape:
            loss = w * 1.0
        with pytest.raises(KeyError, match=message("never asked", "Variable:0", "Tape(watch=[x])")):
            tape.backward(loss).wrt(unused)

    def test_a_keras_variable_and_the_one_inside_it_are_one_source(self):
        v = keras.Variable(3.0)
        with Tape() as tape:
            loss = v * v
        grads = tape.backward(loss)
        assert float(grads.wrt(v)) == float(grads.wrt(v.value)) == 6.0
        assert len(grads) == 1

    @modes
    def test_inputs_are_watched_when_they_are_named(self, mode):
        def step(x):
            with Tape(watch=[x]) as tape:
                loss = tf.reduce_sum(x**3)
            return tape.backward(loss).wrt(x)

        close(in_every_mode(step)[mode](tf.constant([1.0, 2.0])), [3.0, 12.0])

    def test_an_adversarial_step_raises_the_loss(self):
        model = ZOO["sequential"].build()
        fill(model)
        x = rows(4, 3)
        with Tape(watch=x) as tape:
            loss = loss_of(model(x))
        worse = x + 0.01 * tf.sign(tape.backward(loss, wrt=x).wrt(x))
        assert float(loss_of(model(worse))) > float(loss)

    @pytest.mark.parametrize(
        "watch",
        [
            lambda v: v,
            lambda v: [v],
            lambda v: {"a": (v,)},
            lambda v: iter([v]),
            lambda v: {"model": [v], "x": tf.constant(1.0)},
        ],
    )
    def test_what_is_watched_may_come_in_any_container(self, watch):
        v = tf.Variable(2.0, trainable=False)
        with Tape(watch=watch(v)) as tape:
            loss = v * v
        assert float(tape.backward(loss).wrt(v)) == 4.0

    def test_a_frozen_variable_isnt_watched_unless_named(self):
        frozen, w = tf.Variable(2.0, trainable=False), tf.Variable(1.0)
        for watch, count in (((), 1), ([frozen], 2)):
            with Tape(watch=watch) as tape:
                loss = frozen * w
            assert len(tape.backward(loss)) == count

    def test_a_watched_model_or_view_gives_its_unfrozen_variables(self):
        layer = layers.BatchNormalization()
        layer.build((None, 3))
        layer.moving_mean.trainable = True
        for watch in (layer, tfloop.valid(layer), {"layer": layer}):
            with Tape(watch=watch) as tape:
                loss = loss_of(layer(rows(4, 3)))
            assert tape.backward(loss).wrt(layer.moving_mean) is not None

    def test_a_variable_seen_and_watched_is_one_source(self):
        v = tf.Variable(2.0)
        with Tape(watch=[v, v]) as tape:
            loss = v * v
        assert len(tape.backward(loss)) == 1


class TestBackward:
    def test_a_loss_that_isnt_a_scalar_is_summed(self):
        w = tf.Variable([1.0, 2.0])
        with Tape() as tape:
            loss = w * w
        close(tape.backward(loss).wrt(w), [2.0, 4.0])

    def test_a_source_that_doesnt_matter_has_none(self):
        w, v = tf.Variable(1.0), tf.Variable(1.0)
        with Tape() as tape:
            v + 1.0
            loss = w * 2.0
        grads = tape.backward(loss)
        assert grads.wrt(v) is None
        assert float(grads.wrt(w)) == 2.0

    @pytest.mark.parametrize("name", ["sequential", "module_tree", "dict_root", "sonnet_mlp"])
    def test_wrt_a_model_asks_for_its_parameters_alone(self, name):
        case = ZOO[name]
        model, other = case.build(), tf.Variable(2.0)
        with Tape(persistent=True) as tape:
            loss = other * loss_of(case.call(model, case.x()))
        grads = tape.backward(loss, wrt=model)
        named = named_parameters(model)
        assert len(grads) == len(named)
        assert list(GradientsParams.from_grads(grads, model)) == list(named)
        with pytest.raises(KeyError, match="never asked"):
            grads.wrt(other)
        assert len(tape.backward(loss)) == len(named) + 1

    @pytest.mark.parametrize("name", ["sequential", "module_tree", "dict_root", "sonnet_mlp"])
    def test_of_a_model_it_gives_the_share_by_path(self, name):
        case = ZOO[name]
        model, other = case.build(), tf.Variable(2.0)
        with Tape(persistent=True) as tape:
            loss = other * loss_of(case.call(model, case.x()))
        wanted = GradientsParams.from_grads(tape.backward(loss), model)
        got = tape.backward(loss, model)
        assert list(got) == list(wanted) == list(named_parameters(model))
        for path, grad in wanted.items():
            close(tf.convert_to_tensor(got[path]), tf.convert_to_tensor(grad))

    def test_tensors_variables_and_lists_are_what_to_differentiate_by(self):
        v, x = tf.Variable(2.0), tf.constant(3.0)
        with Tape(watch=[x], persistent=True) as tape:
            loss = v * x
        assert float(tape.backward(loss, x).wrt(x)) == 2.0
        assert float(tape.backward(loss, v).wrt(v)) == 3.0
        assert float(tape.backward(loss, [x, v]).wrt(x)) == 2.0
        assert list(tape.backward(loss, {"v": v})) == ["v"]  # a dict is a model, everywhere

    def test_a_model_without_gradient_says_why(self):
        model, other = ZOO["sequential"].build(), tf.Variable(2.0)
        with Tape(persistent=True) as tape:
            loss = other * 2.0
        call = "`tape.backward(loss, model)`"
        with pytest.raises(ValueError, match=message(call, "None for all 6", "wasn't called in")):
            tape.backward(loss, model)
        with pytest.raises(TypeError, match=message(call, "got `wrt`, too", "from_grads")):
            tape.backward(loss, model, wrt=[other])
        model.trainable = False
        with pytest.raises(ValueError, match=message(call, "nothing", "model.trainable = True")):
            tape.backward(loss, model)

    def test_wrt_may_mix_models_variables_and_tensors_of_the_block(self):
        model, v = ZOO["sequential"].build(), tf.Variable(2.0)
        with Tape() as tape:
            hidden = model.layers[0](rows(4, 3))
            loss = v * loss_of(model.layers[1](hidden))
        grads = tape.backward(loss, wrt={"m": tfloop.train(model.layers[1]), "r": [v, hidden]})
        assert len(grads) == 4
        assert grads.wrt(hidden).shape == hidden.shape
        assert grads.wrt(model.layers[1].kernel).shape == (4, 2)

    def test_dtypes_are_those_of_the_sources_but_short_variables_give_float32(self):
        for dtype, wanted in [
            ("float16", tf.float32),
            ("bfloat16", tf.float32),
            ("float32", tf.float32),
            ("float64", tf.float64),
        ]:
            v, x = tf.Variable(2.0, dtype=dtype), tf.constant(2.0, dtype)
            with Tape(watch=[x]) as tape:
                loss = v * x
            grads = tape.backward(loss)
            assert grads.wrt(v).dtype == wanted
            assert grads.wrt(x).dtype == dtype

    def test_mixed_precision_gives_float32(self):
        layer = layers.Dense(2, dtype="mixed_bfloat16")
        y = layer(rows(2, 3))
        with Tape() as tape:
            y = layer(rows(2, 3))
            loss = tf.reduce_mean(tf.square(y))
        assert y.dtype == loss.dtype == tf.bfloat16
        assert tape.backward(loss).wrt(layer.kernel).dtype == tf.float32

    def test_rows_of_a_short_table_are_float32_too(self):
        table = tf.Variable(tf.ones((4, 2), tf.bfloat16))
        with Tape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [1, 1]))
        grad = tape.backward(loss).wrt(table)
        assert isinstance(grad, tf.IndexedSlices)
        assert grad.dtype == tf.float32

    def test_integer_inputs_are_fine(self):
        model = ZOO["embedding"].build()
        with Tape() as tape:
            loss = loss_of(tfloop.train(model)(tokens(4, 3)))
        assert len(GradientsParams.from_grads(tape.backward(loss), model)) == 3

    def test_a_persistent_tape_gives_several_passes(self):
        w = tf.Variable(3.0)
        with Tape(persistent=True) as tape:
            square, cube = w**2, w**3
        assert [float(tape.backward(loss).wrt(w)) for loss in (square, cube, square)] == [6, 27, 6]

    def test_one_pass_feeds_two_models_and_an_input(self):
        g, d, x = ZOO["sequential"].build(), layers.Dense(1), rows(4, 3)
        d.build((None, 2))
        with Tape(watch=[x]) as tape:
            loss = loss_of(d(g(x)))
        grads = tape.backward(loss)
        shares = [GradientsParams.from_grads(grads, model) for model in (g, d)]
        assert [len(share) for share in shares] == [6, 2]
        assert grads.wrt(x).shape == x.shape

    def test_burn_a_graph_may_be_left_by_an_error(self):
        w, losses, tape = tf.Variable(1.0), [], Tape()

        def interrupted():
            with tape:
                losses.append(2.0 * w)
                raise KeyError("stop")

        with pytest.raises(KeyError, match="stop"):
            interrupted()
        assert float(tape.backward(losses[0]).wrt(w)) == 2.0

    def test_repr_lists_sources_and_gradients(self):
        v, x = tf.Variable([1.0], name="v"), tf.constant(2.0)
        with Tape(watch=[x]) as tape:
            loss = v * 2.0
        assert repr(tape.backward(loss)).splitlines() == [
            "Gradients(",
            "  v:0 (1,): (1,) float32",
            "  tensor (): None",
            ")",
        ]


class TestSecondOrder:
    @modes
    def test_nested_tapes_give_second_derivatives(self, mode):
        w = tf.Variable(3.0)

        def step():
            with Tape() as outer:
                with Tape() as inner:
                    loss = w**3
                first = inner.backward(loss).wrt(w)
            return first, outer.backward(first).wrt(w)

        assert [float(t) for t in in_every_mode(step)[mode]()] == [27.0, 18.0]

    @modes
    def test_a_gradient_penalty_equals_the_closed_form(self, mode):
        """Critic sum(tanh(w x)): d/dw of (|dD/dx| - 1)^2, checked against finite differences."""
        w = tf.Variable([0.5, -1.5], dtype=tf.float64)
        x = tf.constant([0.3, 0.7], tf.float64)

        def penalty(weights):
            slope = weights * (1.0 - tf.tanh(tf.reduce_sum(weights * x)) ** 2)
            return (tf.norm(slope) - 1.0) ** 2

        def step(x):
            with Tape() as outer:
                with Tape(watch=[x]) as inner:
                    score = tf.tanh(tf.reduce_sum(w * x))
                slope = inner.backward(score).wrt(x)
                loss = (tf.norm(slope) - 1.0) ** 2
            return outer.backward(loss).wrt(w)

        got = in_every_mode(step)[mode](x)
        h = 1e-6
        for index, unit in enumerate(np.eye(2)):
            both = [float(penalty(w + sign * h * unit)) for sign in (1.0, -1.0)]
            assert float(got[index]) == pytest.approx((both[0] - both[1]) / (2 * h), rel=1e-6)

    def test_a_penalty_reaches_a_keras_model(self):
        model = ZOO["sequential"].build()
        fill(model)
        x = rows(4, 3)
        with Tape() as outer:
            with Tape(watch=[x]) as inner:
                score = tf.reduce_sum(tfloop.train(model)(x))
            loss = tf.reduce_sum(inner.backward(score, wrt=[x]).wrt(x) ** 2)
        grads = GradientsParams.from_grads(outer.backward(loss), model)
        assert {"dense.kernel", "dense_1.kernel", "head.kernel"} <= set(grads)
        assert grads.missing(model) == ["dense_1.bias", "head.bias"]


class Activity(layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        self.add_loss(0.25 * tf.reduce_sum(x) * self.w)
        return x * self.w


def regularised(units=2):
    layer = layers.Dense(units, kernel_regularizer=keras.regularizers.L2(0.5))
    layer.build((None, 3))
    layer.kernel.assign(tf.ones((3, units)))
    return layer


class TestTotalLoss:
    @modes
    def test_it_adds_regularisers_and_activity_losses_with_their_gradients(self, mode):
        layer, activity = regularised(), Activity()
        activity(rows(1, 2))
        model = keras.Sequential([keras.Input((3,)), layer, activity])

        def step(x):
            with Tape() as tape:
                y = model(x)
                loss = total_loss(tf.reduce_sum(y), model)
            grads = tape.backward(loss)
            return loss, tf.add_n([tf.reduce_sum(y), *model.losses]), grads.wrt(layer.kernel)

        x = tf.ones((1, 3))
        loss, wanted, grad = in_every_mode(step)[mode](x)
        assert float(loss) == float(wanted) == 6.0 + 0.25 * 6.0 + 0.5 * 6.0
        close(grad, np.full((3, 2), 1.0 + 0.25 + 1.0))

    def test_nothing_to_add_is_zero(self):
        for name in ("sequential", "module_tree", "dict_root", "sonnet_mlp"):
            assert float(total_loss(tf.constant(2.0), ZOO[name].build())) == 2.0
        empty = layers.Rescaling(2.0)
        empty(rows(1, 3))
        assert float(total_loss(3.0, empty)) == 3.0

    def test_it_has_the_losses_dtype(self):
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            assert total_loss(tf.constant(2.0, dtype), regularised()).dtype == dtype

    def test_a_layer_without_variables_may_have_an_activity_loss(self):
        layer = layers.ActivityRegularization(l2=0.5)
        layer(tf.fill((1, 2), 2.0))
        assert float(total_loss(0.0, layer)) == 4.0

    @pytest.mark.parametrize(
        "root",
        [
            lambda a, b, shared: {"a": a, "b": b},
            lambda a, b, shared: [tfloop.train(a), b, shared],
        ],
    )
    def test_a_shared_layer_counts_once(self, root):
        shared = regularised()
        a, b = (keras.Sequential([keras.Input((3,)), shared]) for _ in range(2))
        assert float(total_loss(0.0, root(a, b, shared))) == 3.0

    def test_keras_parts_of_modules_count_at_every_depth(self):
        module = tf.Module()
        module.part = regularised()
        outer = keras.Sequential([keras.Input((3,)), regularised()])
        outer.inner = module
        for _ in range(2):
            assert float(total_loss(0.0, module)) == 3.0
            assert float(total_loss(0.0, outer)) == 6.0

    def test_frozen_weights_arent_regularised(self):
        layer = regularised()
        layer.trainable = False
        assert float(total_loss(1.0, layer)) == 1.0 + sum(layer.losses) == 1.0


X = tf.constant([1.0, 2.0])


def opened(watch=(), **options):
    with Tape(watch=watch, **options) as tape:
        pass
    return tape


def spent():
    w = tf.Variable(1.0)
    with Tape() as tape:
        loss = w * 2.0
    tape.backward(loss)
    return tape, loss


def recorded(fn, **options):
    """A tape over `fn(w)`, and what it gave."""
    w = tf.Variable(1.0)
    with Tape(**options) as tape:
        result = fn(w)
    return tape, result


BACKWARD = "`tape.backward(loss, wrt)`"


@pytest.mark.parametrize(
    ("kind", "act", "parts"),
    [
        (ValueError, lambda: opened().backward(X), ("no gradient at all", "read no trainable")),
        (
            ValueError,
            lambda: recorded(lambda w: w)[0].backward(tf.constant(1.0)),
            ("got nothing to differentiate by",),
        ),
        (
            ValueError,
            lambda: recorded(lambda w: w * 1.0)[0].backward(tf.constant(1.0)),
            (
                "got None for all 1 sources",
                "after the block",
                "NumPy",
                "valid()",
                "other variables",
            ),
        ),
        (
            ValueError,
            lambda: recorded(lambda w: tf.cast(w, tf.int32))[0].backward(tf.constant(3)),
            ("loss of dtype int32", "tf.cast(x, tf.float32)"),
        ),
        (ValueError, lambda: opened(X).backward(True), ("dtype bool",)),
        (ValueError, lambda: opened(X).backward(2.0), ("None for all 1",)),
        (ValueError, lambda: opened(X).backward(np.float32(2.0)), ("None for all 1",)),
        (
            ValueError,
            lambda: (lambda t: t[0].backward(t[1], wrt=[X]))(recorded(lambda w: w * 2.0)),
            ("a tensor in `wrt` wasn't watched: `tfloop.Tape(watch=[x])`",),
        ),
        (TypeError, lambda: opened(X).backward(None), ("needs a loss: got None", "add_n(parts)")),
        (TypeError, lambda: opened(X).backward([X, X]), ("got an object of type list",)),
        (TypeError, lambda: opened(X).backward({"a": X}), ("got dict(a)",)),
        (TypeError, lambda: opened(X).backward("loss"), ("got str 'loss'",)),
        (TypeError, lambda: opened(X).backward(keras.Input((1,))), ("KerasTensor",)),
        (
            TypeError,
            lambda: opened(X).backward(tf.ragged.constant([[1.0]])),
            ("type RaggedTensor",),
        ),
        (RuntimeError, lambda: Tape().backward(X), ("never recorded: got an unopened tape",)),
        (
            RuntimeError,
            lambda: (lambda t: t[0].backward(t[1]))(spent()),
            ("called twice: got a tape that is spent", "tfloop.Tape(persistent=True)"),
        ),
        (TypeError, lambda: opened(X).backward(X, wrt="x"), ("got str 'x'", "convert_to_tensor")),
        (TypeError, lambda: opened(X).backward(X, wrt=[3]), ("no such source: got int 3",)),
        (TypeError, lambda: opened(X).backward(X, wrt=np.ones(2)), ("type ndarray",)),
        (
            TypeError,
            lambda: opened(X).backward(X, wrt=[tf.constant(1)]),
            ("got dtype int32, expected a floating one",),
        ),
    ],
)
def test_a_backward_pass_that_makes_no_sense_is_refused(kind, act, parts):
    with pytest.raises(kind, match=message(BACKWARD, *parts)):
        act()


@pytest.mark.parametrize(
    ("kind", "act", "parts"),
    [
        (TypeError, lambda: Tape(watch=3), ("`Tape(watch=...)` takes no such source: got int 3",)),
        (TypeError, lambda: Tape(watch=["x"]), ("got str 'x'",)),
        (TypeError, lambda: Tape(watch=[tf.constant([1, 2])]), ("got dtype int32",)),
        (TypeError, lambda: Tape(watch=np.ones(2, np.float32)), ("type ndarray",)),
        (TypeError, lambda: Tape(watch=[None]), ("got None",)),
        (
            ValueError,
            lambda: Tape(watch=layers.Dense(2, name="d")),
            ("got 'd' (Dense), which has no",),
        ),
        (TypeError, lambda: Tape([X]), ("positional argument",)),
        (ValueError, lambda: total_loss(X, Affine(2, 2)), ("total_loss", "got the shape (2,)")),
        (TypeError, lambda: total_loss(3, Affine(2, 2)), ("total_loss", "got dtype int32")),
        (TypeError, lambda: total_loss(1.0, None), ("`total_loss(loss, model)` needs a model",)),
        (TypeError, lambda: total_loss(1.0, X), ("total_loss", "EagerTensor")),
        (ValueError, lambda: total_loss(1.0, layers.Dense(2)), ("total_loss", "needs a built")),
        (KeyError, lambda: Gradients([X], [X]).wrt(tf.constant(1.0)), ("got tensor ()",)),
        (KeyError, lambda: Gradients([X], [X]).wrt("x"), ("got str 'x'", "tensor (2,)")),
        (KeyError, lambda: Gradients([], []).wrt(X), ("expected one of none",)),
    ],
)
def test_what_makes_no_sense_is_refused(kind, act, parts):
    with pytest.raises(kind, match=message(*parts)):
        act()


def test_wrt_a_variable_that_the_tape_overlooked_is_refused():
    frozen, w = tf.Variable(2.0, trainable=False, name="frozen"), tf.Variable(1.0)
    with Tape() as tape:
        loss = frozen * w
    parts = (BACKWARD, "the tape didn't watch: got 'frozen:0 ()'", "Tape(watch=[model])")
    with pytest.raises(ValueError, match=message(*parts)):
        tape.backward(loss, wrt=[frozen, w])
    with Tape(watch=[frozen]) as tape:
        loss = tf.constant(1.0) * w
    assert tape.backward(loss, wrt=[frozen, w]).wrt(frozen) is None

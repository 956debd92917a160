"""Views: the mode they pass, what they change (nothing), other values, copies, refusals."""

import copy
import dataclasses
import pickle
import threading
from typing import NamedTuple

import keras
import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
from helpers import ZOO, Affine, built, fill, in_every_mode, loss_of, message, rows, values
from since import RENORM, has

import tfloop
from tfloop import GradientsParams, Tape, blend, named_parameters, named_variables, to_device
from tfloop import train as train_view
from tfloop import valid as valid_view

layers = keras.layers
modes = pytest.mark.parametrize("mode", ["eager", "graph", "jit"])


class Probe(layers.Layer):
    """Gives the flag that reaches it: 1 for training, 0 for inference, -1 for none."""

    def call(self, x, training=None):
        return x * 0.0 + (-1.0 if training is None else float(training))


def flag(y):
    return float(tf.reshape(y, [-1])[0])


X = tf.ones((1, 3))


class TakesTraining(keras.Model):
    def __init__(self):
        super().__init__()
        self.probe = Probe()

    def call(self, x, training=None):
        return self.probe(x)


class TakesNothing(TakesTraining):
    def call(self, x):
        return self.probe(x)


class TakesAnything(TakesTraining):
    def call(self, x, **options):
        return self.probe(x)


class TakesOther(TakesTraining):
    def call(self, x, is_training=None):
        return self.probe(x) * 0.0 + (-1.0 if is_training is None else float(is_training))


class TracedCall(TakesTraining):
    @tf.function
    def call(self, x, training=None):
        return self.probe(x, training=training)


class DefaultsToTraining(TakesTraining):
    def call(self, x, training=True):
        return self.probe(x)


def wrapped(kind):
    x = keras.Input((3,))
    return {"sequential": keras.Sequential([x, Probe()]), "functional": keras.Model(x, Probe()(x))}[
        kind
    ]


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable(1.0)


class ModuleTraining(Module):
    def __call__(self, x, training=None):
        return x * 0.0 + (-1.0 if training is None else float(training))


class ModuleIsTraining(Module):
    def __call__(self, x, is_training):
        return x * 0.0 + float(is_training)


class ModuleKeyword(Module):
    def __call__(self, x, *, training):
        return x * 0.0 + float(training)


class ModuleTraced(Module):
    @tf.function
    def __call__(self, x, training=None):
        return x * 0.0 + (-1.0 if training is None else float(training))


class SonnetTraining(snt.Module):
    def __call__(self, x, is_training=None):
        return x * 0.0 + (-1.0 if is_training is None else float(is_training))


class ModuleNothing(Module):
    def __call__(self, x):
        return x * 0.0 - 1.0


class ModuleAnything(Module):
    def __call__(self, x, **options):
        assert not options
        return x * 0.0 - 1.0


KERAS = {
    cls.__name__: cls
    for cls in (TakesTraining, TakesNothing, TakesAnything, TakesOther, TracedCall, Probe)
} | {kind: lambda kind=kind: wrapped(kind) for kind in ("sequential", "functional")}
KERAS["DefaultsToTraining"] = DefaultsToTraining
MODULES = {
    cls.__name__: cls
    for cls in (ModuleTraining, ModuleIsTraining, ModuleKeyword, ModuleTraced, SonnetTraining)
}


class TestFlag:
    @pytest.mark.parametrize("name", [*KERAS, *MODULES])
    def test_it_is_passed_explicitly_in_every_form(self, name):
        model = (KERAS | MODULES)[name]()
        train, valid = train_view(model), valid_view(model)
        assert [flag(view(X)) for view in (train, valid, train, valid)] == [1.0, 0.0, 1.0, 0.0]
        assert flag(tf.function(lambda x: train(x))(X)) == 1.0
        assert flag(tf.function(lambda x: valid(x))(X)) == 0.0

    @pytest.mark.parametrize("name", [*KERAS, *MODULES])
    def test_an_explicit_one_wins_under_either_name(self, name):
        model = (KERAS | MODULES)[name]()
        for word in ("training", "is_training"):
            assert flag(train_view(model)(X, **{word: False})) == 0.0
            assert flag(valid_view(model)(X, **{word: True})) == 1.0

    @pytest.mark.parametrize("kind", [bool, np.bool_, tf.constant, None])
    def test_it_may_be_all_that_keras_takes(self, kind):
        net, x = keras.Sequential([layers.Dropout(0.5), layers.Dense(2)]), rows(4, 3)
        for training in (True, False):
            flag = None if kind is None else kind(training)
            for view in (train_view(net), valid_view(net)):
                net.layers[0].seed_generator.state.assign([1, 0])
                expected = net(x, training=flag)
                net.layers[0].seed_generator.state.assign([1, 0])
                np.testing.assert_array_equal(view(x, training=flag), expected)

    def test_a_module_may_take_one_that_a_graph_computes(self):
        norm = snt.BatchNorm(create_scale=True, create_offset=True)
        run = lambda flag: train_view(norm)(rows(4, 3), is_training=flag)  # noqa: E731
        expected = run(True)
        np.testing.assert_allclose(tf.function(run)(tf.constant(True)), expected, rtol=1e-6)

    def test_a_layer_that_cannot_take_it_from_a_graph_says_so(self):
        view = train_view(keras.Sequential([layers.Dropout(0.5)]))
        words = message("`view(x, training=flag)` can't take this flag", "training=bool(flag))`")
        for call in (tf.function, tfloop.compile):
            for flag in (np.True_, tf.constant(True)):
                with pytest.raises(TypeError, match=words):
                    call(lambda flag: view(rows(4, 3), training=flag))(flag)
        with pytest.raises(TypeError, match=words):
            tf.function(lambda flag: train_view(layers.Dropout(0.5))(X, flag))(tf.constant(True))

    def test_an_error_of_another_cause_comes_as_it_is(self):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            train_view(TakesNothing())(X, nothing=1)

    def test_it_may_be_given_by_position(self):
        for cls in (ModuleTraining, ModuleIsTraining, ModuleTraced, SonnetTraining):
            assert flag(train_view(cls())(X, False)) == 0.0
            assert flag(valid_view(cls())(X, True)) == 1.0

    @pytest.mark.parametrize("cls", [ModuleNothing, ModuleAnything])
    def test_a_module_that_names_no_flag_is_called_without(self, cls):
        for view in (train_view(cls()), valid_view(cls())):
            assert flag(view(X)) == -1.0

    def test_a_sonnet_sequential_gets_no_flag(self):
        net = snt.Sequential([snt.Linear(2), tf.nn.relu])
        assert train_view(net)(X).shape == (1, 2)

    def test_a_sonnet_mlp_gets_the_flag_where_it_drops_out(self):
        plain, dropping = snt.nets.MLP([64]), snt.nets.MLP([64, 64], dropout_rate=0.5)
        assert train_view(plain)(X).shape == (1, 64)
        wanted = dropping(X, is_training=False)
        np.testing.assert_array_equal(valid_view(dropping)(X), wanted)
        assert not np.array_equal(train_view(dropping)(X), wanted)

    def test_a_list_or_dict_gives_views(self):
        probe, t = Probe(), tf.Variable(1.0)
        parts = valid_view({"a": probe, "rest": [probe, (TakesTraining(),), t]})
        assert flag(parts["a"](X)) == flag(parts["rest"][1][0](X)) == 0.0
        assert isinstance(parts["rest"][1], tuple)
        assert parts["rest"][2] is t

    def test_views_nest_and_are_idempotent(self):
        model = TakesTraining()
        view = train_view(valid_view(train_view(model)))
        assert view.module is model
        assert view.training
        assert (view.valid().training, view.train().training) == (False, True)
        assert view.valid().train() == view.train() == train_view(model) != view.valid()
        assert flag(view.valid().train()(X)) == 1.0

    def test_a_view_inside_a_model_keeps_its_own_mode(self):
        class Distilled(keras.Model):
            def __init__(self, teacher):
                super().__init__()
                self.student = Probe()
                self.teacher = valid_view(teacher)

            def call(self, x):
                return tf.concat([self.student(x), self.teacher(x)], 0)

        y = train_view(Distilled(TakesTraining()))(X)
        assert y.numpy()[:, 0].tolist() == [1.0, 0.0]

    def test_autograph_reaches_the_call_of_a_module(self):
        class Loop(Module):
            def __call__(self, x, training):
                while x < 10.0:
                    x = x * 2.0 * self.w
                if x > 11.0:
                    x = x + (100.0 if training else 0.0)
                return x

        train, valid = train_view(Loop()), valid_view(Loop())
        both = tf.function(lambda x: (train(x), valid(x)))
        assert [float(y) for y in both(tf.constant(1.0))] == [116.0, 16.0]
        assert float(train(tf.constant(1.0))) == 116.0

    def test_threads_dont_share_a_mode(self):
        model, seen = TakesTraining(), {True: [], False: []}
        start = threading.Barrier(4)

        def run(mode):
            view = train_view(model) if mode else valid_view(model)
            start.wait()
            for _ in range(20):
                seen[mode].append(flag(view(X)))

        model(X)
        threads = [threading.Thread(target=run, args=(mode,)) for mode in (True, False) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(seen[True]) == {1.0}
        assert set(seen[False]) == {0.0}
        assert len(seen[True]) == len(seen[False]) == 40


class TestParts:
    def test_layers_and_modules_come_back_as_views_of_the_same_mode(self):
        class Pair(tf.Module):
            def __init__(self):
                self.generator, self.probes = Probe(), [Probe(), {"x": Probe()}]
                self.names, self.pair = ["a", "b"], (Probe(), 3)

        model = Pair()
        for view, wanted in ((train_view(model), 1.0), (valid_view(model), 0.0)):
            assert flag(view.generator(X)) == wanted
            assert flag(view.probes[0](X)) == flag(view.probes[1]["x"](X)) == wanted
            assert flag(view.pair[0](X)) == wanted
            assert view.pair[1] == 3
            assert view.names == ["a", "b"]
            assert view.generator.module is model.generator

    def test_named_tuples_keep_their_kind(self):
        class Two(NamedTuple):
            one: layers.Layer
            two: int

        class Net(tf.Module):
            def __init__(self):
                self.two = Two(Probe(), 2)

        view = valid_view(Net())
        assert flag(view.two.one(X)) == 0.0
        assert view.two.two == 2

    def test_other_attributes_pass_through(self):
        model = ZOO["sequential"].build()
        view = train_view(model)
        assert view.name == model.name
        assert view.count_params() == model.count_params()
        assert view.trainable_variables[0] is model.trainable_variables[0]
        assert [part.module for part in view.layers] == model.layers
        assert not hasattr(view, "nothing_of_this_name")
        assert {"with_values", "summary", "layers"} <= set(dir(view))

    def test_views_are_equal_by_model_and_mode_and_serve_as_keys(self):
        model, other = Probe(), Probe()
        table = {train_view(model): "t", valid_view(model): "v", train_view(other): "o"}
        assert len(table) == 3
        assert table[train_view(model)] == "t"
        assert table[valid_view(model)] == "v"
        assert train_view(model) != model
        assert train_view(model) != "a view"

    def test_repr_names_mode_and_model(self):
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2)], name="net")
        assert repr(train_view(model)) == "train('net' (Sequential))"
        view = valid_view(model).with_values({"dense.bias": tf.zeros(2)})
        assert repr(view).startswith("valid('net' (Sequential)).with_values('")

    # Keras' way to pickle; not ours to mend.
    @pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
    def test_a_view_copies_and_pickles_as_its_model(self):
        model = ZOO["sequential"].build()
        view = valid_view(model)
        assert copy.copy(view) == view
        for other in (copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
            assert not other.training
            assert other.module is not model
            np.testing.assert_array_equal(other(rows(2, 3)), view(rows(2, 3)))


class Counting(layers.Layer):
    """Counts its calls, whatever the flag says."""

    def build(self, shape):
        self.calls = self.add_weight(name="calls", shape=(), trainable=False)

    def call(self, x, training=None):
        self.calls.assign_add(1.0)
        return x


class TestNothingChanges:
    @modes
    def test_what_moves_in_valid_mode_is_what_moves_without_training(self, mode):
        def make():
            keras.utils.set_random_seed(3)
            inner = [
                layers.LSTM(2, stateful=True, return_sequences=True),
                layers.BatchNormalization(**({"renorm": True} if has(RENORM) else {})),
                layers.SpectralNormalization(layers.Dense(4)),
                layers.Dropout(0.5),
                layers.GaussianNoise(0.3),
                layers.GRU(2, dropout=0.5),
                Counting(),
            ]
            return keras.Sequential([keras.Input(batch_shape=(2, 3, 1)), *inner])

        model, plain, x = make(), make(), rows(2, 3, 1)
        before = values(model)
        seen = in_every_mode(lambda x: valid_view(model)(x))[mode]
        called = in_every_mode(lambda x: plain(x, training=False))[mode]
        for _ in range(3):
            np.testing.assert_array_equal(seen(x), called(x))
        after, expected = values(model), values(plain)
        moved = {path for path, value in after.items() if (value != before[path]).any()}
        assert moved == {
            *("lstm.states.0", "lstm.states.1", "counting.calls"),
            "gru.cell.seed_generator.state",
        }
        for path, value in after.items():
            np.testing.assert_array_equal(value, expected[path], err_msg=path)

    @modes
    def test_burn_valid_then_train_leaves_flags_and_statistics_as_they_were(self, mode):
        model = keras.Sequential(
            [keras.Input((3,)), layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.5)]
        )
        fill(model)
        model.layers[0].trainable = False
        before, x = values(model), rows(4, 3)
        valid = in_every_mode(lambda x: valid_view(train_view(model).valid())(x))[mode]
        outputs = [valid(x).numpy() for _ in range(3)]
        np.testing.assert_array_equal(outputs[0], outputs[2])
        for path, value in values(model).items():
            np.testing.assert_array_equal(value, before[path])
        assert list(named_parameters(model)) == [
            "batch_normalization.gamma",
            "batch_normalization.beta",
        ]
        in_every_mode(lambda x: train_view(model)(x))[mode](x)
        moved = {path for path, v in values(model).items() if (v != before[path]).any()}
        assert moved == {
            "batch_normalization.moving_mean",
            "batch_normalization.moving_variance",
            "dropout.seed_generator.state",
        }

    def test_burn_a_frozen_layer_stays_frozen_through_views(self):
        layer = built(layers.BatchNormalization())
        layer.trainable = False
        for _ in range(2):
            train_view(valid_view(layer))(rows(4, 3))
        assert not layer.trainable
        np.testing.assert_array_equal(layer.moving_mean.numpy(), np.zeros(3))
        assert named_parameters(train_view(layer)) == {}

    def test_burn_freezing_and_unfreezing_while_validating_is_kept(self):
        model = ZOO["sequential"].build()
        model.layers[0].trainable = False
        view = valid_view(model)
        view(rows(2, 3))
        model.layers[0].trainable, model.layers[1].trainable = True, False
        assert list(named_parameters(view.train())) == [
            "dense.kernel",
            "dense.bias",
            "head.kernel",
            "head.bias",
        ]


@dataclasses.dataclass(frozen=True)
class Output:
    y: tf.Tensor
    extra: list
    count: int = dataclasses.field(init=False, default=3)


class Plain:
    def __init__(self, y):
        self.y, self.me = y, self


class Pair(NamedTuple):
    first: tf.Tensor
    second: object


OUTPUTS = {
    "tensor": lambda y: y,
    "dict": lambda y: {"a": y, "b": [y, None, "text", 3]},
    "namedtuple": lambda y: Pair(y, {"x": (y,)}),
    "dataclass": lambda y: Output(y, [y, {"z": y}]),
    "nested dataclass": lambda y: {"out": [Output(Output(y, []), [])]},
    "plain object": lambda y: Plain(y),
    "ragged": lambda y: tf.RaggedTensor.from_row_lengths(tf.reshape(y, [-1]), [2, 1]),
    "sparse": lambda y: tf.sparse.from_dense(y),
    "variable": None,
    "none": lambda y: None,
}


def tensors(output):
    """Every floating tensor in an output."""
    for leaf in tf.nest.flatten(output, expand_composites=True):
        if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating:
            yield leaf
        elif isinstance(leaf, (Output, Plain)):
            yield from tensors({k: v for k, v in vars(leaf).items() if v is not leaf})


class TestDetached:
    @pytest.mark.parametrize("kind", OUTPUTS)
    def test_no_output_of_a_valid_view_carries_a_gradient(self, kind):
        class Net(tf.Module):
            def __init__(self):
                self.w = tf.Variable(tf.ones((1, 3)))

            def __call__(self, x, training=False):
                return self.w if kind == "variable" else OUTPUTS[kind](self.w * x)

        model, one = Net(), tf.constant(1.0)
        for view, carries in ((train_view(model), True), (valid_view(model), False)):
            with Tape(watch=[X, one], persistent=True) as tape:
                output = view(X)
                found = list(tensors(output)) or [tf.zeros(())]
                if kind == "variable":
                    found = [tf.convert_to_tensor(output)]
                loss = one * sum(map(tf.reduce_sum, found))
            grads = tape.backward(loss, wrt=[one, X, model])
            assert (grads.wrt(model.w) is not None) == (carries and kind != "none")
            assert (grads.wrt(X) is not None) == (carries and kind not in ("none", "variable"))

    def test_what_an_output_is_packed_in_stays(self):
        class Net(tf.Module):
            def __call__(self, x):
                self.given = Output(x, [x, "text"])
                return [self.given, Pair(x, None), Plain(x)]

        model = Net()
        output, pair, plain = valid_view(model)(X)
        assert type(output) is Output
        assert output.count == 3
        assert output.extra[1] == "text"
        assert model.given.y is X  # the model's own object is left alone
        assert type(pair) is Pair
        assert plain.me is plain

    # In Keras 3.16 a recurrent layer says that it ends a mask.
    @pytest.mark.filterwarnings("ignore:Layer 'gru.* was passed an input with a mask")
    @modes
    def test_outputs_keep_their_keras_mask(self, mode):
        keras.utils.set_random_seed(0)
        net = keras.Sequential([layers.Embedding(3, 4, mask_zero=True), layers.Dense(2)])
        ids, y = tf.constant([[1, 2, 0], [2, 0, 0]]), rows(2, 3, 2)
        net(ids)
        head, loss = layers.GRU(2), keras.losses.MeanSquaredError()
        head(net(ids))

        def run(model):
            out = model(ids)
            return loss(y, out), head(out)  # a loss and a layer read the mask

        plain = in_every_mode(lambda: run(net))[mode]()
        seen = in_every_mode(lambda: run(valid_view(net)))[mode]()
        for one, other in zip(plain, seen, strict=True):
            np.testing.assert_array_equal(one, other)

    @modes
    @pytest.mark.parametrize("by", ["keras", "tf"])
    def test_outputs_keep_the_logits_that_keras_losses_look_for(self, mode, by):
        softmax = {"keras": keras.activations.softmax, "tf": tf.nn.softmax}[by]

        class Net(keras.Model):
            def call(self, x):
                return softmax(x)

        net, loss = Net(), keras.losses.SparseCategoricalCrossentropy()
        x, y = tf.constant([[60.0, -60.0]]), tf.constant([1])
        plain = float(in_every_mode(lambda: loss(y, net(x)))[mode]())
        seen = float(in_every_mode(lambda: loss(y, valid_view(net)(x)))[mode]())
        assert seen == plain
        if by == "keras" or mode != "eager":  # there Keras finds them
            assert plain == 120.0

    @modes
    def test_it_holds_with_training_on_and_for_every_open_tape(self, mode):
        model = ZOO["sequential"].build()

        def step(x, one):
            with Tape(watch=[x, one]) as outer, Tape(watch=[x, one]) as inner:
                loss = one * loss_of(valid_view(model)(x, training=True))
            found = []
            for tape in (outer, inner):
                grads = tape.backward(loss, wrt=[one, x, model])
                sources = [x, *named_parameters(model).values()]
                found.append(sum(grads.wrt(source) is not None for source in sources))
            return found

        got = in_every_mode(step)[mode](rows(4, 3), tf.constant(1.0))
        assert [int(count) for count in got] == [0, 0]

    def test_it_holds_for_a_tape_around_a_traced_function(self):
        model = ZOO["sequential"].build()
        one, x = tf.constant(1.0), rows(4, 3)
        step = tf.function(lambda x, one: one * loss_of(valid_view(model)(x)))
        with Tape(watch=[x, one]) as tape:
            loss = step(x, one)
        grads = tape.backward(loss, wrt=[one, x])
        assert grads.wrt(one) is not None
        assert grads.wrt(x) is None

    def test_a_train_view_passes_gradients_on(self):
        model, x = ZOO["sequential"].build(), rows(4, 3)
        with Tape(watch=[x]) as tape:
            loss = loss_of(train_view(model)(x, training=False))
        grads = tape.backward(loss)
        assert grads.wrt(x) is not None
        assert len(GradientsParams.from_grads(grads, model)) == 6


class Line(keras.Model):
    """y = w x + b with one weight each, in float64."""

    def __init__(self):
        super().__init__(dtype="float64")
        self.inner = layers.Dense(1, dtype="float64")

    def call(self, x):
        return self.inner(x)


def line(w=2.0, b=1.0):
    model = built(Line(), tf.constant([[0.0]], tf.float64))
    model.inner.kernel.assign([[w]])
    model.inner.bias.assign([b])
    return model


class TestWithValues:
    @modes
    def test_tensors_take_the_place_of_variables(self, mode):
        model = line()
        x = tf.constant([[3.0]], tf.float64)

        def run(x, w):
            view = train_view(model).with_values({"inner.kernel": w})
            return view(x), view.inner(x), view.valid()(x), model(x)

        got = in_every_mode(run)[mode](x, tf.constant([[5.0]], tf.float64))
        assert [float(y[0, 0]) for y in got] == [16.0, 16.0, 16.0, 7.0]
        assert float(model.inner.kernel[0, 0]) == 2.0

    @modes
    def test_one_maml_step_equals_finite_differences(self, mode):
        """d/dw loss(w - a * dloss/dw) through the inner step, for a model with a hidden layer."""
        net = keras.Sequential(
            [
                keras.Input((2,), dtype="float64"),
                layers.Dense(3, "tanh", dtype="float64"),
                layers.Dense(1, dtype="float64"),
            ]
        )
        fill(net)
        view = train_view(net)
        x = tf.cast(rows(5, 2), tf.float64)

        def meta_loss():
            named = {path: tf.convert_to_tensor(v) for path, v in named_parameters(net).items()}
            with Tape(watch=named) as tape:
                loss = loss_of(view.with_values(named)(x))
            inner = tape.backward(loss, wrt=named)
            fast = {path: value - 0.1 * inner.wrt(value) for path, value in named.items()}
            return loss_of(view.with_values(fast)(x + 0.5))

        def step():
            with Tape() as tape:
                loss = meta_loss()
            return GradientsParams.from_grads(tape.backward(loss), net)

        grads = in_every_mode(step)[mode]()
        assert list(grads) == list(named_parameters(net))
        for path, variable in named_parameters(net).items():
            start = variable.numpy()
            direction = np.cos(np.arange(start.size)).reshape(start.shape)
            ends = []
            for h in (1e-5, -1e-5):
                variable.assign(start + h * direction)
                ends.append(float(meta_loss()))
            variable.assign(start)
            slope = (ends[0] - ends[1]) / 2e-5
            assert float(tf.reduce_sum(grads[path] * direction)) == pytest.approx(slope, rel=1e-6)

    def test_a_sharpness_aware_step_needs_no_restoring(self):
        model = line()
        x = tf.constant([[1.0], [2.0]], tf.float64)

        def grads_at(view, wrt):
            with Tape(watch=list(wrt.values())) as tape:
                loss = tf.reduce_mean(view(x) ** 2)
            return tape.backward(loss, wrt=list(wrt.values()))

        here = {path: tf.convert_to_tensor(v) for path, v in named_parameters(model).items()}
        first = grads_at(train_view(model).with_values(here), here)
        climbed = {path: value + 0.1 * tf.sign(first.wrt(value)) for path, value in here.items()}
        second = grads_at(train_view(model).with_values(climbed), climbed)
        w, b = 2.1, 1.1
        wanted = np.mean([2 * (w * v + b) * v for v in (1.0, 2.0)])
        assert float(second.wrt(climbed["inner.kernel"])[0, 0]) == pytest.approx(wanted, rel=1e-12)
        assert float(model.inner.kernel[0, 0]) == 2.0

    def test_state_changes_inside_are_dropped(self):
        model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization()])
        before = values(model)
        train_view(model).with_values({"batch_normalization.gamma": tf.ones(3)})(rows(4, 3))
        for path, value in values(model).items():
            np.testing.assert_array_equal(value, before[path])

    def test_a_later_value_replaces_an_earlier_one(self):
        x = tf.constant([[1.0]], tf.float64)
        view = train_view(line()).with_values({"inner.kernel": [[5.0]], "inner.bias": [0.0]})
        assert float(view(x)[0, 0]) == 5.0
        assert float(view.with_values({"inner.kernel": [[7.0]]})(x)[0, 0]) == 7.0
        assert float(view.inner.with_values({"kernel": np.array([[7.0]])})(x)[0, 0]) == 7.0
        assert float(view(x)[0, 0]) == 5.0
        assert view == view.valid().train()
        assert view != train_view(view.module)

    def test_a_tied_variable_is_replaced_under_any_path(self):
        model = ZOO["shared_layers"].build()
        fill(model)
        x = rows(2, 3)
        zero = tf.zeros((3, 3))
        outputs = [
            train_view(model).with_values({path: zero})(x)
            for path in ("left.shared.kernel", "right.shared.kernel", "again.kernel")
        ]
        model.again.kernel.assign(zero)
        for output in outputs:
            np.testing.assert_allclose(output, model(x), rtol=1e-6)


class TestBlend:
    @modes
    def test_the_target_moves_towards_the_source(self, mode):
        target, source = ZOO["convolutions"].build(), ZOO["convolutions"].build()
        fill(source)
        start = values(target)
        run = in_every_mode(lambda rate: blend(target, source, rate))[mode]
        run(tf.constant(0.25))
        for path, value in values(target).items():
            wanted = start[path] + 0.25 * (values(source)[path] - start[path])
            np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-7)
        assert any("moving_mean" in path for path in start)

    @pytest.mark.parametrize(
        "name", ["sequential", "module_tree", "dict_root", "keras_holding_module"]
    )
    def test_a_rate_of_one_copies_bit_for_bit(self, name):
        target, source = ZOO[name].build(), ZOO[name].build()
        fill(source)
        blend(target, source)
        for path, value in values(source).items():
            np.testing.assert_array_equal(values(target)[path], value)

    def test_a_rate_of_zero_changes_nothing(self):
        target, source = ZOO["sequential"].build(), ZOO["sequential"].build()
        before = values(target)
        blend(target, tfloop.valid(source), 0)
        for path, value in values(target).items():
            np.testing.assert_array_equal(value, before[path])

    def test_an_average_over_steps_equals_its_closed_form_in_float64(self):
        target, source = line(w=0.0), line(w=1.0)
        for _ in range(10):
            blend(target, source, rate=1 - 0.9)
        assert float(target.inner.kernel[0, 0]) == pytest.approx(1.0 - 0.9**10, abs=1e-15)

    def test_frozen_variables_move_and_integers_stay(self):
        target, source = ZOO["module_tree"].build(), ZOO["module_tree"].build()
        source.steps[0].calls.assign(5)
        source.steps[0].w.assign(tf.fill((3, 4), 7.0))
        blend(target, source)
        assert int(target.steps[0].calls) == 0
        assert float(target.steps[0].w[0, 0]) == 7.0
        teacher, student = ZOO["sequential"].build(), ZOO["sequential"].build()
        teacher.trainable = False
        blend(teacher, student)
        np.testing.assert_array_equal(
            teacher.layers[0].kernel.numpy(), student.layers[0].kernel.numpy()
        )

    def test_a_refusal_changes_nothing(self):
        target, source = (
            {"a": Affine(2, 2), "b": Affine(2, 3)},
            {"a": Affine(2, 2), "b": Affine(2, 2)},
        )
        before = values(target)
        source["a"].w.assign(tf.fill((2, 2), 9.0))
        with pytest.raises(ValueError, match=message("got (2, 2) for 'b.w', expected (2, 3)")):
            blend(target, source)
        for path, value in values(target).items():
            np.testing.assert_array_equal(value, before[path])


@keras.saving.register_keras_serializable("tests")
class Configured(keras.Model):
    def __init__(self, units=2, **options):
        super().__init__(**options)
        self.units = units
        self.stack = [layers.Dense(units), layers.BatchNormalization()]

    def call(self, x):
        return self.stack[1](self.stack[0](x))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


COPIED = {
    name: ZOO[name].build
    for name in ("sequential", "convolutions", "nested_functional", "module_tree", "sonnet_mlp")
} | {
    "configured": lambda: built(Configured()),
    "layer": lambda: built(layers.Dense(3)),
    "late": lambda: built(keras.Sequential([layers.Dense(2), layers.Dense(3)])),
    "list": lambda: [built(layers.Dense(2)), Affine(2, 2)],
    "dict": lambda: {"a": ZOO["sequential"].build(), "t": tf.Variable(2.0)},
}


class TestToDevice:
    @pytest.mark.parametrize("name", COPIED)
    def test_a_copy_has_the_same_paths_values_and_flags(self, name):
        model = COPIED[name]()
        fill(model)
        frozen = next(iter(named_parameters(model).values()))
        part = model.layers[0] if isinstance(model, keras.Sequential) else None
        if part is not None:
            part.trainable = False
        elif isinstance(frozen, keras.Variable):
            frozen.trainable = False
        other = to_device(model, "CPU:0")
        assert list(named_variables(other)) == list(named_variables(model))
        assert list(named_parameters(other)) == list(named_parameters(model))
        for path, value in values(model).items():
            np.testing.assert_array_equal(values(other)[path], value)
        for mine, theirs in zip(
            named_variables(model).values(), named_variables(other).values(), strict=True
        ):
            assert mine is not theirs
        blend(other, model, 0.5)

    def test_frozen_parts_of_frozen_wholes_are_copied_as_they_are(self):
        model = ZOO["nested_functional"].build()
        model.trainable = False
        model.layers[-1].trainable = True
        other = to_device(model, "CPU:0")
        assert [layer.trainable for layer in other.layers] == [
            layer.trainable for layer in model.layers
        ]
        assert not other.trainable

    def test_gradients_of_the_copy_apply_to_the_original(self):
        model = ZOO["sequential"].build()
        other = to_device(model, "CPU:0")
        with Tape() as tape:
            loss = loss_of(train_view(other)(rows(4, 3)))
        grads = GradientsParams.from_grads(tape.backward(loss), other)
        before = values(model)
        tfloop.ModuleOptimizer(keras.optimizers.SGD()).step(0.5, model, grads.copy())
        for path, value in values(model).items():
            np.testing.assert_allclose(value, before[path] - 0.5 * grads[path], rtol=1e-5)

    def test_what_cant_be_copied_says_how_to(self):
        model = ZOO["subclass_with_attributes"].build()
        parts = (
            "`to_device(model, device)` can't copy the model: got",
            "(Net)",
            "`with tf.device(device): other = build_model()`, then `tfloop.blend(other, model)`",
        )
        with pytest.raises(ValueError, match=message(*parts)):
            to_device(model, "CPU:0")

    def test_a_copy_with_other_paths_is_refused(self):
        @keras.saving.register_keras_serializable("tests")
        class Grown(keras.Model):
            def __init__(self, **options):
                super().__init__(**options)
                self.head = layers.Dense(2)

            def call(self, x):
                return self.head(x)

        model = built(Grown())
        model.gain = tf.Variable(1.0)
        with pytest.raises(ValueError, match=message("its copy has other paths", "'head.kernel'")):
            to_device(model, "CPU:0")


def in_graph(fn):
    return tf.function(fn)()


SEQUENTIAL = ZOO["sequential"].build()
TRAIN = train_view(SEQUENTIAL)


@pytest.mark.parametrize(
    ("kind", "act", "parts"),
    [
        (TypeError, lambda: train_view(3), ("`train(model)` needs a model: got int 3",)),
        (TypeError, lambda: valid_view(None), ("`valid(model)` needs a model: got None",)),
        (TypeError, lambda: valid_view(X), ("EagerTensor", "`tfloop.train(model)(x)`")),
        (TypeError, lambda: train_view(tf.Variable(1.0)), ("'Variable:0'",)),
        (TypeError, lambda: train_view({"g": Probe(), "x": 2.0}), ("got float 2.0",)),
        (TypeError, lambda: train_view(layers.Dense), ("the class Dense",)),
        (TypeError, lambda: valid_view(lambda x: x), ("type function",)),
        (
            TypeError,
            lambda: TRAIN(keras.Input((3,))),
            ("`train(model)(x)`", "symbolic keras.KerasTensor", "keras.Model(x, model(x))"),
        ),
        (TypeError, lambda: TRAIN.valid()({"x": keras.Input((3,))}), ("`valid(model)(x)`",)),
        (
            AttributeError,
            lambda: setattr(TRAIN, "name", "x"),
            ("`view.name = ...`", "train('sequential", "`view.module.name = ...`"),
        ),
        (AttributeError, lambda: setattr(TRAIN, "training", False), ("view holds no state",)),
        (AttributeError, lambda: TRAIN.nothing, ("nothing",)),
        (AttributeError, lambda: TRAIN.__nothing__, ("'View' object has no attribute",)),
    ],
)
def test_views_refuse_what_makes_no_sense(kind, act, parts):
    with pytest.raises(kind, match=message(*parts)):
        act()


@pytest.mark.parametrize(
    ("kind", "act", "parts"),
    [
        (
            TypeError,
            lambda: train_view(Affine(2, 2)).with_values({"w": X}),
            ("needs a Keras model: got 'affine' (Affine)", "class Net(keras.Model)"),
        ),
        (
            TypeError,
            lambda: train_view(ZOO["keras_holding_module"].build()).with_values(
                {"gain": [1.0, 1.0]}
            ),
            ("can't replace 'gain': got a tf.Variable", "self.add_weight"),
        ),
        (TypeError, lambda: TRAIN.with_values([X]), ("needs a mapping: got", "dict(zip(")),
        (
            ValueError,
            lambda: TRAIN.with_values({"dense.kernal": X}),
            ("got an unknown path: 'dense.kernal', expected a path of 'seq", "Did you"),
        ),
        (
            ValueError,
            lambda: TRAIN.with_values({3: X}),
            ("got an unknown path: 3, expected a path of",),
        ),
        (
            ValueError,
            lambda: TRAIN.with_values({"head.bias": X}),
            ("for 'head.bias': got the shape (1, 3), expected (2,)",),
        ),
        (ValueError, lambda: TRAIN.with_values({"head.bias": 1.0}), ("got the shape ()",)),
        (
            ValueError,
            lambda: train_view(ZOO["shared_layers"].build()).with_values(
                {"left.shared.bias": tf.ones(3), "again.bias": tf.ones(3)}
            ),
            ("two values for one variable: 'again.bias'", "'left.shared.bias'", "values.pop"),
        ),
        (ValueError, lambda: train_view(layers.Dense(2)).with_values({}), ("needs a built model",)),
        (TypeError, lambda: TRAIN.with_values(None), ("got None, expected path -> tensor",)),
    ],
)
def test_with_values_refuses_what_makes_no_sense(kind, act, parts):
    with pytest.raises(kind, match=message("`view.with_values(values)`", *parts)):
        act()


BLEND, TO_DEVICE = "`blend(target, source, rate)`", "`to_device(model, device)`"


@pytest.mark.parametrize(
    ("kind", "act", "parts"),
    [
        (ValueError, lambda: blend(SEQUENTIAL, SEQUENTIAL, 1.5), (BLEND, "got 1.5", "1 - m")),
        (ValueError, lambda: blend(SEQUENTIAL, SEQUENTIAL, -0.1), (BLEND, "got -0.1")),
        (ValueError, lambda: blend(SEQUENTIAL, SEQUENTIAL, np.nan), (BLEND, "got nan")),
        (ValueError, lambda: blend(SEQUENTIAL, SEQUENTIAL, np.float32(2)), (BLEND, "2.0")),
        (TypeError, lambda: blend(SEQUENTIAL, SEQUENTIAL, "x"), (BLEND, "got str 'x'")),
        (TypeError, lambda: blend(SEQUENTIAL, SEQUENTIAL, None), (BLEND, "got None")),
        (TypeError, lambda: blend(SEQUENTIAL, SEQUENTIAL, True), (BLEND, "got bool True")),
        (TypeError, lambda: blend(SEQUENTIAL, SEQUENTIAL, tf.ones(2)), (BLEND, "shape (2,)")),
        (TypeError, lambda: blend(SEQUENTIAL, X), (BLEND, "needs a model: got")),
        (ValueError, lambda: blend(layers.Dense(2), SEQUENTIAL), (BLEND, "needs a built model")),
        (
            ValueError,
            lambda: blend(SEQUENTIAL, ZOO["functional"].build()),
            (BLEND, "got 'head.kernel', 'head.bias' only in the target", "'dense_2.kernel'"),
        ),
        (TypeError, lambda: to_device(3, "CPU:0"), (TO_DEVICE, "got int 3")),
        (ValueError, lambda: to_device(layers.Dense(2), "CPU:0"), (TO_DEVICE, "needs a built")),
        (
            RuntimeError,
            lambda: in_graph(lambda: to_device(SEQUENTIAL, "CPU:0")),
            (TO_DEVICE, "called in a trace", "tfloop.to_device(model, '/GPU:1')"),
        ),
    ],
)
def test_copies_refuse_what_makes_no_sense(kind, act, parts):
    with pytest.raises(kind, match=message(*parts)):
        act()


@pytest.mark.parametrize("mode", ["eager", "graph", "jit"])
def test_a_view_inside_a_call_keeps_its_flag_to_itself(mode):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.backbone = layers.Dense(1000, kernel_initializer="ones")
            self.dropout = layers.Dropout(0.5)

        def call(self, x):
            return self.dropout(tfloop.valid(self.backbone)(x))

    net = Net()
    net(X[:1])
    for training, dropped in ((True, 0.5), (False, 0.0)):
        outputs = in_every_mode(lambda x, t=training: net(x, training=t))[mode](X[:1])
        np.testing.assert_allclose(np.mean(outputs.numpy() == 0.0), dropped, atol=0.1)

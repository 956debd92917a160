"""Canonical paths: their form, that they are unique, what they find, and what is refused."""

import gc
import threading
import types
import weakref

import keras
import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
from helpers import ZOO, Affine, Block, built, message, rows

import tfloop
from tfloop import ParamGroup, named_parameters, named_variables
from tfloop._model.paths import _BOOKS, address_book, variables_below

layers = keras.layers

PATHS = {
    "sequential": "dense.kernel dense.bias dense_1.kernel dense_1.bias head.kernel head.bias",
    "functional": "dense.kernel dense.bias dense_1.kernel dense_1.bias dense_2.kernel dense_2.bias",
    "nested_functional": "dense.kernel dense.bias encoder.dense.kernel encoder.dense.bias "
    "dense_1.kernel dense_1.bias",
    "functional_subclass": "dense.kernel dense.bias dense_1.kernel dense_1.bias",
    "subclass_with_attributes": "encoder.dense.kernel encoder.dense.bias encoder.norm.gamma "
    "encoder.norm.beta scale head.kernel head.bias",
    "subclass_with_containers": "blocks.0.dense.kernel blocks.0.dense.bias blocks.0.norm.gamma "
    "blocks.0.norm.beta blocks.1.dense.kernel blocks.1.dense.bias blocks.1.norm.gamma "
    "blocks.1.norm.beta heads.mean.kernel heads.mean.bias heads.7.kernel heads.7.bias "
    "heads.a.b.kernel heads.a.b.bias pair.0.kernel pair.0.bias pair.1.0.kernel pair.1.0.bias "
    "dense.kernel dense.bias",
    "private_attributes": "hidden.kernel hidden.bias deep.kernel deep.bias out.kernel out.bias",
    "anonymous_weights": "bare listed.0 listed.1 variable variable_1 named",
    "shared_layers": "left.shared.kernel left.shared.bias left.own.kernel left.own.bias "
    "right.own.kernel right.own.bias",
    "shared_in_functional": "dense.kernel dense.bias dense_1.kernel dense_1.bias",
    "tied_embedding": "table.embeddings mix.kernel mix.bias",
    "rnn_cells": "rnn.cell.seed_generator.state rnn.cell.kernel rnn.cell.recurrent_kernel "
    "rnn.cell.bias dense.kernel dense.bias",
    "stacked_cells": "rnn.cell.cells.0.seed_generator.state rnn.cell.cells.0.kernel "
    "rnn.cell.cells.0.recurrent_kernel rnn.cell.cells.0.bias "
    "rnn.cell.cells.1.seed_generator.state rnn.cell.cells.1.kernel "
    "rnn.cell.cells.1.recurrent_kernel rnn.cell.cells.1.bias",
    "bidirectional": " ".join(
        f"bidirectional.{way}_layer.cell.{name}"
        for way in ("forward", "backward")
        for name in ("seed_generator.state", "kernel", "recurrent_kernel", "bias")
    ),
    "attention": " ".join(
        f"attend.{part}_dense.{name}"
        for part in ("query", "key", "value", "output")
        for name in ("kernel", "bias")
    )
    + " norm.gamma norm.beta",
    "time_distributed": "time_distributed.layer.kernel time_distributed.layer.bias",
    "seed_generators": "dense.kernel dense.bias dropout.seed_generator.state "
    "gaussian_noise.seed_generator.state dense_1.kernel dense_1.bias",
    "module_tree": " ".join(
        f"{part}.{name}"
        for part in ("steps.0", "steps.1", "heads.a", "heads.b")
        for name in ("w", "shift", "calls")
    ),
    "sonnet_mlp": "layers.0.w layers.0.b layers.1.w layers.1.b",
    "module_holding_keras": "gain keras_part.kernel keras_part.bias parts.0.kernel parts.0.bias",
    "keras_holding_module": "affine.w affine.shift affine.calls head.kernel head.bias gain "
    "listed.0",
    "dict_root": "body.dense.kernel body.dense.bias parts.0.dense.kernel parts.0.dense.bias "
    "temperature",
    "list_root": "0.kernel 0.bias 1 2",
    "same_names": "a.kernel a.bias b.kernel b.bias nets.0.dense.kernel nets.0.dense.bias "
    "nets.1.dense.kernel nets.1.dense.bias w w_1",
}


def dense(units=2, **options):
    layer = layers.Dense(units, **options)
    layer.build((None, 3))
    return layer


class Holder(keras.Model):
    """A model that holds whatever it is given, and is built."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.built = True


@pytest.mark.parametrize("name", PATHS)
def test_paths_have_the_documented_form(name):
    assert list(named_variables(ZOO[name].build())) == PATHS[name].split()


def test_the_roots_own_name_is_left_out():
    paths = list(named_variables(keras.Sequential([keras.Input((3,)), dense(name="d")], name="me")))
    assert paths == ["d.kernel", "d.bias"]


def test_automatic_names_are_numbered_anew_and_chosen_ones_stay():
    for _ in range(3):
        layers.Dense(1)
    net = keras.Sequential(
        [keras.Input((3,)), dense(3), dense(3, name="Dense_A"), dense(3, name="dense_01"), dense()]
    )
    assert list(named_variables(net))[::2] == [
        "dense.kernel",
        "Dense_A.kernel",
        "dense_01.kernel",
        "dense_1.kernel",
    ]


def test_an_automatic_name_never_takes_a_chosen_one():
    class Dense_1(layers.Layer):  # noqa: N801 - its automatic name is `dense_1`
        def build(self, shape):
            self.w = self.add_weight(shape=(1,))

        def call(self, x):
            return x * self.w

    net = keras.Sequential(
        [keras.Input((3,)), dense(3), Dense_1(), dense(3), dense(3, name="dense_02")]
    )
    assert list(dict.fromkeys(path.partition(".")[0] for path in named_variables(net))) == [
        "dense",
        "dense_1",
        "dense_2",
        "dense_02",
    ]


def test_siblings_that_somebody_counted_from_zero_keep_their_names():
    net = keras.Sequential([keras.Input((3,)), *(dense(3, name=f"dense_{i}") for i in range(3))])
    assert list(named_variables(net))[::2] == [f"dense_{i}.kernel" for i in range(3)]


def test_a_chosen_name_of_automatic_form_is_numbered_anew():
    """Keras doesn't record who chose a name, and a clone must have its original's paths."""
    net = keras.Sequential([keras.Input((3,)), dense(name="dense_3")])
    assert list(named_variables(net)) == ["dense.kernel", "dense.bias"]


@pytest.mark.parametrize(
    ("parts", "paths"),
    [
        ({"a.b": 1, "a": {"b": 1}}, ["a.b", "a.b_1"]),
        ({"a": {"b": 1}, "a.b": 1}, ["a.b", "a.b_1"]),
        ({1: 1, "1": 1, 1.5: 1}, ["1", "1_1", "1.5"]),
        ({("x", 2): 1, None: 1, "": 1}, ["('x', 2)", "None", ""]),
        ({"a": [1, 1], "a.1": 1, "a_1": 1}, ["a.0", "a.1", "a.1_1", "a_1"]),
    ],
)
def test_keys_that_would_collide_are_told_apart(parts, paths):
    named = named_variables(model := fresh(parts))
    assert model
    assert list(named) == paths
    assert len({id(v) for v in named.values()}) == len(paths)


def fresh(parts):
    """The same structure with a new variable in each place."""
    if isinstance(parts, dict):
        return {key: fresh(part) for key, part in parts.items()}
    return [fresh(part) for part in parts] if isinstance(parts, list) else tf.Variable(1.0)


def test_a_nested_path_never_takes_that_of_a_sibling():
    inner = tf.Module()
    inner.b = tf.Variable(1.0)
    outer = tf.Module()
    outer.a = inner
    setattr(outer, "a.b", tf.Variable(2.0))
    assert [float(v) for v in named_variables(outer).values()] == [1.0, 2.0]
    assert list(named_variables(outer)) == ["a.b", "a.b_1"]


def test_every_other_path_resolves_to_the_canonical_one():
    model = ZOO["shared_layers"].build()
    book = address_book(model)
    assert book.resolve("right.shared.kernel") == "left.shared.kernel"
    assert book.resolve("again.bias") == "left.shared.bias"
    assert book.resolve("left.own.kernel") == "left.own.kernel"
    assert book.resolve("left") is None
    assert book.resolve("again.kernel.more") is None
    assert book.paths_of("left.shared.kernel") == (
        "left.shared.kernel",
        "right.shared.kernel",
        "again.kernel",
    )
    selected = ParamGroup.from_name("again").select(model)
    assert list(selected) == ["left.shared.kernel", "left.shared.bias"]


def test_aliases_inside_aliases_resolve():
    leaf = Affine(2, 2)
    one, two = Holder(leaf=leaf), Holder(leaf=leaf)
    book = address_book(Holder(first=Holder(one=one, two=two), second=two, third=one))
    assert book.resolve("second.leaf.w") == "first.one.leaf.w"
    assert book.resolve("third.leaf.w") == "first.one.leaf.w"
    assert set(book.paths_of("first.one.leaf.w")) == {
        "first.one.leaf.w",
        "first.two.leaf.w",
        "second.leaf.w",
        "third.leaf.w",
    }


def test_a_tied_variable_is_listed_once_and_both_paths_lead_to_it():
    model = {"a": Affine(2, 2), "b": Affine(2, 2)}
    model["b"].w = model["a"].w
    assert list(named_parameters(model)) == ["a.w", "a.shift", "b.shift"]
    assert list(ParamGroup.from_path("b.w").select(model)) == ["a.w"]


def test_a_child_that_points_to_its_parent_adds_no_path():
    parent, child = tf.Module(), tf.Module()
    parent.child, child.parent, child.w = child, parent, tf.Variable(1.0)
    assert list(named_variables(parent)) == ["child.w"]
    assert address_book(parent).paths_of("child.w") == ("child.w",)
    assert address_book({"p": parent}).paths_of("p.child.w") == ("p.child.w",)


def test_the_attribute_of_a_functional_subclass_is_another_path():
    model = ZOO["functional_subclass"].build()
    assert address_book(model).resolve("trunk.kernel") == "dense.kernel"


def test_parameters_are_trainable_and_floating():
    model = ZOO["convolutions"].build()
    statistics = {p for p in named_variables(model) if "moving" in p}
    assert len(statistics) == 2
    assert set(named_parameters(model)) == set(named_variables(model)) - statistics
    assert "heads.a.calls" not in named_parameters(ZOO["module_tree"].build())
    assert list(named_parameters({"n": tf.Variable(1), "x": tf.Variable(1.0)})) == ["x"]


def test_freezing_and_unfreezing_is_seen_at_once_at_every_level():
    model = ZOO["subclass_with_attributes"].build()
    everything = list(named_parameters(model))
    model.encoder.dense.trainable = False
    assert list(named_parameters(model)) == everything[2:]
    model.encoder.trainable = False
    assert list(named_parameters(model)) == ["scale", "head.kernel", "head.bias"]
    model.trainable = False
    assert named_parameters(model) == {}
    model.head.trainable = True  # as in Keras, a frozen model has no trainable weights
    assert named_parameters(model) == {}
    assert list(named_parameters(model.head)) == ["kernel", "bias"]
    model.trainable = True
    assert list(named_parameters(model)) == everything
    assert list(named_variables(model)) == everything


def test_a_frozen_layer_freezes_what_keras_doesnt_track_below_it():
    inner = tf.Module()
    inner.dense, inner.w = dense(), tf.Variable(1.0)
    model = Holder(part=Holder(inner=inner, gain=tf.Variable(1.0)), other=dense())
    assert len(named_parameters(model)) == 6
    model.part.trainable = False
    assert list(named_parameters(model)) == ["other.kernel", "other.bias"]


def test_the_paths_of_a_view_are_those_of_its_model():
    model = ZOO["sequential"].build()
    for view in (tfloop.train(model), tfloop.valid(model), tfloop.train(tfloop.valid(model))):
        assert list(named_variables(view)) == list(named_variables(model))
        assert address_book(view) is address_book(model)
    assert list(named_variables({"g": tfloop.train(model)}))[0] == "g.dense.kernel"


def test_a_model_that_holds_a_view_holds_its_model():
    model = tf.Module()
    model.net = tfloop.valid(dense())
    assert list(named_variables(model)) == ["net.kernel", "net.bias"]


def test_metrics_optimizers_and_what_fit_adds_are_no_part_of_the_model():
    model = ZOO["sequential"].build()
    paths = list(named_variables(model))
    model.accuracy = keras.metrics.MeanSquaredError()
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    assert list(named_variables(model)) == paths


def test_low_rank_adapters_are_parameters_and_their_base_is_frozen():
    layer = dense(4)
    address_book(layer)
    layer.enable_lora(2)
    assert list(named_variables(layer)) == ["kernel", "bias", "lora_kernel_a", "lora_kernel_b"]
    assert list(named_parameters(layer)) == ["bias", "lora_kernel_a", "lora_kernel_b"]


def test_a_model_is_looked_up_once():
    for name in ("sequential", "dict_root", "module_tree", "keras_holding_module"):
        model = ZOO[name].build()
        assert address_book(model) is address_book(model), name


def test_a_dict_built_again_of_the_same_parts_is_the_same_root():
    g, d = dense(), dense()
    assert address_book({"g": g, "d": d}) is address_book({"g": tfloop.train(g), "d": d})
    assert address_book({"g": g}) is not address_book({"g": d})
    assert list(named_variables({"g": d, "d": g}).values())[0] is d.kernel


def test_variables_that_come_later_are_found():
    model = Holder(head=dense())
    assert len(named_variables(model)) == 2
    model.gain = tf.Variable(1.0)
    assert list(named_variables(model))[-1] == "gain"
    model.gain = replacement = tf.Variable(2.0)
    assert named_variables(model)["gain"] is replacement
    model.affine = Affine(2, 2)
    model.affine.more = [tf.Variable(3.0)]
    assert list(named_variables(model))[-1] == "affine.more.0"
    model.more = dense()
    assert list(named_variables(model))[-1] == "more.bias"

    lazy = snt.nets.MLP([2, 2])
    lazy._layers[0](rows(1, 3))
    assert len(named_variables(lazy)) == 2
    lazy(rows(1, 3))
    assert len(named_variables(lazy)) == 4


@pytest.mark.parametrize("name", ["sequential", "dict_root", "module_tree", "list_root"])
def test_a_book_keeps_nothing_alive(name):
    gc.collect()
    before = len(_BOOKS)
    model = ZOO[name].build()
    variables = [weakref.ref(v) for v in named_variables(model).values()]
    assert len(_BOOKS) == before + 1
    del model
    gc.collect()
    assert [ref() for ref in variables] == [None] * len(variables)
    assert len(_BOOKS) == before


def test_a_book_of_loose_variables_alone_goes_with_them():
    gc.collect()
    before = len(_BOOKS)
    image = tf.Variable(tf.zeros((8, 8)))
    assert list(named_variables([image])) == ["0"]
    alive = weakref.ref(image)
    del image
    gc.collect()
    assert alive() is None
    assert len(_BOOKS) == before


def test_a_variable_of_another_model_has_no_path():
    model, other = ZOO["sequential"].build(), ZOO["sequential"].build()
    book = address_book(model)
    assert book.path_of(model.layers[0].kernel) == "dense.kernel"
    assert book.path_of(model.layers[0].kernel.value) == "dense.kernel"
    assert book.path_of(other.layers[0].kernel) is None


def test_threads_get_one_book():
    model = ZOO["keras_holding_module"].build()
    books, start = [], threading.Barrier(8)

    def look():
        start.wait()
        for _ in range(5):
            books.append(address_book(model))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(books) == 40
    assert all(book is books[0] for book in books)


def test_paths_are_found_inside_a_trace():
    model = ZOO["sequential"].build()
    traced = []
    tf.function(lambda: traced.append(list(named_parameters(model))))()
    assert traced[0] == list(named_parameters(model))


def test_variables_below_are_those_of_every_library():
    model = ZOO["keras_holding_module"].build()
    assert len(variables_below(model)) == 7
    assert variables_below(layers.Dense(2)) == []


class Part:
    """A plain object: neither Keras nor TensorFlow looks into it."""

    def __init__(self, **things):
        self.__dict__.update(things)


@pytest.mark.parametrize(
    "hide",
    [
        lambda thing: Part(dense=thing),
        lambda thing: Part(stack=[thing]),
        lambda thing: [Part(dense=thing)],
        lambda thing: {"a": (Part(dense=thing),)},
    ],
)
@pytest.mark.parametrize("thing", [dense, lambda: tf.Variable(1.0), lambda: Affine(2, 2)])
def test_trainable_variables_in_a_plain_object_are_refused(hide, thing):
    model = Holder(head=dense(), part=hide(thing()))
    expected = message("would never be trained: got 'part.", "class Part(keras.layers.Layer)")
    with pytest.raises(ValueError, match=expected):
        named_parameters(model)


def test_a_plain_object_may_hold_what_is_frozen_or_found_elsewhere():
    teacher, shared = dense(), dense()
    teacher.trainable = False
    model = Holder(teacher=Part(net=teacher), user=Part(net=shared, n=3), shared=shared)
    assert list(named_variables(model)) == ["shared.kernel", "shared.bias"]
    model.me = Part(model=model)
    assert list(named_variables(model)) == ["shared.kernel", "shared.bias"]


class Unbuilt(tf.Module):
    pass


@pytest.mark.parametrize(
    ("make", "kind", "parts"),
    [
        (lambda: None, TypeError, ("got None", "expected a keras.Model")),
        (lambda: 3.0, TypeError, ("got float 3.0",)),
        (lambda: "net", TypeError, ("got str 'net'",)),
        (lambda: np.ones(2), TypeError, ("type ndarray",)),
        (lambda: tf.ones(2), TypeError, ("EagerTensor",)),
        (lambda: tf.Variable(1.0), TypeError, ("Variable:0", "Pass the model itself")),
        (lambda: keras.Variable(1.0), TypeError, ("(Variable)",)),
        (lambda: layers.Dense, TypeError, ("the class Dense",)),
        (lambda: keras.optimizers.SGD(), TypeError, ("(SGD)",)),
        (lambda: {"g": dense(), "lr": 0.1}, TypeError, ("float 0.1 at ['lr']",)),
        (lambda: [dense(), {"x": ["y"]}], TypeError, ("str 'y' at [1]['x'][0]",)),
        (lambda: layers.Dense(2, name="d"), ValueError, ("'d' (Dense)", "model(sample_batch)")),
        (lambda: keras.Sequential([layers.Dense(2)]), ValueError, ("model.build(input_shape)",)),
        (lambda: snt.Linear(2), ValueError, ("'linear' (Linear)", "no variables yet")),
        (lambda: {}, ValueError, ("got dict()", "no variables yet")),
        (lambda: {"g": dense(), "d": layers.Dense(2, name="d")}, ValueError, ("'d' (Dense)",)),
        (lambda: {"g": dense(), "d": Unbuilt(name="u")}, ValueError, ("'u' (Unbuilt)",)),
        (lambda: layers.Lambda(lambda x: x, name="l"), ValueError, ("'l' (Lambda)",)),
    ],
)
@pytest.mark.parametrize("function", [named_parameters, named_variables])
def test_what_isnt_a_built_model_is_refused(make, kind, parts, function):
    name = f"`{function.__name__}(model)` needs a"
    with pytest.raises(kind, match=message(name, *parts)):
        function(make())


def test_an_unbuilt_keras_part_of_a_module_is_refused():
    module = tf.Module()
    module.w, module.head = tf.Variable(1.0), layers.Dense(2, name="head")
    with pytest.raises(ValueError, match=message("got 'head' (Dense), which has no variables yet")):
        named_variables(module)
    module.head.build((None, 3))
    assert list(named_variables(module)) == ["w", "head.kernel", "head.bias"]


def test_a_namespace_is_a_plain_object():
    with pytest.raises(ValueError, match=message("got 'part.net (Dense)'")):
        named_variables(Holder(head=dense(), part=types.SimpleNamespace(net=dense())))


def test_blocks_of_a_keras_layer_are_built_by_hand():
    assert list(named_variables(built(Block(2))))[0] == "dense.kernel"


class Pair(keras.Model):
    """Only its parts are called."""

    def __init__(self, head=None):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        self.head = head


def test_a_model_whose_parts_are_built_need_not_be_called_itself():
    found = list(tfloop.named_parameters(Pair()))
    assert found == ["generator.dense.kernel", "generator.dense.bias"]
    with pytest.raises(ValueError, match="which has no variables yet"):
        tfloop.named_parameters(Pair(keras.layers.Dense(2)))

    class WithWeights(Pair):
        def build(self, shape):
            self.scale = self.add_weight(shape=())

    with pytest.raises(ValueError, match="which has no variables yet"):
        tfloop.named_parameters(WithWeights())

"""ParamGroup: what each constructor matches, the algebra, JSON, and what it refuses."""

import copy
import functools
import json
import operator
import pickle
import re

import keras
import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfloop._groups.group import ParamGroup, as_group, near_misses
from tfloop._model.modes import train, valid

PATHS = (
    "encoder.dense.kernel",
    "encoder.dense.bias",
    "encoder.norm.gamma",
    "encoder_2.dense.kernel",
    "norm_head.kernel",
    "head.kernel",
    "head.bias",
    "blocks.0.layernorm.beta",
)
# Kernels are matrices, the rest are vectors.
NAMED = {
    path: tf.Variable(tf.zeros((1, 1) if "kernel" in path else (1,)), name=path.rpartition(".")[2])
    for path in PATHS
}


def members(group):
    return {path for path, variable in NAMED.items() if group.matches(path, variable)}


# Burn's tests of its ParamGroup, with what they leave open asserted too.


def test_all_matches_every_parameter_and_a_path_alone():
    assert members(ParamGroup.all()) == set(PATHS)
    assert ParamGroup.all().matches("anything")


def test_ids_match_these_variables_whatever_their_path():
    group = ParamGroup.from_ids([NAMED["head.kernel"], NAMED["head.bias"]])
    assert members(group) == {"head.kernel", "head.bias"}
    assert group.matches("renamed", NAMED["head.bias"])
    assert not group.matches("head.bias", tf.Variable(0.0))


def test_ids_without_a_variable_match_nothing():
    assert not ParamGroup.from_ids([NAMED["head.kernel"]]).matches("head.kernel")


def test_a_path_is_matched_exactly():
    group = ParamGroup.from_path("head.kernel")
    assert members(group) == {"head.kernel"}
    assert not group.matches("norm_head.kernel")
    assert not group.matches("head.kernel.0")


def test_several_paths_are_any_of():
    assert members(ParamGroup.from_path("head.kernel", "head.bias")) == {"head.kernel", "head.bias"}
    assert ParamGroup.from_path(["a", "b"]) == ParamGroup.from_path("b", "a")


def test_a_predicate_text_is_found_anywhere_in_the_path():
    group = ParamGroup.from_predicate("encoder.d")
    assert members(group) == {"encoder.dense.kernel", "encoder.dense.bias"}
    assert ParamGroup.from_predicate("layer1").matches("layer10.kernel")


def test_a_regex_is_searched_not_anchored():
    assert members(ParamGroup.from_regex(r"\.bias$")) == {"encoder.dense.bias", "head.bias"}
    assert members(ParamGroup.from_regex(r"^head\.")) == {"head.kernel", "head.bias"}


def test_a_rank_is_the_number_of_axes():
    vectors = {path for path in PATHS if "kernel" not in path}
    assert members(ParamGroup.from_rank(0, 1)) == vectors
    assert members(ParamGroup.from_rank([2])) == set(PATHS) - vectors
    assert ParamGroup.from_rank(1, 0, 1) == ParamGroup.from_rank(0, 1)
    assert not ParamGroup.from_rank(1).matches("head.bias")
    assert not ParamGroup.from_rank(2).matches("step", tf.Variable(0.0))


def test_layers_match_their_variables():
    layer, other = keras.layers.Dense(2), keras.layers.Dense(2)
    group = ParamGroup.from_layers(layer)
    for built in (layer, other):
        built.build((None, 3))
    assert [group.matches("x", v) for v in layer.variables] == [True, True]
    assert [group.matches("x", v) for v in other.variables] == [False, False]


def test_a_union_of_ids_and_path_matches_both():
    group = ParamGroup.from_ids([NAMED["head.bias"]]) | ParamGroup.from_path("head.kernel")
    assert members(group) == {"head.bias", "head.kernel"}


def test_excluded_ids_are_out():
    group = ParamGroup.from_name("head").exclude(ParamGroup.from_ids([NAMED["head.bias"]]))
    assert members(group) == {"head.kernel"}


def test_an_excluded_path_is_out():
    group = ParamGroup.all().exclude(ParamGroup.from_path("head.bias"))
    assert members(group) == set(PATHS) - {"head.bias"}
    assert members(ParamGroup.all().exclude(ParamGroup.all())) == set()


def test_what_an_excluded_group_excludes_itself_stays_in():
    biases = ParamGroup.from_name("bias")
    group = ParamGroup.all() - (ParamGroup.from_name("encoder") - biases)
    assert "encoder.dense.bias" in members(group)
    assert "encoder.dense.kernel" not in members(group)


def test_a_union_keeps_the_exclusions_of_both_sides():
    left = ParamGroup.from_name("encoder") - ParamGroup.from_name("bias")
    right = ParamGroup.from_name("head") - ParamGroup.from_name("bias")
    assert members(left | right) == {"encoder.dense.kernel", "encoder.norm.gamma", "head.kernel"}


def test_any_of_predicates_is_a_union_and_all_of_them_an_intersection():
    norm, kernel = ParamGroup.from_predicate("norm"), ParamGroup.from_regex("kernel$")
    assert members(norm | kernel) == members(norm) | members(kernel)
    assert members(norm & kernel) == {"norm_head.kernel"}


# Names: whole words (case 15).


def test_a_name_is_a_whole_word_of_the_path():
    assert members(ParamGroup.from_name("norm")) == {"encoder.norm.gamma"}
    assert "norm_head.kernel" in members(ParamGroup.from_predicate("norm"))
    assert "blocks.0.layernorm.beta" in members(ParamGroup.from_predicate("norm"))
    assert "encoder_2.dense.kernel" not in members(ParamGroup.from_name("encoder"))


def test_a_name_of_two_words_wants_them_next_to_each_other():
    assert members(ParamGroup.from_name("dense.kernel")) == {
        "encoder.dense.kernel",
        "encoder_2.dense.kernel",
    }
    assert members(ParamGroup.from_name("encoder.kernel")) == set()


def test_several_names_are_any_of():
    expected = {"encoder.dense.bias", "head.bias", "encoder.norm.gamma"}
    assert members(ParamGroup.from_name("bias", "gamma")) == expected
    assert members(ParamGroup.from_name(["bias", "gamma"])) == expected


# Functions, identities, tied weights.


def test_a_function_gets_path_and_variable():
    matrix = tf.Variable([[1.0]])
    group = ParamGroup.from_predicate(lambda path, v: path == "m" and len(v.shape) == 2)
    assert group.matches("m", matrix)
    assert not group.matches("m", NAMED["head.bias"])
    assert ParamGroup.from_predicate(str.startswith).matches("m", "m")


def test_a_keras_variable_and_the_variable_inside_are_one():
    variable = keras.Variable(1.0)
    for given_, asked in ((variable, variable.value), (variable.value, variable)):
        assert ParamGroup.from_ids([given_]).matches("v", asked)
    assert ParamGroup.from_ids([variable]) == ParamGroup.from_ids([variable.value])
    assert ParamGroup.from_ids(variable) == ParamGroup.from_ids([variable])


def test_a_group_of_variables_keeps_them_alive():
    group = ParamGroup.from_ids([tf.Variable(0.0) for _ in range(20)])
    fresh = [tf.Variable(0.0) for _ in range(200)]
    assert not any(group.matches("v", variable) for variable in fresh)


def test_an_alias_counts_before_the_operators_do():
    paths = ("embedding.kernel", "head.kernel")
    head = ParamGroup.from_path("head.kernel")
    assert head.matches_any(paths)
    assert not (~head).matches_any(paths)
    assert (ParamGroup.from_name("embedding") & ParamGroup.from_name("head")).matches_any(paths)
    assert not (ParamGroup.from_name("embedding") - head).matches_any(paths)


class Head(keras.layers.Layer):
    """Multiplies with a kernel that belongs to somebody else."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel
        self.bias = self.add_weight(shape=(3,), name="bias")


class Tied(keras.Model):
    """A kernel that two paths lead to, a frozen layer and one without variables."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Dense(3, use_bias=False)
        self.embedding.build((None, 3))
        self.head = Head(self.embedding.kernel)
        self.head.build(None)
        self.stem = keras.layers.Dense(3, trainable=False)
        self.stem.build((None, 3))
        self.drop = keras.layers.Dropout(0.5)
        self.built = True


def test_select_gives_the_members_of_a_model_by_canonical_path():
    model = Tied()
    kernels = ParamGroup.from_name("kernel").select(model)
    assert kernels["embedding.kernel"] is model.embedding.kernel
    assert kernels["stem.kernel"] is model.stem.kernel
    frozen = ParamGroup.from_layers(model.stem, model.drop)
    assert list(frozen.select(model)) == ["stem.kernel", "stem.bias"]
    assert ParamGroup.from_path("nothing").select(model) == {}


def test_a_rank_finds_vectors_whatever_a_library_calls_them():
    linear, norm = snt.Linear(2), snt.LayerNorm(-1, True, True)
    norm(linear(tf.ones((1, 3))))
    vectors = ParamGroup.from_rank(0, 1).select({"linear": linear, "norm": norm})
    assert set(vectors) == {"linear.b", "norm.scale", "norm.offset"}


def test_select_sees_every_path_to_a_tied_weight():
    model = Tied()
    selected = ParamGroup.from_name("head").select(model)
    assert list(selected) == ["embedding.kernel", "head.bias"]


def test_layers_of_a_module_that_holds_keras_layers_are_found():
    module = tf.Module()
    module.scale = tf.Variable(1.0)
    module.parts = [keras.layers.Dense(1)]
    module.parts[0].build((None, 1))
    group = ParamGroup.from_layers(module)
    assert group.matches("scale", module.scale)
    assert group.matches("parts.0.kernel", module.parts[0].kernel)
    assert group == ParamGroup.from_layers([module])


def test_a_view_of_a_layer_is_the_layer():
    model = Tied()
    group = ParamGroup.from_layers(train(model).stem)
    assert group == ParamGroup.from_layers(model.stem)
    assert list(group.select(valid(model))) == ["stem.kernel", "stem.bias"]


# The algebra against Python's sets.

_words = st.sampled_from(sorted({word for path in PATHS for word in path.split(".")}))
_subsets = st.lists(st.sampled_from(PATHS), min_size=1, max_size=3, unique=True)


def _by(make, test):
    return lambda wanted: (make(wanted), {path for path in PATHS if test(wanted, path)})


_plain = st.one_of(
    st.just((ParamGroup.all(), set(PATHS))),
    _subsets.map(lambda paths: (ParamGroup.from_path(*paths), set(paths))),
    _words.map(_by(ParamGroup.from_name, lambda word, path: word in path.split("."))),
    _words.map(_by(ParamGroup.from_predicate, lambda text, path: text in path)),
    _words.map(_by(lambda w: ParamGroup.from_regex(f"{w}$"), lambda w, path: path.endswith(w))),
    st.sampled_from([1, 2]).map(
        _by(ParamGroup.from_rank, lambda rank, path: rank == len(NAMED[path].shape))
    ),
)
_objects = st.one_of(
    _subsets.map(lambda p: (ParamGroup.from_ids([NAMED[path] for path in p]), set(p))),
    _subsets.map(lambda p: (ParamGroup.from_predicate(lambda path, _: path in p), set(p))),
)
_OPERATORS = (operator.or_, operator.and_, operator.sub)


def _expressions(leaves):
    def combined(inner):
        binary = st.tuples(st.sampled_from(_OPERATORS), inner, inner)
        return st.one_of(
            binary.map(lambda t: (t[0](t[1][0], t[2][0]), t[0](t[1][1], t[2][1]))),
            inner.map(lambda pair: (~pair[0], set(PATHS) - pair[1])),
        )

    return st.recursive(leaves, combined, max_leaves=8)


_any_group = _expressions(_plain | _objects)
_plain_group = _expressions(_plain)
_examples = settings(max_examples=150, deadline=None)


@_examples
@given(_any_group)
def test_the_algebra_is_that_of_sets(pair):
    group, expected = pair
    assert members(group) == expected


@_examples
@given(_any_group, _any_group, _any_group)
def test_the_laws_of_sets_hold(a, b, c):
    a, b, c = (group for group, _ in (a, b, c))
    assert members(~(a | b)) == members(~a & ~b)
    assert members(~(a & b)) == members(~a | ~b)
    assert members(a - (b - c)) == members((a - b) | (a & c))
    assert members((a - b) | c) == members(a - b) | members(c)
    assert members(a.exclude(b)) == members(a & ~b)


@_examples
@given(_plain_group)
def test_json_gives_the_same_group_back(pair):
    group, expected = pair
    back = ParamGroup.from_config(json.loads(json.dumps(group.to_config())))
    assert back == group
    assert hash(back) == hash(group)
    assert members(back) == expected
    assert pickle.loads(pickle.dumps(group)) == group


@_examples
@given(_plain_group)
def test_the_repr_is_the_expression_that_makes_the_group(pair):
    group, _ = pair
    assert eval(repr(group), {"ParamGroup": ParamGroup}) == group
    assert repr(group).replace("ParamGroup.", "") == str(group)


@_examples
@given(_any_group, _any_group)
def test_equal_groups_match_alike_and_hash_alike(a, b):
    (a, in_a), (b, in_b) = a, b
    if a == b:
        assert hash(a) == hash(b)
        assert in_a == in_b
    assert (a == b) == (b == a)
    assert a != str(a)


@_examples
@given(_any_group)
def test_resolved_groups_match_alike_by_path_alone_and_go_through_json(pair):
    group, expected = pair
    resolved = ParamGroup.from_config(group.resolve(NAMED).to_config())
    assert {path for path in PATHS if resolved.matches(path)} == expected


def test_resolving_asks_every_path_to_a_variable():
    group = ParamGroup.from_predicate(lambda path, variable: path == "alias")
    resolved = group.resolve({"v": NAMED["head.bias"]}, lambda path: (path, "alias"))
    assert resolved == ParamGroup.from_path("v")


def test_structure_decides_equality():
    a, b = ParamGroup.from_name("a"), ParamGroup.from_name("b")
    assert a | b == ParamGroup.from_name("a") | ParamGroup.from_name("b")
    assert a | b != b | a
    assert a != ParamGroup.from_path("a")
    assert ParamGroup.from_predicate(len_is_one) == ParamGroup.from_predicate(len_is_one)
    assert len({a, ParamGroup.from_name("a"), b}) == 2


def len_is_one(path, variable):
    return len(path) == 1


def test_a_function_object_that_cannot_be_hashed_is_its_own_equal():
    class Unhashable:
        __hash__ = None

        def __call__(self, path, variable):
            return True

    one = Unhashable()
    assert hash(ParamGroup.from_predicate(one)) == hash(ParamGroup.from_predicate(one))
    assert ParamGroup.from_predicate(one) != ParamGroup.from_predicate(Unhashable())


def test_a_union_of_thousands_isnt_deep():
    group = functools.reduce(operator.or_, (ParamGroup.from_path(f"p{i}") for i in range(5000)))
    assert group.matches("p4999")
    assert not group.matches("p5000")
    assert hash(group) == hash(ParamGroup.from_config(group.to_config()))


def test_copies_are_the_group_itself():
    group = ParamGroup.from_ids([NAMED["head.bias"]])
    assert copy.deepcopy(group) is group
    assert copy.copy(group) is group


def test_a_group_reads_as_what_makes_it():
    encoder, bias = ParamGroup.from_name("encoder"), ParamGroup.from_path("encoder.bias")
    assert repr(encoder - bias) == (
        "ParamGroup.from_name('encoder') - ParamGroup.from_path('encoder.bias')"
    )
    assert str(~(encoder | bias) & ParamGroup.all()) == (
        "~(from_name('encoder') | from_path('encoder.bias')) & all()"
    )
    assert str(encoder - (bias - encoder)).count("(from_path") == 1
    variables = [tf.Variable(tf.zeros((2, i)), name=f"v{i}") for i in range(7)]
    assert str(ParamGroup.from_ids(variables)).endswith("<v4:0 (2, 4)> and 2 more)")
    assert (
        str(ParamGroup.from_layers(keras.layers.Dense(1, name="d"))) == "from_layers(<Dense 'd'>)"
    )
    assert str(ParamGroup.from_predicate(len_is_one)) == "from_predicate(<len_is_one>)"


# Near misses (case 14).


def test_near_misses_name_the_paths_that_were_meant():
    paths = ["encoder.layernorm.gamma", "encoder.dense.kernel", "head.kernel"]
    assert near_misses(ParamGroup.from_name("layer_norm"), paths) == ["encoder.layernorm.gamma"]
    assert near_misses(ParamGroup.from_path("head/kernel"), paths)[0] == "head.kernel"
    assert near_misses(~ParamGroup.from_predicate("Dense"), paths) == ["encoder.dense.kernel"]
    assert near_misses(ParamGroup.from_regex("^hed"), paths) == ["head.kernel"]
    assert near_misses(ParamGroup.from_name("zzz") | ParamGroup.all(), paths) == []
    assert near_misses(ParamGroup.from_predicate(len_is_one), paths) == []


def test_patterns_and_leaves_say_what_a_group_looks_for():
    group = (ParamGroup.from_name("b", "a") | ParamGroup.all()) - ParamGroup.from_regex("c")
    assert group.patterns() == ["a", "b", "c"]
    assert not group.needs_variables
    assert (group | ParamGroup.from_ids([NAMED["head.bias"]])).needs_variables
    assert [str(leaf) for leaf in group.leaves()] == [
        "from_name('a', 'b')",
        "all()",
        "from_regex('c')",
    ]


# Bad input, by its words.

_A = ParamGroup.from_name("a")
_WRONG = [
    (lambda: ParamGroup("encoder"), TypeError, r"got str 'encoder'.*from_name\('encoder'\)"),
    (lambda: ParamGroup(), TypeError, r"`ParamGroup\(\.\.\.\)`.*got no argument"),
    (lambda: ParamGroup.from_path(), ValueError, r"`ParamGroup.from_path.*an empty list"),
    (lambda: ParamGroup.from_path([]), ValueError, "would match nothing, or everything"),
    (lambda: ParamGroup.from_path("a", ""), ValueError, "`ParamGroup.from_path.*an empty text"),
    (lambda: ParamGroup.from_path(3), TypeError, "got int 3, expected a string"),
    (lambda: ParamGroup.from_name(), ValueError, r"`ParamGroup.from_name.*an empty list"),
    (lambda: ParamGroup.from_name("a..b"), ValueError, r"got 'a\.\.b'.*from_name\('a\.b'\)"),
    (lambda: ParamGroup.from_name("."), ValueError, r"has an empty word: got '\.'"),
    (lambda: ParamGroup.from_name(_A), TypeError, "an object of type ParamGroup, expected a str"),
    (lambda: ParamGroup.from_ids([]), ValueError, r"`ParamGroup.from_ids.*an empty list"),
    (lambda: ParamGroup.from_ids(NAMED), TypeError, "got str 'encoder.dense.kernel', expected a k"),
    (lambda: ParamGroup.from_ids(None), TypeError, "got None, expected a keras.Variable"),
    (lambda: ParamGroup.from_ids([np.ones(2)]), TypeError, "expected a keras.Variable or a tf.V"),
    (lambda: ParamGroup.from_layers(), ValueError, r"`ParamGroup.from_layers.*an empty list"),
    (lambda: ParamGroup.from_layers("enc"), TypeError, "got str 'enc', expected a Keras layer"),
    (lambda: ParamGroup.from_predicate(""), ValueError, "`ParamGroup.from_predicate.*empty text"),
    (lambda: ParamGroup.from_predicate(3), TypeError, "`ParamGroup.from_predicate.*got int 3"),
    (lambda: ParamGroup.from_predicate(lambda p: True), TypeError, r"<lambda>\(p\), expected fn\("),
    (
        lambda: ParamGroup.from_regex("a("),
        ValueError,
        r"got 'a\(', which has an error at position 1",
    ),
    (lambda: ParamGroup.from_rank(), ValueError, r"`ParamGroup.from_rank.*an empty list"),
    (lambda: ParamGroup.from_rank("1"), TypeError, "numbers of axes: got str '1', expected an int"),
    (lambda: ParamGroup.from_rank(True), TypeError, "got bool True, expected an int"),
    (lambda: ParamGroup.from_rank(-1), ValueError, r"negative rank: got -1.*from_rank\(0, 1\)"),
    (lambda: ParamGroup.from_regex(""), ValueError, "`ParamGroup.from_regex.*an empty text"),
    (lambda: ParamGroup.from_regex(re.compile("a")), TypeError, "`ParamGroup.from_regex.*a string"),
    (lambda: _A | "b", TypeError, r"`group \| other` needs a ParamGroup: got str 'b'.*'b'\)`"),
    (lambda: _A & None, TypeError, "`group & other` needs a ParamGroup: got None"),
    (lambda: _A - 3, TypeError, "`group - other` needs a ParamGroup: got int 3"),
    (lambda: _A.exclude("b"), TypeError, "`group - other` needs a ParamGroup: got str 'b'"),
    (
        lambda: _A or _A,
        TypeError,
        r"`bool\(group\)` has no answer.*Write `a & b`, `a \| b` or `~a`",
    ),
    (lambda: _A.matches(3), TypeError, "asks for the path first: got int 3"),
    (lambda: _A.select(3), TypeError, r"`group.select\(model\)` needs a model: got int 3"),
    (lambda: _A.select(keras.layers.Dense(1)), ValueError, "needs a built model: got 'dense"),
    (lambda: as_group("f(group)", "b"), TypeError, r"`f\(group\)` needs a ParamGroup: got str 'b'"),
]


@pytest.mark.parametrize(("call", "error", "text"), _WRONG)
def test_bad_input_is_refused_in_words(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    "group",
    [
        ParamGroup.from_ids([NAMED["head.bias"]]),
        ~ParamGroup.from_layers(keras.layers.Dense(1)),
        ParamGroup.all() - ParamGroup.from_predicate(len_is_one),
    ],
)
def test_objects_have_no_json_until_they_are_resolved(group):
    with pytest.raises(ValueError, match="can't write objects down: got from_.*in this process"):
        group.to_config()
    assert group.resolve(NAMED).to_config()


@pytest.mark.parametrize(
    "config",
    [
        {},
        None,
        {"from_name": "encoder"},
        {"from_name": []},
        {"from_ids": ["a"]},
        {"all": ["a"]},
        {"|": [{"all": []}]},
        {"~": [{"all": []}, {"all": []}]},
        {"-": [{"all": []}, "a"]},
        {"from_regex": ["a", "b"]},
        {"all": [], "from_name": ["a"]},
    ],
)
def test_a_record_of_something_else_is_refused(config):
    with pytest.raises(ValueError, match=r"`ParamGroup.from_config\(config\)` can't read the rec"):
        ParamGroup.from_config(config)

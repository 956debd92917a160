"""The routing table, as plain text and on a terminal."""

import code
import contextlib
import io
import sys

import keras
import pytest
import tensorflow as tf
from since import MUON, since

from tfloop import GradientClipping, ModuleOptimizer, ParamGroup


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self):
        return True


def a_net():
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(4, name="stem"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(2, name="head"),
        ]
    )


def an_optimizer():
    cosine = keras.optimizers.schedules.CosineDecay(0.05, 100)
    return (
        ModuleOptimizer(keras.optimizers.AdamW(1e-3, weight_decay=0.01))
        .with_group(ParamGroup.from_regex(r"gamma|beta|bias$"), keras.optimizers.Adam(2.5e-3))
        .with_group(
            ParamGroup.from_name("head") - ParamGroup.from_name("bias"),
            keras.optimizers.SGD(cosine),
            GradientClipping.by_global_norm(1.0),
        )
        .with_group(ParamGroup.from_name("stem"), None)
    )


EXPECTED = """\
path         shape   group                                  optimizer  clipping       rate                decay  frozen
-----------  ------  -------------------------------------  ---------  -------------  ------------------  -----  ------
stem.kernel  (8, 4)  from_name('stem')                      -          -              -                   -      frozen
stem.bias    (4,)    from_name('stem')                      -          -              -                   -      frozen
norm.gamma   (4,)    from_regex('gamma|beta|bias$')         Adam       -              0.0025              -
norm.beta    (4,)    from_regex('gamma|beta|bias$')         Adam       -              0.0025              -
head.kernel  (4, 2)  from_name('head') - from_name('bias')  SGD        global_norm 1  0.05 (CosineDecay)  -
head.bias    (2,)    from_regex('gamma|beta|bias$')         Adam       -              0.0025              -
"""  # noqa: E501


def test_the_summary_prints_the_table_and_gives_it_back(capsys):
    text = an_optimizer().summary(a_net())
    assert text + "\n" == EXPECTED
    assert capsys.readouterr().out == EXPECTED


def test_on_a_terminal_the_table_has_rules_and_its_text_isnt_markup(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    screen = Terminal()
    with contextlib.redirect_stdout(screen):
        text = (
            ModuleOptimizer("sgd")
            .with_group(ParamGroup.from_regex("[gk]ernel"), "adam")
            .summary({"kernel": tf.Variable([[1.0]]), "bias": tf.Variable([1.0])})
        )
    assert "from_regex('[gk]ernel')" in text
    assert "[gk]ernel" in screen.getvalue()
    assert "┃" in screen.getvalue()
    assert "┃" not in text


def test_the_table_follows_what_is_frozen_and_what_the_rate_is():
    net = a_net()
    given = keras.optimizers.AdamW(1e-3)
    optim = ModuleOptimizer(given)
    assert "frozen" not in optim.summary(net).replace("decay  frozen", "")
    net.get_layer("norm").trainable = False
    given.learning_rate = 0.25
    lines = {line.split()[0]: line.split() for line in optim.summary(net).splitlines()[2:]}
    assert lines["norm.gamma"] == ["norm.gamma", "(4,)", "all()", "AdamW", *"---", "frozen"]
    assert lines["head.kernel"][-2:] == ["0.25", "0.004"]
    assert "moving_mean" not in " ".join(lines)  # a statistic is no parameter


@since(MUON)
def test_the_decay_shown_is_the_one_that_reaches_the_variable():
    net = a_net()
    given = keras.optimizers.Muon(weight_decay=0.1, adam_weight_decay=0.02)
    given.exclude_from_weight_decay(var_names=["beta"])
    lines = ModuleOptimizer(given).summary(net).splitlines()[2:]
    decays = {line.split()[0]: line.split()[-1] for line in lines}
    assert decays["stem.kernel"] == "0.1"
    assert decays["stem.bias"] == "0.02"
    assert decays["norm.beta"] == "-"


def test_the_summary_works_in_a_trace_and_builds():
    net = a_net()
    optim = ModuleOptimizer("adam")
    texts = []
    tf.function(lambda: texts.append(optim.summary(net)))()
    assert texts == [optim.summary(net)]
    assert set(optim.state("head.kernel")) == {"momentums", "velocities"}


def test_a_scalar_and_a_tied_parameter_have_a_row_each():
    model = tf.Module()
    model.scale = tf.Variable(1.0)
    model.also = model.scale
    (row,) = ModuleOptimizer("sgd").summary(model).splitlines()[2:]
    assert row.split()[1:] == ["()", "all()", "SGD", "-", "0.01", "-"]


def test_the_summary_refuses_what_build_refuses():
    with pytest.raises(ValueError, match=r"`ModuleOptimizer.summary\(model\)` needs a built model"):
        ModuleOptimizer("sgd").summary(keras.layers.Dense(1))
    with pytest.raises(ValueError, match="matches nothing"):
        ModuleOptimizer("sgd").with_group(ParamGroup.from_name("x"), "adam").summary(a_net())
    with pytest.raises(TypeError, match="needs a model: got None"):
        ModuleOptimizer("sgd").summary(None)
    optim = ModuleOptimizer("sgd").build(a_net())
    with pytest.raises(ValueError, match="another model, expected"):
        optim.summary(a_net())


def test_a_prompt_shows_the_table_once(monkeypatch):
    net, optim = a_net(), an_optimizer()
    prompt = code.InteractiveInterpreter({"net": net, "optim": optim})
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # as Python and IPython do
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        prompt.runsource("optim.summary(net)")
        assert shown.getvalue() == EXPECTED
        prompt.runsource("table = optim.summary(net)")
        prompt.runsource("print(table)")
    assert shown.getvalue() == 2 * EXPECTED

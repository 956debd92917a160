"""Private of `keras.Variable`: the `tf.Variable` inside, and which one is a seed."""

import functools
from typing import Any

import keras
import tensorflow as tf

from tfloop._backend.versions import unsupported


def tf_variable(variable: Any) -> tf.Variable:
    """The `tf.Variable` behind a Keras variable, or the variable itself.

    Keras hands out a cast tensor as `.value` inside a call under mixed precision, and another
    value in a `StatelessScope`; `_value` is always the variable.
    """
    if not isinstance(variable, keras.Variable):
        return variable
    try:
        return variable._value
    except AttributeError:
        return vars(variable)[_place_of_value(variable)]


def is_variable(thing: object) -> bool:
    """Is it a Keras or a TensorFlow variable?"""
    return isinstance(thing, (keras.Variable, tf.Variable))


def replace_tf_variable(variable: keras.Variable, inner: tf.Variable) -> None:
    """Puts another `tf.Variable` behind a Keras variable."""
    name = "_value" if hasattr(variable, "_value") else _place_of_value(variable)
    setattr(variable, name, inner)


def around(inner: tf.Variable, name: str) -> keras.Variable:
    """A `keras.Variable` that shares a `tf.Variable`; Keras before 3.10 makes a copy of it."""
    variable = keras.Variable(inner, name=name, autocast=False)
    if tf_variable(variable) is not inner:
        replace_tf_variable(variable, inner)
    return variable


def is_seed(variable: tf.Variable) -> bool:
    """Is it the state of a Keras seed generator, a seed and how often it was drawn from?

    Known by the name that this Keras gives it. Call it eagerly.
    """
    return _last_name(variable) == _name_of_seeds() and variable.shape == (2,)


def _place_of_value(variable: keras.Variable) -> str:
    for name, value in vars(variable).items():
        if isinstance(value, tf.Variable):
            return name
    raise unsupported("_value", "keras.Variable", "the `tf.Variable` inside")


@functools.cache
def _name_of_seeds() -> str:
    # Named, so that no automatic name is used up.
    state = keras.random.SeedGenerator(seed=0, name="probe").state
    if tuple(state.shape) != (2,):
        raise unsupported("state", "keras.random.SeedGenerator", "a seed and a count of draws")
    return _last_name(tf_variable(state))


def _last_name(variable: tf.Variable) -> str:
    return variable.name.rpartition("/")[2].partition(":")[0]

"""What is known of the rules of Keras' optimizers, by their classes; a user's own is judged too."""

import keras
from keras.optimizers import Optimizer

from tfloop._backend import keras_optimizers
from tfloop._tracing import traces

_ROW_RULES = {
    kind.update_step
    for kind in keras_optimizers.kinds("SGD", "Adam", "Adamax", "Nadam", "Ftrl", "Lion", "Lamb")
}
_ELEMENTWISE = keras_optimizers.kinds(
    *("SGD", "Adam", "AdamW", "RMSprop", "Nadam", "Lion", "Adagrad", "Adamax", "Ftrl"),
    *("Adadelta", "ScheduleFreeAdamW"),
)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Does it treat each element alone, so that many variables can be updated as one vector?

    Not asked by `isinstance`: a subclass may do otherwise.
    """
    return type(optimizer) in _ELEMENTWISE


def takes_rows(optimizer: Optimizer) -> bool:
    """Is its rule right, also under XLA, for rows that occur once each?

    Those are that first mix the gradient with dense state. The others of Keras divide or add
    sparse tensors, in branches that XLA can't compile; a user's own is likely written for dense
    ones. They get the dense gradient. XLA takes half the time with a dense one where the rule moves
    all rows in any case.
    """
    if traces.is_for_xla() and moves_all_rows(optimizer):
        return False
    return type(optimizer).update_step in _ROW_RULES


def moves_all_rows(optimizer: Optimizer) -> bool:
    """Does it change rows that have no gradient, too, by their momentum?"""
    return not isinstance(optimizer, keras.optimizers.SGD) or bool(optimizer.momentum)


def applies_alone(optimizer: Optimizer) -> bool:
    """Does a subclass do the update by itself, in a way that must not be split up?"""
    by_itself = keras_optimizers.applies_by_itself(optimizer)
    return by_itself or keras_optimizers.updates_by_itself(optimizer)

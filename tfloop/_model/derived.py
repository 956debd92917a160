"""What layers compute from their variables when these are set, and keep as plain tensors.

Keras' protocol for it is `finalize_state`, as in `Normalization`, which normalises by tensors that
it makes of its variables. Whoever assigns variables of a model from outside has to ask for it.
"""

from tfloop._model.paths import AddressBook


def bring_up_to_date(book: AddressBook) -> None:
    """Computes it anew, inner layers first; call it eagerly, after variables were assigned.

    A layer without variables has learnt what it keeps in another way, and is left alone.
    """
    for layer in reversed([*book.layers.values()]):
        finalize = getattr(layer, "finalize_state", None)
        if callable(finalize) and layer.variables:
            finalize()

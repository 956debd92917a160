"""The seeds of a model's random layers: replicas begin with the same, and get different ones."""

import weakref
from collections.abc import Iterable
from typing import Any

from tfloop._backend.keras_variables import is_seed
from tfloop._model.paths import Variable, tf_variable
from tfloop._replicas.placement import replica_ids, strategy_of

# The states that differ already; by identity, as variables can't be hashed.
_DISTINCT: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_STRIDE = 1_000_003
"""Between the seeds of two replicas: further than seeds of a model's layers that were numbered by
hand lie from each other, so that no layer meets another's. A prime, so that no step divides it."""


def make_distinct(variables: Iterable[Variable], *, anew: bool = False) -> None:
    """Gives the random layers of each replica seeds of their own.

    Replicas begin with one seed, and would all drop the same units. The first one keeps it.

    Args:
      variables: Of a model; all but the states of Keras' seed generators are left alone.
      anew: The states were assigned since, the same on all replicas.
    """
    for variable in map(tf_variable, variables):
        strategy = strategy_of([variable])
        if strategy is None or strategy.num_replicas_in_sync == 1 or not is_seed(variable):
            continue
        if anew or _DISTINCT.get(id(variable)) is not variable:
            components = strategy.experimental_local_results(variable)
            for component, number in zip(components, replica_ids(strategy), strict=True):
                seed, drawn = component.numpy()
                # Keras draws its own seeds below 2^31.
                component.assign([(int(seed) + number * _STRIDE) % 2**31, drawn])
            _DISTINCT[id(variable)] = variable

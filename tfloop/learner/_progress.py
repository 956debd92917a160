"""`Progress`: what of an unfinished epoch is neither in the model nor in the data.

State for a `Checkpoint`; when an epoch begins and ends is the loop's to say.
"""

import json
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfloop._model.paths import tf_variable


class Progress(tf.train.experimental.PythonState):
    """The batches of an epoch that was begun, and what its metrics have seen of them.

    A metric that has no variables yet, or others, doesn't take over what was saved.

    Args:
      metrics: Those of the epoch. Between epochs they hold nothing of worth.

    Attributes:
      batches: How many were run; 0 between epochs.
    """

    def __init__(self, metrics: Sequence[keras.metrics.Metric]) -> None:
        self._metrics = metrics
        self.batches = 0

    def serialize(self) -> str:
        """The state as JSON."""
        seen = {
            metric.name: [tf_variable(variable).numpy().tolist() for variable in metric.variables]
            for metric in (self._metrics if self.batches else ())
        }
        return json.dumps({"batches": self.batches, "metrics": seen})

    def deserialize(self, string_value: str) -> None:
        """Takes over what `serialize` gave."""
        record = json.loads(string_value)
        self.batches = record["batches"]
        for metric in self._metrics:
            seen = record["metrics"].get(metric.name, ())
            if len(seen) == len(metric.variables):
                for variable, value in zip(metric.variables, seen, strict=True):
                    variable.assign(value)

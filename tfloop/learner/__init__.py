"""`Learner`: the loop itself, for those who want it written.

`_learner` is the loop, `_checks` what it is given, `_callbacks` what Keras' callbacks see,
`_progress` what of an unfinished epoch is neither in the model nor in the data.
"""

from tfloop.learner._learner import Learner

__all__ = ["Learner"]

"""What only some versions of Keras in the range have, and tests leave out with the others."""

import keras
import pytest

# Before, Muon keeps its state by names of variables, which two of them may share.
MUON = (3, 13)
SCHEDULE_FREE = (3, 14)
# Before, Keras' own line of progress fails at the end of an epoch without a batch.
EMPTY_EPOCHS = (3, 14)
RENORM = MULTI_OPTIMIZER = (3, 15)


def has(release: tuple[int, int]) -> bool:
    """Is this Keras of that release, or newer?"""
    return tuple(map(int, keras.__version__.split(".")[:2])) >= release


def since(release: tuple[int, int]) -> pytest.MarkDecorator:
    """Skips a test, or one of its parameters, with an older Keras."""
    return pytest.mark.skipif(not has(release), reason=f"Keras {release} has it, this has not")

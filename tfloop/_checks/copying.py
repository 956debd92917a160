"""What copies of our objects have in common; what state is, each says itself."""

import copy
from typing import TypeVar

T = TypeVar("T")


def with_attributes_of(original: T, twin: T, memo: dict) -> T:
    """Copies what a user or a subclass has set on the original beside ours."""
    for name in vars(original).keys() - vars(twin).keys():
        setattr(twin, name, copy.deepcopy(vars(original)[name], memo))
    return twin

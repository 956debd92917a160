"""Checks of plain arguments that several rooms share."""

import operator

from tfloop._checks.messages import described


def whole_number(call: str, name: str, value: object, *, least: int, fix: str) -> int:
    """`value` as an int of at least `least`, or the error that says how to write it.

    Args:
      call: The public call, as in `DataLoader(...)`.
      name: The argument's name.
      value: What was given. A bool isn't a number here; NumPy integers are.
      least: The smallest value that makes sense.
      fix: The argument as it could be written, `batch_size=64`.

    Raises:
      TypeError: `value` isn't an integer.
      ValueError: `value` is smaller than `least`.
    """
    expected = f"expected an int of at least {least}. Pass `{fix}`."
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"`{call}` takes no such `{name}`: got {described(value)}, {expected}")
    if number < least:
        raise ValueError(f"`{call}` takes no such `{name}`: got {number}, {expected}")
    return number

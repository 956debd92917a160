"""The routing table: who updates what, for people to read.

Formatting alone; `optimizer` owns the facts.
"""

import sys
from collections.abc import Sequence

import tensorflow as tf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfloop._checks.messages import table_text
from tfloop._model.paths import AddressBook
from tfloop._optimizer.routing import Group, was_parameter

_COLUMNS = ("path", "shape", "group", "optimizer", "clipping", "rate", "decay", "frozen")


class RoutingTable(str):
    """The table as text, which a prompt shows as it is."""

    __slots__ = ()
    __repr__ = str.__str__


def rows(book: AddressBook, owner: dict[str, int], groups: Sequence[Group]) -> list[list[str]]:
    """A row for each variable that is a parameter or could be."""
    trainable = book.parameters()
    return [
        _row(path, book, groups[owner[path]], path in trainable)
        for path in owner
        if path in trainable or was_parameter(book, path)
    ]


def _row(path: str, book: AddressBook, group: Group, trainable: bool) -> list[str]:
    shape = str(tuple(book.variables[path].shape))
    update = group.update
    if update is None or not trainable:
        kind = update.name if update else "-"
        return [path, shape, str(group.group), kind, "-", "-", "-", "frozen"]
    clipping = group.clipping.label if group.clipping else "-"
    rate = f"{float(tf.convert_to_tensor(update.own_rate())):.6g}"
    schedule = update.rate.schedule_name()
    decay = update.state.decay_of(path)
    return [
        path,
        shape,
        str(group.group),
        update.name,
        clipping,
        f"{rate} ({schedule})" if schedule else rate,
        f"{decay:g}" if decay else "-",
        "",
    ]


def show(table: list[list[str]]) -> RoutingTable:
    """Prints the table, with colours and rules on a terminal, and gives it back as plain text.

    At a prompt, as in a notebook, it is left to the prompt to show: twice is once too often.
    """
    text = RoutingTable(table_text(_COLUMNS, table))
    if hasattr(sys, "ps1"):  # set by whatever shows the value of what was typed
        return text
    if sys.stdout.isatty():
        rich = Table(*_COLUMNS)
        for row in table:
            # As text: the brackets of a regular expression aren't markup.
            rich.add_row(*map(Text, row), style="dim" if row[-1] else None)
        Console().print(rich)
    else:
        print(text)
    return text

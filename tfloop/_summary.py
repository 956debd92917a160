"""The routing table: who updates what, for people to read.

Formatting alone; `_optimizer` owns the facts.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfloop._paths import AddressBook, tf_variable

if TYPE_CHECKING:
    from tfloop._routing import Group

_COLUMNS = ("path", "shape", "group", "optimizer", "clipping", "rate", "decay", "frozen")


def rows(book: AddressBook, owner: dict[str, int], groups: Sequence["Group"]) -> list[list[str]]:
    """A row for each variable that is a parameter or could be."""
    trainable = book.parameters()
    return [
        _row(path, book, groups[owner[path]], path in trainable)
        for path in owner
        if path in trainable or _was_parameter(book, path)
    ]


def _was_parameter(book: AddressBook, path: str) -> bool:
    """Is it frozen now, but made to be trained (unlike BatchNorm's statistics)?"""
    return tf_variable(book.variables[path]).trainable


def _row(path: str, book: AddressBook, group: "Group", trainable: bool) -> list[str]:
    shape = str(tuple(book.variables[path].shape))
    update = group.update
    if update is None or not trainable:
        kind = update.name if update else "-"
        return [path, shape, str(group.group), kind, "-", "-", "-", "frozen"]
    clipping = f"{group.clipping.kind} {group.clipping.limit:g}" if group.clipping else "-"
    rate = f"{float(tf.convert_to_tensor(update.own_rate())):.6g}"
    schedule = update.schedule_name()
    decay = update.decay_of(path)
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


def show(table: list[list[str]]) -> str:
    """Prints the table, with colours and rules on a terminal, and gives it back as plain text."""
    text = plain(table)
    if sys.stdout.isatty():
        rich = Table(*_COLUMNS)
        for row in table:
            # As text: the brackets of a regular expression aren't markup.
            rich.add_row(*map(Text, row), style="dim" if row[-1] else None)
        Console().print(rich)
    else:
        print(text)
    return text


def plain(table: list[list[str]], columns: Sequence[str] = _COLUMNS) -> str:
    """Aligned columns under a ruled head."""
    lines = [list(columns), *table]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in text)


def ownership(book: AddressBook, owner: dict[str, int], groups: Sequence["Group"]) -> str:
    """Who owns what, a line for each group: for error messages."""
    table = []
    for index, group in enumerate(groups):
        paths = [path for path in owner if owner[path] == index and _was_parameter(book, path)]
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        served = ", ".join(paths[:3]) + more
        table.append([str(group), str(len(paths)), served or "nothing"])
    return plain(table, ("group", "variables", "paths"))

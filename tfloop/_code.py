"""What the code of a function reads and writes by name, nested functions included.

Found in its bytecode, since the source of a function isn't always at hand (notebooks, `exec`).
Nothing here runs the code, or knows what a name means.
"""

import dis
import functools
import types
from typing import NamedTuple


class Names(NamedTuple):
    """The names in a piece of code.

    Attributes:
      globals: Read from the module.
      attributes: Read from objects; texts, too, where `getattr` is called.
      written: Set on objects or in the module.
      imported: Modules that are imported inside.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    written: frozenset[str]
    imported: frozenset[str]


@functools.lru_cache(maxsize=8192)
def names_in(code: types.CodeType) -> Names:
    """The names in the code of a function, and in that of functions and classes made inside."""
    from_module, attributes, written, imported = set[str](), set[str](), set[str](), set[str]()
    for instruction in dis.get_instructions(code):
        operation, name = instruction.opname, instruction.argval
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            from_module.add(name)
        elif operation in ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"):
            written.add(name)
        elif operation == "IMPORT_NAME":
            imported.add(name)
        elif "ATTR" in operation or operation in ("LOAD_METHOD", "IMPORT_FROM"):
            attributes.add(name)
    if "getattr" in from_module or "attrgetter" in from_module | attributes:
        texts = (const for const in code.co_consts if isinstance(const, str))
        attributes |= {word for text in texts for word in text.split(".") if word.isidentifier()}
    found = Names(*map(frozenset, (from_module, attributes, written, imported)))
    inner = [names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return Names(*(first.union(*rest) for first, *rest in zip(found, *inner, strict=True)))

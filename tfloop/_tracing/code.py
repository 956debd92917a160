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
      attributes: Read from objects; texts, too, where `getattr` or `hasattr` is called.
      asked: These texts alone: names that an object may lack.
      own: Set on the first argument, which is the object of a method.
      written: Set on other objects or in the module, or led to a container that is changed there.
      imported: Modules that are imported inside.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    asked: frozenset[str]
    own: frozenset[str]
    written: frozenset[str]
    imported: frozenset[str]


_CHANGERS = {
    *("append", "extend", "insert", "remove", "pop", "clear", "add", "discard", "update"),
    *("popitem", "setdefault", "appendleft", "popleft"),
}


@functools.lru_cache(maxsize=8192)
def names_in(code: types.CodeType) -> Names:
    """The names in the code of a function, and in that of functions and classes made inside."""
    from_module, attributes, asked = set[str](), set[str](), set[str]()
    own, written, imported = set[str](), set[str](), set[str]()
    instructions = [*dis.get_instructions(code)]
    for number, instruction in enumerate(instructions):
        operation, name = instruction.opname, instruction.argval
        container = _changed_by(instruction, instructions[max(0, number - 3) : number])
        if container is not None:
            written.add(container)
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            from_module.add(name)
        elif operation == "STORE_ATTR" and _is_first(_written_on(instructions, number), code):
            own.add(name)
        elif operation in ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"):
            written.add(name)
        elif operation == "IMPORT_NAME":
            imported.add(name)
        elif "ATTR" in operation or operation in ("LOAD_METHOD", "IMPORT_FROM"):
            attributes.add(name)
    if not {"getattr", "hasattr", "attrgetter"}.isdisjoint(from_module | attributes):
        texts = (const for const in code.co_consts if isinstance(const, str))
        asked = {word for text in texts for word in text.split(".") if word.isidentifier()}
    read = from_module, attributes | asked, asked, own, written, imported
    found = Names(*map(frozenset, read))
    inside = [names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    # The first argument of a function inside is another one.
    inner = [names._replace(own=frozenset(), written=names.own | names.written) for names in inside]
    return Names(*(first.union(*rest) for first, *rest in zip(found, *inner, strict=True)))


def _changed_by(instruction: dis.Instruction, before: list[dis.Instruction]) -> str | None:
    """The name of the container that an instruction changes, where that is near before it."""
    back = 0
    if instruction.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):  # after the container and the key
        back = 2
    elif [i.opname for i in (*before[-1:], instruction)] == ["COPY", "COPY"]:
        back = 3  # of `container[key] += 1`
    elif "ATTR" in instruction.opname or instruction.opname == "LOAD_METHOD":
        back = 1 if instruction.argval in _CHANGERS else 0
    if not 0 < back <= len(before):
        return None
    load = before[-back]
    return load.argval if load.opname.startswith("LOAD") and isinstance(load.argval, str) else None


def _written_on(instructions: list[dis.Instruction], number: int) -> dis.Instruction:
    """What loads the object that an instruction sets an attribute of, where that is near."""
    if instructions[number - 1].opname != "SWAP":
        return instructions[number - 1]
    name = instructions[number].argval  # of `thing.name += value`: load, copy, read, add, set
    for back in range(number - 2, 1, -1):
        before = instructions[back - 1].opname
        if before == "COPY" and instructions[back].argval == name:
            return instructions[back - 2]
    return instructions[number - 1]


def _is_first(load: dis.Instruction, code: types.CodeType) -> bool:
    """Does an instruction load the first argument?"""
    is_local = load.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
    return is_local and code.co_argcount > 0 and load.argval == code.co_varnames[0]

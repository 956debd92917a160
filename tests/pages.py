"""Runs the Python blocks of a Markdown page and compares what they print.

As a script it runs one page in a process of its own: `python tests/pages.py docs/index.md`.
"""

import contextlib
import io
import pathlib
import re
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIME = re.compile(r"\b\d+[mu]?s(?:/\w+)?\b")
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


class Block(NamedTuple):
    """A program of a page, the number of lines above it, and what it has to print."""

    program: str
    above: int
    printed: str


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page. A block without a language shows what the one above prints."""
    found: list[Block] = []
    end = 0
    for fence in FENCE.finditer(text):
        language, body = fence.groups()
        if language == "python":
            found.append(Block(body, text.count("\n", 0, fence.start(2)), ""))
        elif language == "":
            assert found, body
            assert not text[end : fence.start()].strip(), f"what prints this?\n{body}"
            found[-1] = found[-1]._replace(printed=body)
        else:
            assert language in ("sh", "text", "json"), f"a block in {language}"
        end = fence.end()
    return found


def compare(printed: str, expected: str) -> None:
    """The same words, the same whole numbers, and floats that agree as far as they are written.

    Times, `1s` and `20ms/step`, are left out.
    """
    printed, expected = (TIME.sub("", text) for text in (printed, expected))
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", expected).split(), (
        f"printed:\n{printed}\nexpected:\n{expected}"
    )
    for got, want in zip(NUMBER.findall(printed), NUMBER.findall(expected), strict=True):
        mantissa, _, exponent = want.partition("e")
        decimals = len(mantissa.partition(".")[2])
        unit = 10.0 ** (int(exponent or 0) - decimals)
        exact = want.isdecimal()
        room = 0 if exact else 2 * unit + 0.05 * float(want)
        assert abs(float(got) - float(want)) <= room, f"{got} is not {want}"


def run(page: str, folder: pathlib.Path) -> int:
    """Runs a page, and gives the number of its blocks that were run.

    A page that doesn't import tfloop itself goes on from the `index.md` beside it.
    """
    path = ROOT / page
    namespace = {"__name__": f"page_{path.stem}"}
    if not re.search("^import tfloop$", path.read_text(encoding="utf-8"), re.MULTILINE):
        _execute(path.with_name("index.md"), folder, namespace)
    return _execute(path, folder, namespace)


def _execute(path: pathlib.Path, folder: pathlib.Path, namespace: dict) -> int:
    found = blocks(path.read_text(encoding="utf-8"))
    # A file that holds the blocks alone, on the lines that they have in the page: for tracebacks,
    # and for TensorFlow, which reads the source of what it traces.
    file = folder / f"{path.parent.name}_{path.stem}.py"
    lines: list[str] = []
    for block in found:
        lines += [""] * (block.above - len(lines)) + block.program.splitlines()
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for done, block in enumerate(found):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * block.above + block.program, str(file), "exec"), namespace)
        try:
            compare(printed.getvalue(), block.printed)
        except AssertionError as error:
            raise AssertionError(f"{path.name}, block {done + 1}: {error}") from error
    return len(found)


if __name__ == "__main__":
    print(run(sys.argv[1], pathlib.Path.cwd()))

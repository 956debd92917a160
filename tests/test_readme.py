"""What README.md says is run: its loop, its names, its commands."""

import contextlib
import importlib
import io
import pathlib
import re
import runpy

import pytest

import tfloop

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_loop_runs_and_prints_what_it_says(tmp_path):
    program, output = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.S).groups()
    (tmp_path / "loop.py").write_text(program)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(tmp_path / "loop.py"))
    lines = printed.getvalue().splitlines()
    assert len(lines) == len(output.splitlines()) == 3
    for line, expected in zip(lines, output.splitlines(), strict=True):
        numbers = [[float(n) for n in re.findall(r"\d\.\d+", text)] for text in (line, expected)]
        assert numbers[0] == pytest.approx(numbers[1], abs=0.02)
        assert re.sub(r"\d", "0", line) == re.sub(r"\d", "0", expected)


def test_every_noun_of_the_table_exists_where_it_says():
    for names, file in re.findall(r"^\| (`.*?) \| .* \| \[.*\]\((.*)\) \|$", README, re.M):
        assert (ROOT / file).is_file()
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        room = importlib.import_module(module)
        for name in re.findall(r"`(\w+)`", names):
            noun = getattr(tfloop, name)
            assert noun is getattr(room, name, room)


def test_every_link_leads_to_a_file():
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (ROOT / target).exists(), target

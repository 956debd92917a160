"""The table of `README.md` holds every port once, with the lines that it has."""

import pathlib
import re

import pytest
from side_by_side import lines

HERE = pathlib.Path(__file__).parent
PORTS = sorted(set(HERE.glob("test_*.py")) - {pathlib.Path(__file__)})
ROW = re.compile(r"^\| \[(\w+)\]\((\w+\.py)\) \|.*\| (\d+) \| (\d+) \|$", re.MULTILINE)
ROWS = {
    file: (int(plain), int(ours))
    for _, file, plain, ours in ROW.findall((HERE / "README.md").read_text(encoding="utf-8"))
}


def test_every_port_has_a_row():
    assert sorted(ROWS) == [file.name for file in PORTS]


@pytest.mark.parametrize("file", PORTS, ids=lambda file: file.stem)
def test_a_row_has_the_lines_of_the_port(file):
    assert ROWS[file.name] == lines(file)


def test_lines_are_those_of_code(tmp_path):
    file = tmp_path / "port.py"
    file.write_text(
        "def by_hand(world):\n    # Why.\n    x = 1\n\n    return x\n\n\n"
        "def with_tfloop(world):\n    return 1\n"
    )
    assert lines(file) == (2, 1)

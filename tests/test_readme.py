"""The names and links of README.md; its blocks are run by `test_docs`."""

import importlib
import pathlib
import re

import tfloop

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_noun_of_the_table_exists_where_it_says():
    for names, file in re.findall(r"^\| (`.*?) \| .* \| \[.*\]\((.*)\) \|$", README, re.M):
        assert (ROOT / file).is_file()
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        room = importlib.import_module(module)
        for name in re.findall(r"`(\w+)`", names):
            noun = getattr(tfloop, name)
            assert noun is getattr(room, name, room)


def test_every_public_name_is_in_the_table_once():
    rows = re.findall(r"^\| (`.*?) \| .* \| \[.*\]\(.*\) \|$", README, re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(tfloop.__all__)


def test_every_link_leads_to_a_file():
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (ROOT / target.partition("#")[0]).exists(), target

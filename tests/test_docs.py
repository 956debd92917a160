"""What the pages of docs/ and README.md show is run; every public name is in the reference once."""

import re

import keras
import pages
import pytest
from processes import run

import tfloop

PAGES = sorted(str(path.relative_to(pages.ROOT)) for path in pages.ROOT.glob("docs/**/*.md"))
# These change the process for good: its devices, its flags.
ALONE = {
    "docs/coming_from/gradient_tape.md",
    "docs/recipes/replicas.md",
    "docs/recipes/settings.md",
}


@pytest.fixture(autouse=True)
def policy_of_keras():
    yield
    keras.config.set_dtype_policy("float32")


def read(page: str) -> str:
    return (pages.ROOT / page).read_text(encoding="utf-8")


# Keras writes `.keras` files in a way that NumPy 2 finds old.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_every_block_runs_and_prints_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page in ALONE:
        child = run("-W", "error", pages.__file__, page, cwd=tmp_path)
        assert child.returncode == 0, child.stderr
        executed = int(child.stdout.split()[-1])
    else:
        executed = pages.run(page, tmp_path)
    assert executed == read(page).count("```python")


def test_the_guides_have_blocks_to_run():
    without = {page for page in PAGES if "```python" not in read(page)}
    assert without <= {"docs/api.md", "docs/benchmarks.md"}


def test_the_reference_has_every_public_name_exactly_once():
    names = re.findall(r"^::: tfloop\.([a-zA-Z]\w*)$", read("docs/api.md"), re.M)
    assert sorted(names) == sorted(tfloop.__all__)


def test_every_page_is_in_the_navigation_once():
    nav = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", read("mkdocs.yml"), re.M)
    assert sorted(f"docs/{page}" for page in nav) == PAGES


@pytest.mark.parametrize(
    ("printed", "expected"),
    [("a 1", "b 1"), ("1", "2"), ("0.50", "0.60"), ("1e-3", "1e-4"), ("", "1"), ("x", "")],
)
def test_a_page_that_says_something_else_fails(printed, expected):
    with pytest.raises(AssertionError):
        pages.compare(printed, expected)
    pages.compare("loss 0.51 after 3", "loss  0.50 after 3")

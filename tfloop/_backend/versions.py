"""Which TensorFlow and Keras this is written for, and what is said where there is another.

`tfloop._backend` checks them before any other room reads a name of theirs.
"""

import re
import sys
import warnings
from typing import Any

LOWEST = {"tensorflow": (2, 20), "keras": (3, 10)}
"""Where the range begins. With a Keras before 3.10 raw variables would never train, in silence."""

NEWEST_KERAS = (3, 15)
"""The newest that the whole suite was run with."""

TESTED = {
    "keras": "keras>=3.10,<3.16",
    "tensorflow": "tensorflow>=2.20,<2.24",
    "sonnet": "dm-sonnet==2.0.2",
    "tf_keras": "tf_keras>=2.20",
}
"""The versions that the tests run with, as pip takes them."""


def check(found: dict[str, str]) -> None:
    """Refuses versions below the range, and warns of a Keras that nobody has tested yet.

    Args:
      found: Library -> its version.

    Raises:
      ImportError: One is below the range.
    """
    versions = {name: _release(version) for name, version in found.items()}
    if any(versions[name] < lowest for name, lowest in LOWEST.items()):
        fix = " ".join(f"'{name}>={_text(lowest)}'" for name, lowest in LOWEST.items())
        raise ImportError(
            f"`import tfloop` got {_listed(found)}, expected at least "
            f"{_listed({name: _text(lowest) for name, lowest in LOWEST.items()})}: with older ones "
            f"some variables would not be trained, in silence. Run `pip install -U {fix}`."
        )
    if versions["keras"] > NEWEST_KERAS:
        warnings.warn(
            f"`import tfloop` got keras {found['keras']}, expected at most "
            f"{_text(NEWEST_KERAS)}, the newest it was tested with. It may hold all the same. If "
            f"not, report it, or run `pip install '{TESTED['keras']}'`.",
            stacklevel=2,
        )


def required(thing: Any, name: str, owner: str, meaning: str) -> Any:
    """A private attribute that we can't do without; its arguments are those of `unsupported`.

    Raises:
      RuntimeError: It isn't there.
    """
    try:
        return getattr(thing, name)
    except AttributeError:
        raise unsupported(name, owner, meaning) from None


def unsupported(name: str, owner: str, meaning: str) -> RuntimeError:
    """The error for a private name that isn't there.

    Args:
      name: The name.
      owner: What should have it, as a dotted path that begins with the library.
      meaning: What it is to us.
    """
    library = owner.partition(".")[0]
    version = getattr(sys.modules.get(library), "__version__", "of unknown version")
    return RuntimeError(
        f"tfloop needs `{name}` of `{owner}`: got {library} {version} without it, "
        f"expected {meaning}. It is private, and was renamed or removed. Report it, or install "
        f"what tfloop was tested with: `pip install '{TESTED[library]}'`."
    )


def _release(version: str) -> tuple[int, int]:
    """Major and minor, whatever follows: `2.23.0-dev20261026` is 2.23."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def _listed(versions: dict[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in versions.items())

"""What is said where a library isn't what tfloop was written for."""

import sys

TESTED = {
    "keras": "keras>=3.15.1,<3.16",
    "tensorflow": "tensorflow~=2.21",
    "sonnet": "dm-sonnet==2.0.2",
}
"""The versions that the tests run with, as pip takes them."""


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

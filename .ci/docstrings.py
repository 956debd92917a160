"""Makes the docstrings' own sections readable for mkdocstrings: `mkdocs.yml` names this file."""

import re
from typing import Any

import griffe

# A line such as `Graph mode: works, jitted too.`, and the indented lines after it.
_OWN = re.compile(
    r"^(Returns|Mutates|Graph mode|Replicas|References):(.*(?:\n[ ]+.*)*)", re.MULTILINE
)


class Sections(griffe.Extension):
    """Makes paragraphs of what Google's style doesn't know, or would split at a colon."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of everything that has one."""
        if obj.docstring:
            text = _OWN.sub(_paragraph, obj.docstring.value)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)


def _paragraph(section: re.Match) -> str:
    name, text = section.groups()
    return f"\n**{name}:** {' '.join(text.split())}\n"

"""Words that several error messages share: short lists, near misses, names of things.

Only formatting lives here. What is wrong, and how to mend it, is said next to each `raise`.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

_MOST_SHOWN = 5
_LONGEST = 60


def listed(names: Iterable[object]) -> str:
    """Quotes at most five names and counts the rest: `'a', 'b' and 3 more`."""
    quoted = [repr(name) for name in names]
    shown = ", ".join(quoted[:_MOST_SHOWN])
    hidden = len(quoted) - _MOST_SHOWN
    return f"{shown} and {hidden} more" if hidden > 0 else shown or "none"


def near_misses(wanted: str, known: Collection[str], most: int = 3) -> list[str]:
    """The known names that somebody who typed `wanted` may have meant, best first.

    Spelling is compared without case and punctuation, over the whole name and over its
    words, so that `layer_norm` finds `encoder.layernorm.gamma`.
    """

    def folded(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    target = folded(wanted)
    scores = {}
    for name in known:
        forms = [folded(name), *(folded(word) for word in name.split("."))]
        ratios = [difflib.SequenceMatcher(None, target, form).ratio() for form in forms]
        contains = 0.9 if target and target in folded(name) else 0.0
        scores[name] = max(*ratios, contains)
    close = sorted((name for name in scores if scores[name] >= 0.6), key=lambda n: -scores[n])
    return close[:most]


def did_you_mean(wanted: str, known: Collection[str]) -> str:
    """A sentence with the near misses, or an empty string where nothing is near."""
    close = near_misses(wanted, known)
    return f" Did you mean {listed(close)}?" if close else ""


def described(thing: object) -> str:
    """Names an object as its owner would: `'encoder' (Functional)`, `float 0.5`, `dict(g, d)`."""
    kind = type(thing).__name__
    if thing is None:
        return "None"
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    if isinstance(thing, dict):
        keys = [str(key) for key in thing]
        shown = ", ".join(keys[:_MOST_SHOWN])
        return f"dict({shown}, ...)" if len(keys) > _MOST_SHOWN else f"dict({shown})"
    if isinstance(thing, (bool, int, float, str)):
        text = repr(thing)
        half = _LONGEST // 2
        return f"{kind} {text if len(text) <= _LONGEST else f'{text[:half]}...{text[-half:]}'}"
    name = getattr(thing, "name", None)
    return f"{name!r} ({kind})" if isinstance(name, str) else f"an object of type {kind}"


def not_pickled(thing: object) -> TypeError:
    """The error for something whose state is written down by checkpoints alone."""
    name = type(thing).__name__
    return TypeError(
        f"`pickle.dumps(...)` can't write a {name} down: got state that belongs to this process, "
        "expected a checkpoint. Make the object there as here, and take its state along: "
        "`tfloop.Checkpoint(folder, part=thing).save(step)`, and `.restore()` there."
    )


def table_text(columns: Sequence[str], table: list[list[str]]) -> str:
    """Aligned columns under a ruled head."""
    lines = [list(columns), *table]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in text)

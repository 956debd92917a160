"""The files of checkpoints: written whole or not at all, read whole, counted and swept.

Knows directories and TensorFlow's checkpoint format, not what the values mean. A checkpoint
exists as soon as its index file has its final name, which is the last step of a write and one
rename; an older one ceases with its index file, the first step of its removal.
"""

import json
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfloop._checks.messages import listed

_FORMAT = 1
_NAME = re.compile(r"tfloop-(\d+)\.(index|data-.*)")
_DRAFT = ".tfloop-draft"
_RESTORE = "Checkpoint.restore()"
_DAMAGED = (tf.errors.OpError, RuntimeError, ValueError, LookupError)
_MSG_DAMAGED = (
    "`{call}` can't read {path!r}: got damaged files, expected those that `save` wrote ({error}). "
    "A copy was cut short, or the disk failed. {fix}."
)


def written(directory: str) -> list[str]:
    """The paths of the complete checkpoints of a directory, oldest first."""
    numbers = sorted(number for number, kind in _files(directory) if kind == "index")
    return [os.path.join(directory, f"tfloop-{number}") for number in numbers]


def number_of(path: str) -> int:
    """What a checkpoint is told by among those of its directory; -1 for another file's path."""
    match = _NAME.fullmatch(f"{os.path.basename(path)}.index")
    return int(match[1]) if match else -1


def write(
    directory: str, manifest: Mapping[str, Any], values: Mapping[str, Mapping[str, Any]]
) -> str:
    """Writes a checkpoint; on an error, or killed at any instant, nothing else changes.

    Args:
      directory: Made if it isn't there.
      manifest: What JSON can say.
      values: Name -> key -> `tf.Variable`, or what makes one. Variables are written from where
        they are.

    Returns:
      The new path.
    """
    sweep(directory)
    numbers = [number for number, _ in _files(directory)]
    name = f"tfloop-{max(numbers, default=0) + 1}"
    drafts = os.path.join(directory, _DRAFT)
    # TensorFlow writes a variable once, under the first place where it meets it.
    first: dict[int, list[str]] = {}
    places = {
        owner: {key: first.setdefault(id(value), [owner, key]) for key, value in group.items()}
        for owner, group in values.items()
    }
    table: dict[str, dict[str, tf.Variable]] = {}
    for owner, key in first.values():
        table.setdefault(owner, {})[key] = _as_variable(values[owner][key])
    text = json.dumps({"format": _FORMAT, "places": places, **manifest})
    tf.io.gfile.makedirs(drafts)
    try:
        checkpoint = tf.train.Checkpoint(manifest=tf.Variable(text), values=table)
        checkpoint.write(os.path.join(drafts, name))
        files = sorted(tf.io.gfile.listdir(drafts))  # the data files, then the index
        for file in files:
            _to_disk(os.path.join(drafts, file))
        for file in files:
            tf.io.gfile.rename(os.path.join(drafts, file), os.path.join(directory, file))
            _to_disk(directory)  # so that the index can't get there before the data
    finally:
        sweep(directory)
    return os.path.join(directory, name)


def keep(directory: str, most: int | None) -> None:
    """Removes the oldest checkpoints beyond `most`, and tells TensorFlow's tools of the rest."""
    paths = written(directory)
    kept = paths[-most:] if most is not None else paths
    names = [os.path.basename(path) for path in kept]
    # What `tf.train.latest_checkpoint` reads; relative, so that the directory can be moved.
    lines = [f'model_checkpoint_path: "{names[-1]}"']
    lines += [f'all_model_checkpoint_paths: "{name}"' for name in names]
    draft = os.path.join(directory, _DRAFT, "checkpoint")
    tf.io.gfile.makedirs(os.path.dirname(draft))
    with tf.io.gfile.GFile(draft, "w") as file:
        file.write("\n".join(lines))
    tf.io.gfile.rename(draft, os.path.join(directory, "checkpoint"), overwrite=True)
    for path in paths[: -len(kept)]:
        tf.io.gfile.remove(f"{path}.index")
    sweep(directory)


def sweep(directory: str) -> None:
    """Removes what killed saves have left: drafts, and data files without an index."""
    if tf.io.gfile.isdir(os.path.join(directory, _DRAFT)):
        tf.io.gfile.rmtree(os.path.join(directory, _DRAFT))
    found = _files(directory)
    for number, kind in found:
        if (number, "index") not in found:
            tf.io.gfile.remove(os.path.join(directory, f"tfloop-{number}.{kind}"))


def read(path: str) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
    """The manifest, and every value by name and key, read to the end before anything is used.

    Raises:
      FileNotFoundError: There is no checkpoint.
      ValueError: It is damaged, or of a newer format.
    """
    others = [other for other in written(os.path.dirname(path)) if other != path]
    if not tf.io.gfile.exists(f"{path}.index"):
        raise FileNotFoundError(
            f"`{_RESTORE}` found no checkpoint at {path!r}: expected the path that `save` gave, "
            f"without a suffix, such as {listed(reversed(others))}. It may have been removed as "
            "the oldest. Take the newest: `checkpoint.restore()`."
        )
    try:
        reader = tf.compat.v1.train.NewCheckpointReader(path)
        # The object graph too, whose bytes come last: a file cut short lacks them.
        stored = {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()}
        manifest = json.loads(stored.get(_stored_as("manifest"), "{}"))
        found = manifest.get("format")
        places = manifest.pop("places", {}) if found == _FORMAT else {}
        values = {
            owner: {key: stored[_stored_as("values", *place)] for key, place in group.items()}
            for owner, group in places.items()
        }
    except _DAMAGED as error:
        fix = f"Restore another: `checkpoint.restore(path)` with one of {listed(others)}"
        fix = fix if others else "There is no other. Begin again, in another folder"
        text = _MSG_DAMAGED.format(call=_RESTORE, path=path, error=error, fix=fix)
        raise ValueError(text) from error
    if found != _FORMAT:
        raise ValueError(
            f"`{_RESTORE}` got format {found} at {path!r}, expected {_FORMAT}. A newer tfloop, or "
            "not tfloop, wrote it. Upgrade: `pip install --upgrade tfloop-keras`."
        )
    return manifest, values


def _files(directory: str) -> set[tuple[int, str]]:
    """(number, suffix) of the files that make checkpoints."""
    names = tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []
    matches = (_NAME.fullmatch(name) for name in names)
    return {(int(match[1]), match[2]) for match in matches if match}


def _as_variable(value: Any) -> tf.Variable:
    """A variable, which is written from where it is, or a copy of what has a value."""
    if isinstance(value, tf.Variable):
        return value
    return tf.Variable(value.numpy() if hasattr(value, "numpy") else value)


def _stored_as(*names: str) -> str:
    """The key that `tf.train.Checkpoint` writes an attribute under."""
    escaped = (name.replace(".", "..").replace("/", ".S") for name in names)
    return "/".join([*escaped, ".ATTRIBUTES", "VARIABLE_VALUE"])


def _to_disk(path: str) -> None:
    """Makes a local file, or the names in a local directory, outlast a power cut."""
    if os.name == "posix" and os.path.exists(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

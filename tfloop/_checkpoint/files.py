"""The files of checkpoints: written whole or not at all, read whole, counted and swept.

Knows TensorFlow's checkpoint format, not what the values mean, nor who may write. A checkpoint
exists as soon as its index file has its final name, which is the last step of a write and one
rename; an older one ceases with its index file, the first step of its removal.
"""

import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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


class Snapshot(NamedTuple):
    """What a checkpoint will hold, as it was at one moment.

    Attributes:
      names: The keys in the file.
      tensors: Their values, in the memory of the host.
    """

    names: list[str]
    tensors: list[tf.Tensor]


def snapshot(manifest: Mapping[str, Any], values: Mapping[str, Mapping[str, Any]]) -> Snapshot:
    """Holds on to values as they are now.

    A variable in the memory of the host is not copied here: TensorFlow copies it at its next
    update, if it is still held then. One on another device is fetched.

    Args:
      manifest: What JSON can say.
      values: Name -> key -> `tf.Variable`, or what makes a tensor.
    """
    # What several objects share is written once, under the first place where it is met.
    first: dict[int, list[str]] = {}
    places = {
        owner: {key: first.setdefault(id(value), [owner, key]) for key, value in group.items()}
        for owner, group in values.items()
    }
    text = json.dumps({"format": _FORMAT, "places": places, **manifest})
    with tf.device("CPU:0"):
        return Snapshot(
            [_stored_as("manifest"), *(_stored_as("values", *place) for place in first.values())],
            [tf.constant(text), *(tf.identity(values[o][key]) for o, key in first.values())],
        )


def write(path: str, content: Snapshot, *, settled: bool) -> None:
    """Writes a checkpoint; on an error, or killed at any instant, nothing else changes.

    Args:
      path: As `Folder.next_path` gives it.
      content: What it holds.
      settled: Does it exist only once the disk has it? Else `settle` has to see to that.
    """
    directory, name = os.path.split(path)
    drafts = os.path.join(directory, _DRAFT)
    tf.io.gfile.makedirs(drafts)
    try:
        with tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=os.path.join(drafts, name),
                tensor_names=content.names,
                shape_and_slices=[""] * len(content.names),
                tensors=content.tensors,
            )
        files = sorted(tf.io.gfile.listdir(drafts))  # the data files, then the index
        for file in files if settled else ():
            _to_disk(os.path.join(drafts, file))
        for file in files:
            tf.io.gfile.rename(os.path.join(drafts, file), os.path.join(directory, file))
            if settled:
                _to_disk(directory)  # so that the index can't get there before the data
    finally:
        sweep(directory)


def settle(path: str) -> None:
    """Makes a checkpoint outlast a power cut."""
    directory, name = os.path.split(path)
    for number, kind in sorted(_files(directory), key=lambda file: file[1]):
        if name == f"tfloop-{number}":
            _to_disk(os.path.join(directory, f"{name}.{kind}"))
    _to_disk(directory)


def keep(directory: str, most: int | None, every: int | None = None) -> None:
    """Removes the oldest checkpoints beyond `most`, and tells TensorFlow's tools of the rest.

    Args:
      directory: Where they are.
      most: So many of the newest stay.
      every: The first one at or after each multiple of so many steps stays, too.
    """
    paths = written(directory)
    old = [] if most is None else paths[:-most]
    stay = _milestones(old, every) if every is not None else set()
    removed = [path for path in old if path not in stay]
    names = [os.path.basename(path) for path in paths if path not in removed]
    # What `tf.train.latest_checkpoint` reads; relative, so that the directory can be moved.
    lines = [f'model_checkpoint_path: "{names[-1]}"']
    lines += [f'all_model_checkpoint_paths: "{name}"' for name in names]
    draft = os.path.join(directory, _DRAFT, "checkpoint")
    tf.io.gfile.makedirs(os.path.dirname(draft))
    with tf.io.gfile.GFile(draft, "w") as file:
        file.write("\n".join(lines))
    tf.io.gfile.rename(draft, os.path.join(directory, "checkpoint"), overwrite=True)
    for path in removed:
        tf.io.gfile.remove(f"{path}.index")
    sweep(directory)


def _milestones(paths: Sequence[str], every: int) -> set[str]:
    """Those of checkpoints in their order that are the first ones past a multiple of `every`."""
    found, reached = set(), 0
    for path in paths:
        written_at = tf.io.gfile.stat(f"{path}.index").mtime_nsec
        multiple = _step_of(path, written_at) // every
        if multiple > reached:
            found.add(path)
            reached = multiple
    return found


@functools.lru_cache(1024)  # those that stay are asked again with each save
def _step_of(path: str, written_at: int) -> int:
    del written_at  # tells it from another at the same path
    reader = tf.train.load_checkpoint(path)
    return int(json.loads(reader.get_tensor(_stored_as("manifest")))["step"])


def sweep(directory: str) -> None:
    """Removes what killed saves have left: drafts, and data files without an index."""
    if tf.io.gfile.isdir(os.path.join(directory, _DRAFT)):
        tf.io.gfile.rmtree(os.path.join(directory, _DRAFT))
    found = _files(directory)
    for number, kind in found:
        if (number, "index") not in found:
            tf.io.gfile.remove(os.path.join(directory, f"tfloop-{number}.{kind}"))


def read(
    path: str, wanted: Callable[[str, str], bool] = lambda owner, key: True
) -> tuple[dict[str, Any], dict[str, dict[str, tf.Tensor]]]:
    """The manifest, and values by name and key, read to the end before anything is used.

    Args:
      path: Without suffix.
      wanted: `(name, key)` -> is this value to be read?

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
        kinds = reader.get_variable_to_dtype_map()
        text = _stored_as("manifest")
        manifest = json.loads(reader.get_tensor(text) if text in kinds else "{}")
        found = manifest.get("format")
        places = manifest.pop("places", {}) if found == _FORMAT else {}
        sources = {
            owner: {
                k: _stored_as("values", *place) for k, place in group.items() if wanted(owner, k)
            }
            for owner, group in places.items()
        }
        names = list(dict.fromkeys(name for group in sources.values() for name in group.values()))
        stored = dict(zip(names, _restored(path, names, kinds), strict=True))
        values = {
            owner: {key: stored[name] for key, name in group.items()}
            for owner, group in sources.items()
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


def next_number(directory: str) -> int:
    """What no file of the directory has yet."""
    return max((number for number, _ in _files(directory)), default=0) + 1


def _files(directory: str) -> set[tuple[int, str]]:
    """(number, suffix) of the files that make checkpoints."""
    names = tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []
    matches = (_NAME.fullmatch(name) for name in names)
    return {(int(match[1]), match[2]) for match in matches if match}


def _restored(path: str, names: list[str], kinds: Mapping[str, tf.DType]) -> list[tf.Tensor]:
    """All in one call, which reads large ones side by side; they stay where they were read to."""
    if not names:
        return []
    with tf.device("CPU:0"):
        return tf.raw_ops.RestoreV2(
            prefix=path,
            tensor_names=names,
            shape_and_slices=[""] * len(names),
            dtypes=[kinds[name] for name in names],
        )


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

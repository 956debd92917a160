"""The folder of a run: whether it may be used, its settings, its TensorBoard files."""

import contextlib
import os
import pathlib
from typing import Any

import tensorflow as tf

import tfloop
from tfloop.examples import _command

# What a run leaves, whichever example it is, as soon as it trains.
_TRACES = ("checkpoints", "train", "valid", "log.csv")
# What may change when a run goes on: how long, how fast, how loud and where. Whether the data are
# the same is seen by their number.
_FREE = {"num_epochs", "num_workers", "steps_per_execution", "jit_compile", "strategy", "dataset"}
_FREE |= {"data_dir", "workdir", "resume", "log_every"}


def check(workdir: str, config: tfloop.Config, *, resume: bool) -> pathlib.Path:
    """The folder, if it is free, or if its run is to go on with the settings that it had.

    Raises:
      UnusableInput: It holds a run, or one with other settings; nothing could draw its curves.
    """
    _command.need("matplotlib")
    folder = pathlib.Path(workdir).expanduser()
    if not resume and any((folder / name).exists() for name in _TRACES):
        raise _command.UnusableInput(
            f"--workdir={workdir} holds a run already. Go on with it by --resume, or name another "
            "folder."
        )
    file = folder / "config.json"
    if resume and file.exists():
        with _command.blaming("--resume"):
            earlier = _flat(type(config).load(file).model_dump())
        now = _flat(config.model_dump())
        changed = [name for name in now if now[name] != earlier[name] and name not in _FREE]
        if changed:
            got, expected = (
                ", ".join(f"{name}={values[name]!r}" for name in changed)
                for values in (now, earlier)
            )
            raise _command.UnusableInput(
                f"--resume can't be used: got {got}, expected {expected} as the run had it. Its "
                f"settings are a file: --config={file} --workdir={workdir} --resume."
            )
    return folder


def open_writers(folder: pathlib.Path, splits: Any, *, last_step: int) -> dict[str, Any]:
    """A TensorBoard writer a split; what was written after `last_step` will come once more."""
    for split in splits:
        for file in sorted((folder / split.lower()).glob("*")):
            _cut(file, last_step)
    return {split: tf.summary.create_file_writer(str(folder / split.lower())) for split in splits}


def _cut(file: pathlib.Path, last_step: int) -> None:
    """Leaves out the events after a step, and an end that a killed run hadn't written whole."""
    kept, is_whole = [], False
    with contextlib.suppress(tf.errors.DataLossError):
        for record in tf.data.TFRecordDataset(str(file)):
            kept.append(record.numpy())
        is_whole = True
    count = len(kept)
    kept = [one for one in kept if tf.compat.v1.Event.FromString(one).step <= last_step]
    if is_whole and len(kept) == count:
        return
    draft = file.with_name(f".{file.name}")
    with tf.io.TFRecordWriter(str(draft)) as writer:
        for one in kept:
            writer.write(one)
    os.replace(draft, file)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings under their flags' names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, dict)
        found |= _flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found

"""Finds handwritten digits: MNIST where it can be had quickly, scikit-learn's own otherwise."""

import contextlib
import io
import pathlib
import re
import tempfile
import threading
import urllib.request
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tensorflow as tf

from tfloop.examples._command import UnusableInput, need

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

# One of the files that TFDS downloads. Asked first, since TFDS retries for minutes.
_MNIST_FILE = "https://storage.googleapis.com/cvdf-datasets/mnist/t10k-labels-idx1-ubyte.gz"
_PATIENCE = 3.0


class Images(NamedTuple):
    """A split: images `[N, 28, 28]` uint8, labels `[N]` int64."""

    images: np.ndarray
    labels: np.ndarray


def load(dataset: str, data_dir: str | None) -> tuple[Images, Images]:
    """The training and the test split, as arrays in memory; says on stdout what was found.

    Args:
      dataset: `mnist`, `digits`, or `auto`: MNIST if it is prepared under `data_dir` or its
        host answers within seconds, else the digits.
      data_dir: Where TFDS keeps its data sets; None is TFDS' default.

    Raises:
      UnusableInput: The data set can't be read or had.
    """
    need("tensorflow_datasets", "importlib_resources", "sklearn")
    import tensorflow_datasets as tfds

    if dataset == "digits":
        return _digits()
    folder = pathlib.Path(data_dir or tfds.core.constants.DATA_DIR).expanduser()
    if folder.exists() and not folder.is_dir():
        raise UnusableInput(f"--data_dir={folder} is a file. Name the folder of TFDS' data sets.")
    try:
        builder = tfds.builder("mnist", data_dir=folder)
        is_there = builder.is_prepared() or pathlib.Path(builder.data_dir).exists()
        if is_there or _host_answers():
            return _mnist(builder)
    except Exception as error:  # TFDS, protobuf and TensorFlow each raise their own.
        raise UnusableInput(
            f"MNIST under --data_dir={folder} can't be read: {_cause(error)}. Remove "
            f"{folder / 'mnist'}, or choose --dataset digits."
        ) from error
    missing = f"MNIST isn't prepared under {folder} and its host doesn't answer"
    if dataset == "mnist":
        raise UnusableInput(f"{missing}. Choose --dataset digits, or another --data_dir.")
    print(f"{missing}: taking the bundled digits.", flush=True)
    return _digits()


def _mnist(builder: "tfds.core.DatasetBuilder") -> tuple[Images, Images]:
    if not builder.is_prepared():
        if pathlib.Path(builder.data_dir).exists():
            raise FileNotFoundError("its dataset_info.json is missing or empty")
        print(f"Downloading MNIST into {builder.data_dir}.", flush=True)
        _prepare(builder)
    splits = _read(builder, "train"), _read(builder, "test")
    print(f"Data: MNIST, from {builder.data_dir}.", flush=True)
    return splits


def _digits() -> tuple[Images, Images]:
    from tfloop.examples._digits import UciDigits

    with tempfile.TemporaryDirectory() as folder:
        builder = UciDigits(data_dir=folder)
        _prepare(builder)
        splits = _read(builder, "train"), _read(builder, "test")
    print("Data: scikit-learn's 1,797 UCI digits, enlarged from 8x8 to 28x28.", flush=True)
    return splits


def _prepare(builder: "tfds.core.DatasetBuilder") -> None:
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):  # TFDS tells its own story.
        builder.download_and_prepare()


def _read(builder: "tfds.core.DatasetBuilder", split: str) -> Images:
    whole = builder.as_dataset(split=split, batch_size=-1)
    return Images(tf.squeeze(whole["image"], axis=-1).numpy(), whole["label"].numpy())


def _host_answers() -> bool:
    """Whether a download would start: a name server alone can keep one waiting for long."""
    answers = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(_MNIST_FILE, method="HEAD")
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=_PATIENCE):
            answers.set()

    threading.Thread(target=ask, daemon=True).start()
    return answers.wait(_PATIENCE)


def _cause(error: Exception) -> str:
    """The first words of an error, without TensorFlow's node names."""
    noise = r"\{\{.*?\}\}|\[Op:.*|Failed to construct dataset .*?\": "
    text = re.sub(noise, "", str(error)).strip().rstrip(".")
    return text or type(error).__name__

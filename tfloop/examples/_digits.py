"""The digits that are always there: scikit-learn's copy of the UCI set, as a TFDS data set."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds


class UciDigits(tfds.core.GeneratorBasedBuilder):
    """1,797 handwritten digits of 8x8 pixels, enlarged to MNIST's 28x28.

    Every fifth image is for testing. The grey levels 0..16 become 0..255, the enlargement is
    bilinear: smooth digits without more detail than the originals had.
    """

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(shape=(28, 28, 1)),
            "label": tfds.features.ClassLabel(num_classes=10),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description=__doc__,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager  # The images come with scikit-learn.
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        images = tf.image.resize(images.reshape(-1, 8, 8, 1) * (255 / 16), (28, 28))
        images = np.asarray(tf.round(images), np.uint8)
        is_test = np.arange(len(labels)) % 5 == 4
        return {
            "train": self._generate_examples(images[~is_test], labels[~is_test]),
            "test": self._generate_examples(images[is_test], labels[is_test]),
        }

    def _generate_examples(
        self, images: np.ndarray, labels: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            yield index, {"image": image, "label": int(label)}

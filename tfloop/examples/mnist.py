"""Trains Burn's small convolutional network on handwritten digits, with an explicit loop.

    python -m tfloop.examples.mnist --lr 1e-3

Read it from top to bottom: settings, model, data, loop. Everything that a training loop does
stands in `train`; finding the data and printing are in the modules beside this one.
"""

from typing import Literal, NamedTuple

import keras
import tensorflow as tf
from pydantic import Field, ValidationInfo, field_validator

import tfloop
from tfloop.examples import _command, _images, _workdir
from tfloop.examples._report import Report

MEAN, STD = 0.1307, 0.3081  # Of MNIST's training pixels, in units of 255.


class ModelConfig(tfloop.Config):
    """The network of Burn's guide: 1,061,098 parameters at the defaults."""

    num_classes: int = Field(10, gt=0, description="Classes to tell apart.")
    hidden_size: int = Field(1024, gt=0, description="Units of the hidden layer.")
    dropout: float = Field(0.5, ge=0, lt=1, description="Share of activations to drop.")
    dtype: Literal["float32", "mixed_float16", "mixed_bfloat16"] = Field(
        "float32", description="Precision of the layers."
    )

    def init(self) -> keras.Model:
        """Builds the model: images `[B, 28, 28]` in, logits `[B, num_classes]` out."""
        layers, kind = keras.layers, {"dtype": self.dtype}
        return keras.Sequential(
            [
                keras.Input((28, 28)),
                layers.Reshape((28, 28, 1), **kind),
                layers.Conv2D(8, 3, name="conv1", **kind),
                layers.Dropout(self.dropout, **kind),
                layers.Conv2D(16, 3, name="conv2", **kind),
                layers.Dropout(self.dropout, **kind),
                layers.ReLU(**kind),
                # An adaptive average pool to 8x8. From 24x24 its windows are these, exactly;
                # Keras' AdaptiveAveragePooling2D gives the same numbers at 8 times the cost.
                layers.AveragePooling2D(3, **kind),
                layers.Flatten(**kind),
                layers.Dense(self.hidden_size, name="linear1", **kind),
                layers.Dropout(self.dropout, **kind),
                layers.ReLU(**kind),
                layers.Dense(self.num_classes, name="linear2"),  # Logits are float32 in any case.
            ]
        )


class TrainingConfig(tfloop.Config):
    """Every setting of a run; each is a flag, and `--config` reads them from a file."""

    num_epochs: int = Field(10, ge=0, description="Passes over the training images.")
    batch_size: int = Field(64, gt=0, lt=2**63, description="Images per step.")
    num_workers: int = Field(4, ge=0, le=1024, description="Batches prepared at the same time.")
    seed: int = Field(42, ge=0, lt=2**32, description="Of weights, dropout and order.")
    lr: float = Field(1e-4, ge=0, description="Learning rate.")
    accumulate: int = Field(1, gt=0, description="Batches behind each update.")
    steps_per_execution: int = Field(1, gt=0, description="Training steps per call of the graph.")
    jit_compile: bool = Field(False, description="Compile the steps with XLA.")
    strategy: str = Field("auto", description="Devices: auto, cpu, cpu:2, gpu, tpu, multi_worker.")
    dataset: Literal["auto", "mnist", "digits"] = Field(
        "auto", description="auto: MNIST if it is there or its host answers, else the digits."
    )
    data_dir: str | None = Field(None, description="Where TFDS keeps its data sets.")
    workdir: str | None = Field(
        None,
        description="Folder for config.json, checkpoints, TensorBoard scalars, curves.png (losses, "
        "accuracies) and confusion.png (which digits are taken for which).",
    )
    resume: bool = Field(False, description="Go on after the last whole epoch in --workdir.")
    log_every: int = Field(10, gt=0, description="Iterations between two lines.")
    model: ModelConfig = ModelConfig()
    optimizer: tfloop.AdamConfig = tfloop.AdamConfig()

    @field_validator("steps_per_execution")
    @classmethod
    def _has_no_window(cls, steps: int, settings: ValidationInfo) -> int:
        if steps > 1 and settings.data.get("accumulate", 1) > 1:
            raise ValueError("expected 1 beside accumulate > 1, whose updates are calls between")
        return steps


class Batch(NamedTuple):
    """Normalised images `[B, 28, 28]` and class numbers `[B]`."""

    images: tf.Tensor
    targets: tf.Tensor


def batcher(raw: _images.Images) -> Batch:
    """Makes a batch of what the data set holds."""
    images = tf.cast(raw.images, tf.float32) / 255
    return Batch((images - MEAN) / STD, raw.labels)


def cross_entropy(logits: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """The mean loss over a batch."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits))


def percent_correct(logits: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """The accuracy over a batch, in %."""
    hits = tf.argmax(logits, axis=-1, output_type=targets.dtype) == targets
    return 100 * tf.reduce_mean(tf.cast(hits, tf.float32))


def train(
    config: TrainingConfig,
    train_images: _images.Images,
    test_images: _images.Images,
    strategy: tf.distribute.Strategy | None = None,
) -> Report:
    """Runs the loop and returns what it reported."""
    strategy = strategy or tf.distribute.get_strategy()
    tfloop.seed(config.seed)
    with strategy.scope():  # On one device it changes nothing.
        net = config.model.init()
    model = tfloop.train(net)  # A view: `model(x)` runs in training mode.
    # float16 loses small gradients without a scale; the other precisions need none.
    scaler = tfloop.LossScaler() if config.model.dtype == "mixed_float16" else None
    optim = config.optimizer.init(scaler=scaler)
    groups = {"gradient_norm/all": tfloop.ParamGroup.all()}  # Of `optim`, by their curves.
    window = tfloop.GradientsAccumulator(reduction="mean")

    def loader(images: _images.Images) -> tfloop.DataLoader:
        return tfloop.DataLoader(
            images,
            batcher,
            batch_size=config.batch_size,
            shuffle=config.seed,
            num_workers=config.num_workers,
        )

    train_loader, test_loader = loader(train_images), loader(test_images)

    compiled = tfloop.compile(jit_compile=config.jit_compile, strategy=strategy)

    @compiled
    def train_step(batch: Batch, lr: float) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, dict]:
        with tfloop.Tape(scaler=optim.scaler) as tape:
            logits = model(batch.images)
            loss = cross_entropy(logits, batch.targets)
        grads = tape.backward(loss, model)  # By path, for the parameters of this model.
        mean = grads.reduce()  # Over the replicas, as `step` does; on one device a copy.
        scalars = {curve: mean.global_norm(group, model) for curve, group in groups.items()}
        samples = tf.shape(batch.targets)[0]
        if config.accumulate == 1:
            optim.step(lr, model, grads)
        else:
            window.accumulate(model, grads, weight=samples)
        accuracy = percent_correct(logits, batch.targets)
        return loss, accuracy, samples, scalars | {"learning_rate": lr}

    @compiled
    def update(lr: float) -> None:
        optim.step(lr, model, window)  # The mean over the samples of all its batches.

    @compiled
    def valid_step(batch: Batch) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        logits = model.valid()(batch.images)  # No dropout, and nothing recorded.
        loss = cross_entropy(logits, batch.targets)
        predicted = tf.argmax(logits, axis=-1)
        confusion = tf.math.confusion_matrix(batch.targets, predicted, config.model.num_classes)
        # The new axis: several replicas' matrices come back end to end.
        return loss, percent_correct(logits, batch.targets), confusion[tf.newaxis]

    lengths = {"Train": len(train_loader), "Valid": len(test_loader)}
    report = Report(config, lengths, workdir=config.workdir, log_every=config.log_every)
    checkpoint, done = None, 0
    if config.workdir is not None:
        folder = _workdir.check(config.workdir, config, resume=config.resume)
        objects = {"model": model, "optim": optim, "train": train_loader, "valid": test_loader}
        checkpoint = tfloop.Checkpoint(folder / "checkpoints", **objects, report=report)
        if config.resume:
            with _command.blaming("--resume"):
                done = checkpoint.restore() or 0  # The epochs behind it, or None.

    with report:
        for epoch in range(done + 1, config.num_epochs + 1):
            if config.steps_per_execution == 1:
                for iteration, batch in enumerate(train_loader):
                    report.iteration("Train", epoch, iteration, *train_step(batch, config.lr))
                    full = (iteration + 1) % config.accumulate == 0
                    if config.accumulate > 1 and (full or iteration + 1 == lengths["Train"]):
                        update(config.lr)
            else:
                batches = iter(train_loader)
                for first in range(0, lengths["Train"], config.steps_per_execution):
                    # What the steps return comes stacked, and shorter at the end.
                    several = train_step.run(batches, config.lr, steps=config.steps_per_execution)
                    report.iteration("Train", epoch, first, *several)
                next(batches, None)  # Its end, so that the checkpoint begins with the next epoch.
            for iteration, batch in enumerate(test_loader):
                loss, accuracy, confusion = valid_step(batch)
                report.iteration("Valid", epoch, iteration, loss, accuracy, len(batch.targets))
                report.confuse(confusion)
            report.epoch(epoch)
            if checkpoint is not None:
                checkpoint.save(epoch)
    return report


def main(config: TrainingConfig) -> None:
    """Finds the images and trains."""
    if config.resume and config.workdir is None:
        raise _command.UnusableInput("--resume needs the folder of the run: --workdir=FOLDER.")
    with _command.blaming("--strategy"):
        strategy = tfloop.strategy(config.strategy)  # Before TensorFlow is used.
    devices = {device.device_type for device in tf.config.list_logical_devices()}
    if config.jit_compile and devices == {"CPU"}:
        _command.warn("--jit_compile makes convolutions on a CPU many times slower.")
    train(config, *_images.load(config.dataset, config.data_dir), strategy)


tfloop.flags.define_config(TrainingConfig)

if __name__ == "__main__":
    _command.run(main)

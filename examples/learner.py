"""The run of tfloop/examples/mnist.py through `Learner`: the same numbers, without a loop.

Settings, model and data are those of that file, flags too. What its `train` writes out is here the
business of `Learner.fit`: steps, windows, validation, checkpoints. Keras' callbacks go with it.

    python examples/learner.py --dataset digits --lr 1e-3 --quick
"""

import keras
import tensorflow as tf
from absl import flags

import tfloop
from tfloop.examples import _command, _images, _workdir, mnist

_QUICK = flags.DEFINE_bool("quick", False, "Two epochs, to see that everything works.")


def loader(config: mnist.TrainingConfig, images: _images.Images) -> tfloop.DataLoader:
    """Batches `(images, labels)` in an order of their own for each epoch."""
    return tfloop.DataLoader(
        images,
        mnist.batcher,
        batch_size=config.batch_size,
        shuffle=config.seed,
        num_workers=config.num_workers,
    )


def train(
    config: mnist.TrainingConfig,
    train_images: _images.Images,
    test_images: _images.Images,
    strategy: tf.distribute.Strategy | None = None,
) -> keras.callbacks.History:
    """Builds everything as `mnist.train` does, and fits."""
    strategy = strategy or tf.distribute.get_strategy()
    tfloop.seed(config.seed)
    with strategy.scope():  # On one device it changes nothing.
        model = config.model.init()
        accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    learner = tfloop.Learner(
        model,
        config.optimizer.init(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        lr=config.lr,
        metrics=[accuracy],
        accumulate=config.accumulate,
        strategy=strategy,
    )
    callbacks, checkpoint = [], None
    if config.workdir is not None:
        folder = _workdir.check(config.workdir, config, resume=config.resume)
        config.save(folder / "config.json")
        log = keras.callbacks.CSVLogger(str(folder / "log.csv"), append=config.resume)
        callbacks.append(log)
        checkpoint = folder / "checkpoints"
    return learner.fit(
        loader(config, train_images),
        loader(config, test_images),
        epochs=config.num_epochs,
        callbacks=callbacks,
        checkpoint=checkpoint,
        resume=config.resume,
    )


def main(config: mnist.TrainingConfig) -> None:
    """Finds the images, trains, and prints how well the last epoch went."""
    if config.jit_compile:
        raise _command.UnusableInput(
            "--jit_compile needs a loop: `tfloop.compile(jit_compile=...)`"
        )
    if _QUICK.value:
        config = config.replace(num_epochs=2)
    with _command.blaming("--strategy"):
        strategy = tfloop.strategy(config.strategy)  # Before TensorFlow is used.
    history = train(config, *_images.load(config.dataset, config.data_dir), strategy).history
    if history:
        loss, accuracy = history["val_loss"][-1], history["val_accuracy"][-1]
        print(f"Test loss {loss:.3f}, accuracy {100 * accuracy:.2f} %")


if __name__ == "__main__":
    _command.run(main)

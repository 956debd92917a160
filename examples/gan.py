"""Train a GAN: two networks in one root, one optimizer, two groups that take turns.

The root is a dict of two networks. One `ModuleOptimizer` serves both, with a group for each, so
each has its own Adam, whose steps count only its own turns. In a turn the gradients of one
network alone are taken and stepped; the other one stays untouched, its Adam's state included.

The generator learns 8 x 8 handwritten digits. It prints the Fréchet distance between its samples
and real digits it has never seen, before and after training, beside that of real digits; and a few
samples.

    python examples/gan.py --quick
"""

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import tfloop

_EPOCHS = flags.DEFINE_integer("epochs", 300, "Passes over the training digits.", lower_bound=1)
_LR = flags.DEFINE_float("lr", 1e-3, "Rate of both networks.", lower_bound=0.0)
_QUICK = flags.DEFINE_bool("quick", False, "A few epochs, to see that everything works.")

_NOISE = 32  # numbers that a sample is made from


def build_generator() -> keras.Model:
    """Noise `[B, 32]` in, images `[B, 64]` in [0, 1] out."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((_NOISE,)),
            layers.Dense(128, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Dense(128, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Dense(64, "sigmoid"),
        ]
    )


def build_discriminator() -> keras.Model:
    """Images `[B, 64]` in, logits `[B, 1]` out: above 0 where it takes them for real."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(128),
            layers.LeakyReLU(0.2),
            layers.Dropout(0.3),
            layers.Dense(128),
            layers.LeakyReLU(0.2),
            layers.Dropout(0.3),
            layers.Dense(1),
        ]
    )


def adam() -> keras.optimizers.Optimizer:
    """Adam with the short memory that GANs need: the other network keeps changing."""
    return keras.optimizers.Adam(beta_1=0.5)


def make_step(networks: dict[str, keras.Model]):
    """One turn of the discriminator, then one of the generator."""
    model = tfloop.train(networks)  # a dict of views
    generator, discriminator = model["generator"], model["discriminator"]

    in_generator = tfloop.ParamGroup.from_name("generator")
    in_discriminator = tfloop.ParamGroup.from_name("discriminator")
    optim = tfloop.ModuleOptimizer(adam())
    optim.with_group(in_generator, adam()).with_group(in_discriminator, adam())

    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    @tfloop.compile
    def step(real, lr):
        noise = tf.random.normal((2, tf.shape(real)[0], _NOISE))

        fake = generator(noise[0])  # before the tape: the generator isn't to learn from this
        with tfloop.Tape() as tape:
            of_real, of_fake = discriminator(real), discriminator(fake)
            # 0.9 and not 1: a discriminator that is too sure gives no slope to climb.
            loss = cross_entropy(0.9 * tf.ones_like(of_real), of_real)
            loss += cross_entropy(tf.zeros_like(of_fake), of_fake)
        grads = tape.backward(loss)
        grads = tfloop.GradientsParams.from_grads(grads, model, in_discriminator)
        optim.step(lr, model, grads)

        with tfloop.Tape() as tape:
            of_fake = discriminator(generator(noise[1]))
            loss = cross_entropy(tf.ones_like(of_fake), of_fake)
        # The tape saw both networks; only the generator's share is taken.
        grads = tape.backward(loss)
        grads = tfloop.GradientsParams.from_grads(grads, model, in_generator)
        optim.step(lr, model, grads)

    return step


def frechet_distance(images: np.ndarray, others: np.ndarray) -> float:
    """Between the normal distributions of two sets of images `[N, 64]`; 0 for equal ones.

    |m1 - m2|^2 + trace(C1 + C2 - 2 (C1 C2)^(1/2)), of the means and the covariances.
    """
    means = images.mean(axis=0) - others.mean(axis=0)
    first, second = np.cov(images, rowvar=False), np.cov(others, rowvar=False)
    roots = np.sqrt(np.linalg.eigvals(first @ second).real.clip(min=0.0))
    return float(means @ means + np.trace(first) + np.trace(second) - 2.0 * roots.sum())


def draw(images: np.ndarray) -> None:
    """Prints images side by side, a character for a pixel."""
    shades = np.array(list(" .:-=+*#%@"))[np.int32(9.99 * images.reshape(-1, 8, 8))]
    for row in range(8):
        print("   ".join("".join(image[row]) for image in shades))


def main(_: list[str]) -> None:
    """Trains, and compares samples with real digits."""
    tfloop.seed(0)
    epochs = 30 if _QUICK.value else _EPOCHS.value

    images = (load_digits().data / 16.0).astype("float32")
    images = np.random.permutation(images)
    seen, unseen = images[:900], images[900:]
    data = tfloop.DataLoader(seen, batch_size=64, shuffle=0, drop_last=True)

    networks = {"generator": build_generator(), "discriminator": build_discriminator()}
    noise = tf.random.normal((len(unseen), _NOISE))
    before = tfloop.valid(networks["generator"])(noise).numpy()

    step = make_step(networks)
    for real in (batch for _ in range(epochs) for batch in data):
        step(real, _LR.value)

    after = tfloop.valid(networks["generator"])(noise).numpy()
    draw(after[:8])
    print(f"Distance to unseen digits, {epochs} epochs:")
    for name, samples in ("before training", before), ("after training", after), ("real", seen):
        print(f"  {name:<15}  {frechet_distance(samples, unseen):6.3f}")


if __name__ == "__main__":
    app.run(main)

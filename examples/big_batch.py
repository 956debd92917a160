"""Train as with a large batch where only small ones fit into memory.

Three ways to the same update, from the same weights, over the same rows:

* the whole batch at once;
* `GradientsAccumulator`: micro-batches arrive one by one, each in a call of its own, and the
  optimizer takes the window when it is full;
* `tfloop.microbatch`: the batch is there as a whole and is cut inside the compiled step.

The micro-batches have unequal sizes, so each is weighed by its rows. It prints the losses side by
side, and the largest difference of a parameter from those of the whole batch; and, as the last of
each, what comes out when all micro-batches weigh the same.

    python examples/big_batch.py --quick
"""

import keras
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import tfloop

_UPDATES = flags.DEFINE_integer("updates", 50, "Updates of the weights.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 256, "Rows behind an update.", 1, 1797)
_ROWS = flags.DEFINE_integer("rows", 60, "Rows that fit into memory at once.", lower_bound=1)
_LR = flags.DEFINE_float("lr", 1e-3, "Learning rate.", lower_bound=0.0)
_QUICK = flags.DEFINE_bool("quick", False, "A few updates, to see that everything works.")


def build_model() -> keras.Model:
    """64 pixels in, logits for ten classes out.

    LayerNormalization sees one row at a time. BatchNormalization would see each micro-batch by
    itself, so its numbers are those of the small batch, whatever is done to the gradients.
    """
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(128, "relu"),
            layers.LayerNormalization(),
            layers.Dense(128, "relu"),
            layers.Dense(10),
        ]
    )


def gradients(model, batch) -> tuple[tfloop.GradientsParams, tf.Tensor]:
    """Of the mean loss over a batch, whatever its size; and the loss of each row."""
    pixels, labels = batch
    with tfloop.Tape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(pixels))
        loss = tf.reduce_mean(losses)
    return tape.backward(loss, model), losses


def make_whole(model):
    """An update from the whole batch."""
    optim = tfloop.ModuleOptimizer(keras.optimizers.AdamW())

    @tfloop.compile
    def step(batch, lr):
        grads, losses = gradients(model, batch)
        optim.step(lr, model, grads)
        return tf.reduce_mean(losses)

    return step


def make_microbatch(model):
    """An update from a batch that is cut inside the step; the pieces are weighed by their rows."""
    optim = tfloop.ModuleOptimizer(keras.optimizers.AdamW())
    pieces = -(-_BATCH.value // _ROWS.value)

    @tfloop.compile
    def step(batch, lr):
        grads, losses = tfloop.microbatch(lambda part: gradients(model, part), batch, num=pieces)
        optim.step(lr, model, grads)
        return tf.reduce_mean(losses)

    return step


def make_accumulated(model, weigh: bool = True):
    """An update from micro-batches that come one by one, as from a loader or from a device."""
    optim = tfloop.ModuleOptimizer(keras.optimizers.AdamW())
    window = tfloop.GradientsAccumulator(reduction="mean")

    @tfloop.compile
    def micro_step(batch):
        grads, losses = gradients(model, batch)
        window.accumulate(model, grads, weight=tf.size(losses) if weigh else 1.0)
        return losses

    @tfloop.compile
    def update(lr):
        optim.step(lr, model, window)  # AdamW counts this as one step, decays once

    def step(batch, lr):
        micro_batches = tfloop.DataLoader(batch, batch_size=_ROWS.value)  # the last one is short
        losses = [micro_step(micro_batch) for micro_batch in micro_batches]
        update(lr)
        return tf.reduce_mean(tf.concat(losses, axis=0))

    return step


def largest_difference(model, other) -> float:
    """Of any element of any parameter."""
    others = tfloop.named_parameters(other)
    return max(
        float(tf.reduce_max(tf.abs(variable - others[path])))
        for path, variable in tfloop.named_parameters(model).items()
    )


def main(_: list[str]) -> None:
    """Trains in each way, and compares."""
    tfloop.seed(0)
    updates = 10 if _QUICK.value else _UPDATES.value
    digits = load_digits()
    data = (digits.data / 16.0).astype("float32"), digits.target.astype("int32")
    loader = tfloop.DataLoader(data, batch_size=_BATCH.value, shuffle=0, drop_last=True)
    batches = [batch for _ in range(1 + updates // len(loader)) for batch in loader][:updates]

    ways = {
        "whole batch": make_whole,
        "accumulated": make_accumulated,
        "microbatch": make_microbatch,
        "unweighted": lambda model: make_accumulated(model, weigh=False),
    }
    models = {name: tfloop.train(build_model()) for name in ways}
    for model in models.values():
        tfloop.blend(model, models["whole batch"])  # all begin with the same weights

    steps = {name: make(models[name]) for name, make in ways.items()}
    print(f"Losses of {_BATCH.value} rows, of which {_ROWS.value} at once:")
    print("  update  " + "  ".join(f"{name:>11}" for name in steps))
    for number, batch in enumerate(batches, start=1):
        losses = [step(batch, _LR.value) for step in steps.values()]
        if number == 1 or number % (updates // 5 or 1) == 0:
            print(f"  {number:6}  " + "  ".join(f"{float(loss):11.7f}" for loss in losses))

    print("Largest difference of a parameter from those of the whole batch:")
    for name in list(ways)[1:]:
        difference = largest_difference(models[name], models["whole batch"])
        print(f"  {name:<11}  {difference:.1e}")


if __name__ == "__main__":
    app.run(main)

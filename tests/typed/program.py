# pyright: strict, reportUnnecessaryTypeIgnoreComment=error
"""What a type checker knows of a program: `assert_type` is held by mypy, Pyright and a run.

Keras and TensorFlow have no types of their own, so that theirs are `Any` or unknown to a checker.
"""

from collections.abc import Iterator
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import tensorflow as tf  # type: ignore[import-untyped, unused-ignore]

import tfloop
from tfloop import GradientsParams, ModuleOptimizer

Rows = npt.NDArray[np.float32]


class Linear(tf.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(tf.ones((3, 1)))

    def __call__(self, x: Any) -> Any:
        return x @ self.w


model = Linear()
view = tfloop.train(model)
assert_type(view.module, Linear)
assert_type(view.valid().module, Linear)
assert_type(tfloop.valid(model).train().module, Linear)
assert_type(tfloop.train({"a": model})["a"].module, Linear)
assert_type(tfloop.valid([model])[0].module, Linear)
optim = ModuleOptimizer("sgd")


@tfloop.compile
def step(batch: Rows, lr: float) -> dict[str, tf.Tensor]:
    with tfloop.Tape() as tape:
        loss = tf.reduce_mean(view(batch) ** 2)
    grads = GradientsParams.from_grads(tape.backward(loss), model)
    optim.step(lr, model, grads)
    return {"loss": loss}


@tfloop.compile(jit_compile=True)
def valid_step(batch: Rows) -> tuple[tf.Tensor, int]:
    return tf.reduce_mean(tfloop.valid(model)(batch)), 1


class Trainer:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    @tfloop.compile
    def step(self, batch: Rows) -> tf.Tensor:
        return tf.reduce_mean(batch) * self.scale


def of_piece(piece: Rows) -> tuple[GradientsParams, list[tf.Tensor]]:
    with tfloop.Tape() as tape:
        loss = tf.reduce_mean(view(piece) ** 2)
    return GradientsParams.from_grads(tape.backward(loss), model), [loss]


def batches() -> Iterator[Rows]:
    yield from np.ones((4, 2, 3), np.float32)


rows = np.ones((2, 3), np.float32)
assert_type(step(rows, 0.1), dict[str, tf.Tensor])
assert_type(step(batch=rows, lr=0.1), dict[str, tf.Tensor])
assert_type(step.run(batches(), 0.1, steps=2), dict[str, tf.Tensor])
assert_type(step.trace_count, int)
assert_type(valid_step(rows), tuple[tf.Tensor, int])
assert_type(Trainer(2.0).step(rows), tf.Tensor)
assert_type(Trainer(2.0).step.run(batches(), steps=2), tf.Tensor)
grads, losses = tfloop.microbatch(of_piece, rows, num=2)
assert_type(grads, GradientsParams)
assert_type(losses, list[tf.Tensor])

# Each of these lines is an error to a checker: an ignored one that is none would be an error.
if not __debug__:
    step(rows)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    step("rows", 0.1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Trainer(2.0).step(rows, 1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    step.run(iter("ab"), 0.1, steps=2)  # type: ignore[arg-type, unused-ignore]  # pyright: ignore[reportArgumentType]

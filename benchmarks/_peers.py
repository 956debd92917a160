"""The dense network of W2 in PyTorch and JAX, in a process of its own.

    python benchmarks/_peers.py torch|jax|jax_scan FILE.npz

Needs NumPy and that library alone. FILE holds the weights w0, b0, w1, ... and the batches x, y. It
prints "ready", or why it can't be; then it trains on all batches for each line that it reads, and
prints the losses as JSON.
"""

import json
import sys

import numpy as np

RATE, EPSILON = 1e-3, 1e-7  # Keras' epsilon; theirs is 1e-8.
STEPS_A_CALL = 50


def torch_eager(layers, x, y):
    """The usual loop, with the fused Adam."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)  # Operations this small only wait for a second one.
    parameters = [[torch.tensor(a, requires_grad=True) for a in layer] for layer in layers]
    optimizer = torch.optim.Adam(sum(parameters, []), lr=RATE, eps=EPSILON, fused=True)
    batches = list(zip(torch.tensor(x), torch.tensor(y).long(), strict=True))

    def step(x, y):
        for n, (w, b) in enumerate(parameters):
            x = (functional.relu(x) if n else x) @ w + b
        loss = functional.cross_entropy(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return lambda: torch.stack([step(*batch) for batch in batches]).tolist()


def jax_step(layers):
    """The step of JAX and optax, and the state it begins with."""
    import jax
    import optax

    optimizer = optax.adam(RATE, eps=EPSILON)

    def loss_of(layers, x, y):
        for n, (w, b) in enumerate(layers):
            x = (jax.nn.relu(x) if n else x) @ w + b
        return optax.softmax_cross_entropy_with_integer_labels(x, y).mean()

    def step(state, batch):
        layers, slots = state
        loss, grads = jax.value_and_grad(loss_of)(layers, *batch)
        updates, slots = optimizer.update(grads, slots)
        return (optax.apply_updates(layers, updates), slots), loss

    layers = jax.tree.map(jax.numpy.asarray, layers)
    return step, (layers, optimizer.init(layers))


def jax_jit(layers, x, y):
    """One jitted step a call."""
    import jax

    step, state = jax_step(layers)
    step = jax.jit(step, donate_argnums=0)
    batches = list(zip(map(jax.numpy.asarray, x), map(jax.numpy.asarray, y), strict=True))

    def run():
        nonlocal state
        losses = []
        for batch in batches:
            state, loss = step(state, batch)
            losses.append(loss)
        return [float(loss) for loss in losses]

    return run


def jax_scan(layers, x, y):
    """Many steps a call."""
    import jax

    step, state = jax_step(layers)
    scan = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches), donate_argnums=0)
    cuts = range(0, len(x), STEPS_A_CALL)
    calls = [tuple(jax.numpy.asarray(a[cut : cut + STEPS_A_CALL]) for a in (x, y)) for cut in cuts]

    def run():
        nonlocal state
        losses = []
        for batches in calls:
            state, found = scan(state, batches)
            losses.append(found)
        return np.concatenate(losses).tolist()

    return run


LOOPS = {"torch": torch_eager, "jax": jax_jit, "jax_scan": jax_scan}


def main(name: str, path: str) -> None:
    """Sets up, then runs on demand."""
    with np.load(path) as given:
        arrays = dict(given)
    x, y = arrays.pop("x"), arrays.pop("y")
    layers = [[arrays[f"w{n}"], arrays[f"b{n}"]] for n in range(len(arrays) // 2)]
    try:
        run = LOOPS[name](layers, x, y)
    except ModuleNotFoundError as error:
        sys.exit(print(f"{error.name} isn't installed"))
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(run()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Two ways to write one training step: the plain loop, and the one with tfloop.

A program (see `programs.py`) is given one of these kits and writes its step once with it. `PLAIN`
is the reference: `tf.GradientTape` and one Keras optimizer per variable, nothing of ours but the
paths that name variables. What a kit makes is opaque to a program; `slots` reads it.
"""

import functools

import keras
import tensorflow as tf

import tfloop


def tensor(variable):
    return variable._value if isinstance(variable, keras.Variable) else variable


def copied(optimizer):
    """A Keras optimizer like it, unbuilt."""
    own = type(optimizer).from_config(optimizer.get_config())
    own.global_clipnorm = None  # It is kept by the kit, which sees all gradients.
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(optimizer, name):  # The config doesn't have them.
            setattr(own, name, getattr(optimizer, name))
    return own


class PlainOptimizer:
    """One Keras optimizer per variable, made where the variable is first met."""

    def __init__(self, groups, scale=1.0, skip_nonfinite=False):
        self.groups = groups
        self.scale, self.skip_nonfinite = scale, skip_nonfinite
        self.owned = {}

    def of(self, path, variable):
        """The optimizer of a variable; `None` where it is frozen."""
        given = [optimizer for word, optimizer in self.groups if word in (None, *path.split("."))]
        if given[-1] is None:
            return None
        known = self.owned.get(id(variable))
        if known is None or known[0] is not given[-1]:
            with tf.init_scope():
                own = copied(given[-1])
                own.build([variable])
            known = self.owned[id(variable)] = given[-1], own, variable
        return known[1]


class Plain:
    """The loop by hand."""

    name = "plain"

    def train(self, net):
        return functools.partial(net, training=True)

    def valid(self, net):
        return lambda *args: tf.stop_gradient(net(*args, training=False))

    def compile(self, fn):
        return tf.function(fn)

    def optim(self, net, optimizer, *groups, **options):
        return PlainOptimizer([(None, optimizer), *groups], **options)

    def add_group(self, optim, word, optimizer):
        optim.groups.append((word, optimizer))

    def set_rate(self, optim, net, rate):
        for _, optimizer, _ in optim.owned.values():
            optimizer.learning_rate = rate
        for _, optimizer in optim.groups:
            optimizer.learning_rate = rate

    def gradients(self, net, loss_fn):
        """(loss, path -> gradient); dense, since most Keras optimizers are wrong for rows."""
        with tf.GradientTape() as tape:
            loss = loss_fn()
        named = _parameters(net)
        grads = tape.gradient(loss, [tensor(v) for v in named.values()])
        pairs = zip(named, grads, strict=True)
        return loss, {path: tf.convert_to_tensor(g) for path, g in pairs if g is not None}

    def step(self, optim, net, loss_fn, lr=None):
        loss, grads = self.gradients(net, loss_fn)
        if optim.skip_nonfinite:
            finite = [tf.reduce_all(tf.math.is_finite(grad)) for grad in grads.values()]
            if tf.reduce_all(finite):
                self.apply(optim, net, grads, lr)
        else:
            self.apply(optim, net, grads, lr)
        return loss

    def apply(self, optim, net, grads, lr=None):
        named = _parameters(net)
        owners = {path: optim.of(path, named[path]) for path in grads}
        for _, given in optim.groups:
            limit = getattr(given, "global_clipnorm", None)
            share = [p for p in grads if owners[p] and optim.owned[id(named[p])][0] is given]
            if limit and share:
                clipped, _ = tf.clip_by_global_norm([grads[path] for path in share], limit)
                grads = grads | dict(zip(share, clipped, strict=True))
        with tf.control_dependencies([*grads.values()]):  # Before the first value changes.
            for path, grad in grads.items():
                if owners[path] is not None:
                    if lr is not None:
                        owners[path].learning_rate = lr
                    owners[path].apply([tf.identity(grad)], [named[path]])

    def window(self, net):
        sums = {path: tf.Variable(tf.zeros(v.shape)) for path, v in _parameters(net).items()}
        return {"sums": sums, "weight": tf.Variable(0.0)}

    def accumulate(self, window, net, loss_fn, weight):
        weight = tf.cast(weight, tf.float32)
        loss, grads = self.gradients(net, loss_fn)
        for path, grad in grads.items():
            window["sums"][path].assign_add(weight * tf.cast(grad, tf.float32))
        window["weight"].assign_add(weight)
        return loss

    def update(self, optim, net, window, lr=None):
        mean = {path: total / window["weight"] for path, total in window["sums"].items()}
        self.apply(optim, net, mean, lr)
        for buffer in (window["weight"], *window["sums"].values()):
            buffer.assign(tf.zeros_like(buffer))

    def micro_step(self, optim, net, loss_fn, batch, num):
        """A large batch, piece by piece: by hand, all at once."""
        return self.step(optim, net, lambda: loss_fn(batch))

    def total_loss(self, loss, net):
        return loss + sum(net.losses)

    def slots(self, optim, net):
        """Path -> slot -> value, and the number of updates."""
        found = {"iterations": max(int(own.iterations) for _, own, _ in optim.owned.values())}
        for path, variable in _parameters(net).items():
            own = optim.of(path, variable)
            if own is None:
                continue
            held = {n.lstrip("_"): v for n, v in vars(own).items() if isinstance(v, list)}
            held = {n: v[0] for n, v in held.items() if len(v) == 1}
            slots = {n: v for n, v in held.items() if n not in ("trainable_variables", "variables")}
            found[path] = {n: v.numpy() for n, v in slots.items() if hasattr(v, "numpy")}
        return found


class Tfloop:
    """The same in the words of this library."""

    name = "tfloop"
    train = staticmethod(tfloop.train)
    valid = staticmethod(tfloop.valid)
    compile = staticmethod(tfloop.compile)
    total_loss = staticmethod(tfloop.total_loss)

    def optim(self, net, optimizer, *groups, scale=None, skip_nonfinite=False):
        scaler = None if scale is None else tfloop.LossScaler.fixed(scale)
        optim = tfloop.ModuleOptimizer(optimizer, scaler=scaler, skip_nonfinite=skip_nonfinite)
        for word, other in groups:
            self.add_group(optim, word, other)
        optim.given = optimizer
        return optim

    def add_group(self, optim, word, optimizer):
        optim.with_group(tfloop.ParamGroup.from_name(word), optimizer)

    def set_rate(self, optim, net, rate):
        optim.given.learning_rate = rate

    def gradients(self, net, loss_fn, scaler=None):
        with tfloop.Tape(scaler=scaler) as tape:
            loss = loss_fn()
        return loss, tfloop.GradientsParams.from_grads(tape.backward(loss), net)

    def step(self, optim, net, loss_fn, lr=None):
        loss, grads = self.gradients(net, loss_fn, optim.scaler)
        optim.step(lr, net, grads)
        return loss

    def window(self, net):
        return tfloop.GradientsAccumulator(reduction="mean")

    def accumulate(self, window, net, loss_fn, weight):
        loss, grads = self.gradients(net, loss_fn)
        window.accumulate(net, grads, weight=weight)
        return loss

    def update(self, optim, net, window, lr=None):
        optim.step(lr, net, window)

    def micro_step(self, optim, net, loss_fn, batch, num):
        def piece(part):
            loss, grads = self.gradients(net, lambda: loss_fn(part))
            return grads, loss

        grads, losses = tfloop.microbatch(piece, batch, num=num)
        optim.step(None, net, grads)
        return tf.reduce_mean(losses)

    def slots(self, optim, net):
        """As of `Plain`, read where checkpoints read it."""
        optim.build(net)
        found = {path: optim.state(path) for path in _parameters(net)}
        found = {path: {n: v.numpy() for n, v in slots.items()} for path, slots in found.items()}
        return {"iterations": int(optim.iterations.numpy()), **found}


def _parameters(net):
    """What a plain loop trains, by the paths that name it."""
    named = tfloop.named_variables(net)
    kinds = {path: tf.as_dtype(v.dtype) for path, v in named.items() if v.trainable}
    return {p: named[p] for p, kind in kinds.items() if kind.is_floating or kind.is_complex}


PLAIN, TFLOOP = Plain(), Tfloop()

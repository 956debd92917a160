"""Random histories of one optimizer, against one plain Keras optimizer per variable.

Hypothesis makes them up: steps with any of the gradients, windows, groups that are added, layers
frozen and unfrozen, rates, clippings, saves, restores, rebuilt models and deep copies, each step
compiled or not. After every rule all values and all slots are compared. A history that falls is
shrunk, and becomes a test.
"""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kits import copied
from ways import deep_copy

import tfloop
from tfloop import GradientClipping, GradientsAccumulator, GradientsParams, ModuleOptimizer

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5),
    "amsgrad": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "frozen": lambda: None,
}
CLIPPINGS = {
    "none": None,
    "by_value": GradientClipping.by_value(0.5),
    "by_norm": GradientClipping.by_norm(0.5),
    "by_global_norm": GradientClipping.by_global_norm(0.5),
}
LAYERS = ("a", "b", "c")
WORDS = (*LAYERS, "kernel", "bias")
TOLERANCE = 2e-5


def network(sizes):
    net = keras.Sequential([keras.Input((2,))])
    for name, size in zip(LAYERS, sizes, strict=False):
        net.add(keras.layers.Dense(size, name=name))
    for number, variable in enumerate(net.variables):
        variable.assign(np.random.default_rng(number).normal(size=variable.shape))
    return net


def gradients_of(net, seed, paths):
    rng = np.random.default_rng(seed)
    named = {p: v for p, v in tfloop.named_variables(net).items() if p in paths}
    return {path: rng.normal(size=v.shape).astype("float32") for path, v in named.items()}


def clip(name, grads):
    """By the formula, on one group's gradients."""
    if name == "by_value":
        return {path: np.clip(grad, -0.5, 0.5) for path, grad in grads.items()}
    if name == "none":
        return grads
    norms = {path: np.linalg.norm(grad) for path, grad in grads.items()}
    if name == "by_global_norm":
        norms = dict.fromkeys(grads, np.sqrt(sum(norm**2 for norm in norms.values())))
    return {path: grad * min(1.0, 0.5 / norms[path]) for path, grad in grads.items()}


class Reference:
    """One Keras optimizer per variable; a group's count is what all its members go by."""

    def __init__(self, net, optimizer, clipping):
        self.variables = {p: keras.Variable(v) for p, v in tfloop.named_variables(net).items()}
        self.frozen, self.groups, self.own = set(), [], {}
        self.sums, self.weight, self.micro_steps = {}, 0.0, 0
        self.add("", optimizer, clipping)

    def owner(self, path, groups=None):
        groups = self.groups if groups is None else groups
        matches = [n for n, (word, *_) in enumerate(groups) if not word or word in path.split(".")]
        return matches[-1]

    def would_serve(self, word):
        """Has every group a member still, once this one is there?"""
        groups = [*self.groups, (word, None, None, [0])]
        return {self.owner(path, groups) for path in self.variables} == set(range(len(groups)))

    def add(self, word, optimizer, clipping):
        self.groups.append((word, OPTIMIZERS[optimizer](), clipping, [0]))
        for path, variable in self.variables.items():
            if self.owner(path) == len(self.groups) - 1:
                self.own[path] = None if optimizer == "frozen" else copied(self.groups[-1][1])
                if self.own[path] is not None:
                    self.own[path].build([variable])

    def live(self):
        frozen = lambda path: path.split(".")[0] in self.frozen  # noqa: E731
        return [path for path, own in self.own.items() if own and not frozen(path)]

    def step(self, grads, lr):
        grads = {path: grad for path, grad in grads.items() if path in self.live()}
        for number, (_, _, clipping, count) in enumerate(self.groups):
            share = {path: grad for path, grad in grads.items() if self.owner(path) == number}
            for path, grad in clip(clipping, share).items():
                own = self.own[path]
                own.iterations.assign(count[0])
                own.learning_rate = lr
                own.apply([tf.constant(grad)], [self.variables[path]])
            count[0] += bool(share)

    def accumulate(self, grads, weight):
        for path, grad in grads.items():
            if path in self.live():
                self.sums[path] = self.sums.get(path, 0.0) + weight * grad
        self.weight += weight
        self.micro_steps += 1

    def take(self):
        found = {path: total / self.weight for path, total in self.sums.items()}
        self.sums, self.weight, self.micro_steps = {}, 0.0, 0
        return {path: grad.astype("float32") for path, grad in found.items()}

    def slots(self, path):
        lists = {n: v for n, v in vars(self.own[path]).items() if isinstance(v, list)}
        ignored = ("_trainable_variables", "_variables")
        return {n: v[0] for n, v in lists.items() if len(v) == 1 and n not in ignored}

    def snapshot(self):
        """All that a checkpoint holds, as plain values."""
        return {
            "values": {path: v.numpy() for path, v in self.variables.items()},
            "slots": {
                p: {n: s.numpy() for n, s in self.slots(p).items()} for p in self.own if self.own[p]
            },
            "counts": [count[0] for *_, count in self.groups],
            "window": (dict(self.sums), self.weight, self.micro_steps),
        }

    def restore(self, saved):
        for path, value in saved["values"].items():
            self.variables[path].assign(value)
        for path, slots in saved["slots"].items():
            for name, value in slots.items():
                self.slots(path)[name].assign(value)
        for group, count in zip(self.groups, saved["counts"], strict=True):
            group[3][0] = count
        self.sums, self.weight, self.micro_steps = saved["window"]
        self.sums = dict(self.sums)


seeds = st.integers(0, 99)
shares = st.sets(st.sampled_from(LAYERS), min_size=1)
rates = st.sampled_from([0.1, 0.03])


class History(RuleBasedStateMachine):
    """One run. `declared` are the groups, so that the optimizer can be made anew."""

    @initialize(
        sizes=st.sampled_from([(3, 2), (2, 3, 1), (1, 1, 4)]),
        optimizer=st.sampled_from(["SGD", "AdamW", "RMSprop", "amsgrad"]),
        clipping=st.sampled_from([*CLIPPINGS]),
    )
    def begin(self, sizes, optimizer, clipping):
        self.sizes, self.declared, self.saved = sizes, [("", optimizer, clipping)], None
        self.folder = tempfile.mkdtemp()
        self.make()
        self.hand = Reference(self.net, optimizer, clipping)

    def make(self):
        """The objects of a run, as a script makes them when it is started again."""
        self.net = network(self.sizes)
        (_, optimizer, clipping), *others = self.declared
        self.optim = ModuleOptimizer(OPTIMIZERS[optimizer](), clipping=CLIPPINGS[clipping])
        for word, optimizer, clipping in others:
            self.group(word, optimizer, clipping)
        self.window = GradientsAccumulator(reduction="mean")
        self.compile()

    def compile(self):
        net, optim, window = self.net, self.optim, self.window

        def step(grads, lr):
            optim.step(lr, net, GradientsParams(grads))

        def accumulate(grads, weight):
            window.accumulate(net, GradientsParams(grads), weight=weight)

        def update(lr):
            optim.step(lr, net, window)

        self.eager = {f.__name__: f for f in (step, accumulate, update)}
        self.compiled = {name: tfloop.compile(f) for name, f in self.eager.items()}

    def group(self, word, optimizer, clipping):
        word = tfloop.ParamGroup.from_name(word)
        self.optim.with_group(word, OPTIMIZERS[optimizer](), CLIPPINGS[clipping])

    def call(self, name, is_compiled, *args):
        args = tf.nest.map_structure(tf.constant, args)
        (self.compiled if is_compiled else self.eager)[name](*args)

    def gradients(self, seed, share):
        paths = [p for p in self.hand.live() if p.split(".")[0] in share]
        return gradients_of(self.net, seed, paths)

    @rule(seed=seeds, share=shares, lr=rates, is_compiled=st.booleans())
    def step(self, seed, share, lr, is_compiled):
        grads = self.gradients(seed, share)
        if grads:
            self.call("step", is_compiled, grads, lr)
            self.hand.step(grads, lr)

    @rule(seed=seeds, share=shares, weight=st.sampled_from([1.0, 3.0]), is_compiled=st.booleans())
    def accumulate(self, seed, share, weight, is_compiled):
        grads = self.gradients(seed, share)
        if grads:
            self.call("accumulate", is_compiled, grads, weight)
            self.hand.accumulate(grads, weight)

    @precondition(lambda self: self.hand.micro_steps)
    @rule(lr=rates, is_compiled=st.booleans())
    def update(self, lr, is_compiled):
        self.call("update", is_compiled, lr)
        self.hand.step(self.hand.take(), lr)

    @precondition(lambda self: self.hand.micro_steps)
    @rule()
    def drop_the_window(self):
        self.window.reset()
        self.hand.take()

    # What becomes of a parameter's sum when it is taken or frozen within a window isn't said.
    @precondition(lambda self: not self.hand.micro_steps and len(self.declared) < 4)
    @rule(
        word=st.sampled_from(WORDS),
        optimizer=st.sampled_from([*OPTIMIZERS]),
        clipping=st.sampled_from([*CLIPPINGS]),
    )
    def add_a_group(self, word, optimizer, clipping):
        if optimizer == "frozen":
            clipping = "none"
        if self.hand.would_serve(word):
            self.declared.append((word, optimizer, clipping))
            self.group(word, optimizer, clipping)
            self.hand.add(word, optimizer, clipping)

    @precondition(lambda self: not self.hand.micro_steps)
    @rule(clipping=st.sampled_from([*CLIPPINGS]))
    def clip_otherwise(self, clipping):
        self.optim.with_clipping(CLIPPINGS[clipping])
        self.declared[0] = (*self.declared[0][:2], clipping)
        word, optimizer, _, count = self.hand.groups[0]
        self.hand.groups[0] = word, optimizer, clipping, count

    @precondition(lambda self: not self.hand.micro_steps)
    @rule(name=st.sampled_from(LAYERS[:2]))
    def freeze_or_unfreeze(self, name):
        layer = self.net.get_layer(name)
        layer.trainable = not layer.trainable
        if self.optim.root is not None:
            self.optim.build(
                self.net
            )  # As the next step would; an unfrozen one has its slots then.
        self.hand.frozen ^= {name}

    @rule()
    def look(self):
        self.optim.summary(self.net)
        repr(self.optim), repr(self.window), self.optim._assembly.fingerprint()
        self.optim.as_keras(self.net).get_config()

    def checkpoint(self):
        parts = {"net": self.net, "optim": self.optim, "window": self.window}
        return tfloop.Checkpoint(self.folder, **parts)

    @rule()
    def save(self):
        self.optim.build(self.net)
        self.window.build(self.net)
        self.checkpoint().save(1)
        frozen = frozenset(self.hand.frozen)
        self.saved = self.hand.snapshot(), [*self.declared], frozen

    def can_restore(self):
        # What is frozen, and which groups there are, isn't saved: a script says it again.
        return self.saved and self.saved[1:] == (self.declared, frozenset(self.hand.frozen))

    @precondition(can_restore)
    @rule()
    def restore(self):
        self.checkpoint().restore()
        self.hand.restore(self.saved[0])

    @precondition(lambda self: self.can_restore() and not self.hand.frozen)
    @rule()
    def start_again(self):
        self.make()
        self.restore()

    @rule()
    def go_on_with_deep_copies(self):
        parts = self.net, self.optim, self.window
        self.net, self.optim, self.window = deep_copy(parts)
        self.compile()

    @invariant()
    def all_is_equal(self):
        if not hasattr(self, "hand"):
            return
        named = tfloop.named_variables(self.net)
        for path, variable in self.hand.variables.items():
            self.compare(path, named[path].numpy(), variable.numpy())
        if self.optim.root is not None:
            for path in self.hand.live():
                found = self.optim.state(path)
                for name, slot in self.hand.slots(path).items():
                    self.compare(f"{path} {name}", found[name.lstrip("_")].numpy(), slot.numpy())

    def compare(self, what, found, expected):
        apart = np.linalg.norm(found - expected)
        assert apart <= TOLERANCE * max(np.linalg.norm(expected), 1e-2), (what, found, expected)


History.TestCase.settings = settings(
    max_examples=40 if os.environ.get("TFLOOP_TEST_ALL") else 8,
    stateful_step_count=14,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[*HealthCheck],
)
TestHistories = History.TestCase

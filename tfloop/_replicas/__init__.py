"""The replicas of a strategy: where state lives, and what their gradients are together.

`placement` knows `tf.distribute`: contexts, collectives, seeds; `reduction` makes one gradient of
all replicas', a sum or a mean over samples. How a batch is spread over them is a matter of the
compiled call: `tfloop._compile.distribution`.
"""

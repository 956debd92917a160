"""`compile`: a step as a `tf.function` that is traced again exactly when it would be stale.

A call walks `step` (signatures, traces) -> `bindings` (does a name lead elsewhere?) -> `launch`
(the shortest way into a trace), or through `loop` for several steps, and `distribution` where a
strategy spreads the batch.
"""

"""`ModuleOptimizer`: gradients by path become an update.

A `step` walks one way: `contribution` (what this replica brings) -> `tfloop._replicas.reduction` ->
finite? -> `clipper` (a `clipping` at work for one group) -> `rates` -> `update` (the variables of
one group, by a Keras optimizer of its own; small ones side by side, `fused`). `routing` says which
group serves which variable, `assembly` holds the groups together for one root, and `optimizer` is
what a user sees of it. `checks` judges routing and parameters, `keras_optimizer` what a user may
give; `record` writes the state down, `summary` shows the table, `as_keras` offers the same to
Keras' `fit`.
"""

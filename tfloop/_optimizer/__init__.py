"""`ModuleOptimizer`: gradients by path become an update.

A `step` walks one way: `contribution` (what this replica brings) -> `tfloop._replicas.reduction` ->
finite? -> `tfloop._clipping` -> `rates` -> `tfloop._update`. `routing` says which group serves
which variable, `assembly` holds the groups together for one root, and `optimizer` is what a user
sees of it. `checks` judges routing and parameters, `record` writes the state down, `summary` shows
the table, `as_keras` offers the same to Keras' `fit`.
"""

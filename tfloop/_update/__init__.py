"""The update of one group by a Keras optimizer of its own.

`keras_optimizer` judges and copies what a user gives, `slots` keeps its state by path, `given_rate`
reads its learning rate, `rules` knows what its rule can take. An update walks `update` (a group) ->
`cell_update` (what is updated at once: a variable, or many small ones side by side, `fused`).
"""

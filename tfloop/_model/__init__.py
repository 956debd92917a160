"""A model as seen from outside: its variables by path, its modes, its copies.

`graphs` says what one thing holds, `walk` follows that from the root, `paths` makes the address
book of it (path <-> variable) that all rooms above use. `modes` shows a model in training or in
inference, `copies` writes one's values into another, `derived` refreshes what layers compute from
their variables.
"""

"""`ParamGroup`: which parameters are meant.

`patterns` are what one expression looks for, `group` their algebra over (path, variable). What a
group means for an update is decided in `tfloop._optimizer` and `tfloop.schedulers`.
"""

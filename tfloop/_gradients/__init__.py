"""From a loss to gradients by path.

`tape` records and differentiates, `gradients` is the result of one backward pass, `params` the
share of one model, keyed by path, with its algebra; `checks` says whose a gradient is and whether
it fits, `scaling` keeps float16 from vanishing on the way.
"""

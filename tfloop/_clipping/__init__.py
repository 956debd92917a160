"""Bounds on gradients, for one group at a time.

`clipping` says what every clipping is and has the three of Keras, `adaptive_clipping` is one more
in a file of its own; `clipper` hands a clipping its gradients and parameters, and keeps what it
remembers between updates.
"""

"""Kinds of tensors that stand for gradients, and what is known beside their numbers.

`sparse` knows `tf.IndexedSlices`, `overwritten` values that replace a variable, `counts` how much
a micro-batch counts, `annotations` what Keras notes on a tensor. Pure functions of tensors.
"""

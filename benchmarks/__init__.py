"""Measures loops written with tfloop against the loops people write without it."""

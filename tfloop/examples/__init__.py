"""Examples that run with `python -m`; start reading at `mnist.py`."""

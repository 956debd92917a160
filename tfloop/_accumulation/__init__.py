"""Several micro-batches as one batch.

`accumulator` sums them in `buffers` that outlive a call, `microbatch` inside of one call. Both end
in gradients that `tfloop._optimizer` takes as those of a single batch.
"""

"""The replicas of a strategy: where code and variables are, and what their gradients are together.

`contexts` says where code runs, `placement` where variables live, `seeds` makes random layers
differ, `per_replica` reads and assigns what each replica has of a variable. Data walks
`reduction` (one gradient of all replicas', a sum or a mean over samples) -> `collectives` (what is
sent) -> `synchronized` (changes made once for all). How a batch is spread over replicas is a matter
of the compiled call: `tfloop._compile.distribution`.
"""

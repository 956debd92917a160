"""What a trace depends on, noted while it is made and compared before it is used again.

`traces` holds the notes of our own objects, `code` reads the names in a function's code,
`settings` compares what the parts of a model are set to. Every room above may leave a note;
`tfloop._compile` reads them.
"""

"""`Checkpoint`: everything that a run needs to go on exactly.

`checkpoint` is the public object, `kinds` says what the state of each kind of object is, `files`
writes sets of files whole or not at all.
"""

"""What several rooms check and say in the same words.

`messages` has the words of error messages (short lists, near misses, names of things),
`arguments` the checks of plain arguments. Nothing here knows a model or a gradient.
"""

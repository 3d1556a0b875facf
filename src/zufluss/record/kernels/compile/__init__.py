"""Compiles all kernels at once: to the library of a wheel or a clone, or to numba's cache.

`workers` compiles in several processes, `objects` makes object files of what numba compiled, and
`link` makes them a library. `target` says for which processor.
"""

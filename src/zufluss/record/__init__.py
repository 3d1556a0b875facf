"""Records as they stand on the wire and on disk: log batches, their Arrow and row bodies.

Pure functions over buffers, no I/O. `batch` knows the header, `arrow` the Arrow message, `check`
refuses what no reader should ever meet, `project` rewrites a batch to fewer columns; `kernels`
holds the compiled loops. Nothing here is imported by `import zufluss`, and numba is first
imported by `kernels` itself.
"""

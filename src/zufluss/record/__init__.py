"""Records on the wire and on disk: log batches, their Arrow and row bodies, keys, aggregation.

Pure functions over buffers, without I/O. `import zufluss` imports nothing of this package, and only
`kernels` imports numba. The parts, each of which uses only those below it:

| part | content |
|---|---|
| `aggregate` | folds records into the rows of their keys |
| `batch` | checks log batches, their statistics and row bodies; batches of keys and rows |
| `keys` | encodes keys and chooses their buckets |
| `rows` | compacted and indexed rows |
| `arrow` | Arrow messages: reading, writing, compression, projection |
| `kernels` | the compiled loops |
| `header`, `fault`, `lz4`, `slices` | batch headers, reasons to refuse, LZ4 frames, byte strings |
"""

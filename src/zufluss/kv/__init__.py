"""Primary-key tables: the rows of each bucket by key, in memory and on disk.

`tablet` is one bucket and the way of a put, `table` what the buckets of a table share, `store` the
two tiers under one interface: `hot` in memory, `cold` in RocksDB. `merge` has the merge engines,
`producer` exactly-once writers, `scan` reads of whole buckets.
"""

"""The rows of buckets on disk: RocksDB, flushes into it, checkpoints of it."""

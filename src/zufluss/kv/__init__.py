"""Tables with a primary key: the state of a bucket, in memory by key and on disk by RocksDB."""

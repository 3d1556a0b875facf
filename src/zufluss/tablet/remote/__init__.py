"""Remote storage of buckets: log segments, key-value snapshots, restores."""

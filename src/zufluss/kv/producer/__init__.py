"""Exactly-once writers in a bucket: who may write which columns, and undoing their changes."""

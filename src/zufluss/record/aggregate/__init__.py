"""Aggregation functions over batches of rows: what a column's values become, key by key."""

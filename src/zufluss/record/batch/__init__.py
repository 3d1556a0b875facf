"""Whole batches: the checks before an append, statistics, key-value batches."""

"""Producers of exactly-once writers: epochs, column ownership, checkpoints."""

"""Exactly-once writers: producers, their checkpoints, and the undo after a crash."""

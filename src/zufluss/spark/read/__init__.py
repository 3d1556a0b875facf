"""Reads from Spark: plans on the driver, splits in tasks, batch and streaming."""

"""Writes from Spark: checked on the driver, staged and sent by tasks."""

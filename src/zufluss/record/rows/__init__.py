"""Compacted and indexed rows, and their conversion to and from Arrow."""

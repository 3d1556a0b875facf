"""Scans of logs, of the lake, and of both as one table."""

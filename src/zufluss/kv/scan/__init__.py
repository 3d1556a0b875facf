"""Scans of whole buckets: pinned states, and the processes that read their pages."""

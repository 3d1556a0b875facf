"""Scans of primary-key buckets over pinned state."""

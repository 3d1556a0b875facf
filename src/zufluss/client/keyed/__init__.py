"""Reads of primary-key tables: lookups, scans of live state, key-value snapshots."""

"""Leases of key-value snapshots, held and renewed by a client."""

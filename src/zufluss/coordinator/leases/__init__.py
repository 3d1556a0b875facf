"""Leases of key-value snapshots, durable at the coordinator."""

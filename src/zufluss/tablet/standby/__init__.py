"""Warm standbys: buckets that other servers lead, followed here so that a take-over is short."""

"""Fault tests: real server processes that are killed, starved, damaged and restarted."""

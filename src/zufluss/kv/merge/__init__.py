"""Merge engines: what becomes of a row whose key is there already. One file each."""

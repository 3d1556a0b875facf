"""Merge engines: each decides what becomes of a row whose key is stored already. One file each."""

"""Databases, tables and partitions: the catalog and the handlers that change it."""

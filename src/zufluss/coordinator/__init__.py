"""The coordinator role: the catalog, its picture in memory, and word of it to tablet servers.

`image` and `metadata_service` are used by tablet servers too: both roles answer for the catalog
from the same kind of picture.
"""

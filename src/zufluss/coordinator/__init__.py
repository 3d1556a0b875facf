"""The coordinator role: the catalog, and word of it to tablet servers."""

"""The coordinator role: keeps the catalog, and tells tablet servers about changes of it."""

"""The coordinator role: it keeps the catalog and announces its changes to tablet servers."""

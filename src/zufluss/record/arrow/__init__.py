"""Arrow messages: layout, compression, projection, filters."""

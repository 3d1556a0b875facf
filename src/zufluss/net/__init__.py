"""Sockets: the only package that opens them. `server` listens, `client` connects."""

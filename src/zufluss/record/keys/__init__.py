"""Encoded keys and the bucket hashes over them."""

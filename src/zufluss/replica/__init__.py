"""Bucket replicas: a log, its high watermark, and who waits for it to move."""

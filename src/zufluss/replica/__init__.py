"""Bucket replicas: a log, its high watermark, and the requests that wait for it."""

"""The rows of buckets in memory: one arena, versions by key, keys in order."""

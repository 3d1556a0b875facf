"""A cluster of three tablet servers, as clients and operators see it."""

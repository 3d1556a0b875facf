"""The client for synchronous code, over the async one."""

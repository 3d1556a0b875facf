"""The wire protocol without sockets: frames, API keys, messages, scanners, SASL.

Everything here turns bytes into values and back and does no I/O; `zufluss.net` owns sockets. Bytes
from a peer either become a value or raise a typed error, never another exception.
"""

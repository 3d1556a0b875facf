"""The protocol's messages by topic: `.proto` files and the Python generated from them.

Field numbers below 1000 are the protocol's and fixed. Fields of our own, which only zufluss servers
exchange, have numbers from 1000 and are never required, so that a peer without them still decodes.

Import the messages through `zufluss.wire.messages`.
"""

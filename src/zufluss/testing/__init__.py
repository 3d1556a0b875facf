"""Test kits that ship with zufluss: conformance suites for authors of backends.

They need pytest and pytest-asyncio, which zufluss itself does not install. Nothing in zufluss
imports this package.
"""

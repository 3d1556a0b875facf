"""How much is tested: `make test` runs a sample, `make fault` (`ZUFLUSS_FAULT=full`) everything."""

import os

import pytest

FULL = os.environ.get("ZUFLUSS_FAULT") == "full"

only_full = pytest.mark.skipif(not FULL, reason="with the full counts only (make fault)")
"""A test whose sample is another test."""

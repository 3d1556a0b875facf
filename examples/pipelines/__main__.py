"""`python examples/pipelines`: all pipelines, one after the other."""

from __future__ import annotations

import sys

import cdc
import clickstream
import declarative
import enrich
import export
from running import in_session, run

if __name__ == "__main__":
    pipelines = in_session(clickstream.main, cdc.main, enrich.main, export.main)
    sys.exit(run(pipelines, declarative.main))

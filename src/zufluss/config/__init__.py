"""Configuration: options declared once, loaded from file, environment and command line.

`options` declares server and client keys, `table_options` the table properties, `values` the
text forms, `load` the sources, `docs` generates `docs/configuration.md`.
"""

from zufluss.config.load import Configuration
from zufluss.config.option import Kind, Option
from zufluss.config.values import Endpoint

__all__ = ["Configuration", "Endpoint", "Kind", "Option"]

"""`python -m zufluss.tiering`: the tiering service."""

from __future__ import annotations

import sys

from zufluss.tiering.main import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m zufluss.record.kernels`: compile the kernels now, so that no later start waits."""

from __future__ import annotations

import sys

from zufluss.record.kernels import is_cold, warm

if is_cold():
    sys.stderr.write("compiling the kernels, once per install: some seconds\n")
warm()

"""Clocks."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell the start's time")
def test_the_age_of_a_process_includes_what_came_before_the_import() -> None:
    code = (
        "import time\n"
        "while time.perf_counter() < begin + 0.2: pass\n"
        "from zufluss.clock import process_seconds\n"
        "print(process_seconds())"
    )
    code = "import time; begin = time.perf_counter()\n" + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) >= 0.19  # the system counts in hundredths

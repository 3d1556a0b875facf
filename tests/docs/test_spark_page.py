"""docs/spark.md does what it says. Its last block is run in tests/spark/test_iceberg_runtime.py."""

import re

import pytest

from tests.docs.test_readme import ROOT, blocks, run_python
from zufluss.testing.server import DevServer

PAGE = ROOT / "docs" / "spark.md"
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DevServer(tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.mark.parametrize("number", range(5))
def test_the_blocks_of_the_spark_page_print_what_they_say(server, number):
    code = blocks(PAGE, "python")[number]
    said = re.findall(r"^print\(.*\)  # (.*)$", code, re.M)
    assert said
    assert run_python(code, server).splitlines() == said


def test_every_block_of_the_page_is_run_by_some_test():
    assert len(blocks(PAGE, "python")) == 6

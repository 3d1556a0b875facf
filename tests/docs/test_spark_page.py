"""docs/spark.md does what it says. Its last block is run in tests/spark/test_iceberg_runtime.py."""

import re

import pytest

from tests.docs.test_readme import ROOT, blocks, run_python
from tests.servers import WarmServer

PAGE = ROOT / "docs" / "spark.md"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with WarmServer(tmp_path_factory.mktemp("data")) as server:
        yield server


def test_the_blocks_of_the_spark_page_print_what_they_say(server):
    code_blocks = blocks(PAGE, "python")[:5]  # in one process: what takes time is to start Java
    expected = [re.findall(r"^print\(.*\)  # (.*)$", block, re.M) for block in code_blocks]
    assert all(expected)
    printed = run_python("\n".join(code_blocks), server).splitlines()
    assert printed == [line for lines in expected for line in lines]


def test_every_block_of_the_page_is_run_by_some_test():
    assert len(blocks(PAGE, "python")) == 6

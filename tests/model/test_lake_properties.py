"""What the cluster says of its lake is no property a table can have of its own."""

from __future__ import annotations

from typing import Any

import pytest

from zufluss.config import Configuration
from zufluss.errors import ConfigError, InvalidAlterTableError
from zufluss.model.alter import PropertyChange, alter_properties
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor
from zufluss.model.validation import check_table, complete

CONF = Configuration.of(
    {
        "datalake.format": "iceberg",
        "datalake.iceberg.uri": "http://catalog",
        "datalake.iceberg.s3.secret-access-key": "geheim",
    }
)
TOLD = {"table.datalake.iceberg.uri": "http://catalog"}


def descriptor(**options: Any) -> TableDescriptor:
    return TableDescriptor(Schema.of("a BIGINT, b STRING"), **options)


def test_a_descriptor_that_came_from_the_server_can_be_sent_back() -> None:
    completed = complete(descriptor(properties=TOLD), CONF)
    check_table(completed, CONF, live_servers=1)
    assert completed == complete(descriptor(), CONF)


@pytest.mark.parametrize(
    "properties",
    [
        {"table.datalake.iceberg.uri": "http://mine"},
        {"table.datalake.iceberg.warehouse": "s3://mine"},
        {"table.datalake.iceberg.s3.secret-access-key": "geheim"},
        {"table.datalake.paimon.warehouse": "/mine"},
    ],
)
def test_a_table_cannot_choose_a_lake_of_its_own_nor_guess_a_secret(
    properties: dict[str, str],
) -> None:
    with pytest.raises(ConfigError, match="not the table's to set"):
        complete(descriptor(properties=properties), CONF)


def test_alter_refuses_the_properties_of_the_cluster() -> None:
    table = complete(descriptor(), CONF)
    with pytest.raises(InvalidAlterTableError, match=r"table\.datalake\.iceberg\.uri"):
        alter_properties(table, [PropertyChange("table.datalake.iceberg.uri", "x")], CONF)

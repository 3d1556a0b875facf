"""ALTER TABLE: what may change, and 56 with the reason for all else."""

from __future__ import annotations

import pytest

from zufluss.config import Configuration
from zufluss.errors import InvalidAlterTableError, ZuflussError
from zufluss.model.aggregate import AggFunction
from zufluss.model.alter import (
    ConfigOp,
    NewColumn,
    PropertyChange,
    TableChanges,
    add_columns,
    alter_properties,
    alter_table,
)
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor
from zufluss.model.types import INTEGER, STRING
from zufluss.model.validation import complete

CONF = Configuration.of({})


def stored(text: str = "a INT, b STRING", **properties: str) -> TableDescriptor:
    named = {f"table.{k.replace('_', '.')}": v for k, v in properties.items()}
    return complete(TableDescriptor(Schema.of(text), properties=named), CONF)


def test_alterable_and_custom_properties_are_set_and_deleted() -> None:
    table = alter_properties(
        stored(), [PropertyChange("table.log.ttl", "1d"), PropertyChange("owner", "me")], CONF
    )
    assert table.properties["table.log.ttl"] == "1d"
    assert table.custom_properties == {"owner": "me"}
    back = alter_properties(
        table,
        [
            PropertyChange("table.log.ttl", None, ConfigOp.DELETE),
            PropertyChange("owner", None, ConfigOp.DELETE),
            PropertyChange("never there", None, ConfigOp.DELETE),
        ],
        CONF,
    )
    assert back == stored()


def test_a_change_to_the_same_value_returns_the_same_object() -> None:
    table = stored(log_ttl="1d")
    assert alter_properties(table, [PropertyChange("table.log.ttl", "1d")], CONF) is table


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (PropertyChange("table.log.format", "INDEXED"), 56, "cannot be altered; alterable:"),
        (PropertyChange("table.log.format", None, ConfigOp.DELETE), 56, "cannot be altered"),
        (PropertyChange("table.log.tll", "1d"), 56, "did you mean table.log.ttl"),
        (PropertyChange("table.log.ttl", "1d", ConfigOp.APPEND), 56, "SET"),
        (PropertyChange("owner", "x", ConfigOp.SUBTRACT), 56, "SET"),
        (PropertyChange("owner", "x", 9), 56, "operation 9"),
        (PropertyChange("owner", None), 56, "has no value"),
        (PropertyChange("table.kv.standby-replica.enabled", "true"), 56, "primary-key tables"),
        (PropertyChange("table.datalake.freshness", "1min"), 56, "create a new table"),
        (PropertyChange("table.datalake.enabled", "true"), 56, "no lake"),
        (PropertyChange("table.log.ttl", "soon"), 39, "table.log.ttl"),
        (
            PropertyChange("table.auto-partition.enabled", "true"),
            39,
            "only supported for partitioned table",
        ),
        (PropertyChange("table.statistics.columns", "x"), 39, "not a column"),
        (PropertyChange("iceberg.write.data.path", "file:///x/../y"), 39, "leave the property out"),
    ],
)
def test_other_changes_are_refused(change: PropertyChange, code: int, message: str) -> None:
    with pytest.raises(ZuflussError, match=message) as caught:
        alter_properties(stored(), [change], CONF)
    assert caught.value.code.value == code


def test_a_log_table_without_keys_can_join_the_lake_later() -> None:
    conf = Configuration.of({"datalake.format": "paimon"})
    table = alter_properties(stored(), [PropertyChange("table.datalake.enabled", "true")], conf)
    assert table.properties["table.datalake.format"] == "paimon"
    keyed = complete(TableDescriptor(Schema.of("a INT"), bucket_keys=("a",)), CONF)
    with pytest.raises(
        InvalidAlterTableError, match="that were created before the Fluss cluster enabled datalake"
    ):
        alter_properties(keyed, [PropertyChange("table.datalake.enabled", "true")], conf)


def test_no_table_joins_a_lake_that_is_closed_and_tables_in_it_can_still_be_altered() -> None:
    lake = {"datalake.format": "paimon"}
    closed = Configuration.of(lake | {"datalake.enabled": "false"})
    enabled = PropertyChange("table.datalake.enabled", "true")
    with pytest.raises(InvalidAlterTableError, match=r"set datalake\.enabled = true"):
        alter_properties(stored(), [enabled], closed)
    inside = alter_properties(stored(), [enabled], Configuration.of(lake))
    later = alter_properties(inside, [PropertyChange("table.datalake.freshness", "1min")], closed)
    assert later.properties["table.datalake.freshness"] == "1min"


def test_a_table_whose_server_is_gone_can_still_be_altered() -> None:
    table = stored(replication_factor="3")
    assert alter_properties(table, [PropertyChange("table.log.ttl", "1d")], CONF) is not table


def test_columns_are_added_at_the_end_with_new_ids() -> None:
    table = add_columns(
        stored(), [NewColumn("c", parse_type("ROW<x INT>"), "note"), NewColumn("d", STRING)]
    )
    assert table.schema.names == ("a", "b", "c", "d")
    assert table.schema.ids == (0, 1, 2, 4)
    assert table.schema.column("c").comment == "note"


@pytest.mark.parametrize(
    ("column", "code", "message"),
    [
        (NewColumn("a", STRING), 56, "exists already"),
        (NewColumn("c", STRING, position=1), 56, "at the end only"),
        (NewColumn("c", STRING, position=3), 56, "LAST"),
        (NewColumn("c", STRING.as_nullable(False)), 56, "add it as nullable"),
        (NewColumn("", STRING), 56, "empty name"),
        (NewColumn("__offset", STRING), 15, "reserved"),
        (NewColumn("c", INTEGER, agg_function=AggFunction("sum")), 39, "aggregation"),
    ],
)
def test_columns_that_cannot_be_added_are_refused(
    column: NewColumn, code: int, message: str
) -> None:
    with pytest.raises(ZuflussError, match=message) as caught:
        add_columns(stored(), [column])
    assert caught.value.code.value == code


def test_two_new_columns_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidAlterTableError, match="exists already"):
        add_columns(stored(), [NewColumn("c", STRING), NewColumn("c", STRING)])


def test_one_request_changes_properties_or_columns_not_both() -> None:
    both = TableChanges([PropertyChange("owner", "me")], [NewColumn("c", STRING)])
    with pytest.raises(InvalidAlterTableError, match="send two"):
        alter_table(stored(), both, CONF)
    assert alter_table(stored(), TableChanges(add_columns=[NewColumn("c", STRING)]), CONF)
    assert alter_table(stored(), TableChanges([PropertyChange("o", "m")]), CONF)
    table = stored()
    assert alter_table(table, TableChanges(), CONF) is table


@pytest.mark.parametrize("verb", ["drop", "rename", "modify"])
def test_columns_cannot_be_dropped_renamed_or_modified(verb: str) -> None:
    changes = TableChanges.of_columns(
        [], [], **{v: ["a"] if v == verb else [] for v in ("drop", "rename", "modify")}
    )
    with pytest.raises(
        InvalidAlterTableError, match=f"Not support {verb} column now.*to {verb} a, "
    ):
        alter_table(stored(), changes, CONF)


def test_many_columns_are_added_with_one_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema per column took minutes of the event loop for 5,000 columns, a request of 150 kB."""
    schemas = []
    check = Schema.__post_init__

    def counted(self: Schema) -> None:
        schemas.append(self)
        check(self)

    table = stored()
    monkeypatch.setattr(Schema, "__post_init__", counted)
    added = add_columns(table, [NewColumn(f"c{i}", parse_type("ROW<x INT>")) for i in range(300)])
    assert len(schemas) <= 3
    assert added.schema.ids == (0, 1, *range(2, 602, 2)), "ids of columns and of the rows' fields"
    again = [NewColumn("c1", INTEGER), NewColumn("c1", INTEGER)]
    with pytest.raises(InvalidAlterTableError, match="exists already"):
        add_columns(table, again)

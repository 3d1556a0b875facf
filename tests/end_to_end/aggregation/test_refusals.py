"""Invalid declarations are refused when a table is created, and the error names the column."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.end_to_end.aggregation.reference import ANY, TAKES
from tests.end_to_end.aggregation.tables import (
    DATABASE,
    DEFAULT_FUNCTION,
    ENGINE,
    aggregated,
    described,
    fresh_name,
    put,
    refusal,
    values,
)
from tests.end_to_end.raw import RawClient
from zufluss.client.sync.connection import Connection
from zufluss.errors import ConfigError, ErrorCode, ZuflussError
from zufluss.model.ddl import parse_type
from zufluss.model.table import TableDescriptor

CONFIG, TABLE = ErrorCode.INVALID_CONFIG_EXCEPTION, ErrorCode.INVALID_TABLE_EXCEPTION


def document(
    function: object, kind: str = "BIGINT", properties: Mapping[str, str] = ENGINE
) -> dict[str, Any]:
    """A table as JSON whose column `pv` has a function that no client has checked."""
    table = json.loads(described(f"seen BIGINT MAX, low INT MIN, pv {kind} LAST_VALUE").to_json())
    table["properties"] = dict(properties)
    table["schema"]["columns"][3]["agg_function"] = function
    return dict(table)


def refused(raw: RawClient, table: TableDescriptor | dict[str, Any]) -> ZuflussError:
    """The error of the answer; asserts that no table was created."""
    data = json.dumps(table).encode() if isinstance(table, dict) else table
    problem = refusal(raw, data)
    assert problem is not None, "it was created"
    return problem


def declared(function: str, **parameters: str) -> dict[str, Any]:
    return {"type": function, **({"parameters": parameters} if parameters else {})}


# -- functions and their parameters --------------------------------------------------------------


@pytest.mark.parametrize("function", TAKES)
def test_a_function_is_refused_for_every_type_that_it_does_not_take(
    raw: RawClient, function: str
) -> None:
    by = {"max_by": "seen", "min_by": "low"}.get(function)
    parameters = {} if by is None else {"by": by}
    allowed = {parse_type(kind).root for kind in TAKES[function]}
    for kind in ANY:
        table = document(declared(function, **parameters), kind)
        if parse_type(kind).root in allowed:
            assert refusal(raw, json.dumps(table).encode()) is None, kind
            continue
        problem = refused(raw, table)
        assert problem.code == CONFIG
        assert f"{function} cannot merge column 'pv' of type {kind}" in problem.message
        assert "allowed: " in problem.message


@pytest.mark.parametrize("name", ["avg", "summ", "", "SUM MAX", "a" * 300, "kll"])
def test_an_unknown_function_is_refused_with_the_column(raw: RawClient, name: str) -> None:
    problem = refused(raw, document(declared(name)))
    assert problem.code in (CONFIG, TABLE)
    assert "'pv'" in problem.message
    assert len(problem.message) < 1000
    if name:
        through = refused(raw, described("pv BIGINT", fields__pv__agg=name))
        assert through.code == CONFIG
        assert "'pv'" in through.message


@pytest.mark.parametrize("function", [7, [], "sum", {"parameters": {}}, {"type": 5}], ids=str)
def test_a_function_that_is_none_is_refused_or_taken_as_missing(
    raw: RawClient, function: object
) -> None:
    problem = refused(raw, document(function))
    assert problem.code in (CONFIG, TABLE)
    assert "'pv'" in problem.message


@pytest.mark.parametrize(
    ("kind", "function", "parameters"),
    [
        ("STRING", "listagg", {"delimiter": ""}),
        ("STRING", "string_agg", {"delimiter": ""}),
        ("STRING", "listagg", {"delimeter": ";"}),
        ("STRING", "listagg", {"limit": "0"}),
        ("STRING", "listagg", {"limit": "-1"}),
        ("STRING", "listagg", {"limit": "1e3"}),
        ("STRING", "listagg", {"overflow": "wrap"}),
        ("ARRAY<INT>", "array_agg", {"delimiter": ","}),
        ("ARRAY<INT>", "collect", {"limit": "4294967296"}),
        ("BIGINT", "sum", {"overflow": "widen"}),
        ("BIGINT", "max", {"overflow": "error"}),
        ("DECIMAL(5, 2)", "sum", {"overflow": "wrap"}),
        ("DOUBLE", "product", {"overflow": "wrap"}),
        ("BIGINT", "max", {"ignore_retract": "perhaps"}),
        ("BYTES", "rbm32", {"seed": "1"}),
        ("STRING", "max_by", {}),
        ("STRING", "max_by", {"by": "low"}),
        ("STRING", "min_by", {"by": "seen"}),
        ("STRING", "max_by", {"by": "k"}),
        ("STRING", "max_by", {"by": "pv"}),
    ],
)
def test_a_parameter_that_is_unknown_or_not_allowed_is_refused_with_the_column(
    raw: RawClient, kind: str, function: str, parameters: dict[str, str]
) -> None:
    problem = refused(raw, document(declared(function, **parameters), kind))
    assert problem.code == CONFIG
    assert "'pv'" in problem.message
    named = {f"fields__pv__{function}__{key}": value for key, value in parameters.items()}
    rest = described(f"seen BIGINT MAX, low INT MIN, pv {kind}", fields__pv__agg=function, **named)
    through = refused(raw, rest)
    assert (through.code, "'pv'" in through.message) == (CONFIG, True), "by fields.* it is the same"


@pytest.mark.parametrize("function", ["listagg", "string_agg"])
def test_a_list_of_texts_needs_room_to_grow(
    raw: RawClient, conn: Connection, function: str
) -> None:
    """A CHAR column of INDEXED rows has a fixed length, so a longer list could not be read."""
    indexed = {"table.kv.format": "INDEXED"}
    problem = refused(raw, described(f"pv CHAR(3) {function}", **indexed))
    assert problem.code == CONFIG
    assert f"{function} makes texts that are longer than column 'pv'" in problem.message
    table = aggregated(conn, f"n STRING {function}, pv CHAR(3) MAX", **indexed)
    with pytest.raises(ConfigError, match="longer than column 'more'"):
        conn.admin.alter_table(table.info.path, add_columns=f"more CHAR(3) {function}")
    put(table, (1, "ab", "ab"), (1, "cd", "cd"))
    assert values(table, 1) == ("ab,cd", "cd")


def test_a_column_that_is_added_is_looked_at_like_those_of_a_new_table(
    conn: Connection,
) -> None:
    table = aggregated(conn, "n BIGINT SUM")
    alter, path = conn.admin.alter_table, table.info.path
    with pytest.raises(ConfigError, match=r"sum cannot merge column 'names' of type STRING"):
        alter(path, add_columns="names STRING SUM")
    with pytest.raises(ConfigError, match=r"'delimiter' of listagg of column 'names' is empty"):
        alter(path, add_columns="names STRING LISTAGG(delimiter = '')")
    with pytest.raises(ConfigError, match=r"column 'names' has no aggregation function"):
        alter(path, add_columns="names STRING")
    with pytest.raises(ConfigError, match=r"'names'.*'lastvalue' is not .*did you mean last_value"):
        alter(path, add_columns="names STRING", set={"fields.names.agg": "lastvalue"})
    assert conn.admin.table_info(path).schema == table.schema, "nothing was added"


# -- columns without a function ------------------------------------------------------------------


def test_a_column_without_a_function_is_refused_and_the_message_says_how_to_name_one(
    raw: RawClient, conn: Connection
) -> None:
    table = document(declared("sum"))
    del table["schema"]["columns"][1]["agg_function"]
    problem = refused(raw, table)
    assert problem.code == CONFIG
    assert "column 'seen' has no aggregation function" in problem.message
    assert "fields.seen.agg" in problem.message
    assert DEFAULT_FUNCTION in problem.message
    with pytest.raises(ConfigError, match="column 'note' has no aggregation function"):
        aggregated(conn, "n BIGINT SUM, note STRING")


def test_only_the_option_of_the_table_gives_a_default(raw: RawClient, conn: Connection) -> None:
    table = aggregated(
        conn, "n BIGINT SUM, note STRING", **{DEFAULT_FUNCTION: "last_value_ignore_nulls"}
    )
    put(table, (1, 2, "a"), (1, 3, None))
    assert values(table, 1) == (5, "a")
    assert [str(c.agg_function) for c in table.schema.columns[1:]] == [
        "SUM",
        "LAST_VALUE_IGNORE_NULLS",
    ]
    sums = refused(raw, described("note STRING", **{DEFAULT_FUNCTION: "sum"}))
    assert "sum cannot merge column 'note'" in sums.message
    assert (
        "not an aggregation function"
        in refused(raw, described("n INT SUM", **{DEFAULT_FUNCTION: "latest"})).message
    )


# -- columns that cannot have a function ---------------------------------------------------------


@pytest.mark.parametrize("place", ["schema", "fields"])
def test_a_function_on_a_column_of_the_key_is_refused(raw: RawClient, place: str) -> None:
    table = document(declared("sum"))
    if place == "schema":
        table["schema"]["columns"][0]["agg_function"] = declared("max")
    else:
        table["properties"]["fields.k.agg"] = "max"
    problem = refused(raw, table)
    assert problem.code in (CONFIG, TABLE)
    assert "'k'" in problem.message


@pytest.mark.parametrize("engine", [None, "first_row", "versioned"])
@pytest.mark.parametrize("place", ["schema", "fields", "custom"])
def test_a_function_on_a_table_that_does_not_aggregate_is_refused(
    raw: RawClient, engine: str | None, place: str
) -> None:
    properties = {} if engine is None else {"table.merge-engine": engine}
    if engine == "versioned":
        properties["table.merge-engine.versioned.ver-column"] = "seen"
    table = document(declared("sum"), properties=properties)
    for column in table["schema"]["columns"][1:]:
        del column["agg_function"]
    assert refusal(raw, json.dumps(table).encode()) is None, "it is sound without a function"
    if place == "schema":
        table["schema"]["columns"][3]["agg_function"] = declared("sum")
    else:
        table["properties" if place == "fields" else "custom_properties"]["fields.pv.agg"] = "sum"
    problem = refused(raw, table)
    assert problem.code == CONFIG
    assert "'pv'" in problem.message
    assert "table.merge-engine = aggregation" in problem.message


def test_a_log_table_has_neither_functions_nor_the_engine(conn: Connection) -> None:
    for columns, properties in (("n BIGINT SUM", {}), ("n BIGINT", ENGINE)):
        with pytest.raises(ConfigError, match=r"aggregation"):
            conn.admin.create_table(f"{DATABASE}.{fresh_name()}", columns, properties=properties)

"""How the columns of an aggregation table get their functions, and which of them are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zufluss.config import Configuration
from zufluss.errors import ConfigError, InvalidTableError, ZuflussError
from zufluss.model import types as t
from zufluss.model.aggregate import FUNCTIONS, AggFunction
from zufluss.model.alter import NewColumn, PropertyChange, TableChanges, alter_table
from zufluss.model.ddl import parse_type
from zufluss.model.merge import column_lock
from zufluss.model.schema import Column, Schema
from zufluss.model.table import TableDescriptor
from zufluss.model.validation import check_table, complete

CONF = Configuration.of({})
ENGINE = {"table.merge-engine": "aggregation"}
DEFAULT = "table.merge-engine.aggregation.default-function"
SAMPLES = {
    t.Root.CHAR: "CHAR(4)",
    t.Root.STRING: "STRING",
    t.Root.BOOLEAN: "BOOLEAN",
    t.Root.BINARY: "BINARY(4)",
    t.Root.BYTES: "BYTES",
    t.Root.DECIMAL: "DECIMAL(10, 2)",
    t.Root.TINYINT: "TINYINT",
    t.Root.SMALLINT: "SMALLINT",
    t.Root.INTEGER: "INT",
    t.Root.BIGINT: "BIGINT",
    t.Root.FLOAT: "FLOAT",
    t.Root.DOUBLE: "DOUBLE",
    t.Root.DATE: "DATE",
    t.Root.TIME: "TIME(3)",
    t.Root.TIMESTAMP: "TIMESTAMP(6)",
    t.Root.TIMESTAMP_LTZ: "TIMESTAMP_LTZ(6)",
    t.Root.ARRAY: "ARRAY<INT>",
    t.Root.MAP: "MAP<INT, STRING>",
    t.Root.ROW: "ROW<x INT>",
}


def descriptor(
    columns: str,
    properties: Mapping[str, str] | None = None,
    custom: Mapping[str, str] | None = None,
    engine: bool = True,
) -> TableDescriptor:
    """A table with the key `k` and these columns."""
    return TableDescriptor(
        Schema.of(f"k INT, {columns}", ["k"]),
        properties={**(ENGINE if engine else {}), **(properties or {})},
        custom_properties=custom or {},
    )


def made(given: TableDescriptor) -> TableDescriptor:
    """What CREATE TABLE stores of the JSON a client sends."""
    stored = complete(TableDescriptor.from_json(given.to_json()), CONF)
    check_table(stored, CONF, live_servers=1)
    return stored


def functions(table: TableDescriptor) -> dict[str, str]:
    return {c.name: str(c.agg_function) for c in table.schema.columns if c.agg_function}


def refused(given: TableDescriptor) -> str:
    with pytest.raises(ConfigError) as caught:
        made(given)
    return caught.value.message


def test_there_is_a_sample_of_every_type() -> None:
    assert set(SAMPLES) == set(t.Root)


@pytest.mark.parametrize("function", sorted(FUNCTIONS))
@pytest.mark.parametrize("root", sorted(t.Root))
def test_a_function_takes_the_types_it_declares_and_refuses_others_by_column(
    function: str, root: t.Root
) -> None:
    by = "(by = seen)" if function.endswith("_by") else ""
    order = "MIN" if function == "min_by" else "MAX"
    table = descriptor(f"seen BIGINT {order}, value {SAMPLES[root]} {function.upper()}{by}")
    if root in FUNCTIONS[function].roots:
        assert made(table).schema.column("value").agg_function is not None
    else:
        message = refused(table)
        assert "'value'" in message
        assert f"{function} cannot merge" in message


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("v STRING LISTAGG(delimiter = '')", "'delimiter' of listagg of column 'v' is empty"),
        ("v STRING LISTAGG(limit = 0)", "is '0'; allowed: 1 to 2147483647"),
        ("v STRING LISTAGG(limit = 2147483648)", "allowed: 1 to 2147483647"),
        ("v STRING LISTAGG(limit = many)", "allowed: 1 to 2147483647"),
        ("v STRING LISTAGG(limit = '٣')", "allowed: 1 to 2147483647"),
        ("v STRING LISTAGG(overflow = wrap)", "is 'wrap'; allowed: error, truncate"),
        ("v STRING LISTAGG(delimeter = ';')", r"did you mean delimiter\?"),
        ("v INT SUM(delimiter = ';')", "does not exist; allowed: ignore_retract, overflow"),
        ("v INT SUM(overflow = truncate)", "allowed: error, wrap"),
        ("v DECIMAL(5, 2) SUM(overflow = wrap)", "DECIMAL can only refuse"),
        ("v DOUBLE SUM(overflow = error)", "become infinite"),
        ("v FLOAT PRODUCT(overflow = wrap)", "become infinite"),
        ("v INT MAX(ignore_retract = maybe)", "allowed: true, false"),
        ("v INT MAX_BY", "goes by None; set parameter by to a column of the function max"),
        ("v INT MAX_BY(by = other)", "goes by 'other'"),
        ("v INT MAX_BY(by = v)", "goes by 'v'"),
        ("v INT MAX_BY(by = k)", "goes by 'k'"),
        ("v INT MAX_BY(by = low), low INT MIN", "of the function max: there is none"),
        ("v INT MIN_BY(by = high), high INT MAX, low INT MIN", "of the function min: low"),
    ],
)
def test_a_parameter_that_is_not_allowed_is_refused_by_column(column: str, message: str) -> None:
    found = refused(descriptor(column))
    assert "'v'" in found
    with pytest.raises(ConfigError, match=message):
        made(descriptor(column))


@pytest.mark.parametrize(
    "column",
    [
        "v STRING LISTAGG(delimiter = ' | ', limit = 2147483647, overflow = TRUNCATE)",
        "v DECIMAL(5, 2) SUM(overflow = error, ignore_retract = true)",
        "v INT SUM(overflow = Wrap)",
        "v INT MAX(ignore_retract = TRUE)",
        "v STRING MAX_BY(by = high), high TIMESTAMP(3) MAX",
        "v ARRAY<ROW<x INT>> ARRAY_AGG(limit = 3)",
        "v INT NOT NULL SUM COMMENT 'all of them'",
    ],
)
def test_parameters_that_are_allowed_are_stored_in_one_spelling(column: str) -> None:
    stored = made(descriptor(column)).schema
    text = str(stored)
    assert Schema.of(text) == stored
    assert not {"TRUNCATE", "Wrap", "TRUE"} & set(text.replace(")", " ").split())


def test_an_unknown_function_is_refused_by_column_with_the_nearest_one() -> None:
    """Also when the client knows it: the request is JSON that anybody can write."""
    document = json.loads(descriptor("pv BIGINT SUM").to_json())
    document["schema"]["columns"][1]["agg_function"] = {"type": "SUMM"}
    with pytest.raises(ConfigError, match=r"'pv': 'summ' is not .* \(did you mean sum\?\)"):
        check_table(complete(TableDescriptor.from_json(json.dumps(document)), CONF), CONF, 1)
    with pytest.raises(InvalidTableError, match=r"function \(did you mean sum\?\), COMMENT"):
        Schema.of("pv BIGINT SUMM")


def test_a_column_without_a_function_is_refused_unless_the_table_names_a_default() -> None:
    message = refused(descriptor("pv BIGINT SUM, name STRING"))
    assert "column 'name' has no aggregation function" in message
    assert DEFAULT in message
    table = made(descriptor("pv BIGINT SUM, name STRING, k2 INT", {DEFAULT: "LAST-VALUE"}))
    assert functions(table) == {"pv": "SUM", "name": "LAST_VALUE", "k2": "LAST_VALUE"}
    assert "cannot merge column 'name'" in refused(descriptor("name STRING", {DEFAULT: "sum"}))
    assert "did you mean max" in refused(descriptor("v INT SUM", {DEFAULT: "maxx"}))
    assert "merge-engine = aggregation" in refused(
        descriptor("v INT", {DEFAULT: "sum"}, engine=False)
    )


def test_a_cluster_may_name_the_default_of_tables_that_name_none() -> None:
    conf = Configuration.of({"zufluss.aggregation.default-function": "last_value_ignore_nulls"})
    stored = complete(descriptor("v INT SUM, name STRING"), conf)
    assert functions(stored) == {"v": "SUM", "name": "LAST_VALUE_IGNORE_NULLS"}
    assert stored.properties[DEFAULT] == "last_value_ignore_nulls"
    own = complete(descriptor("name STRING", {DEFAULT: "last_value"}), conf)
    assert functions(own) == {"name": "LAST_VALUE"}
    assert DEFAULT not in complete(descriptor("name STRING", engine=False), conf).properties


def test_a_function_on_a_key_column_or_without_the_engine_is_refused() -> None:
    with pytest.raises(InvalidTableError, match="primary key column 'k' cannot have"):
        made(TableDescriptor(Schema.of("k INT SUM, v INT SUM", ["k"]), properties=ENGINE))
    with pytest.raises(InvalidTableError, match="primary key column 'k' cannot have"):
        made(descriptor("v INT SUM", {"fields.k.agg": "sum"}))
    assert "merge-engine = aggregation" in refused(descriptor("v INT SUM", engine=False))
    assert "merge-engine = aggregation" in refused(
        descriptor("v INT", custom={"fields.v.agg": "sum"}, engine=False)
    )


@pytest.mark.parametrize("place", ["properties", "custom"])
def test_field_options_become_part_of_the_schema_and_are_not_stored(place: str) -> None:
    options = {
        "fields.pv.agg": "SUM",
        "fields.pv.sum.ignore-retract": "True",
        "fields.names.agg": "listagg",
        "fields.names.listagg.delimiter": ";",
        "fields.a.b.agg": "max",
    }
    both = {"properties": {}, "custom": {"owner": "me"}}
    both[place] = {**both[place], **options}
    table = made(descriptor("pv BIGINT, names STRING, `a.b` INT", **both))
    assert functions(table) == {
        "pv": "SUM(ignore_retract = true)",
        "names": "LISTAGG(delimiter = ';')",
        "a.b": "MAX",
    }
    assert table.custom_properties == {"owner": "me"}
    assert not [key for key in table.properties if key.startswith("fields.")]


@pytest.mark.parametrize(
    ("columns", "properties", "custom", "message"),
    [
        ("v INT SUM", {"fields.v.agg": "max"}, {}, "column 'v' has sum; keep one of them"),
        ("v INT", {"fields.v.agg": "max"}, {"fields.v.agg": "sum"}, "among the custom properties"),
        ("v INT", {"fields.v.agg": "sum"}, {"fields.v.max.by": "k"}, "column 'v' has sum"),
        ("v INT", {"fields.v.sum.overflow": "wrap"}, {}, r"set fields\.v\.agg = sum too"),
        (
            "v INT SUM(overflow = error)",
            {"fields.v.sum.overflow": "wrap"},
            {},
            "has overflow = 'error' already",
        ),
        ("v INT SUM", {"fields.x.agg": "sum"}, {}, "column 'x', but the columns are k, v"),
        ("v INT SUM", {"fields.v": "sum"}, {}, "is not an option of a column"),
        ("v INT SUM", {"fields..agg": "sum"}, {}, "is not an option of a column"),
        ("v INT SUM", {}, {"fields.v.kind": "random"}, "is not an option of a column"),
        ("v INT", {"fields.v.agg": "summ"}, {}, "did you mean sum"),
    ],
)
def test_declarations_that_contradict_each_other_are_refused(
    columns: str, properties: dict[str, str], custom: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        made(descriptor(columns, properties, custom))


def test_declarations_that_say_the_same_and_parameters_of_a_default_are_fine() -> None:
    table = made(
        descriptor(
            "a INT SUM(overflow = wrap), b STRING",
            {"fields.a.agg": "sum", "fields.a.sum.overflow": "WRAP", DEFAULT: "listagg"},
            {"fields.a.agg": "sum", "fields.b.listagg.limit": "9"},
        )
    )
    assert functions(table) == {"a": "SUM(overflow = wrap)", "b": "LISTAGG(limit = 9)"}


def test_custom_properties_of_other_tables_are_the_users_own() -> None:
    custom = {"fields.v.kind": "random", "fields.gone.agg": "sum"}
    assert made(descriptor("v INT", custom=custom, engine=False)).custom_properties == custom
    with pytest.raises(ConfigError, match="not a Fluss table property"):
        made(descriptor("v INT", custom, engine=False))


def test_an_auto_increment_column_keeps_its_first_number() -> None:
    def numbered(column: str) -> TableDescriptor:
        return TableDescriptor(Schema.of(f"k INT, {column}", ["k"], ["n"]), properties=ENGINE)

    assert functions(made(numbered("n BIGINT"))) == {"n": "FIRST_VALUE_IGNORE_NULLS"}
    with pytest.raises(ConfigError, match="'n' keeps its first number, so sum cannot merge it"):
        made(numbered("n BIGINT SUM"))


def test_a_new_column_needs_a_function_too_and_may_have_it_beside_it() -> None:
    before = made(descriptor("pv BIGINT SUM"))
    column = NewColumn("seen", parse_type("TIMESTAMP(3)"))
    with pytest.raises(ConfigError, match="column 'seen' has no aggregation function"):
        alter_table(before, TableChanges(add_columns=[column]), CONF)
    options = [PropertyChange("fields.seen.agg", "max")]
    after = alter_table(before, TableChanges(options, [column]), CONF)
    assert functions(after) == {"pv": "SUM", "seen": "MAX"}
    assert (after.properties, after.custom_properties) == (before.properties, {})
    defaulted = made(descriptor("pv BIGINT SUM", {DEFAULT: "last_value"}))
    after = alter_table(defaulted, TableChanges(add_columns=[column]), CONF)
    assert functions(after) == {"pv": "SUM", "seen": "LAST_VALUE"}


@pytest.mark.parametrize(
    ("change", "columns", "message"),
    [
        (PropertyChange("fields.pv.agg", "max"), [], "cannot be altered"),
        (PropertyChange("fields.pv.sum.overflow", "wrap"), [], "cannot be altered"),
        (PropertyChange("fields.pv.agg", "max"), ["seen"], "about the column 'pv'"),
        (PropertyChange("fields.seen.agg", None, 1), ["seen"], "can only be SET"),
        (PropertyChange("table.log.ttl", "1d"), ["seen"], "send two"),
        (PropertyChange("owner", "me"), ["seen"], "send two"),
    ],
)
def test_the_function_of_a_column_that_exists_never_changes(
    change: PropertyChange, columns: list[str], message: str
) -> None:
    before = made(descriptor("pv BIGINT SUM"))
    added = [NewColumn(name, t.BIGINT, agg_function=AggFunction("max")) for name in columns]
    with pytest.raises(ZuflussError, match=message):
        alter_table(before, TableChanges([change], added), CONF)


def test_column_locks_are_on_with_the_engine_and_need_old_values() -> None:
    lock = "table.column-lock.enabled"
    assert column_lock(made(descriptor("v INT SUM")).properties)
    assert not column_lock(made(descriptor("v INT SUM", {lock: "false"})).properties)
    assert not column_lock(made(descriptor("v INT", engine=False)).properties)
    assert column_lock(made(descriptor("v INT", {lock: "true"}, engine=False)).properties)
    wal = {"table.changelog.image": "WAL"}
    assert "set FULL" in refused(descriptor("v INT", {lock: "true", **wal}, engine=False))
    assert made(descriptor("v INT", {lock: "false", **wal}, engine=False))
    assert "primary-key tables" in refused(
        TableDescriptor(Schema.of("v INT"), properties={lock: "true"})
    )


VALUES = st.text(min_size=1, max_size=6).filter(lambda s: s.isprintable())


@settings(max_examples=100)
@given(
    st.sampled_from(sorted(FUNCTIONS)),
    st.dictionaries(st.sampled_from(["by", "delimiter", "limit"]), VALUES, max_size=3),
    st.none() | VALUES,
)
def test_the_text_of_a_column_parses_back(
    name: str, parameters: dict[str, str], comment: str | None
) -> None:
    column = Column("v", t.BIGINT, comment, agg_function=AggFunction.named(name, parameters))
    schema = Schema((Column("k", t.INTEGER), column), ("k",))
    assert Schema.of(str(schema)) == schema
    assert Schema.from_json(schema.to_json_bytes()) == schema


def test_first_value_keeps_its_name_also_in_a_column_that_is_added() -> None:
    """Fluss's clients compare the function with the one that they declared."""
    column = NewColumn("seen", t.BIGINT, agg_function=AggFunction("first_value"))
    table = descriptor("a INT FIRST_VALUE, b INT FIRST_VALUE_IGNORE_NULLS")
    after = alter_table(made(table), TableChanges(add_columns=[column]), CONF)
    assert functions(after) == {
        "a": "FIRST_VALUE",
        "b": "FIRST_VALUE_IGNORE_NULLS",
        "seen": "FIRST_VALUE",
    }

"""Modes of puts and who may use them, states that clients aggregate, and retracts."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import pandas as pd
import pytest

import zufluss
from tests.counts import rounds
from tests.end_to_end.aggregation.reference import (
    DECIMALS,
    INTEGERS,
    NUMBERS,
    TAKES,
    same,
    samples,
    value_of,
)
from tests.end_to_end.aggregation.tables import (
    DATABASE,
    ENGINE,
    Row,
    aggregated,
    batch_of,
    changes,
    end_offset,
    fresh_name,
    put,
    put_code,
    values,
)
from tests.end_to_end.guarded import guarded_properties, listener_ports
from tests.end_to_end.kv import PUT_VERSION, Codec, kv_batch, put_request
from tests.end_to_end.raw import RawClient
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import (
    AggregationError,
    AuthorizationError,
    ConfigError,
    ErrorCode,
    InvalidTableError,
)
from zufluss.model.merge import MergeMode
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

# -- modes of puts -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [3, 4, 99, 101, -1, 2**31 - 1, -(2**31)])
def test_an_unknown_mode_is_an_error_and_nothing_is_written(
    conn: Connection, raw: RawClient, mode: int
) -> None:
    table = aggregated(conn, "n BIGINT SUM")
    put(table, (1, 5))
    rows = kv_batch([Codec(table.schema).put((1, 1))])
    code = put_code(raw, table.info.table_id, rows, mode=mode)
    assert code == ErrorCode.UNSUPPORTED_VERSION
    assert (values(table, 1), end_offset(raw, table)) == ((5,), 1)


def test_two_modes_in_one_put_are_an_error(conn: Connection, raw: RawClient) -> None:
    """A put has one mode for all its buckets and rows; one that names two is refused."""
    table = aggregated(conn, "n BIGINT SUM")
    put(table, (1, 5))
    request = put_request(table.info.table_id, kv_batch([Codec(table.schema).put((1, 1))]))
    request.agg_mode = MergeMode.RETRACT
    for mode, wanted in ((MergeMode.OVERWRITE, ErrorCode.CORRUPT_MESSAGE), (MergeMode.RETRACT, 0)):
        twice = (
            request.SerializeToString() + m.PutKvRequest(agg_mode=mode).SerializePartialToString()
        )
        assert raw.error_code(ApiKey.PUT_KV, twice, PUT_VERSION) == wanted
    assert values(table, 1) == (4,), "the same mode twice is one mode"
    assert raw.alive()


def test_a_writer_of_the_client_has_one_mode_and_two_writers_do_not_mix_theirs(
    conn: Connection,
) -> None:
    table = aggregated(conn, "n BIGINT SUM, c INT COUNT", buckets=2)
    with pytest.raises(ConfigError, match="pre_aggregate turns inputs into states"):
        table.upsert(merge_mode="retract", pre_aggregate=True)
    with pytest.raises(ConfigError, match="merge_mode 'replace' is none of aggregate, overwrite"):
        table.upsert(merge_mode="replace")  # type: ignore[arg-type]
    with table.upsert() as adds, table.upsert(merge_mode="retract") as takes:
        for i in range(200):
            adds.write({"k": i % 5, "n": 3, "c": 1})
            if i % 2:
                takes.write({"k": i % 5, "n": 1, "c": 1})
    assert [values(table, key) for key in range(5)] == [(100, 20)] * 5


@pytest.mark.parametrize("mode", ["merge_state", "retract"])
def test_modes_of_aggregation_are_refused_by_other_tables(
    conn: Connection, raw: RawClient, mode: str
) -> None:
    table = aggregated(conn, "n BIGINT", **{"table.merge-engine": "first_row"})
    with pytest.raises(InvalidTableError, match="merge engine first_row"):
        table.upsert(merge_mode=mode)  # type: ignore[arg-type]
    rows = kv_batch([Codec(table.schema).put((1, 1))])
    code = put_code(raw, table.info.table_id, rows, mode=MergeMode[mode.upper()])
    assert code == ErrorCode.UNSUPPORTED_VERSION
    assert values(table, 1) is None


def test_overwrite_without_permission_is_denied(new_server: Callable[..., DevServer]) -> None:
    ports = listener_ports()
    allowed = {"super.users": "User:admin", "zufluss.overwrite.users": "User:loader"}
    new_server(guarded_properties(ports, "admin", "loader", "bob") | allowed)

    def login(name: str) -> Connection:
        return zufluss.connect(
            f"127.0.0.1:{ports['SECURE']}",
            **{
                "client.security.protocol": "sasl",
                "client.security.sasl.username": name,
                "client.security.sasl.password": f"{name}-secret",
            },
        )

    with login("admin") as admin, login("loader") as loader, login("bob") as bob:
        table = aggregated(admin, "n BIGINT SUM, t STRING LISTAGG")
        mine = bob.table(table.info.path)
        put(mine, (1, 5, "a"))
        for columns, row in ((None, (1, 100, "x")), (["k", "n"], (1, 100))):
            with pytest.raises(AuthorizationError, match=r"bob may not overwrite.*overwrite.users"):
                put(mine, row, columns=columns, mode="overwrite")
        assert values(mine, 1) == (5, "a")
        put(mine, (1, 2, "b"))
        with mine.upsert(["k", "n"], merge_mode="retract") as writer:
            writer.write({"k": [1], "n": [1]})
        assert values(mine, 1) == (6, "a,b"), "what goes through the engine needs no permission"
        put(loader.table(table.info.path), (1, 1), columns=["k", "n"], mode="overwrite")
        assert values(mine, 1) == (1, "a,b")
        put(table, (1, 2, None), mode="overwrite")
        assert values(mine, 1) == (2, None)
        undone_without_permission(mine)


def undone_without_permission(table: Table) -> None:
    """The server performs the undo of a restart, so a job needs no permission to overwrite."""
    writer = table.exactly_once_writer("job", ["k", "n"])
    writer.write({"k": [1], "n": [1]})
    kept = writer.checkpoint()
    writer.write({"k": [1], "n": [50]})
    writer.flush()
    with table.exactly_once_writer(state=kept) as again:
        assert values(table, 1) == (3, None)
        again.release()


# -- states that clients aggregate ---------------------------------------------------------------

COUNT, KEYS = 1000, 8
BY = "by"
EXACT: dict[str, list[Any]] = {
    **{kind: [-1, 0, 1] for kind in INTEGERS},
    "FLOAT": [-1.0, 0.5, 2.0],
    "DOUBLE": [-1.0, 0.5, 2.0],
    **{kind: [Decimal(-1), Decimal("0.5"), Decimal(1)] for kind in DECIMALS},
}
"""Numbers whose sums and products are exact in any order, and fit."""


def inputs(function: str, kind: str, rng: random.Random) -> list[Any]:
    """Values of 1,000 rows."""
    if function == "product":
        factors = [1, -1]
        chosen = [rng.choice([None, *factors]) for _ in range(COUNT)]
        for key in range(KEYS):
            chosen[key + KEYS * rng.randrange(COUNT // KEYS - 1)] = 3
        make = float if kind in ("FLOAT", "DOUBLE") else Decimal if kind in DECIMALS else int
        return [None if value is None else make(value) for value in chosen]
    known = EXACT.get(kind) if function == "sum" else None
    return [rng.choice([None, *(known or samples(function, kind))]) for _ in range(COUNT)]


@pytest.mark.parametrize("function", TAKES)
def test_states_of_1_000_rows_aggregated_before_give_what_1_000_accumulates_give(
    conn: Connection, rng: random.Random, function: str
) -> None:
    parameter = f"(by = {BY})" if function.endswith("_by") else ""
    order = "MIN" if function == "min_by" else "MAX"
    kinds = TAKES[function]
    columns = [f"v{i} {kind} {function}{parameter}" for i, kind in enumerate(kinds)]
    tables = [aggregated(conn, ", ".join([f"{BY} INT {order}", *columns])) for _ in range(2)]
    given = {f"v{i}": inputs(function, kind, rng) for i, kind in enumerate(kinds)}
    given[BY] = [rng.choice([None, 1, 2, 3]) for _ in range(COUNT)]
    rows = [
        {"k": i % KEYS, **{name: column[i] for name, column in given.items()}} for i in range(COUNT)
    ]
    plainly, before = tables
    cut = rng.randrange(1, COUNT)
    for table, folds in ((plainly, False), (before, True)):
        with table.upsert(pre_aggregate=folds) as writer:
            for part in (rows[:cut], rows[cut:]):
                writer.write(batch_of(table, part))
                writer.flush()
    check_states(function, kinds, rows, tables)
    sent = [kind for kind, _ in changes(before) if kind != "-U"]
    assert len(sent) <= 2 * KEYS, "one row per key and batch"


def check_states(function: str, kinds: Sequence[str], rows: list[Row], tables: list[Table]) -> None:
    """Assert that both tables have the results of plain Python."""
    found = [{row["k"]: row for row in t.scan().to_arrow().to_pylist()} for t in tables]
    for key, (i, kind) in itertools.product(range(KEYS), enumerate(kinds)):
        mine = [row for row in rows if row["k"] == key]
        column = [row[f"v{i}"] for row in mine]
        expected = same(function, value_of(function, kind, column, [row[BY] for row in mine]))
        for state in found:
            assert same(function, state[key][f"v{i}"]) == expected, f"{function} of {kind}"


def test_states_by_hand_are_merged_as_states(conn: Connection, raw: RawClient) -> None:
    """A count adds states and not inputs; a state of a new key is stored as it is."""
    table = aggregated(
        conn, "c BIGINT COUNT, n BIGINT SUM, t STRING LISTAGG(limit = 7, overflow = truncate)"
    )
    put(table, (1, 0, 5, "a"), (1, 0, 5, "b"))
    codec = Codec(table.schema)
    states = kv_batch([codec.put((1, 40, 7, "cc,d,e")), codec.put((2, 40, 7, "x"))])
    code = put_code(raw, table.info.table_id, states, mode=MergeMode.MERGE_STATE)
    assert code == 0
    assert values(table, 1) == (42, 17, "a,b,cc"), "a list of lists is cut between its elements"
    assert values(table, 2) == (40, 7, "x")


def test_rows_are_aggregated_before_by_keys_of_any_type_and_number(conn: Connection) -> None:
    """Keys that are equal as numbers but not as bytes are different keys."""
    tables = []
    for folds in (False, True):
        path = f"{DATABASE}.{fresh_name()}"
        conn.admin.create_table(
            path,
            "a DOUBLE, b STRING, c TIMESTAMP(9), d DECIMAL(20, 2), n BIGINT SUM, "
            "PRIMARY KEY (a, b, c, d)",
            bucket_count=2,
            properties=ENGINE,
        )
        tables.append(conn.table(path))
        keys = itertools.product(
            [0.0, -0.0, math.nan],
            ["", "a"],
            [pd.Timestamp(0), pd.Timestamp(1)],
            [Decimal("1.00"), Decimal("-1.00")],
        )
        rows = [dict(zip("abcd", key, strict=True)) for key in keys] * 3
        with tables[-1].upsert(pre_aggregate=folds) as writer:
            writer.write(batch_of(tables[-1], [{**row, "n": i} for i, row in enumerate(rows)]))
    plainly, before = (sorted(map(str, t.scan().to_arrow().to_pylist())) for t in tables)
    assert len(plainly) == 24
    assert plainly == before


def test_a_batch_that_cannot_be_aggregated_before_is_refused_and_the_next_is_not(
    conn: Connection,
) -> None:
    table = aggregated(conn, "n TINYINT SUM")
    with table.upsert(pre_aggregate=True) as writer:
        writer.write([{"k": 1, "n": 1}] * 200)
        with pytest.raises(AggregationError, match=r"'n' \(sum\) of key k = 1: .*TINYINT"):
            writer.flush()
        writer.write({"k": 2, "n": 1})
    assert (values(table, 1), values(table, 2)) == (None, (1,))


def test_partial_states_and_refusals_are_those_of_inputs(conn: Connection, raw: RawClient) -> None:
    table = aggregated(conn, "n TINYINT SUM, c INT COUNT, b BYTES RBM32")
    with table.upsert(["k", "n", "c"], pre_aggregate=True) as writer:
        writer.write([{"k": 1, "n": 1, "c": 0}] * 100)
    assert values(table, 1) == (100, 100, None)
    end = end_offset(raw, table)
    with pytest.raises(AggregationError, match=r"'n' \(sum\) of key k = 1: .*TINYINT"):
        put(table, (1, 28, None, None), mode="merge_state")
    with pytest.raises(AggregationError, match=r"'b' \(rbm32\) of key k = 2: "):
        put(table, (2, None, None, b"none"), mode="merge_state")
    assert (values(table, 1), values(table, 2)) == ((100, 100, None), None)
    assert end_offset(raw, table) == end


# -- retracts ------------------------------------------------------------------------------------


def test_a_retract_of_a_sum_subtracts_for_every_type(conn: Connection, rng: random.Random) -> None:
    table = aggregated(conn, ", ".join(f"v{i} {kind} SUM" for i, kind in enumerate(NUMBERS)))
    count = rounds(20, 200)
    rows = [[rng.choice([None, *EXACT[kind]]) for kind in NUMBERS] for _ in range(count)]
    put(table, *((1, *row) for row in rows))
    back = rng.sample(range(count), count // 2)
    put(table, *((1, *rows[i]) for i in back), mode="retract")
    rest = [rows[i] for i in range(count) if i not in back]
    found = values(table, 1)
    assert found is not None
    for i, kind in enumerate(NUMBERS):
        assert found[i] == sum(row[i] for row in rest if row[i] is not None), kind


def test_a_retract_of_a_count_takes_one_away_for_each_value(conn: Connection) -> None:
    table = aggregated(conn, "c BIGINT COUNT")
    put(table, *((1, value) for value in (5, None, 0, 7)))
    put(table, (1, 9), (1, None), mode="retract")
    assert values(table, 1) == (2,)


def test_a_retract_of_a_product_divides_and_0_or_a_rest_is_an_error(
    conn: Connection, raw: RawClient
) -> None:
    table = aggregated(conn, "i INT PRODUCT, d DOUBLE PRODUCT, m DECIMAL(9, 2) PRODUCT")
    put(table, (1, 6, 1.5, Decimal("2.50")), (1, 4, 2.0, Decimal("3.00")))
    put(table, (1, 4, 2.0, Decimal("3.00")), mode="retract")
    assert values(table, 1) == (6, 1.5, Decimal("2.50"))
    end = end_offset(raw, table)
    zeros: dict[str, tuple[Any, ...]] = {
        "i": (0, None, None),
        "d": (None, -0.0, None),
        "m": (None, None, Decimal(0)),
    }
    for name, row in zeros.items():
        with pytest.raises(AggregationError, match=rf"'{name}' \(product\) of key k = 1: .* by 0"):
            put(table, (2, None, None, None), (1, *row), mode="retract")
    with pytest.raises(AggregationError, match=r"'i' .* not a multiple"):
        put(table, (1, 4, None, None), mode="retract")
    with pytest.raises(AggregationError, match=r"'i' .*key k = 9: there is no product"):
        put(table, (9, 4, None, None), mode="retract")
    assert values(table, 1) == (6, 1.5, Decimal("2.50")), "nothing was changed"
    assert (values(table, 2), values(table, 9), end_offset(raw, table)) == (None, None, end)


ONE_WAY = [name for name in TAKES if name not in ("sum", "product", "count")]


@pytest.mark.parametrize("function", ONE_WAY)
def test_other_functions_refuse_a_retract_unless_they_are_told_to_ignore_it(
    conn: Connection, function: str
) -> None:
    kind, by = TAKES[function][0], f"{BY} INT {'MIN' if function == 'min_by' else 'MAX'}"
    one, other = samples(function, kind)[0], samples(function, kind)[1]
    parameters = [f"by = {BY}"] if function.endswith("_by") else []
    for ignores in (False, True):
        parameters += ["ignore_retract = true"] if ignores else []
        text = f"({', '.join(parameters)})" if parameters else ""
        table = aggregated(
            conn, f"n BIGINT SUM, {by}(ignore_retract = true), v {kind} {function}{text}"
        )
        put(table, (1, 5, 1, one))
        if not ignores:
            with pytest.raises(AggregationError, match=rf"'v' .*{function}.*ignore_retract"):
                put(table, (1, 1, 1, one), mode="retract")
            assert values(table, 1) == (5, 1, one)
            continue
        put(table, (1, 1, 9, other), mode="retract")
        assert values(table, 1) == (4, 1, one)


def test_columns_that_cannot_be_taken_back_may_be_left_out(conn: Connection) -> None:
    table = aggregated(conn, "n BIGINT SUM, m INT MAX")
    put(table, (1, 5, 7))
    put(table, (1, 2), columns=["k", "n"], mode="retract")
    assert values(table, 1) == (3, 7)


def test_a_retract_of_a_key_that_is_not_there_waits_for_what_it_takes_back(
    conn: Connection,
) -> None:
    """A retract may come before its input, from another source; together they cancel out."""
    table = aggregated(conn, "n BIGINT SUM, c INT COUNT, d DECIMAL(9, 2) SUM")
    put(table, (1, 5, 1, Decimal("1.25")), mode="retract")
    assert values(table, 1) == (-5, -1, Decimal("-1.25"))
    put(table, (1, 5, 1, Decimal("1.25")))
    assert values(table, 1) == (0, 0, Decimal("0.00"))
    assert [kind for kind, _ in changes(table)] == ["+I", "-U", "+U"]


def test_a_retract_beyond_the_type_is_an_error(conn: Connection, raw: RawClient) -> None:
    table = aggregated(conn, "n TINYINT SUM, w TINYINT SUM(overflow = wrap)")
    put(table, (1, -128, -128))
    with pytest.raises(AggregationError, match=r"'n' \(sum\) of key k = 1: .*TINYINT"):
        put(table, (1, 1, None), mode="retract")
    with pytest.raises(AggregationError, match=r"'n' \(sum\) of key k = 2: .*TINYINT"):
        put(table, (2, -128, None), mode="retract")
    put(table, (1, None, 1), mode="retract")
    assert (values(table, 1), values(table, 2)) == ((-128, 127), None)

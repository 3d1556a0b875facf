"""Overflow, zeros and NaN, lists, nested arrays, bitmaps."""

from __future__ import annotations

import itertools
import math
import threading
from decimal import Decimal
from typing import Any

import fluss
import pytest
from pyroaring import BitMap, BitMap64

import zufluss
from tests.counts import rounds
from tests.end_to_end.aggregation.reference import hll, rbm32, rbm64, same, theta
from tests.end_to_end.aggregation.tables import (
    aggregated,
    changes,
    end_offset,
    put,
    put_code,
    values,
)
from tests.end_to_end.helpers import connected, in_time
from tests.end_to_end.kv import Codec, kv_batch, upsert
from tests.end_to_end.raw import RawClient
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import AggregationError
from zufluss.model.merge import MergeMode
from zufluss.model.schema import Schema
from zufluss.testing.server import DevServer

MAXIMA = {"TINYINT": 2**7 - 1, "SMALLINT": 2**15 - 1, "INT": 2**31 - 1, "BIGINT": 2**63 - 1}


def refuses(raw: RawClient, table: Table, key: Any, row: tuple[Any, ...], message: str) -> None:
    """Assert that a batch with this row is refused, and that no row or change of it is stored."""
    before, end = values(table, key), end_offset(raw, table)
    other = (key + 1000, *(None for _ in row))
    with pytest.raises(AggregationError, match=message):
        put(table, other, (key, *row))
    assert values(table, key) == before
    assert values(table, key + 1000) is None
    assert end_offset(raw, table) == end


# -- overflow ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAXIMA)
def test_an_integer_beyond_its_type_is_an_error_with_column_and_key(
    conn: Connection, raw: RawClient, kind: str
) -> None:
    table, most = aggregated(conn, f"n {kind} SUM, p {kind} PRODUCT"), MAXIMA[kind]
    put(table, (1, most, most), (2, -most - 1, -most - 1))
    refuses(raw, table, 1, (1, None), rf"'n' \(sum\) of key k = 1: .*{kind}")
    refuses(raw, table, 1, (None, 2), rf"'p' \(product\) of key k = 1: .*{kind}")
    refuses(raw, table, 2, (-1, None), rf"'n' \(sum\) of key k = 2: .*{kind}")
    refuses(raw, table, 2, (None, -1), rf"'p' \(product\) of key k = 2: .*{kind}")
    put(table, (1, -1, -1), (2, 1, 1))
    assert (values(table, 1), values(table, 2)) == ((most - 1, -most), (-most, -most - 1))


@pytest.mark.parametrize("kind", MAXIMA)
def test_an_integer_wraps_only_where_the_column_says_so(conn: Connection, kind: str) -> None:
    table = aggregated(conn, f"n {kind} SUM(overflow = wrap), p {kind} PRODUCT(overflow = wrap)")
    most = MAXIMA[kind]
    put(table, (1, most, most))
    put(table, (1, 1, 2))
    assert values(table, 1) == (-most - 1, -2)


def test_a_count_at_its_end_is_an_error_or_wraps(conn: Connection, raw: RawClient) -> None:
    most = MAXIMA["INT"]
    table = aggregated(conn, "c INT COUNT, w INT COUNT(overflow = wrap)")
    put(table, (1, most, most), mode="overwrite")
    refuses(raw, table, 1, (7, None), r"'c' \(count\) of key k = 1: .*INT")
    put(table, (1, None, 7))
    assert values(table, 1) == (most, -most - 1)


def test_a_decimal_beyond_its_precision_is_an_error_and_the_value_stays(
    conn: Connection, raw: RawClient
) -> None:
    table = aggregated(conn, "s DECIMAL(5, 2) SUM, p DECIMAL(5, 2) PRODUCT, w DECIMAL(38, 0) SUM")
    most, widest = Decimal("999.99"), Decimal(10**38 - 1)
    put(table, (1, most, most, widest))
    beyond = r"of key k = 1: .*DECIMAL\("
    refuses(raw, table, 1, (Decimal("0.01"), None, None), rf"'s' \(sum\) {beyond}5, 2\)")
    refuses(raw, table, 1, (None, Decimal("1.01"), None), rf"'p' \(product\) {beyond}5, 2\)")
    refuses(raw, table, 1, (None, None, Decimal(1)), rf"'w' \(sum\) {beyond}38, 0\)")
    assert values(table, 1) == (most, most, widest)
    put(table, (1, Decimal("-0.01"), Decimal("0.50"), Decimal(-1)))
    assert values(table, 1) == (Decimal("999.98"), Decimal("500.00"), Decimal(10**38 - 2))


def test_floats_become_infinite(conn: Connection) -> None:
    table = aggregated(conn, "f FLOAT SUM, d DOUBLE PRODUCT")
    put(table, (1, 3e38, 1e308), (1, 3e38, -10.0))
    assert values(table, 1) == (math.inf, -math.inf)


def test_an_overflow_in_the_middle_of_a_batch_is_one(conn: Connection, raw: RawClient) -> None:
    """Later rows of the batch would bring the sum back into range, but rows count one by one."""
    table = aggregated(conn, "n BIGINT SUM")
    with pytest.raises(AggregationError, match="key k = 5"):
        put(table, (5, 2**63 - 1), (5, 1), (5, -1))
    assert (values(table, 5), end_offset(raw, table)) == (None, 0)


def test_a_decimal_beyond_its_precision_is_refused_at_the_first_write_too(
    conn: Connection, raw: RawClient
) -> None:
    """Only raw frames can contain such a value; its bytes are those of a wider type."""
    for narrow, wide, value in (
        ("DECIMAL(5, 2)", "DECIMAL(18, 2)", Decimal("1000.00")),
        ("DECIMAL(20, 2)", "DECIMAL(38, 2)", Decimal(10**18)),
    ):
        table = aggregated(conn, f"d {narrow} SUM")
        codec = Codec(Schema.of(f"k INT NOT NULL, d {wide}", ["k"]))
        for mode in MergeMode:
            assert put_code(raw, table.info.table_id, kv_batch([codec.put((1, value))]), mode=mode)
        assert (values(table, 1), end_offset(raw, table)) == (None, 0)


async def test_a_client_of_fluss_is_told_column_and_key(
    server: DevServer, conn: Connection
) -> None:
    """pyfluss does not know the error code, and must not retry it."""
    table = aggregated(conn, "n INT SUM")
    async with connected(server.bootstrap) as connection:
        theirs = await in_time(
            connection.get_table(fluss.TablePath(*str(table.info.path).split(".")))
        )
        with pytest.raises(fluss.FlussError, match=r"column 'n' \(sum\) of key k = 1.* INT"):
            await upsert(theirs, [1, 2**31 - 1], [1, 1])
    assert values(table, 1) is None


# -- zeros and NaN -------------------------------------------------------------------------------


def test_a_product_by_0_is_0_and_by_null_unchanged(conn: Connection) -> None:
    table = aggregated(
        conn, "i INT PRODUCT, d DOUBLE PRODUCT, m DECIMAL(9, 2) PRODUCT, f DOUBLE PRODUCT"
    )
    put(table, (1, 6, 1.5, Decimal("2.50"), math.inf))
    put(table, (1, None, None, None, None))
    assert values(table, 1) == (6, 1.5, Decimal("2.50"), math.inf)
    put(table, (1, 0, -0.0, Decimal("0.00"), 0.0))
    i, d, m, f = values(table, 1) or ()
    assert (i, math.copysign(1, d), m) == (0, -1.0, Decimal("0.00"))
    assert d == 0
    assert math.isnan(f)
    put(table, (1, 7, 7.0, Decimal("7.00"), 1.0), (2, None, None, None, None), (2, 3, 3.0, 3, 3.0))
    assert (values(table, 1) or ())[:3] == (0, -0.0, Decimal("0.00")), "0 stays 0"
    assert values(table, 2) == (3, 3.0, Decimal("3.00"), 3.0), "NULL is no factor"


@pytest.mark.parametrize("kind", ["FLOAT", "DOUBLE"])
def test_nan_is_above_everything_and_minus_0_below_0(conn: Connection, kind: str) -> None:
    table = aggregated(conn, f"hi {kind} MAX, lo {kind} MIN")
    cases = {
        1: ([1.0, math.nan, math.inf], math.nan, 1.0),
        2: ([math.nan, -1.0], math.nan, -1.0),
        3: ([math.nan, math.nan], math.nan, math.nan),
        4: ([0.0, -0.0], 0.0, -0.0),
        5: ([-0.0, 0.0], 0.0, -0.0),
        6: ([-math.inf, None, math.inf], math.inf, -math.inf),
        7: ([None, -0.0, None], -0.0, -0.0),
    }
    for key, (inputs, _, _) in cases.items():
        put(table, *((key, value, value) for value in inputs))
        for value in inputs:
            put(table, (-key, value, value))
    for key, (inputs, hi, lo) in cases.items():
        for under in (key, -key):
            found = [same("max", value) for value in values(table, under) or ()]
            assert found == [same("max", hi), same("max", lo)], inputs


# -- lists ---------------------------------------------------------------------------------------


def test_the_order_of_a_list_is_that_in_which_rows_arrived(
    server: DevServer, conn: Connection
) -> None:
    """Several clients write the same keys at once; the changelog has their order."""
    table = aggregated(conn, "names STRING LISTAGG, tags ARRAY<STRING> ARRAY_AGG")
    writers, count, keys = 3, rounds(40, 400), 2

    def write(number: int) -> None:
        with (
            zufluss.connect(server.bootstrap) as connection,
            connection.table(table.info.path).upsert() as writer,
        ):
            for i in range(count):
                text = f"{number}.{i}"
                writer.write([{"k": k, "names": text, "tags": [text]} for k in range(keys)])
                if i % 7 == number:
                    writer.flush()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    arrived: dict[int, list[str]] = {key: [] for key in range(keys)}
    for kind, row in changes(table):
        if kind != "-U":
            arrived[row["k"]].append(row["tags"][-1])
            assert row["tags"] == arrived[row["k"]]
            assert row["names"] == ",".join(arrived[row["k"]])
    for key, texts in arrived.items():
        assert values(table, key) == (",".join(texts), texts)
        for number in range(writers):
            mine = [text for text in texts if text.startswith(f"{number}.")]
            assert mine == [f"{number}.{i}" for i in range(count)], "each writer's own order"


def test_a_list_at_its_limit_refuses_what_does_not_fit(conn: Connection, raw: RawClient) -> None:
    table = aggregated(
        conn,
        "t STRING LISTAGG(delimiter = '; ', limit = 8), a ARRAY<INT> ARRAY_AGG(limit = 3), "
        "c ARRAY<INT> COLLECT(limit = 2)",
    )
    put(table, (1, "é€", [1, 2], [1, 1, 1]))
    refuses(raw, table, 1, ("xx", None, None), r"'t' \(listagg\) of key k = 1: .*9 bytes.* is 8")
    refuses(raw, table, 1, (None, [3, 4], None), r"'a' \(array_agg\) .*4 elements.* is 3")
    refuses(raw, table, 1, (None, None, [2, 3]), r"'c' \(collect\) .*3 elements.* is 2")
    refuses(raw, table, 2, ("123456789", None, None), r"'t' .*of key k = 2: .*9 bytes")
    put(table, (1, "x", [3], [2, 1, 2]))
    assert values(table, 1) == ("é€; x", [1, 2, 3], [1, 2]), "the limit itself fits"


def test_a_list_that_truncates_keeps_what_fits_as_whole_elements(conn: Connection) -> None:
    table = aggregated(
        conn,
        "t STRING STRING_AGG(limit = 6, overflow = truncate), "
        "a ARRAY<STRING> ARRAY_AGG(limit = 3, overflow = truncate), "
        "c ARRAY<INT> COLLECT(limit = 2, overflow = truncate)",
    )
    put(table, (1, "ab", ["a", "b"], [1, 1]))
    put(table, (1, "too long", ["c", "d"], [2, 3]))
    put(table, (1, "cde", ["e"], [4]))
    put(table, (1, "f", ["f"], [5]))
    assert values(table, 1) == ("ab,cde", ["a", "b", "c"], [1, 2])
    put(table, (2, "too long", None, None), (2, "short", None, None))
    assert values(table, 2) == ("short", None, None)


def test_without_a_limit_of_its_own_a_list_ends_at_1_mib(conn: Connection, raw: RawClient) -> None:
    table = aggregated(conn, "t STRING LISTAGG")
    put(table, (1, "x" * ((1 << 20) - 2)))
    refuses(raw, table, 1, ("yy",), r"'t' \(listagg\) of key k = 1: .*1048577 bytes")
    put(table, (1, "y"))
    (text,) = values(table, 1) or ()
    assert (len(text), text[-2:]) == (1 << 20, ",y")


# -- arrays of nested types ----------------------------------------------------------------------


def test_arrays_of_nested_types_are_joined_whole(conn: Connection) -> None:
    table = aggregated(
        conn,
        "a ARRAY<ROW<x INT, y ARRAY<STRING>>> ARRAY_AGG, c ARRAY<ROW<x INT, y STRING>> COLLECT, "
        "m ARRAY<MAP<STRING, INT>> ARRAY_AGG, aa ARRAY<ARRAY<BIGINT>> COLLECT",
    )
    one, other = {"x": 1, "y": ["a", None]}, {"x": None, "y": None}
    p, q = {"x": 1, "y": "p"}, {"x": None, "y": None}
    put(table, (1, [one], [p, q], [[("a", 1)]], [[1], [2, None]]))
    put(table, (1, [other, one, None], [q, p, None], [[], None], [[2, None], []]))
    put(table, (1, [], [None], [[("a", 1)]], None))
    (row,) = table.scan().to_arrow().to_pylist()
    assert row == {
        "k": 1,
        "a": [one, other, one, None],
        "c": [p, q, None],
        "m": [[("a", 1)], [], None, [("a", 1)]],
        "aa": [[1], [2, None], []],
    }


def test_a_null_array_is_ignored_and_null_elements_are_kept(conn: Connection) -> None:
    table = aggregated(conn, "a ARRAY<INT> ARRAY_AGG, c ARRAY<INT> COLLECT")
    put(table, (1, None, None))
    assert values(table, 1) == (None, None)
    put(table, (1, [], []))
    assert values(table, 1) == ([], []), "an empty array is a value"
    put(table, (1, [None, 1, None], [None, 1, None]), (1, None, None), (1, [None], [None]))
    assert values(table, 1) == ([None, 1, None, None], [None, 1])


# -- sets ----------------------------------------------------------------------------------------

SOUND = {"rbm32": rbm32(1, 70_000), "rbm64": rbm64(1, 1 << 40), "hll": hll(1, 2), "theta": theta(1)}


@pytest.mark.parametrize("function", SOUND)
def test_bytes_that_are_no_set_are_refused_at_the_first_write_and_later(
    conn: Connection, raw: RawClient, function: str
) -> None:
    table, sound = aggregated(conn, f"s BYTES {function}"), SOUND[function]
    bad = [b"", b"\x00", b"not a set", sound[:-1], sound[: len(sound) // 2], b"\xff" * len(sound)]
    if function in ("rbm32", "rbm64"):
        bad.append(sound + b"\x00")
    named = rf"'s' \({function}\) of key k = "
    for data in bad:
        refuses(raw, table, 1, (data,), named + "1: ")
    put(table, (1, sound))
    for data in bad:
        refuses(raw, table, 1, (data,), named + "1: ")
        refuses(raw, table, 2, (data,), named + "2: ")
    put(table, (1, sound))
    assert same(function, (values(table, 1) or ())[0]) == same(function, sound)


def test_the_union_of_bitmaps_is_idempotent_and_written_once(conn: Connection) -> None:
    table = aggregated(conn, "a BYTES RBM32, b BYTES RBM64")
    few, more = range(0, 100_000, 7), range(50_000, 200_000, 3)
    for _ in range(2):
        put(table, (1, rbm32(*few), rbm64(*few)), (1, rbm32(*more), rbm64(*more)))
        put(table, (1, rbm32(*few), rbm64(*few)))
    a, b = values(table, 1) or ()
    assert set(BitMap.deserialize(a)) == set(BitMap64.deserialize(b)) == {*few, *more}
    found = changes(table)
    assert [kind for kind, _ in found] == ["+I", "-U", "+U", *("-U", "+U") * 3]
    idle = [before == after for (_, before), (_, after) in itertools.pairwise(found[1:])][::2]
    assert idle == [False, True, True, True], "one update is logged of a put that changed nothing"

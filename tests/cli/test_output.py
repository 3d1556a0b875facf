"""The output of commands; ndjson reads back the output of a scan."""

from __future__ import annotations

import datetime
import io
import json
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zufluss.cli.files import _ndjson
from zufluss.cli.output import Output, cell, json_line, print_fields, print_rows
from zufluss.cli.printable import printable

SCHEMA = pa.schema(
    [
        ("n", pa.int32()),
        ("f", pa.float32()),
        ("b", pa.binary()),
        ("x", pa.binary(2)),
        ("d", pa.date32()),
        ("t0", pa.time32("s")),
        ("t9", pa.time64("ns")),
        ("ms", pa.timestamp("ms")),
        ("ns", pa.timestamp("ns")),
        ("z", pa.timestamp("us", "UTC")),
        ("e", pa.decimal128(20, 4)),
        ("l", pa.list_(pa.timestamp("ns"))),
        ("m", pa.map_(pa.string(), pa.date32())),
        ("r", pa.struct([("u", pa.string()), ("v", pa.binary())])),
    ]
)
DAY_NS = 86_400 * 10**9
MOMENT_NS = st.integers(-(2**62), 2**62)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ROWS = st.fixed_dictionaries(
    {
        "n": st.none() | st.integers(-(2**31), 2**31 - 1),
        "f": st.none() | st.floats(width=32, allow_nan=False, allow_infinity=False),
        "b": st.none() | st.binary(max_size=5),
        "x": st.none() | st.binary(min_size=2, max_size=2),
        "d": st.none() | st.dates(),
        "t0": st.none() | st.integers(0, 86_399),
        "t9": st.none() | st.integers(0, DAY_NS - 1),
        "ms": st.none() | st.integers(-(10**13), 10**14),
        "ns": st.none() | MOMENT_NS,
        "z": st.none() | st.integers(-(10**16), 10**17),
        "e": st.none() | st.decimals(-(10**9), 10**9, places=4),
        "l": st.none() | st.lists(st.none() | MOMENT_NS, max_size=3),
        "m": st.none() | st.lists(st.tuples(TEXT, st.none() | st.dates()), max_size=2),
        "r": st.none() | st.fixed_dictionaries({"u": st.none() | TEXT, "v": st.binary()}),
    }
)


@settings(max_examples=100, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=5))
def test_what_scan_prints_as_json_append_reads_back_unchanged(
    rows: list[dict[str, object]],
) -> None:
    # A dump and restore through the shell must not change a value, nanoseconds included.
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    text = "".join(json_line(row) + "\n" for row in printable(batch).to_pylist())
    (back,) = _ndjson(io.BytesIO(text.encode()), SCHEMA)
    assert back.cast(SCHEMA).equals(batch)


def test_a_table_aligns_its_columns_and_keeps_every_row_on_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_rows(Output.TABLE, ["id", "text"], [(1, "two\nlines"), (100, None)])
    assert capsys.readouterr().out.splitlines() == [
        "id   text",
        "---  ----------",
        "1    two\\nlines",
        "100  NULL",
    ]


def test_json_of_a_list_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(Output.JSON, ["id", "name"], [(1, "ä"), (2, None)])
    assert json.loads(capsys.readouterr().out) == [
        {"id": 1, "name": "ä"},
        {"id": 2, "name": None},
    ]


def test_fields_without_value_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    print_fields({"id": 0, "comment": None, "keys": ("a", "b"), "custom": {}})
    assert capsys.readouterr().out == "id    0\nkeys  a, b\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (b"\x00\xff", "00ff"),
        (Decimal("1.50"), "1.50"),
        (float("nan"), "nan"),
        (datetime.date(2026, 1, 31), "2026-01-31"),
        ({"a": [1, None]}, '{"a": [1, null]}'),
    ],
)
def test_a_cell_shows_a_value_as_text(value: object, text: str) -> None:
    assert cell(value) == text


def test_json_has_no_nan_so_that_every_parser_reads_it() -> None:
    assert json_line({"a": float("nan"), "b": float("inf")}) == '{"a":null,"b":null}'

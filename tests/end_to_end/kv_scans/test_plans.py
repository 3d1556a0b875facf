"""What a scan opens, at which time, and which bytes it transfers when."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.client.pk import create_table, delete, upsert
from tests.end_to_end.kv import Codec, limit_values
from tests.end_to_end.kv_scans.support import (
    BUSY,
    close_pins,
    create,
    fresh_name,
    metric,
    open_pins,
    pinned_offsets,
    requests_of,
)
from tests.end_to_end.raw import RawClient
from tests.end_to_end.scans import (
    CODEC,
    Row,
    all_rows,
    arrow_of,
    delete_rows,
    go_on,
    good,
    in_key_order,
    numbered,
    open_request,
    page,
    pages,
    pin,
    pin_request,
    put_rows,
)
from tests.waiting import eventually
from zufluss import col
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.model.expression import Expression
from zufluss.model.schema import Schema
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

COLUMNS = "id BIGINT NOT NULL, text STRING, PRIMARY KEY (id)"
WIDE = Schema.of("id BIGINT NOT NULL, text STRING, extra INT", primary_key=["id"])
ROWS, MANY, BUCKETS = 300, 1_500, 16
SCAN, OPEN = "SCAN_KV_SNAPSHOT", "OPEN_KV_SNAPSHOT"


def filled(connection: Connection, rows: int = ROWS, buckets: int = 1) -> Table:
    table = create_table(connection, COLUMNS, bucket_count=buckets)
    upsert(table, {"id": [*range(rows)], "text": [f"row {i}" for i in range(rows)]})
    return table


# -- several scans of one bucket -----------------------------------------------------------------


def test_scans_of_one_bucket_see_the_states_at_their_own_open(
    server: DevServer, raw: RawClient
) -> None:
    """Scans of different times are read in turns, page by page, and do not affect each other."""
    table_id = create(raw)
    made, sessions = [], []
    for turn in range(3):
        put_rows(raw, table_id, numbered(0, 100, f"turn {turn}"))
        delete_rows(raw, table_id, numbered(turn * 10, turn * 10 + 10))
        made += pin(raw, table_id)
        sessions.append(good(raw, open_request(table_id, size=200)))
    assert pinned_offsets(server, table_id) == [each.log_offset for each in made]
    wanted = [
        in_key_order(r for r in numbered(0, 100, f"turn {t}") if r[0] // 10 != t) for t in range(3)
    ]
    found: list[list[object]] = [[], [], []]
    after: list[bytes | None] = [None] * 3
    for _ in range(200):
        for turn in (2, 0, 1):
            options = {"size": 200, "after_key": after[turn]}
            answer = page(raw, table_id, made[turn].pin_id, **options)
            found[turn] += all_rows([answer])
            after[turn] = answer.last_key
        if answer.done:
            break
    assert found == wanted
    assert [go_on(raw, session, 200) for session in sessions[::-1]] == wanted[::-1]
    close_pins(raw, *(each.pin_id for each in made))


def test_two_runs_of_a_client_see_their_own_states(paged: Connection) -> None:
    table = filled(paged)
    with table.scan(prefetch=0).open() as first:
        begun = [next(first)]
        delete(table, {"id": [*range(0, ROWS, 2)]})
        with table.scan(prefetch=0).open() as second:
            later = [next(second)]
            upsert(table, {"id": [*range(ROWS)], "text": ["last"] * ROWS})
            ids = [sorted(pa.Table.from_batches([*a, *b])["id"].to_pylist())
                   for a, b in ((begun, first), (later, second))]  # fmt: skip
            assert ids == [[*range(ROWS)], [*range(1, ROWS, 2)]]
            assert first.log_offsets != second.log_offsets


# -- queries that open many pins -----------------------------------------------------------------


def test_all_buckets_of_a_table_are_pinned_in_one_call(
    server: DevServer, raw: RawClient, paged: Connection
) -> None:
    table = filled(paged, ROWS, BUCKETS)
    before, held = requests_of(server, OPEN), open_pins(server)
    with table.scan().open() as scanner:
        assert requests_of(server, OPEN) == before + 1
        assert open_pins(server) == held + BUCKETS
        offsets = {bucket.bucket_id: at for bucket, at in scanner.log_offsets.items()}
        ends = {b: raw.end_offset(table.info.table_id, b) for b in range(BUCKETS)}
        assert offsets == ends == paged.admin.list_offsets(table.path)
        upsert(table, {"id": [*range(ROWS)], "text": ["later"] * ROWS})
        texts = pa.Table.from_batches([*scanner])["text"].to_pylist()
        assert sorted(texts) == sorted(f"row {i}" for i in range(ROWS))
    assert open_pins(server) == held


def test_a_bucket_that_cannot_be_pinned_releases_the_others(
    server: DevServer, raw: RawClient
) -> None:
    table_id, held = create(raw, buckets=BUCKETS), open_pins(server)
    for bucket in range(BUCKETS):
        put_rows(raw, table_id, numbered(0, 3), bucket)

    def code(buckets: range, at: list[int | None] | None = None) -> int:
        return raw.error_code(ApiKey.OPEN_KV_SNAPSHOT, pin_request(table_id, buckets, at))

    full = [pin(raw, table_id, 3)[0].pin_id for _ in range(8)]
    offsets: list[int | None] = [None] * BUCKETS
    for _ in range(10):  # more often than a bucket may have pins
        assert code(range(BUCKETS)) == BUSY
        assert code(range(BUCKETS + 1)) == 21
        assert code(range(4, BUCKETS), [*offsets[5:], 1_000]) == 68
    assert open_pins(server) == held + 8
    for bucket in range(BUCKETS):
        states = [3] if bucket == 3 else []
        eventually(
            lambda b=bucket, s=states: pinned_offsets(server, table_id, b) == s,  # type: ignore[misc]
            f"the end of the states of bucket {bucket}",
        )
    close_pins(raw, *full)
    pins = pin(raw, table_id, *range(BUCKETS))
    assert [each.log_offset for each in pins] == [3] * BUCKETS
    close_pins(raw, *(each.pin_id for each in pins))
    assert open_pins(server) == held


# -- schema evolution ----------------------------------------------------------------------------


def test_a_column_added_during_a_scan_is_null_or_not_there_as_the_reader_asks(
    raw: RawClient, paged: Connection
) -> None:
    name = fresh_name()
    table_id = create(raw, name=name)
    rows = in_key_order(numbered(0, 100))
    put_rows(raw, table_id, rows)
    (old,) = pin(raw, table_id)
    session = good(raw, open_request(table_id, size=200))
    begun = page(raw, table_id, old.pin_id, size=500)
    paged.admin.alter_table(f"fluss.{name}", add_columns="extra INT")
    upsert(paged.table(f"fluss.{name}"), {"id": [0, 200], "text": ["new", "new"], "extra": [7, 8]})
    rest = pages(raw, table_id, old.pin_id, size=500, after_key=begun.last_key)
    assert all_rows([begun, *rest]) == rows
    wide = pages(raw, table_id, old.pin_id, size=500, after_key=begun.last_key, schema_id=2)
    found = [row for answer in wide for row in arrow_of(answer, WIDE.arrow).to_pylist()]
    assert [(row["id"], row["text"]) for row in found] == rows[begun.rows :]
    assert {row["extra"] for row in found} == {None}
    assert go_on(raw, session, 200) == rows
    (new,) = pin(raw, table_id)
    narrow = dict(all_rows(pages(raw, table_id, new.pin_id)))
    assert (narrow[0], narrow[200], len(narrow)) == ("new", "new", 101)
    late = good(raw, open_request(table_id))
    evolved = {row[0]: row for row in mixed_rows(late)}
    assert evolved[0] == (0, "new", 7)
    assert evolved[1][:2] == (1, "row 1")
    close_pins(raw, old.pin_id, new.pin_id)


def mixed_rows(answer: m.ScanKvResponse) -> list[Row]:
    """Rows of a value batch, each with the schema id that precedes it."""
    codecs = {1: CODEC, 2: Codec(WIDE, 2)}
    found = []
    for value in limit_values(answer.records):
        row = codecs[int.from_bytes(value[:2], "little")].value(value)
        assert row is not None
        found.append(row)
    return found


def test_a_run_of_a_client_has_the_schema_it_was_opened_with(paged: Connection) -> None:
    table = filled(paged)
    with table.scan(prefetch=0).open() as scanner:
        begun = [next(scanner)]
        paged.admin.alter_table(table.path, add_columns="extra INT")
        wide = paged.table(table.path)
        upsert(wide, {"id": [0, ROWS], "text": ["new", "new"], "extra": [7, 8]})
        whole = pa.Table.from_batches([*begun, *scanner])
        offsets = scanner.log_offsets
    assert whole.schema.names == ["id", "text"]
    assert whole.sort_by("id")["text"].to_pylist() == [f"row {i}" for i in range(ROWS)]
    before = wide.scan(at=offsets).to_arrow()
    assert before.select(["id", "text"]).sort_by("id") == whole.sort_by("id")
    assert before["extra"].null_count == ROWS
    now = wide.scan(filter=col("extra").is_not_null()).to_arrow().sort_by("id")
    assert now.to_pydict() == {"id": [0, ROWS], "text": ["new"] * 2, "extra": [7, 8]}
    assert table.scan().to_arrow().num_rows == ROWS + 1


# -- columns and bytes ---------------------------------------------------------------------------

WIDER = "id BIGINT NOT NULL, name STRING, score DOUBLE, note STRING, PRIMARY KEY (id)"
FILTERS: dict[str, Expression] = {
    "range": (col("id") >= 100) & (col("id") < 150),
    "text": col("name").starts_with("name 12"),
    "null": col("score").is_null() & (col("id") > 50),
    "either": (col("score") > 140.0) | col("name").isin(["name 1", "name 77"]),
    "none": col("id") < 0,
}


@pytest.fixture(scope="module")
def wide(paged: Connection) -> Table:
    """A table with a long column that no query selects."""
    table = create_table(paged, WIDER, bucket_count=3)
    ids = range(ROWS)
    upsert(
        table,
        {
            "id": [*ids],
            "name": [f"name {i}" for i in ids],
            "score": [None if i % 5 == 0 else i / 2 for i in ids],
            "note": ["a long note " * 10] * ROWS,
        },
    )
    return table


def sent(server: DevServer, work: Callable[[], pa.Table]) -> tuple[pa.Table, float]:
    """The rows of a scan, and the bytes that the server sent."""
    before = metric(server, "zufluss_kv_scan_bytes_total")
    found = work()
    return found, metric(server, "zufluss_kv_scan_bytes_total") - before


@pytest.mark.parametrize("name", FILTERS)
def test_projection_and_filter_on_the_server_find_what_they_find_on_the_client(
    server: DevServer, wide: Table, name: str
) -> None:
    filter = FILTERS[name]
    everything, whole = sent(server, lambda: wide.scan().to_arrow())
    expected = everything.filter(filter.to_arrow(wide.schema)).sort_by("id")
    found, filtered = sent(server, lambda: wide.scan(filter=filter).to_arrow())
    assert found.sort_by("id") == expected
    assert filtered < whole / 2
    few, both = sent(server, lambda: wide.scan(["score", "id"], filter).to_arrow())
    assert few.sort_by("id") == expected.select(["score", "id"])
    assert both < filtered or both == filtered == 0
    named, projected = sent(server, lambda: wide.scan(["id"]).to_arrow())
    assert pc.sum(named["id"]).as_py() == sum(range(ROWS))
    assert projected < whole / 3


# -- limits and read-ahead -----------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"limit": MANY}], ids=["prefetch", "limit"])
def test_without_prefetch_nothing_is_asked_for_before_it_is_wanted(
    server: DevServer, paged: Connection, options: dict[str, int]
) -> None:
    table = filled(paged, MANY, 3)
    before, rows = requests_of(server, SCAN), metric(server, "zufluss_kv_scan_rows_total")
    with table.scan(**options).open() as scanner:  # type: ignore[arg-type]
        assert requests_of(server, SCAN) == before
        taken = 0
        for page_number in range(1, 4):
            taken += next(scanner).num_rows
            for _ in range(20):
                table.lookup(5)  # time in which a client that reads ahead would
            assert requests_of(server, SCAN) == before + page_number
            assert metric(server, "zufluss_kv_scan_rows_total") == rows + taken
    assert requests_of(server, SCAN) == before + 3


def test_with_prefetch_a_page_of_each_bucket_is_asked_for_ahead(
    server: DevServer, paged: Connection
) -> None:
    """A control: with read-ahead the test above would fail."""
    table = filled(paged, MANY, 3)
    before = requests_of(server, SCAN)
    with table.scan().open() as scanner:
        next(scanner)
        eventually(lambda: requests_of(server, SCAN) == before + 4, "reading ahead")
        for _ in range(20):
            table.lookup(5)
        assert requests_of(server, SCAN) == before + 4, "one page of each bucket, and no more"

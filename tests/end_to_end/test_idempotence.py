"""A batch sent again is stored once: what makes a client's retries safe.

pyfluss cannot be told to repeat itself, so these tests send produce requests by hand, with the
writer ids and sequence numbers that pyfluss uses, and read the result back with pyfluss.
"""

from __future__ import annotations

import fluss
import pyarrow as pa
import pytest

from tests.end_to_end.helpers import create, ids, read_arrow
from tests.end_to_end.raw import RawClient, produce_request
from zufluss.record.header import build_batch
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

RETAINED = 5
OUT_OF_ORDER, DUPLICATE = 31, 32


def numbered(writer_id: int, sequence: int, batch: pa.RecordBatch | None = None) -> bytes:
    """A batch of a writer; by default one row with the sequence as its id."""
    rows = ids(sequence, sequence + 1) if batch is None else batch
    body = rows.serialize().to_pybytes()
    return bytes(build_batch(1, body, rows.num_rows, writer_id=writer_id, sequence=sequence))


def new_writer(raw: RawClient, path: fluss.TablePath) -> int:
    request = m.InitWriterRequest()
    request.table_path.add(database_name=path.database_name, table_name=path.table_name)
    return int(raw.call(ApiKey.INIT_WRITER, request).writer_id)


class Writer:
    """A writer that numbers its batches by hand."""

    def __init__(self, raw: RawClient, table: fluss.FlussTable) -> None:
        self.raw = raw
        self.table_id = table.get_table_info().table_id
        self.id = new_writer(raw, table.get_table_path())

    def send(self, sequence: int, bucket: int = 0) -> tuple[int, int]:
        """Error code and base offset of the answer."""
        entry = self.raw.produce(self.table_id, numbered(self.id, sequence), bucket)
        return entry.error_code, entry.base_offset

    def end(self, bucket: int = 0) -> int:
        return self.raw.end_offset(self.table_id, bucket)


@pytest.fixture
async def table(conn: fluss.FlussConnection, path: fluss.TablePath) -> fluss.FlussTable:
    return await create(conn, path, bucket_count=2)


@pytest.fixture
def writer(raw: RawClient, table: fluss.FlussTable) -> Writer:
    return Writer(raw, table)


def test_every_writer_gets_an_id_of_its_own(raw: RawClient, table: fluss.FlussTable) -> None:
    path = table.get_table_path()
    found = [new_writer(raw, path) for _ in range(50)]
    assert len(set(found)) == 50
    assert min(found) >= 0


async def test_a_repeated_batch_is_stored_once_and_gets_its_first_offset(
    writer: Writer, table: fluss.FlussTable
) -> None:
    assert [writer.send(s) for s in range(3)] == [(0, 0), (0, 1), (0, 2)]
    assert [writer.send(s) for s in range(3)] == [(0, 0), (0, 1), (0, 2)]
    assert writer.end() == 3
    rows = await read_arrow(table, {0: fluss.EARLIEST_OFFSET})
    assert rows.column("id").to_pylist() == [0, 1, 2]


def test_the_last_five_batches_can_be_repeated_and_no_older_one(writer: Writer) -> None:
    for sequence in range(10):
        assert writer.send(sequence) == (0, sequence)
    for sequence in range(10 - RETAINED, 10):
        assert writer.send(sequence) == (0, sequence)
    code, _ = writer.send(10 - RETAINED - 1)
    assert code in (OUT_OF_ORDER, DUPLICATE)
    assert writer.end() == 10


@pytest.mark.parametrize("first", [1, 5, 2**31 - 1])
def test_a_new_writer_must_begin_with_zero(writer: Writer, first: int) -> None:
    assert writer.send(first)[0] == OUT_OF_ORDER
    assert writer.end() == 0
    assert writer.send(0) == (0, 0)


@pytest.mark.parametrize("gap", [3, 4, 100])
def test_a_gap_in_the_sequence_is_refused_and_can_be_filled(writer: Writer, gap: int) -> None:
    for sequence in range(2):
        writer.send(sequence)
    assert writer.send(gap)[0] == OUT_OF_ORDER
    assert writer.end() == 2
    assert writer.send(2) == (0, 2)


def test_sequences_count_per_bucket(writer: Writer) -> None:
    assert writer.send(0, bucket=0) == (0, 0)
    assert writer.send(0, bucket=1) == (0, 0)
    assert writer.send(1, bucket=1) == (0, 1)
    assert (writer.end(0), writer.end(1)) == (1, 2)


def test_writers_do_not_know_of_each_other(raw: RawClient, table: fluss.FlussTable) -> None:
    one, two = Writer(raw, table), Writer(raw, table)
    assert one.send(0) == (0, 0)
    assert two.send(0) == (0, 1)
    assert one.send(1) == (0, 2)
    assert two.send(1) == (0, 3)
    assert one.send(0) == (0, 0)


def test_batches_without_a_writer_are_never_duplicates(
    raw: RawClient, table: fluss.FlussTable
) -> None:
    table_id = table.get_table_info().table_id
    batch = numbered(-1, -1, ids(0, 1))
    assert [raw.produce(table_id, batch).base_offset for _ in range(3)] == [0, 1, 2]


async def test_several_batches_in_one_request_are_repeated_as_one(
    raw: RawClient, writer: Writer, table: fluss.FlussTable
) -> None:
    both = numbered(writer.id, 0, ids(0, 3)) + numbered(writer.id, 1, ids(3, 5))
    for _ in range(2):
        entry = raw.produce(writer.table_id, both)
        assert (entry.error_code, entry.base_offset) == (0, 0)
    rows = await read_arrow(table, {0: fluss.EARLIEST_OFFSET})
    assert rows.column("id").to_pylist() == [0, 1, 2, 3, 4]


async def test_pipelined_requests_are_stored_in_order(
    raw: RawClient, writer: Writer, table: fluss.FlussTable
) -> None:
    sent = [
        raw.begin(ApiKey.PRODUCE_LOG, produce_request(writer.table_id, numbered(writer.id, s)))
        for s in range(100)
    ]
    assert all(raw.answer(request).error is None for request in sent)
    rows = await read_arrow(table, {0: fluss.EARLIEST_OFFSET})
    assert rows.column("id").to_pylist() == list(range(100))


def test_a_repeat_on_another_connection_is_recognised(
    raw: RawClient, writer: Writer, dev_server: DevServer
) -> None:
    batch = numbered(writer.id, 0)
    request = produce_request(writer.table_id, batch)
    with RawClient(dev_server.port) as other:
        other.begin(ApiKey.PRODUCE_LOG, request)
        other.finish()  # the answer is lost, the client comes again
    entry = raw.produce(writer.table_id, batch)
    assert (entry.error_code, entry.base_offset) == (0, 0)
    assert writer.end() == 1


def test_the_wrong_number_of_acknowledgements_is_refused(
    raw: RawClient, table: fluss.FlussTable
) -> None:
    table_id = table.get_table_info().table_id
    request = produce_request(table_id, numbered(-1, -1, ids(0, 1)), acks=2)
    assert raw.error_code(ApiKey.PRODUCE_LOG, request) == 18
    assert raw.end_offset(table_id) == 0


def test_one_bad_bucket_entry_does_not_touch_the_others(
    raw: RawClient, table: fluss.FlussTable
) -> None:
    table_id = table.get_table_info().table_id
    request = produce_request(table_id, numbered(-1, -1, ids(0, 2)), bucket=0)
    request.buckets_req.add(bucket_id=1, records=b"nonsense")
    request.buckets_req.add(bucket_id=7, records=numbered(-1, -1, ids(0, 2)))
    answer = raw.call(ApiKey.PRODUCE_LOG, request)
    found = {e.bucket_id: e.error_code for e in answer.buckets_resp}
    assert found == {0: 0, 1: 14, 7: 21}
    assert (raw.end_offset(table_id, 0), raw.end_offset(table_id, 1)) == (2, 0)

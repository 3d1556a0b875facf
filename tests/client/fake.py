"""A cluster in the test's own event loop, for what a real server cannot be made to do on demand.

`FakeServer` speaks frames: each request runs in a task of its own, so answers leave in any order,
and a handler may answer with a message, an error, or not at all. `FakeCluster` adds one tablet
server with tables whose logs keep the rules of idempotent writers, and hooks to fail single
batches and fetches. Primary-key tables keep their rows as the bytes that came.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from crc32c import crc32c
from google.protobuf.message import Message

from zufluss.errors import ErrorCode, ZuflussError, error
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableDescriptor, TableInfo, TablePath
from zufluss.record.header import iter_headers, stamp, verify_crc
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, ApiKey
from zufluss.wire.frame import pack_error, pack_response
from zufluss.wire.tables import partition_id_of

Handler = Callable[[Any], Awaitable[Message | bytes | ZuflussError | None]]
NODE_ID = 0


class FakeServer:
    def __init__(self) -> None:
        self.handlers: dict[int, Handler] = {ApiKey.API_VERSIONS: self._api_versions}
        self.received: Counter[ApiKey] = Counter()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self):  # type: ignore[no-untyped-def]
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        self.drop_connections()
        for task in list(self._tasks):
            task.cancel()
        while self._writers:
            await asyncio.sleep(0)

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        return len(self._writers)

    def drop_connections(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    def send_raw(self, data: bytes) -> None:
        for writer in self._writers:
            writer.write(data)

    def advertised(self) -> Iterable[int]:
        return self.handlers

    async def _api_versions(self, request: m.ApiVersionsRequest) -> Message:
        response = m.ApiVersionsResponse()
        for key in self.advertised():
            api = APIS[key]
            response.api_versions.add(
                api_key=key, min_version=api.min_version, max_version=api.max_version
            )
        return response

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                frame = await reader.readexactly(size)
                task = asyncio.ensure_future(self._handle(frame, writer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _handle(self, frame: bytes, writer: asyncio.StreamWriter) -> None:
        key, _, request_id = struct.unpack_from(">hhi", frame)
        self.received[ApiKey(key)] += 1
        request = APIS[key].request.FromString(frame[8:])
        answer = await self.handlers[key](request)
        if answer is None or writer.is_closing():
            return
        if isinstance(answer, ZuflussError):
            writer.write(pack_error(request_id, answer.code, answer.message))
        else:
            body = answer if isinstance(answer, bytes) else answer.SerializeToString()
            writer.write(pack_response(request_id, body))


@dataclass
class FakeLog:
    """One bucket: batches as bytes with their base offset, and the state of its writers."""

    batches: list[tuple[int, bytes]] = field(default_factory=list)
    end: int = 0
    sequences: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """The last five (sequence, base offset) of each writer."""

    def append(self, records: bytes) -> int:
        """Append one batch; the base offset, or an error code as a ZuflussError."""
        [(_, header)] = iter_headers(records)
        if not verify_crc(records, 0, header):
            raise error(ErrorCode.CORRUPT_RECORD_EXCEPTION, "crc")
        if header.writer_id >= 0:
            known = self.sequences.setdefault(header.writer_id, [])
            for sequence, base in known:
                if sequence == header.batch_sequence:
                    return base
            expected = known[-1][0] + 1 if known else 0
            if header.batch_sequence != expected:
                raise error(ErrorCode.OUT_OF_ORDER_SEQUENCE_EXCEPTION, "gap")
            known.append((header.batch_sequence, self.end))
            del known[:-5]
        base = self.end
        stored = bytearray(records)
        stamp(stored, 0, header.magic, base, 1_700_000_000_000, -1)
        self.batches.append((base, bytes(stored)))
        self.end += header.last_offset_delta + 1
        return base


@dataclass
class FakeStore(FakeLog):
    """One bucket of a primary-key table; its log has the KV batches as they came."""

    rows: dict[bytes, bytes] = field(default_factory=dict)
    """Values with their schema id, by key."""

    def put(self, records: bytes) -> None:
        """Apply one KV batch, unless it was seen before."""
        size, _, crc, schema_id, _, writer_id, sequence, count = KV_HEADER.unpack_from(records)
        if size != len(records) - 4 or crc32c(records[9:]) != crc:
            raise error(ErrorCode.CORRUPT_RECORD_EXCEPTION, "crc")
        known = self.sequences.setdefault(writer_id, [])
        if any(sequence == seen for seen, _ in known):
            return
        if sequence != (known[-1][0] + 1 if known else 0):
            raise error(ErrorCode.OUT_OF_ORDER_SEQUENCE_EXCEPTION, "gap")
        known.append((sequence, self.end))
        del known[:-5]
        self.batches.append((self.end, records))
        self.end += 1
        for key, row in _kv_records(records, count):
            if row:
                self.rows[key] = struct.pack("<h", schema_id) + row
            else:
                self.rows.pop(key, None)


KV_HEADER = struct.Struct("<iBIhBqii")


def _kv_records(records: bytes, count: int) -> Iterable[tuple[bytes, bytes]]:
    position = KV_HEADER.size
    for _ in range(count):
        (size,) = struct.unpack_from("<i", records, position)
        record = records[position + 4 : position + 4 + size]
        assert record[0] < 0x80, "the fake reads short keys only"
        yield record[1 : 1 + record[0]], record[1 + record[0] :]
        position += 4 + size


@dataclass
class FakeTable:
    info: TableInfo
    schemas: dict[int, Schema]
    partitions: dict[str, int] = field(default_factory=dict)


class FakeCluster(FakeServer):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[TablePath, FakeTable] = {}
        self.logs: dict[TableBucket, FakeLog] = {}
        self.leaderless = False
        self.writer_ids = 0
        self.produce_fault: Callable[[TableBucket, int], ErrorCode | str | None] = lambda *_: None
        """Asked for each batch (bucket, sequence): an error code to answer, "lost" to append it
        and drop the connection, "drop" to drop the connection before, "omit" to leave it out."""
        self.fetch_fault: Callable[[TableBucket, int], ErrorCode | None] = lambda *_: None
        """Asked for each bucket of a fetch (bucket, offset)."""
        self.cut_bytes: int | None = None
        """Cut the records of a bucket here, mid-batch."""
        self.pruned: dict[TableBucket, int] = {}
        """Buckets that answer with a filtered_end_offset and no records below it."""
        self.remote: Callable[[TableBucket, int], m.PbRemoteLogFetchInfo | None] = lambda *_: None
        """Asked for each bucket of a fetch (bucket, offset): where in remote storage it is."""
        self.token = m.GetFileSystemSecurityTokenResponse(schema="file", token=b"")
        """What opens remote files."""
        self.token_requests: list[m.GetFileSystemSecurityTokenRequest] = []
        self.fetches: list[m.FetchLogRequest] = []
        self.stores: dict[TableBucket, FakeStore] = {}
        self.puts: list[m.PutKvRequest] = []
        self.pressure: float | None = None
        """What every answer to a put says of it."""
        self.lookup_fault: Callable[[TableBucket], ErrorCode | None] = lambda _: None
        """Asked for each bucket of a lookup."""
        self.lookups: list[m.LookupRequest] = []
        for key, handler in {
            ApiKey.GET_METADATA: self._metadata,
            ApiKey.TABLE_EXISTS: self._table_exists,
            ApiKey.GET_TABLE_SCHEMA: self._schema,
            ApiKey.LIST_PARTITION_INFOS: self._list_partitions,
            ApiKey.CREATE_PARTITION: self._create_partition,
            ApiKey.INIT_WRITER: self._init_writer,
            ApiKey.PRODUCE_LOG: self._produce,
            ApiKey.FETCH_LOG: self._fetch,
            ApiKey.LIST_OFFSETS: self._list_offsets,
            ApiKey.GET_FILESYSTEM_SECURITY_TOKEN: self._token,
            ApiKey.PUT_KV: self._put,
            ApiKey.LOOKUP: self._lookup,
            ApiKey.PREFIX_LOOKUP: self._prefix_lookup,
        }.items():
            self.handlers[key] = handler

    def advertised(self) -> Iterable[int]:
        return APIS

    def create(self, name: str, columns: str, **changes: Any) -> TableInfo:
        schema = Schema.of(columns)
        descriptor = TableDescriptor(schema, **{"bucket_count": 1, **changes})
        path = TablePath("fluss", name)
        info = TableInfo(path, len(self.tables) + 7, 1, descriptor, 0, 0)
        self.tables[path] = FakeTable(info, {1: schema})
        return info

    def log(self, bucket: TableBucket) -> FakeLog:
        return self.logs.setdefault(bucket, FakeLog())

    async def _metadata(self, request: m.MetadataRequest) -> Message | ZuflussError:
        node = {"node_id": NODE_ID, "host": "127.0.0.1", "port": self.port}
        response = m.MetadataResponse(
            coordinator_server=m.PbServerNode(**node), tablet_servers=[m.PbServerNode(**node)]
        )
        for path in request.table_path:
            table = self.tables.get(TablePath(path.database_name, path.table_name))
            if table is None:
                return error(ErrorCode.TABLE_NOT_EXIST, "no such table")
            info = table.info
            added = response.table_metadata.add(
                table_path=path,
                table_id=info.table_id,
                schema_id=info.schema_id,
                table_json=info.descriptor.to_json(),
                created_time=0,
                modified_time=0,
            )
            if not info.is_partitioned:
                self._leaders(added, info.bucket_count)
        for path in request.partitions_path:
            table = self.tables[TablePath(path.database_name, path.table_name)]
            partition_id = table.partitions.get(path.partition_name)
            if partition_id is None:
                return error(ErrorCode.PARTITION_NOT_EXISTS, "no such partition")
            added = response.partition_metadata.add(
                table_id=table.info.table_id,
                partition_name=path.partition_name,
                partition_id=partition_id,
            )
            self._leaders(added, table.info.bucket_count)
        return response

    def _leaders(self, added: Any, count: int) -> None:
        for bucket in range(count):
            entry = added.bucket_metadata.add(bucket_id=bucket)
            if not self.leaderless:
                entry.leader_id = NODE_ID

    async def _table_exists(self, request: m.TableExistsRequest) -> Message:
        path = TablePath(request.table_path.database_name, request.table_path.table_name)
        return m.TableExistsResponse(exists=path in self.tables)

    async def _schema(self, request: m.GetTableSchemaRequest) -> Message:
        path = TablePath(request.table_path.database_name, request.table_path.table_name)
        schema = self.tables[path].schemas[request.schema_id]
        return m.GetTableSchemaResponse(
            schema_id=request.schema_id, schema_json=schema.to_json_bytes()
        )

    async def _list_partitions(self, request: m.ListPartitionInfosRequest) -> Message:
        path = TablePath(request.table_path.database_name, request.table_path.table_name)
        table = self.tables[path]
        response = m.ListPartitionInfosResponse()
        for name, partition_id in table.partitions.items():
            info = response.partitions_info.add(partition_id=partition_id)
            for key, value in zip(table.info.partition_keys, name.split("$"), strict=True):
                info.partition_spec.partition_key_values.add(key=key, value=value)
        return response

    async def _create_partition(self, request: m.CreatePartitionRequest) -> Message:
        path = TablePath(request.table_path.database_name, request.table_path.table_name)
        name = "$".join(p.value for p in request.partition_spec.partition_key_values)
        partitions = self.tables[path].partitions
        partitions.setdefault(name, len(partitions) + 100)
        return m.CreatePartitionResponse()

    async def _init_writer(self, request: m.InitWriterRequest) -> Message:
        self.writer_ids += 1
        return m.InitWriterResponse(writer_id=self.writer_ids)

    async def _produce(self, request: m.ProduceLogRequest) -> Message | None:
        response = m.ProduceLogResponse()
        for entry in request.buckets_req:
            partition_id = partition_id_of(entry)
            bucket = TableBucket(request.table_id, partition_id, entry.bucket_id)
            [(_, header)] = iter_headers(entry.records)
            fault = self.produce_fault(bucket, header.batch_sequence)
            if fault == "drop":
                self.drop_connections()
                return None
            if fault == "omit":
                continue
            answer = response.buckets_resp.add(partition_id=partition_id, bucket_id=entry.bucket_id)
            if isinstance(fault, ErrorCode):
                answer.error_code = fault
                continue
            try:
                answer.base_offset = self.log(bucket).append(entry.records)
            except ZuflussError as e:
                answer.error_code, answer.error_message = e.code, e.message
            if fault == "lost":
                self.drop_connections()
                return None
        return response

    async def _fetch(self, request: m.FetchLogRequest) -> Message:
        self.fetches.append(request)
        response = m.FetchLogResponse()
        found = False
        for table in request.tables_req:
            answer = response.tables_resp.add(table_id=table.table_id)
            for entry in table.buckets_req:
                found |= self._fetch_bucket(table.table_id, entry, answer)
        if not found:
            await asyncio.sleep(request.max_wait_ms / 1000)
        return response

    def _fetch_bucket(self, table_id: int, entry: Any, answer: Any) -> bool:
        partition_id = partition_id_of(entry)
        bucket = TableBucket(table_id, partition_id, entry.bucket_id)
        result = answer.buckets_resp.add(partition_id=partition_id, bucket_id=entry.bucket_id)
        fault = self.fetch_fault(bucket, entry.fetch_offset)
        if fault is not None:
            result.error_code = fault
            return True
        log = self.log(bucket)
        if not 0 <= entry.fetch_offset <= log.end:
            result.error_code = ErrorCode.LOG_OFFSET_OUT_OF_RANGE_EXCEPTION
            return True
        result.high_watermark = log.end
        remote = self.remote(bucket, entry.fetch_offset)
        if remote is not None:
            result.remote_log_fetch_info.CopyFrom(remote)
            return True
        pruned = self.pruned.get(bucket, 0)
        if entry.fetch_offset < pruned:
            result.filtered_end_offset = pruned
        start = max(entry.fetch_offset, pruned)
        ends = [*(base for base, _ in log.batches[1:]), log.end]
        wanted = [b for (_, b), end in zip(log.batches, ends, strict=True) if end > start]
        records = b"".join(wanted)
        if self.cut_bytes is not None and len(records) > self.cut_bytes:
            limit = max(self.cut_bytes, entry.max_fetch_bytes)
            records = records[: limit if len(records) > limit else len(records)]
        result.records = records
        return bool(records) or entry.fetch_offset < pruned

    async def _token(self, request: m.GetFileSystemSecurityTokenRequest) -> Message:
        self.token_requests.append(request)
        return self.token

    async def _list_offsets(self, request: m.ListOffsetsRequest) -> Message:
        partition_id = partition_id_of(request)
        response = m.ListOffsetsResponse()
        for bucket_id in request.bucket_id:
            log = self.log(TableBucket(request.table_id, partition_id, bucket_id))
            offset = 0 if request.offset_type == 0 else log.end
            response.buckets_resp.add(bucket_id=bucket_id, offset=offset)
        return response

    def store(self, bucket: TableBucket) -> FakeStore:
        return self.stores.setdefault(bucket, FakeStore())

    async def _put(self, request: m.PutKvRequest) -> Message | None:
        self.puts.append(request)
        response = m.PutKvResponse()
        for entry in request.buckets_req:
            bucket = _bucket(request.table_id, entry)
            fault = self.produce_fault(bucket, KV_HEADER.unpack_from(entry.records)[6])
            answer = response.buckets_resp.add(
                partition_id=bucket.partition_id, bucket_id=bucket.bucket_id, pressure=self.pressure
            )
            if isinstance(fault, ErrorCode):
                answer.error_code = fault
                continue
            try:
                self.store(bucket).put(entry.records)
            except ZuflussError as e:
                answer.error_code, answer.error_message = e.code, e.message
            if fault == "lost":
                self.drop_connections()
                return None
        return response

    async def _lookup(self, request: m.LookupRequest) -> Message:
        self.lookups.append(request)
        response = m.LookupResponse()
        for entry in request.buckets_req:
            bucket = _bucket(request.table_id, entry)
            answer = response.buckets_resp.add(
                partition_id=bucket.partition_id, bucket_id=bucket.bucket_id
            )
            fault = self.lookup_fault(bucket)
            if fault is not None:
                answer.error_code = fault
                continue
            for key in entry.keys:
                answer.values.add(values=self.store(bucket).rows.get(key))
        return response

    async def _prefix_lookup(self, request: m.PrefixLookupRequest) -> Message:
        response = m.PrefixLookupResponse()
        for entry in request.buckets_req:
            bucket = _bucket(request.table_id, entry)
            answer = response.buckets_resp.add(
                partition_id=bucket.partition_id, bucket_id=bucket.bucket_id
            )
            rows = sorted(self.store(bucket).rows.items())
            for prefix in entry.keys:
                found = [value for key, value in rows if key.startswith(prefix)]
                answer.value_lists.add(values=found)
        return response


def _bucket(table_id: int, entry: Any) -> TableBucket:
    partition_id = partition_id_of(entry)
    return TableBucket(table_id, partition_id, entry.bucket_id)

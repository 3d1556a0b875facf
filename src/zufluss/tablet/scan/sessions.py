"""SCAN_KV (1061), the scan of clients of Fluss: a pin and a cursor that the server keeps.

| request | with |
|---|---|
| open | `bucket_scan_req`, `call_seq_id` 0, `batch_size_bytes`; answered with id and log offset |
| go on | `scanner_id`, the next `call_seq_id`, `batch_size_bytes` |
| close | `scanner_id`, `close_scanner` |

The scanner id is the id of the pin. A scan ends with its last row; an empty bucket gets no id. A
repeated `call_seq_id` gets the same answer, after the end of the scan as long as the answer is kept
(`LAST_ANSWERS_BYTES_MAX`). A wrong `call_seq_id` and a concurrent call on the same scan are
refused; the scan continues. A call that found no row in its time is answered without records, and
with `has_more_results`.

Errors stand inside the answer, as Apache Fluss has them.
"""

from __future__ import annotations

from typing import Final

from zufluss.errors import (
    AuthorizationError,
    ErrorCode,
    InvalidScanRequestError,
    KvPinGoneError,
    KvScanBusyError,
    KvScanExpiredError,
    TooManyScannersError,
    ZuflussError,
)
from zufluss.kv.table import KvTable
from zufluss.net.services import RequestContext
from zufluss.tablet.scan.pins import RETRY_AFTER_MS, StatePin
from zufluss.tablet.scan.rows import value_batch
from zufluss.tablet.scan.service import (
    PinContent,
    PinTarget,
    ScanService,
    ScanSession,
    not_negative,
)
from zufluss.wire import messages as m
from zufluss.wire.tables import partition_id_of

LAST_ANSWERS_BYTES_MAX: Final = 32 << 20
"""Last answers of ended scans are kept up to this size, for clients that repeat the call."""
ENTRY_BYTES: Final = 512
"""Bytes counted for each kept answer besides its size."""
ROWS_MAX: Final = 1 << 20
"""Most rows of an answer."""


class _LastAnswers:
    """The last answers of scans that have ended, the newest ones."""

    def __init__(self) -> None:
        self._answers: dict[bytes, tuple[str | None, int, m.ScanKvResponse]] = {}
        self._size = 0

    def add(self, owner: str | None, call_seq_id: int, answer: m.ScanKvResponse) -> None:
        self._answers[answer.scanner_id] = (owner, call_seq_id, answer)
        self._size += answer.ByteSize() + ENTRY_BYTES
        while self._size > LAST_ANSWERS_BYTES_MAX:
            _, _, dropped = self._answers.pop(next(iter(self._answers)))
            self._size -= dropped.ByteSize() + ENTRY_BYTES

    def find(
        self, scanner_id: bytes, owner: str | None, call_seq_id: int
    ) -> m.ScanKvResponse | None:
        last = self._answers.get(scanner_id)
        if last is None or last[1] != call_seq_id:
            return None
        if last[0] != owner:
            raise AuthorizationError("another user opened the scan; open your own")
        return last[2]


class ScanSessions:
    """The handler of SCAN_KV."""

    def __init__(self, scans: ScanService) -> None:
        self._scans = scans
        self._pins = scans.pins
        self._last = _LastAnswers()

    async def scan_kv(self, request: m.ScanKvRequest, context: RequestContext) -> m.ScanKvResponse:
        """SCAN_KV (1061)."""
        await context.reader.room()
        try:
            return await self._answer(request, context)
        except KvPinGoneError as e:  # clients of Fluss know only that a scan has expired
            return m.ScanKvResponse(error_code=ErrorCode.SCANNER_EXPIRED, error_message=e.message)
        except ZuflussError as e:
            return m.ScanKvResponse(error_code=e.code, error_message=e.message)

    async def _answer(self, request: m.ScanKvRequest, context: RequestContext) -> m.ScanKvResponse:
        opens = request.HasField("bucket_scan_req")
        if opens == request.HasField("scanner_id"):
            raise InvalidScanRequestError(
                "a SCAN_KV has either bucket_scan_req, to open a scan, or scanner_id, to continue"
            )
        if request.close_scanner:
            if opens:
                raise InvalidScanRequestError("a SCAN_KV cannot open a scan and close it at once")
            self._pins.close(request.scanner_id, context.principal)
            return m.ScanKvResponse(scanner_id=request.scanner_id, has_more_results=False)
        for field in ("call_seq_id", "batch_size_bytes"):
            if not request.HasField(field):
                raise InvalidScanRequestError(f"a SCAN_KV needs {field}, unless it closes a scan")
        self._scans.size(request.batch_size_bytes)
        if opens:
            return await self._open(request, context)
        return await self._go_on(request, context)

    async def _open(self, request: m.ScanKvRequest, context: RequestContext) -> m.ScanKvResponse:
        principal = context.principal
        target = request.bucket_scan_req
        _check_sequence(request.call_seq_id, 0)
        left = not_negative("limit", target.limit) or None
        partition_id = partition_id_of(target)
        replica = self._scans.replica(target.table_id, partition_id, target.bucket_id, principal)
        try:
            (pin,) = await self._scans.open([PinTarget(replica, None)], principal)
        except KvScanBusyError as e:
            raise TooManyScannersError(e.message) from None
        pin.content.session = ScanSession(left)
        try:
            answer = await self._next(pin, request, context, replica.tablet.table)
        except BaseException:
            self._pins.close(pin.pin_id, principal)
            raise
        if not answer.has_more_results and not answer.records:
            return m.ScanKvResponse(has_more_results=False, log_offset=answer.log_offset)
        return answer

    async def _go_on(self, request: m.ScanKvRequest, context: RequestContext) -> m.ScanKvResponse:
        principal = context.principal
        last = self._last.find(request.scanner_id, principal, request.call_seq_id)
        if last is not None:
            return last
        pin = self._pins.find(request.scanner_id, principal)
        session = pin.content.session
        if session is None:
            raise KvScanExpiredError(
                f"{pin.pin_id.hex()} is a pin, not a scan; read it with SCAN_KV_SNAPSHOT",
                code=ErrorCode.UNKNOWN_SCANNER_ID,
            )
        replica = self._scans.replica(*pin.bucket, principal)
        self._scans.check_leader(pin, replica)
        if session.busy:
            raise KvScanBusyError(
                f"another call on the scan {pin.pin_id.hex()} is under way; retry after "
                f"{RETRY_AFTER_MS} ms"
            )
        if session.answer is not None and request.call_seq_id == session.call_seq_id:
            with self._pins.use(pin, context.reader):
                return session.answer
        _check_sequence(request.call_seq_id, session.call_seq_id + 1)
        return await self._next(pin, request, context, replica.tablet.table)

    async def _next(
        self,
        pin: StatePin[PinContent],
        request: m.ScanKvRequest,
        context: RequestContext,
        table: KvTable,
    ) -> m.ScanKvResponse:
        """Answer the next rows of a scan; its position stays if that fails."""
        with self._pins.use(pin, context.reader) as pinned:
            session = pinned.session
            assert session is not None
            session.busy = True
            deadline = self._scans.loop.time() + self._scans.seconds_max
            try:
                async with self._scans.turn(deadline) as mine:
                    answer = m.ScanKvResponse(has_more_results=True)
                    if mine:
                        size = self._scans.size(request.batch_size_bytes)
                        answer = await self._page(pinned, session, size, deadline, table)
            finally:
                session.busy = False
            answer.scanner_id = pin.pin_id
            if session.call_seq_id < 0:
                answer.log_offset = pinned.state.log_offset
            session.call_seq_id, session.answer = request.call_seq_id, answer
        if not answer.has_more_results:
            self._pins.close(pin.pin_id, pin.owner)
            if request.call_seq_id:  # a client without the id cannot repeat the first call
                self._last.add(pin.owner, request.call_seq_id, answer)
        return answer

    async def _page(
        self, pinned: PinContent, session: ScanSession, size: int, deadline: float, table: KvTable
    ) -> m.ScanKvResponse:
        rows = ROWS_MAX if session.left is None else min(session.left, ROWS_MAX)
        wait = max(deadline - self._scans.loop.time(), 0.0)
        page = await pinned.state.page(session.after, None, rows, size, wait)
        if page is None:
            return m.ScanKvResponse(has_more_results=True)
        values = page.values
        if values.count == 0:
            return m.ScanKvResponse(has_more_results=False)
        records = await self._scans.in_thread(lambda: value_batch(table, values))
        self._scans.count(pinned, values.count, len(records))
        session.after = page.last_key
        if session.left is not None:
            session.left -= values.count
        more = not page.done and session.left != 0
        return m.ScanKvResponse(has_more_results=more, records=records)


def _check_sequence(call_seq_id: int, expected: int) -> None:
    if call_seq_id != expected:
        raise InvalidScanRequestError(
            f"call_seq_id is {call_seq_id}, {expected} is next; the calls of a scan count from 0, "
            "and only the last one may be repeated"
        )

"""Scans as operators see them: LIST_KV_SCANS and END_KV_SCANS.

A scan of a bucket, or its pinned state, is listed under a number that gives no access to its rows.
Users see the scans of tables that they may read, and end their own; `super.users` see and end all.
The client of a scan that was ended gets an error, and does not open it again by itself.
"""

from __future__ import annotations

import structlog

from zufluss.cluster.authority import Authority
from zufluss.config.load import Configuration
from zufluss.errors import AuthorizationError
from zufluss.net.services import RequestContext
from zufluss.tablet.scan.pins import StatePin
from zufluss.tablet.scan.service import PinContent, ScanService
from zufluss.wire import messages as m

log = structlog.get_logger(__name__)


class ScanListing:
    """The handlers for operators."""

    def __init__(self, conf: Configuration, scans: ScanService) -> None:
        self._scans = scans
        self._authority = Authority(conf)

    async def list_kv_scans(
        self, request: m.ListKvScansRequest, context: RequestContext
    ) -> m.ListKvScansResponse:
        """LIST_KV_SCANS (30033)."""
        table_id = request.table_id if request.HasField("table_id") else None
        pins = [p for p in self._scans.pins if table_id in (None, p.bucket.table_id)]
        sees_all = self._authority.is_super(context.principal)
        visible = [p for p in pins if sees_all or self._scans.sees(context.principal, p)]
        return m.ListKvScansResponse(scans=[self._described(pin) for pin in visible])

    async def end_kv_scans(
        self, request: m.EndKvScansRequest, context: RequestContext
    ) -> m.EndKvScansResponse:
        """END_KV_SCANS (30034): all of them or none."""
        who = context.principal
        wanted = set(request.numbers)
        pins = [pin for pin in self._scans.pins if pin.number in wanted]
        for pin in pins:
            if pin.owner != who and not self._authority.is_super(who):
                raise AuthorizationError(
                    f"scan {pin.number} belongs to {pin.owner or 'an unknown user'}, not to "
                    f"{who or 'an unknown user'}; no scan was ended"
                )
        for pin in pins:
            log.info("kv_scan_ended", bucket=str(pin.bucket), client=pin.peer, by=who)
            self._scans.pins.kill(pin, who)
        return m.EndKvScansResponse(numbers=[pin.number for pin in pins])

    def _described(self, pin: StatePin[PinContent]) -> m.PbKvScan:
        bucket, content, path = pin.bucket, pin.content, pin.content.state.path
        return m.PbKvScan(
            number=pin.number,
            table_id=bucket.table_id,
            partition_id=bucket.partition_id,
            bucket_id=bucket.bucket_id,
            table=str(path.path),
            partition=path.partition,
            log_offset=content.state.log_offset,
            owner=pin.owner,
            client=pin.peer,
            connected=bool(pin.readers),
            age_ms=int(self._scans.pins.age_seconds(pin) * 1000),
            idle_ms=int(self._scans.pins.idle_seconds(pin) * 1000),
            rows=content.rows,
            bytes=content.bytes,
        )

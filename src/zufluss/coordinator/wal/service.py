"""Handlers of the calls with which tablet servers continue, trim and follow the shared log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zufluss.cluster.remote import WalCommits
from zufluss.cluster.wal import (
    released_from_proto,
    report_from_proto,
    session_from_proto,
    takeover_from_proto,
)
from zufluss.coordinator.remote.checks import check_epoch
from zufluss.wire import messages as m
from zufluss.wire.tables import bucket_to_proto

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext


class WalService:
    """COMMIT_TAKEOVERS, COMMIT_WAL_FLOOR, REPORT_RELEASED and REPORT_STANDBYS."""

    def __init__(self, commits: WalCommits, epoch: int) -> None:
        """`epoch` is the coordinator's."""
        self._commits = commits
        self._epoch = epoch

    async def commit_takeovers(
        self, request: m.CommitTakeoversRequest, ctx: RequestContext
    ) -> m.CommitTakeoversResponse:
        """COMMIT_TAKEOVERS (30007)."""
        check_epoch(request.coordinator_epoch, self._epoch)
        takeovers = list(map(takeover_from_proto, request.takeovers))
        done = await self._commits.commit_takeovers(session_from_proto(request.session), takeovers)
        return m.CommitTakeoversResponse(committed=map(bucket_to_proto, done))

    async def report_standbys(
        self, request: m.ReportStandbysRequest, ctx: RequestContext
    ) -> m.ReportStandbysResponse:
        """REPORT_STANDBYS (30009)."""
        check_epoch(request.coordinator_epoch, self._epoch)
        reports = list(map(report_from_proto, request.reports))
        await self._commits.report_standbys(session_from_proto(request.session), reports)
        return m.ReportStandbysResponse()

    async def commit_wal_floor(
        self, request: m.CommitWalFloorRequest, ctx: RequestContext
    ) -> m.CommitWalFloorResponse:
        """COMMIT_WAL_FLOOR (30008)."""
        check_epoch(request.coordinator_epoch, self._epoch)
        await self._commits.commit_wal_floor(session_from_proto(request.session), request.floor)
        return m.CommitWalFloorResponse()

    async def report_released(
        self, request: m.ReportReleasedRequest, ctx: RequestContext
    ) -> m.ReportReleasedResponse:
        """REPORT_RELEASED (30062)."""
        check_epoch(request.coordinator_epoch, self._epoch)
        released = list(map(released_from_proto, request.buckets))
        session = session_from_proto(request.session)
        adopted = await self._commits.report_released(session, released)
        return m.ReportReleasedResponse(adopted=map(bucket_to_proto, adopted))

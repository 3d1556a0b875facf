"""The calls of those who run a cluster: its servers, its remote locations, its options.

They stand beside the calls for databases and tables (`admin.py`), which few people make together
with these. `connection.admin` has both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.metadata import PROBLEM, ServerFinding, ServerNode
from zufluss.client.core.servers import ServerInfo, server_info
from zufluss.client.keyed import snapshots
from zufluss.client.locations import (
    ClusterConfig,
    InspectionDepth,
    LocationFiles,
    LocationProbe,
    LocationSweep,
    RemoteLocation,
    RemoteLocations,
    alter_request,
    altered_location,
    configs_of,
    files_of,
    inspect_request,
    locations_of,
    probe_request,
    probes_of,
    sweep_of,
    sweep_request,
)
from zufluss.client.rebalance import RebalancePlan, RebalanceProgress, plan_of, progress_of
from zufluss.errors import (
    NetworkError,
    RequestTimeoutError,
    UnsupportedVersionError,
    ZuflussError,
)
from zufluss.model.rebalance import RebalanceGoal, ServerTag
from zufluss.model.table import PhysicalTablePath
from zufluss.remote.locations import AdminState
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

_SET: Final = 0
_DELETE: Final = 1

LOST_POLL_SECONDS: Final = 0.5
"""Pause between two questions whether a lost location is retired."""

log = logging.getLogger(__name__)


class AsyncOperations:
    """The calls for operators, which `connection.admin` has."""

    def __init__(self, connection: ClusterConnection) -> None:
        self._connection = connection

    async def server_nodes(self) -> list[ServerNode]:
        """List the servers of the cluster with the addresses that clients connect to."""
        await self._connection.refresh()
        metadata = self._connection.metadata
        coordinator = [metadata.coordinator] if metadata.coordinator else []
        return [*coordinator, *metadata.tablets.values()]

    async def examine_servers(self, *, confirm_clock: bool = False) -> list[ServerFinding]:
        """Ask every server for shortages, doubts and failures; one that is away is a finding, too.

        `confirm_clock` tells them that their wall clocks are right although they jumped.
        """
        request = m.ExamineServerRequest(confirm_clock=confirm_clock)
        findings: list[ServerFinding] = []
        for address in dict.fromkeys(node.address for node in await self.server_nodes()):
            server = f"{address[0]}:{address[1]}"
            try:
                answer = await self._connection.call_at(address, ApiKey.EXAMINE_SERVER, request)
            except (NetworkError, RequestTimeoutError) as problem:
                findings.append(ServerFinding(server, PROBLEM, "server", problem.message))
                continue
            findings += [
                ServerFinding(server, f.severity, f.subject, f.text) for f in answer.findings
            ]
        return findings

    async def describe_servers(self) -> list[ServerInfo]:
        """Return version, role, uptime and metrics of every server that answers.

        Servers of Apache Fluss do not tell them and are left out.
        """
        infos: list[ServerInfo] = []
        for address in dict.fromkeys(node.address for node in await self.server_nodes()):
            try:
                request = m.DescribeServerRequest()
                answer = await self._connection.call_at(address, ApiKey.DESCRIBE_SERVER, request)
            except (NetworkError, RequestTimeoutError, UnsupportedVersionError):
                continue  # `examine_servers` reports it
            infos.append(server_info(f"{address[0]}:{address[1]}", answer))
        return infos

    async def add_server_tag(self, server_ids: Iterable[int], tag: ServerTag) -> None:
        """Tag tablet servers that are about to leave: they get no more buckets. All or none.

        >>> await admin.add_server_tag([3], ServerTag.PERMANENT_OFFLINE)  # doctest: +SKIP
        """
        request = m.AddServerTagRequest(server_ids=server_ids, server_tag=tag)
        await self._change(ApiKey.ADD_SERVER_TAG, request)

    async def remove_server_tag(self, server_ids: Iterable[int], tag: ServerTag) -> None:
        """Take a tag from tablet servers, which may get buckets again then. All or none."""
        request = m.RemoveServerTagRequest(server_ids=server_ids, server_tag=tag)
        await self._change(ApiKey.REMOVE_SERVER_TAG, request)

    async def plan_rebalance(
        self, goals: Iterable[RebalanceGoal] = (RebalanceGoal.LEADER_DISTRIBUTION,)
    ) -> RebalancePlan:
        """Return what `rebalance` would do now: its moves, and the leaders of each server.

        Nothing moves. Servers of Fluss cannot do this.
        """
        request = m.PlanRebalanceRequest(goals=goals)
        return plan_of(await self._ask(ApiKey.PLAN_REBALANCE, request))

    async def rebalance(
        self, goals: Iterable[RebalanceGoal] = (RebalanceGoal.LEADER_DISTRIBUTION,)
    ) -> str:
        """Begin to move buckets, so that each tablet server leads its share; returns an id.

        The goals of Fluss are alike here: leaders are shared out by tables and racks, and servers
        with tags lead none. `RebalanceFailureError` while another one is under way.
        """
        request = m.RebalanceRequest(goals=goals)
        answer = await self._change(ApiKey.REBALANCE, request)
        return str(answer.rebalance_id)

    async def rebalance_progress(self, rebalance_id: str | None = None) -> RebalanceProgress | None:
        """Return how far the newest rebalance is; None if there was none.

        `NoRebalanceError` if the newest one has another id than is given.
        """
        request = m.ListRebalanceProgressRequest(rebalance_id=rebalance_id)
        return progress_of(await self._ask(ApiKey.LIST_REBALANCE_PROGRESS, request))

    async def cancel_rebalance(self, rebalance_id: str | None = None) -> None:
        """Begin no more moves of the newest rebalance; those under way are finished."""
        request = m.CancelRebalanceRequest(rebalance_id=rebalance_id)
        await self._change(ApiKey.CANCEL_REBALANCE, request)

    # -- remote locations and configuration ----------------------------------------------------

    async def locations(self) -> RemoteLocations:
        """Return the remote locations: state, use, and the health that each server reports."""
        return locations_of(await self._ask(ApiKey.LIST_LOCATIONS, m.ListLocationsRequest()))

    async def alter_location(
        self,
        operation: str,
        location_id: int | None = None,
        *,
        uri: str | None = None,
        weight: int | None = None,
        expected_version: int | None = None,
    ) -> RemoteLocation:
        """Change a remote location: add, drain, activate, retire, set-weight or move.

        With `expected_version` the change is made only if the registry still has that version.

        >>> await admin.alter_location("add", uri="s3://bucket/b", weight=2)  # doctest: +SKIP
        >>> await admin.alter_location("drain", 1)  # doctest: +SKIP
        """
        request = alter_request(operation, location_id, uri, weight, expected_version)
        if operation == "move" and location_id is not None and uri is not None:
            await self.verify_location(location_id, uri=uri)  # in parts: it may take long
        return altered_location(
            await self._connection.call_coordinator(
                ApiKey.ALTER_LOCATION, request, repeatable=False
            )
        )

    async def retire_lost_location(
        self, location_id: int, *, progress: Callable[[RemoteLocation], None] | None = None
    ) -> RemoteLocation:
        """Give up a location that was destroyed, with everything that only it had.

        `location_files(location_id, documents=True)` tells what that is. Lost segments leave the
        manifests, leases of lost snapshots are revoked, and new snapshots are taken. Returns when
        nothing refers to the location any more; if this is interrupted, the servers go on, and
        another call waits for the end. A location that still works is refused with `ConfigError`.
        `progress` is called with the location while references are left.
        """
        known = (await self.locations()).get(location_id)
        tables = []
        if known.state is not AdminState.LOST:
            groups = await self.location_files(location_id)
            tables = list(dict.fromkeys(group.table for group in groups if group.kind == "kv"))
        request = alter_request("retire", location_id, None, None, None, force=True)
        lost = altered_location(
            await self._connection.call_coordinator(
                ApiKey.ALTER_LOCATION, request, repeatable=False
            )
        )
        for table in tables:
            await self._take_new_snapshots(table)
        while lost.state is not AdminState.RETIRED:
            await asyncio.sleep(LOST_POLL_SECONDS)
            lost = (await self.locations()).get(location_id)
            if lost.state is AdminState.LOST:
                if progress is not None:
                    progress(lost)
                await self._change(ApiKey.ALTER_LOCATION, request)  # ends the wait for another try
        return lost

    async def _take_new_snapshots(self, table: PhysicalTablePath) -> None:
        """Take snapshots of a table or partition; servers repeat in their interval what fails."""
        try:
            await snapshots.take_kv_snapshots(self._connection, table.path, table.partition)
        except ZuflussError as problem:
            log.warning("admin.snapshots_not_taken table=%s error=%s", table, problem)

    async def probe_locations(self, location_id: int | None = None) -> list[LocationProbe]:
        """Let the coordinator write, read and delete a small object in one location, or in all."""
        request = probe_request(location_id)
        return probes_of(await self._ask(ApiKey.PROBE_LOCATION, request))

    async def location_files(
        self, location_id: int, *, documents: bool = False
    ) -> list[LocationFiles]:
        """List the files in a location, by table, bucket and kind.

        With `documents` the lists of files are read, so that log offsets and snapshots are known.
        """
        depth = InspectionDepth.DOCUMENTS if documents else InspectionDepth.COUNTS
        return await self._inspect(inspect_request(location_id, depth, None), None)

    async def verify_location(
        self,
        location_id: int,
        *,
        uri: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[LocationFiles]:
        """Look for every live file of a location, and compare its size; returns all groups.

        `uri` looks at another address, where the files were copied to. `progress` is called with
        the number of groups that were checked, and of all. Groups with missing files have
        `problems`.
        """
        request = inspect_request(location_id, InspectionDepth.FILES, uri)
        return await self._inspect(request, progress)

    async def sweep_locations(
        self, location_id: int | None = None, *, dry_run: bool = False
    ) -> LocationSweep:
        """Delete the files in a location, or in all, that nothing refers to; with reasons.

        `dry_run` only lists them. Files that are younger than `zufluss.remote.sweep.grace` are
        left alone.
        """
        request = sweep_request(location_id, dry_run)
        while True:
            answer = await self._connection.call_coordinator(
                ApiKey.SWEEP_LOCATIONS, request, repeatable=False
            )
            if answer.finished:
                return sweep_of(answer)
            request = m.SweepLocationsRequest(sweep_id=answer.sweep_id)

    async def _inspect(
        self, request: m.InspectLocationRequest, progress: Callable[[int, int], None] | None
    ) -> list[LocationFiles]:
        groups: list[LocationFiles] = []
        while True:
            answer = await self._connection.call_coordinator(
                ApiKey.INSPECT_LOCATION, request, repeatable=False
            )
            groups += files_of(answer)
            if progress is not None:
                progress(answer.done, answer.total)
            if not answer.HasField("next"):
                return groups
            request.after = answer.next

    async def cluster_configs(self) -> list[ClusterConfig]:
        """List the options that were set for the cluster; secrets are hidden."""
        request = m.DescribeClusterConfigsRequest()
        return configs_of(await self._ask(ApiKey.DESCRIBE_CLUSTER_CONFIGS, request))

    async def alter_cluster_configs(
        self, set: Mapping[str, str] | None = None, *, reset: Iterable[str] = ()
    ) -> None:
        """Set options of the running cluster, or undo such changes (`reset`); all or none of them.

        >>> await admin.alter_cluster_configs(  # doctest: +SKIP
        ...     {"remote.data.dirs": "s3://one/a,s3://two/b"}
        ... )
        """
        request = m.AlterClusterConfigsRequest(alter_configs=config_changes(set, reset))
        await self._change(ApiKey.ALTER_CLUSTER_CONFIGS, request)

    # -- calls ---------------------------------------------------------------------------------

    async def _ask(self, api_key: ApiKey, request: Any) -> Any:
        return await self._connection.call_coordinator(api_key, request)

    async def _change(self, api_key: ApiKey, request: Any) -> Any:
        return await self._connection.call_coordinator(api_key, request, repeatable=False)


def config_changes(
    changed: Mapping[str, str] | None, removed: Iterable[str]
) -> list[m.PbAlterConfig]:
    """Return the changes of properties or options that requests carry."""
    changes = [
        m.PbAlterConfig(config_key=key, config_value=str(value), op_type=_SET)
        for key, value in (changed or {}).items()
    ]
    return changes + [m.PbAlterConfig(config_key=key, op_type=_DELETE) for key in removed]

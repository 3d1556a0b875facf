"""The roles apart: a tablet server registers, follows, is replaced, falls silent, comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.coordinator.support import (
    COORDINATOR,
    COUNTED,
    EVENTS,
    TABLET,
    Clock,
    RecordingTablet,
    Seconds,
    call,
    counted,
    picture,
    table_json,
)
from zufluss.cluster.image import ClusterImage, ClusterNode
from zufluss.cluster.replicas import LakeOffsets
from zufluss.cluster.writer_ids import WriterIds
from zufluss.config.load import Configuration
from zufluss.config.values import DAY_MS, MINUTE_MS
from zufluss.coordinator.lake.tables import LakeCommit
from zufluss.coordinator.registration import SESSION_SECONDS
from zufluss.coordinator.server import Coordinator
from zufluss.errors import (
    ConfigError,
    ErrorCode,
    InvalidReplicationFactorError,
    InvalidTableError,
    LogStorageError,
    NetworkError,
    UnknownTableOrBucketError,
    ZuflussError,
)
from zufluss.meta.embedded import EmbeddedStore
from zufluss.model.table import TableBucket, TablePath
from zufluss.net.services import RequestContext, Services
from zufluss.remote.health import HealthReport
from zufluss.tablet.coordinator_client import NOT_REGISTERED, CoordinatorClient
from zufluss.tablet.link import CoordinatorLink
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey


class Loopback:
    """A connection to a server in this process that a test can close."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.down = False
        self.hold: dict[ApiKey, asyncio.Event] = {}
        self.held = asyncio.Event()
        self.asked = asyncio.Event()

    async def call(self, api_key: ApiKey, request: Any, *, timeout_ms: int) -> Any:
        self.asked.set()
        if self.down:
            raise NetworkError("the server is down")
        answer = await call(self.services, api_key, request, "INTERNAL")
        if api_key in self.hold:
            self.held.set()
            await self.hold[api_key].wait()
        return answer


class Apart:
    """A coordinator and a tablet server that only know each other by messages."""

    def __init__(self, directory: Path, conf: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.conf = Configuration.of({"data.dir": str(directory.parent / "data")} | (conf or {}))
        self.clock, self.seconds = Clock(), Seconds()
        self.tablet = RecordingTablet()
        self.to_tablet = Loopback(Services())
        self.to_coordinator = Loopback(Services())
        self.cluster_ids: list[str] = []
        self.reports: list[HealthReport] = []
        self.list_offsets = self._list_ends
        self.link = self.new_link()

    def new_link(self) -> CoordinatorLink:
        self.image = ClusterImage()
        self.client = CoordinatorClient(self._coordinator)
        link = CoordinatorLink(
            TABLET, self.image, self.tablet, self.client, self.cluster_ids.append,
            lambda: self.reports,
        )  # fmt: skip
        services = Services()
        link.register(services)
        services.register(ApiKey.LIST_OFFSETS, lambda request, ctx: self.list_offsets(request, ctx))
        self.to_tablet.services = services
        return link

    @property
    def tablet_services(self) -> Services:
        """The handlers of the newest process of the tablet server."""
        return self.to_tablet.services

    async def start_coordinator(self) -> None:
        self.store = await EmbeddedStore.open(self.directory)
        self.coordinator = await Coordinator.open(
            self.conf,
            self.store,
            COORDINATOR,
            self.clock,
            connect=self._tablet,
            clock=self.seconds,
        )
        assert self.coordinator.registrations is not None
        await self.coordinator.registrations.stop()  # its checks: tests make them
        services = Services()
        self.coordinator.register(services)
        self.to_coordinator.services = services

    async def stop_coordinator(self) -> None:
        await self.coordinator.stop()
        await self.store.close()

    async def _tablet(self, node: ClusterNode) -> Loopback:
        assert node == TABLET
        return self.to_tablet

    async def _coordinator(self) -> Loopback:
        return self.to_coordinator

    async def create_table(self, name: str = "events", **properties: str) -> None:
        await call(
            self.to_coordinator.services,
            ApiKey.CREATE_TABLE,
            m.CreateTableRequest(
                table_path={"database_name": "fluss", "table_name": name},
                table_json=table_json(buckets=2, properties=properties),
                ignore_if_exists=False,
            ),
        )

    async def tiered(
        self, path: TablePath, snapshot_id: int, offsets: dict[TableBucket, int]
    ) -> None:
        """Have a tiering service commit a lake snapshot of the only lake table."""
        self.clock.now_ms += DAY_MS
        self.seconds.now += DAY_MS / 1000
        self.tablet.ends |= offsets
        lake = self.coordinator.lake
        turn = await lake.hand_out(MINUTE_MS)
        assert turn is not None
        info, hand_out = turn
        file = await lake.prepare(info.table_id, path, offsets, hand_out=hand_out)
        await lake.commit(LakeCommit(info.table_id, snapshot_id, file, hand_out=hand_out))

    async def _list_ends(
        self, request: m.ListOffsetsRequest, ctx: RequestContext
    ) -> m.ListOffsetsResponse:
        buckets = [TableBucket(request.table_id, None, i) for i in request.bucket_id]
        ends = await self.tablet.end_offsets(buckets)
        answers = [
            m.PbListOffsetsRespForBucket(bucket_id=b.bucket_id, offset=o) for b, o in ends.items()
        ]
        return m.ListOffsetsResponse(buckets_resp=answers)

    def in_step(self) -> bool:
        """The tablet server has the coordinator's picture."""
        return picture(self.image) == picture(self.coordinator.image)


@pytest_asyncio.fixture
async def apart(tmp_path: Path) -> AsyncIterator[Apart]:
    apart = Apart(tmp_path / "meta")
    await apart.start_coordinator()
    yield apart
    await apart.stop_coordinator()


async def test_a_registered_server_follows_every_change(apart: Apart) -> None:
    await apart.link.join()
    await apart.create_table()
    assert apart.in_step()
    assert len(apart.tablet.buckets) == 2
    await apart.coordinator.catalog.drop_table(EVENTS)
    assert apart.in_step()
    assert apart.tablet.buckets == {}


async def test_without_a_tablet_server_no_table_can_be_created(apart: Apart) -> None:
    with pytest.raises(InvalidReplicationFactorError):
        await apart.create_table()


async def test_a_restarted_tablet_server_learns_everything_and_forgets_the_rest(
    apart: Apart,
) -> None:
    """A table dropped while the server was away is gone from its disk after it registers."""
    await apart.link.join()
    await apart.create_table("events")
    await apart.create_table("stays")
    apart.to_tablet.down = True
    await apart.coordinator.catalog.drop_table(EVENTS)
    assert len(apart.tablet.buckets) == 4
    apart.to_tablet.down = False
    apart.link = apart.new_link()
    await apart.link.join()
    assert apart.in_step()
    paths = {str(r.physical_path) for r in apart.tablet.buckets.values()}
    assert paths == {"fluss.stays"}


async def test_a_server_learns_how_far_the_lake_got_with_a_commit_and_when_it_registers(
    tmp_path: Path,
) -> None:
    apart = Apart(tmp_path / "meta", {"datalake.format": "iceberg", "data.dir": str(tmp_path)})
    await apart.start_coordinator()
    await apart.link.join()
    await apart.create_table(**{"table.datalake.enabled": "true"})
    bucket = TableBucket(apart.coordinator.image.table(EVENTS).info.table_id, None, 1)
    await apart.tiered(EVENTS, 4711, {bucket: 10})
    await apart.coordinator.lake.settle()
    assert apart.tablet.lake_offsets == {bucket: LakeOffsets(bucket, 4711, 10)}
    asked = m.GetLakeSnapshotRequest()
    asked.table_path.database_name, asked.table_path.table_name = EVENTS
    found = await call(apart.tablet_services, ApiKey.GET_LAKE_SNAPSHOT, asked)
    assert found.snapshotId == 4711
    apart.tablet.lake_offsets.clear()
    await apart.stop_coordinator()
    await apart.start_coordinator()
    apart.link = apart.new_link()
    await apart.link.join()
    await apart.coordinator.lake.settle()
    assert apart.tablet.lake_offsets == {bucket: LakeOffsets(bucket, 4711, 10)}
    await apart.stop_coordinator()


async def test_a_restarted_coordinator_goes_on_with_registrations(apart: Apart) -> None:
    """The heartbeat finds out, and the tables are all there."""
    await apart.link.join()
    await apart.create_table()
    epoch = apart.link.server_epoch
    await apart.stop_coordinator()
    await apart.start_coordinator()
    assert apart.coordinator.image.tablets == {}
    await apart.link.heartbeat()
    assert apart.link.server_epoch == epoch
    assert apart.in_step()
    assert len(apart.tablet.buckets) == 2
    assert len(set(apart.cluster_ids)) == 1
    await apart.create_table("more")
    assert apart.in_step()


async def test_of_two_processes_with_one_id_the_earlier_ends(apart: Apart) -> None:
    """If it registered again, the two would take the buckets from each other for ever."""
    ended: list[str] = []
    earlier = CoordinatorLink(
        TABLET, ClusterImage(), RecordingTablet(), CoordinatorClient(apart._coordinator),
        lambda _: None, replaced=lambda: ended.append("earlier"),
    )  # fmt: skip
    await earlier.join()
    await apart.link.join()
    await earlier.heartbeat()
    assert ended == ["earlier"]
    assert earlier.replacement is not None
    assert "tablet-server.id of its own" in earlier.replacement.message
    await apart.link.heartbeat()
    await apart.create_table()
    assert len(apart.tablet.buckets) == 2


async def test_a_heartbeat_keeps_a_server_and_silence_removes_it(apart: Apart) -> None:
    """A silent server is in nobody's metadata; it is back as soon as it speaks."""
    await apart.link.join()
    await apart.create_table()
    registrations = apart.coordinator.registrations
    assert registrations is not None
    apart.seconds.now += SESSION_SECONDS
    await apart.link.heartbeat()
    apart.seconds.now += SESSION_SECONDS
    await registrations.expire()
    assert set(apart.coordinator.image.tablets) == {1}
    apart.seconds.now += 0.1
    await registrations.expire()
    assert apart.coordinator.image.tablets == {}
    with pytest.raises(InvalidReplicationFactorError):
        await apart.create_table("more")
    await apart.link.heartbeat()
    assert set(apart.coordinator.image.tablets) == {1}
    assert apart.in_step()


async def test_a_change_that_overtakes_the_answer_of_a_registration_waits_for_it(
    apart: Apart,
) -> None:
    """Otherwise the answer, made before the change, would delete the new table again."""
    apart.to_coordinator.hold[ApiKey.REGISTER_TABLET_SERVER] = gate = asyncio.Event()
    join = asyncio.create_task(apart.link.join())
    await apart.to_coordinator.held.wait()
    create = asyncio.create_task(apart.create_table())
    await apart.to_tablet.asked.wait()
    gate.set()
    await join
    await create
    assert apart.in_step()
    assert len(apart.tablet.buckets) == 2


async def test_a_change_that_waits_for_the_old_process_does_not_hold_up_the_new_one(
    apart: Apart,
) -> None:
    """The table is withdrawn with an error, the server joins at once."""
    await apart.link.join()
    apart.tablet.gate = asyncio.Event()
    create = asyncio.create_task(apart.create_table())
    await apart.tablet.waiting.wait()
    apart.tablet.gate, apart.link = None, apart.new_link()
    await apart.link.join()
    with pytest.raises(NetworkError, match="registered again"):
        await create
    assert apart.in_step()
    assert apart.coordinator.image.find_table(EVENTS) is None


ORDERS = {
    ApiKey.UPDATE_METADATA: m.UpdateMetadataRequest(full=True),
    ApiKey.NOTIFY_LEADER_AND_ISR: m.NotifyLeaderAndIsrRequest(),
    ApiKey.STOP_REPLICA: m.StopReplicaRequest(),
    ApiKey.NOTIFY_LAKE_TABLE_OFFSET: m.NotifyLakeTableOffsetRequest(),
    ApiKey.UPDATE_LOCATIONS: m.UpdateLocationsRequest(
        locations=m.PbLocations(version=9, explicit=False, adaptive=False)
    ),
    ApiKey.UPDATE_CONFIGS: m.UpdateConfigsRequest(configs=m.PbDynamicConfigs(version=9)),
    ApiKey.UPDATE_PRODUCERS: m.UpdateProducersRequest(),
    ApiKey.RELEASE_BUCKET: m.ReleaseBucketRequest(
        bucket=m.PbTableBucket(table_id=1, bucket_id=0), leader_epoch=0
    ),
    ApiKey.PREPARE_BUCKET: m.PrepareBucketRequest(
        bucket=m.PbNotifyLeaderAndIsrReqForBucket(
            physical_table_path=m.PbPhysicalTablePath(database_name="d", table_name="t"),
            table_bucket=m.PbTableBucket(table_id=1, bucket_id=0),
            leader=1,
            leader_epoch=0,
            bucket_epoch=0,
        )
    ),
}


@pytest.mark.parametrize("key", ORDERS)
async def test_an_order_of_an_earlier_registration_or_coordinator_is_refused(
    apart: Apart, key: ApiKey
) -> None:
    """A late request of a former coordinator changes nothing."""
    await apart.link.join()
    stale, order = apart.link.server_epoch, ORDERS[key]
    await apart.link.join()
    server, coordinator = apart.link.server_epoch, apart.coordinator.catalog.epoch
    for order.server_epoch, order.coordinator_epoch, whose in (
        (stale, coordinator, "server"),
        (server, coordinator - 1, "coordinator"),
    ):
        with pytest.raises(ZuflussError, match=f"belongs to {whose} epoch") as caught:
            await call(apart.tablet_services, key, order)
        assert caught.value.code == ErrorCode.INVALID_COORDINATOR_EXCEPTION
    assert apart.in_step()


async def test_a_server_of_another_cluster_deletes_nothing(apart: Apart) -> None:
    """The refusal comes before the assignment, so the data of the other cluster stays."""

    def refuse(cluster_id: str) -> None:
        raise ConfigError(f"this directory belongs to another cluster than {cluster_id}")

    async def connect() -> Loopback:
        return apart.to_coordinator

    link = CoordinatorLink(TABLET, ClusterImage(), apart.tablet, CoordinatorClient(connect), refuse)
    with pytest.raises(ConfigError, match="another cluster"):
        await link.start()
    assert apart.tablet.assigned == 0
    assert link.server_epoch == NOT_REGISTERED


async def test_a_bucket_that_does_not_start_is_an_error_at_the_coordinator(apart: Apart) -> None:
    await apart.link.join()
    apart.tablet.failure = LogStorageError("no space left on device")
    with pytest.raises(LogStorageError):
        await apart.create_table()
    assert apart.coordinator.image.find_table(EVENTS) is None
    assert apart.in_step()


@pytest.mark.parametrize("listeners", ["", "nonsense", "A://h:1,A://h:2"])
async def test_a_registration_without_good_listeners_is_refused(
    apart: Apart, listeners: str
) -> None:
    request = m.RegisterTabletServerRequest(server_id=1, listeners=listeners)
    with pytest.raises(ConfigError, match="listeners"):
        await call(apart.to_coordinator.services, ApiKey.REGISTER_TABLET_SERVER, request)


async def test_writer_ids_of_a_tablet_server_come_from_the_coordinator(apart: Apart) -> None:
    """Two servers hand out different ids; too many at once are refused."""
    one, two = (WriterIds(apart.client.allocate_writer_ids) for _ in range(2))
    ids = [await ids.next() for ids in (one, two) * 600]
    assert len(set(ids)) == 1200
    for count in (0, 10_000_000):
        with pytest.raises(ConfigError, match="count"):
            await apart.client.allocate_writer_ids(count)


async def test_ids_of_an_auto_increment_column_come_from_the_coordinator(apart: Apart) -> None:
    """Over the wire as in one process: ranges that follow each other, and refusals with a code."""
    await apart.link.join()
    table = await apart.coordinator.catalog.create_table(EVENTS, counted())
    table_id = table.info.table_id
    assert await apart.client.allocate_ids(table_id, COUNTED, 100_000) == (1, 100_001)
    assert await apart.coordinator.catalog.allocate_ids(table_id, COUNTED, 1) == (100_001, 100_002)
    assert await apart.client.allocate_ids(table_id, COUNTED, 2**63 - 1) == (100_002, 2**63 - 1)
    with pytest.raises(InvalidTableError, match="not an auto-increment column"):
        await apart.client.allocate_ids(table_id, 0, 1)
    with pytest.raises(UnknownTableOrBucketError):
        await apart.client.allocate_ids(table_id + 1, COUNTED, 1)


async def test_the_link_starts_and_stops(apart: Apart) -> None:
    await apart.link.start()
    assert apart.in_step()
    await apart.link.stop()
    await apart.link.stop()

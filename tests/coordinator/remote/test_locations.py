"""Remote locations at the coordinator: registry, configuration at run time, homes of tables."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.coordinator.lake.test_tables import (
    LAKE,
    LakeCluster,
    commit,
    lake_table,
    offsets_of,
    prepare,
    prepared,
    snapshot,
    tiered,
)
from tests.coordinator.support import COORDINATOR, EVENTS, TABLET, Cluster, table_json
from zufluss.cluster.image import TableEntry
from zufluss.coordinator.remote.locations import CONFIGS_PATH, LOCATIONS_PATH
from zufluss.coordinator.server import Coordinator
from zufluss.errors import ConfigError, ErrorCode, ZuflussError
from zufluss.meta.api import Put
from zufluss.model.table import TableBucket, TablePath
from zufluss.obs.metrics import Sample
from zufluss.obs.server import location_samples, registry_samples
from zufluss.remote.files import RemoteFile
from zufluss.remote.health import HealthReport
from zufluss.remote.locations import AdminState, AlterOp, Health, Locations
from zufluss.remote.storage import RemoteStorage
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

DIRS = "remote.data.dirs"
STRATEGY = "remote.data.dirs.strategy"
WEIGHTS = "remote.data.dirs.weights"
SET, DELETE, APPEND, SUBTRACT = range(4)


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    """Addresses for locations, in the one spelling."""
    return [f"file://{tmp_path}/remote-{name}" for name in "abc"]


@pytest_asyncio.fixture
async def cluster(tmp_path: Path, places: list[str]) -> AsyncIterator[Cluster]:
    """A cluster with two locations, a lake and one tablet server."""
    conf = LAKE | {DIRS: ",".join(places[:2])}
    cluster = await LakeCluster(tmp_path / "meta", conf).start()
    yield cluster
    await cluster.stop()


async def refused(directory: Path, conf: Mapping[str, str], why: str) -> None:
    """A coordinator that does not start."""
    cluster = LakeCluster(directory, conf)
    with pytest.raises(ZuflussError, match=why):
        await cluster.start()
    await cluster.store.close()


async def alter_configs(cluster: Cluster, *changes: tuple[str, str | None, int]) -> None:
    await cluster.call(
        ApiKey.ALTER_CLUSTER_CONFIGS,
        alter_configs=[
            m.PbAlterConfig(config_key=key, config_value=value, op_type=op)
            for key, value, op in changes
        ],
    )


async def set_configs(cluster: Cluster, values: Mapping[str, str]) -> None:
    await alter_configs(cluster, *((key, value, SET) for key, value in values.items()))


async def configs(cluster: Cluster) -> dict[str, tuple[str, str]]:
    found = await cluster.call(ApiKey.DESCRIBE_CLUSTER_CONFIGS)
    return {c.config_key: (c.config_value, c.config_source) for c in found.configs}


async def alter(cluster: Cluster, op: AlterOp, **fields: Any) -> Any:
    return await cluster.call(ApiKey.ALTER_LOCATION, op=op, **fields)


async def listed(cluster: Cluster) -> dict[int, Any]:
    found = await cluster.call(ApiKey.LIST_LOCATIONS)
    return {each.location.location_id: each for each in found.locations}


async def uris(cluster: Cluster) -> dict[int, str]:
    return {i: each.location.uri for i, each in (await listed(cluster)).items()}


async def create(cluster: Cluster, name: str, **properties: str) -> TableEntry:
    return await cluster.catalog.create_table(
        TablePath("fluss", name), table_json(properties=properties)
    )


async def alter_table(cluster: Cluster, key: str, value: str) -> None:
    change = m.PbAlterConfig(config_key=key, config_value=value, op_type=SET)
    await cluster.call(
        ApiKey.ALTER_TABLE,
        table_path=m.PbTablePath(database_name="fluss", table_name="events"),
        ignore_if_not_exists=False,
        config_changes=[change],
    )


async def remote_data_dir(cluster: Cluster, path: TablePath = EVENTS) -> str:
    table_path = m.PbTablePath(database_name=path.database, table_name=path.table)
    info = await cluster.call(ApiKey.GET_TABLE_INFO, table_path=table_path)
    metadata = await cluster.call(ApiKey.GET_METADATA, table_path=[table_path])
    assert metadata.table_metadata[0].remote_data_dir == info.remote_data_dir
    return str(info.remote_data_dir)


# -- at start -------------------------------------------------------------------------------------


async def test_a_list_of_directories_alone_is_enough(cluster: Cluster, places: list[str]) -> None:
    assert await uris(cluster) == {1: places[0], 2: places[1]}
    found = cluster.coordinator.locations.locations
    assert found.explicit
    assert cluster.coordinator.locations.storage.locations == found


async def test_one_directory_alone_is_one_location(tmp_path: Path) -> None:
    conf = {"remote.data.dir": str(tmp_path / "one")}
    cluster = await LakeCluster(tmp_path / "meta", conf).start()
    await create(cluster, "events")
    assert await remote_data_dir(cluster) == f"file://{tmp_path}/one"
    assert await uris(cluster) == {1: f"file://{tmp_path}/one"}
    await cluster.stop()


async def test_no_directory_at_all_is_one_beside_the_data_that_moves_with_it(
    tmp_path: Path,
) -> None:
    cluster = await LakeCluster(tmp_path / "meta", {"data.dir": str(tmp_path / "one")}).start()
    assert await uris(cluster) == {1: f"file://{tmp_path}/one/remote"}
    assert not cluster.coordinator.locations.locations.explicit
    await cluster.stop()
    moved = await LakeCluster(tmp_path / "meta", {"data.dir": str(tmp_path / "two")}).start()
    assert await uris(moved) == {1: f"file://{tmp_path}/two/remote"}
    await moved.stop()


async def test_one_directory_must_be_in_the_list_or_the_start_is_refused(
    tmp_path: Path, places: list[str]
) -> None:
    conf = {"remote.data.dir": places[2], DIRS: ",".join(places[:2])}
    await refused(tmp_path / "meta", conf, r"remote\.data\.dir is .* remote\.data\.dirs")
    conf["remote.data.dir"] = places[1]
    cluster = await LakeCluster(tmp_path / "meta", conf).start()
    assert await uris(cluster) == {1: places[0], 2: places[1]}
    await cluster.stop()


async def test_ids_stay_when_the_list_is_in_another_order_after_a_restart(
    cluster: Cluster, places: list[str]
) -> None:
    cluster.conf = cluster.conf.with_overrides({DIRS: ",".join(reversed(places))})
    again = await cluster.restart()
    assert {uri: i for i, uri in (await uris(again)).items()} == {
        places[0]: 1,
        places[1]: 2,
        places[2]: 3,
    }
    await again.stop()


async def test_a_start_without_a_location_that_has_files_is_refused_and_changes_nothing(
    cluster: Cluster, places: list[str]
) -> None:
    await lake_table(cluster)
    await tiered(cluster, 1, {0: 10})
    [home] = [i for i, each in (await listed(cluster)).items() if each.live_files]
    await cluster.stop()
    why = f"location {home} .* still has 1 files"
    await refused(cluster.directory, LAKE | {DIRS: places[2 - home]}, why)
    again = await Cluster(cluster.directory, LAKE | {DIRS: ",".join(places[:2])}).start()
    assert await uris(again) == {1: places[0], 2: places[1]}
    await again.stop()


async def test_a_damaged_registry_stops_the_start(cluster: Cluster) -> None:
    await cluster.store.transact([Put(LOCATIONS_PATH, b"{")])
    await cluster.stop()
    await refused(cluster.directory, LAKE, "restore the metadata store")


# -- homes of tables and partitions ---------------------------------------------------------------


async def test_new_tables_take_turns_by_weight_also_over_restarts(
    tmp_path: Path, places: list[str]
) -> None:
    conf = {DIRS: ",".join(places), STRATEGY: "WEIGHTED_ROUND_ROBIN", WEIGHTS: "5,1,1"}
    cluster = await LakeCluster(tmp_path / "meta", conf).start()
    homes = []
    for number in range(14):
        entry = await create(cluster, f"t{number}")
        homes.append(entry.remote_location)
        if number % 3 == 0:
            cluster = await cluster.restart()
    assert homes == [1, 1, 2, 1, 3, 1, 1] * 2
    await cluster.stop()


async def test_partitions_have_homes_of_their_own_and_clients_see_them(
    cluster: Cluster, places: list[str]
) -> None:
    path = TablePath("fluss", "by_day")
    await cluster.catalog.create_table(path, table_json("a INT, d STRING", partitions=("d",)))
    for day in "1234":
        await cluster.catalog.create_partition(path, {"d": day})
    table_path = m.PbTablePath(database_name=path.database, table_name=path.table)
    found = await cluster.call(ApiKey.LIST_PARTITION_INFOS, table_path=table_path)
    counted = Counter(each.remote_data_dir for each in found.partitions_info)
    assert counted == {places[0]: 2, places[1]: 2}
    again = await cluster.restart()
    same = await again.call(ApiKey.LIST_PARTITION_INFOS, table_path=table_path)
    assert same == found
    await again.stop()


async def test_a_failed_create_does_not_take_a_turn(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(ops: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as broken:
        broken.setattr(cluster.store, "transact", refuse)
        with pytest.raises(OSError, match="no space"):
            await create(cluster, "events")
    homes = [(await create(cluster, name)).remote_location for name in "abcd"]
    assert homes == [1, 2, 1, 2]


async def test_an_old_record_without_a_location_is_in_the_first_one(
    cluster: Cluster, places: list[str]
) -> None:
    await create(cluster, "other")
    entry = await create(cluster, "events")
    path = f"/tables/{entry.info.table_id}"
    found = await cluster.store.read(path)
    assert found is not None
    value = json.loads(found.value)
    assert value.pop("remote_location") == 2
    await cluster.store.transact([Put(path, json.dumps(value).encode())])
    again = await cluster.restart()
    assert again.image.table(EVENTS).remote_location is None
    assert await remote_data_dir(again) == places[0]
    await again.stop()


async def test_offsets_files_of_before_and_after_locations_are_read_and_count(
    cluster: Cluster,
) -> None:
    entry = await lake_table(cluster)
    await tiered(cluster, 1, {0: 10})
    path = f"/tables/{entry.info.table_id}/lake/snapshots"
    found = await cluster.store.read(path)
    assert found is not None
    value = json.loads(found.value)
    assert value["snapshots"][0].pop("location") == 1
    await cluster.store.transact([Put(path, json.dumps(value).encode())])
    again = await cluster.restart()
    assert offsets_of(await snapshot(again)) == {0: 10}
    assert (await listed(again))[1].live_files == 1
    await tiered(again, 2, {0: 20})
    assert offsets_of(await snapshot(again)) == {0: 20}
    assert (await listed(again))[1].live_files == 1
    await again.stop()


async def test_a_table_whose_location_was_retired_is_in_the_first_one(
    cluster: Cluster, places: list[str]
) -> None:
    pinned = {"table.zufluss.remote.placement": "pinned:1"}
    assert (await create(cluster, "events", **pinned)).remote_location == 1
    await alter(cluster, AlterOp.DRAIN, location_id=1)
    await alter(cluster, AlterOp.RETIRE, location_id=1)
    assert await remote_data_dir(cluster) == places[1]
    await alter_table(cluster, "table.log.ttl", "1d")
    with pytest.raises(ConfigError, match="no location 1"):
        await alter_table(cluster, "table.zufluss.remote.placement", "pinned:1,2")


async def test_a_table_keeps_its_home_when_it_is_altered(cluster: Cluster) -> None:
    await create(cluster, "other")
    entry = await create(cluster, "events")
    await alter_table(cluster, "table.log.ttl", "1d")
    assert cluster.image.table(EVENTS).remote_location == entry.remote_location == 2
    assert cluster.tablet.image.table(EVENTS).remote_location == 2


async def test_pinned_tables_have_one_of_their_locations(cluster: Cluster) -> None:
    pinned = {"table.zufluss.remote.placement": "pinned:2"}
    homes = [(await create(cluster, f"t{i}", **pinned)).remote_location for i in range(3)]
    assert homes == [2, 2, 2]


@pytest.mark.parametrize("text", ["pinned:3", "pinned:", "pinned:x", "everywhere", "pinned:1,9"])
async def test_a_placement_that_does_not_fit_is_refused_at_create_and_alter(
    cluster: Cluster, text: str
) -> None:
    placement = {"table.zufluss.remote.placement": text}
    with pytest.raises(ConfigError, match=r"table\.zufluss\.remote\.placement"):
        await create(cluster, "events", **placement)
    await create(cluster, "events")
    with pytest.raises(ConfigError, match=r"table\.zufluss\.remote\.placement"):
        await alter_table(cluster, "table.zufluss.remote.placement", text)
    assert (
        "table.zufluss.remote.placement"
        not in cluster.image.table(EVENTS).info.descriptor.properties
    )


# -- configuration at run time --------------------------------------------------------------------


async def test_a_directory_added_at_run_time_is_used_at_once_and_after_a_restart(
    cluster: Cluster, places: list[str]
) -> None:
    await alter_configs(cluster, (DIRS, places[2], APPEND))
    assert await uris(cluster) == dict(enumerate(places, 1))
    assert cluster.tablet.locations == cluster.coordinator.locations.locations
    homes = {(await create(cluster, f"t{i}")).remote_location for i in range(3)}
    assert homes == {1, 2, 3}
    assert (await configs(cluster))[DIRS] == (",".join(places), "DYNAMIC_SERVER_CONFIG")
    assert (await configs(cluster))["datalake.format"] == ("iceberg", "INITIAL_SERVER_CONFIG")
    again = await cluster.restart()
    assert await uris(again) == dict(enumerate(places, 1))
    await alter_configs(again, (DIRS, None, DELETE))
    assert (await configs(again))[DIRS] == (",".join(places[:2]), "INITIAL_SERVER_CONFIG")
    assert (await listed(again))[3].location.state == AdminState.RETIRED
    await again.stop()


@pytest.mark.parametrize(
    ("dirs", "weights"),
    [
        ("{0},{1}", "0,0"),
        ("{0},{1}", "1,-1"),
        ("{0},{1}", "1"),
        ("{0},{1}", "1,2,3"),
        ("{0},{1}", "1,1.5"),
        ("{0},{1}", "1,two"),
        ("{0},{1}", ""),
        ("{0},{1},ftp://x/y", "1,1,1"),
        ("{0},{1},{0}", "1,1,1"),
        ("{0},{1},{0}/inside", "1,1,1"),
        ("{0},{1},/", "1,1,1"),
        ("{0},{1},s3://", "1,1,1"),
    ],
)
async def test_a_configuration_that_is_not_allowed_leaves_the_old_one_in_force(
    cluster: Cluster, places: list[str], dirs: str, weights: str
) -> None:
    await set_configs(cluster, {STRATEGY: "WEIGHTED_ROUND_ROBIN", WEIGHTS: "2,1"})
    before = cluster.coordinator.locations.locations
    shown = await configs(cluster)
    stored = await cluster.store.read(CONFIGS_PATH)
    with pytest.raises(ConfigError):
        await set_configs(cluster, {DIRS: dirs.format(*places), WEIGHTS: weights})
    assert cluster.coordinator.locations.locations == before
    assert cluster.tablet.locations == before
    assert await configs(cluster) == shown
    assert await cluster.store.read(CONFIGS_PATH) == stored
    await create(cluster, "events")


async def test_only_options_that_take_effect_at_run_time_can_be_changed(cluster: Cluster) -> None:
    for key in ("data.dir", "remote.data.dir", "no.such.key"):
        with pytest.raises(ConfigError, match=r"remote\.data\.dirs\.weights"):
            await set_configs(cluster, {DIRS: "/elsewhere", key: "x"})
    with pytest.raises(ConfigError, match="allowed: SET"):
        await alter_configs(cluster, ("zufluss.remote.adaptive-weights", "true", APPEND))
    with pytest.raises(ConfigError, match="needs a value"):
        await alter_configs(cluster, (DIRS, None, SET))
    with pytest.raises(ConfigError, match="operation 7"):
        await alter_configs(cluster, (DIRS, "/x", 7))
    assert (await configs(cluster))[DIRS][1] == "INITIAL_SERVER_CONFIG"


async def test_adaptive_weights_are_switched_at_run_time(cluster: Cluster) -> None:
    await set_configs(cluster, {"zufluss.remote.adaptive-weights": "true"})
    assert cluster.tablet.locations is not None
    assert cluster.tablet.locations.adaptive
    assert cluster.coordinator.locations.storage.locations.adaptive


async def test_a_directory_with_files_cannot_be_removed_until_they_are_gone(
    cluster: Cluster, places: list[str]
) -> None:
    await lake_table(cluster)
    await tiered(cluster, 1, {0: 10})
    assert (await listed(cluster))[1].live_files == 1
    with pytest.raises(ConfigError, match=r"location 1 .* still has 1 files"):
        await alter_configs(cluster, (DIRS, places[0], SUBTRACT))
    await alter(cluster, AlterOp.DRAIN, location_id=1)
    with pytest.raises(ConfigError, match=r"still has 1 files; wait .* pinned .* location show 1"):
        await alter(cluster, AlterOp.RETIRE, location_id=1)
    await tiered(cluster, 2, {0: 20})
    await cluster.coordinator.lake.settle()
    assert [each.live_files for each in (await listed(cluster)).values()] == [0, 1]
    await alter_configs(cluster, (DIRS, places[0], SUBTRACT))
    assert (await listed(cluster))[1].location.state == AdminState.RETIRED
    assert offsets_of(await snapshot(cluster)) == {0: 20}


async def test_a_table_created_during_a_change_has_a_home_of_before_or_after(
    cluster: Cluster, places: list[str]
) -> None:
    async def tables(first: int) -> list[int | None]:
        return [(await create(cluster, f"t{first + i}")).remote_location for i in range(10)]

    async def changes() -> None:
        for _ in range(5):
            await alter_configs(cluster, (DIRS, places[2], APPEND))
            await alter_configs(cluster, (DIRS, None, DELETE))

    one, two, _ = await asyncio.gather(tables(0), tables(100), changes())
    assert {*one, *two} <= {1, 2, 3}


# -- operators ------------------------------------------------------------------------------------


async def test_an_operator_adds_weighs_drains_and_retires_a_location(
    cluster: Cluster, places: list[str]
) -> None:
    added = await alter(cluster, AlterOp.ADD, uri=places[2], weight=3)
    assert (added.location.location_id, added.location.weight) == (3, 3)
    weighed = await alter(cluster, AlterOp.SET_WEIGHT, location_id=3, weight=5)
    assert weighed.location.weight == 5
    assert weighed.version == added.version + 1
    await alter(cluster, AlterOp.DRAIN, location_id=3)
    again = await cluster.restart()
    assert (await listed(again))[3].location.state == AdminState.DRAINING
    assert {(await create(again, f"t{i}")).remote_location for i in range(4)} == {1, 2}
    await alter(again, AlterOp.RETIRE, location_id=3)
    assert (await listed(again))[3].location.state == AdminState.RETIRED
    activated = await alter(again, AlterOp.ACTIVATE, location_id=3)
    assert activated.location.state == AdminState.ACTIVE
    await again.stop()


@pytest.mark.parametrize("moment", ["prepare", "commit"])
async def test_an_offsets_file_at_the_former_address_of_a_moved_location_never_counts(
    cluster: Cluster,
    places: list[str],
    tmp_path: Path,
    moment: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The location is moved after the file was written, or found, and before it is committed."""
    home = (await lake_table(cluster)).remote_location
    assert home is not None
    cluster.tablet.end = 10
    shutil.copytree(places[home - 1].removeprefix("file://"), tmp_path / "remote-c")
    storage, upload = cluster.coordinator.locations.storage, RemoteStorage.upload

    async def move() -> None:
        await alter(cluster, AlterOp.SET_WEIGHT, location_id=home, weight=0)
        await alter(cluster, AlterOp.MOVE, location_id=home, uri=places[2])

    async def upload_and_move(*args: Any) -> list[RemoteFile]:
        files = await upload(storage, *args)
        await move()
        return files

    end_offsets = cluster.tablet.end_offsets

    async def move_and_answer(buckets: Sequence[TableBucket]) -> dict[TableBucket, int]:
        await move()
        return await end_offsets(buckets)

    with monkeypatch.context() as patch:
        if moment == "prepare":
            patch.setattr(storage, "upload", upload_and_move)
            answer = await prepare(cluster, {0: 10})
            assert answer.error_code == ErrorCode.STORAGE_EXCEPTION
        else:
            file = await prepared(cluster, {0: 10})
            patch.setattr(cluster.tablet, "end_offsets", move_and_answer)
            answer = await commit(cluster, 1, file)
            assert answer.error_code == ErrorCode.REMOTE_LOCATION_MOVED
    assert "another address" in answer.error_message
    assert "upload them again" in answer.error_message
    await tiered(cluster, 1, {0: 10})
    assert offsets_of(await snapshot(cluster)) == {0: 10}


async def test_a_moved_location_has_its_files_where_they_were_copied(
    cluster: Cluster, places: list[str], tmp_path: Path
) -> None:
    await lake_table(cluster)
    file = await tiered(cluster, 1, {0: 10})
    await alter(cluster, AlterOp.DRAIN, location_id=1)
    shutil.copytree(tmp_path / "remote-a", tmp_path / "remote-c")
    shutil.rmtree(tmp_path / "remote-a")
    moved = await alter(cluster, AlterOp.MOVE, location_id=1, uri=places[2])
    assert moved.location.uri == places[2]
    assert cluster.tablet.locations is not None
    assert cluster.tablet.locations.get(1).uri == places[2]
    again = await cluster.restart()
    assert offsets_of(await snapshot(again)) == {0: 10}
    assert await remote_data_dir(again, TablePath("fluss", "events")) == places[2]
    assert "/remote-a/" in file
    await again.stop()


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        (AlterOp.ADD, {}),
        (AlterOp.ADD, {"uri": ""}),
        (AlterOp.ADD, {"uri": "ftp://host/path"}),
        (AlterOp.DRAIN, {}),
        (AlterOp.DRAIN, {"location_id": 9}),
        (AlterOp.RETIRE, {"location_id": 1}),
        (AlterOp.SET_WEIGHT, {"location_id": 1}),
        (AlterOp.SET_WEIGHT, {"location_id": 1, "weight": -1}),
        (AlterOp.MOVE, {"location_id": 1}),
        (99, {"location_id": 1}),
    ],
)
async def test_an_order_that_is_not_allowed_changes_nothing(
    cluster: Cluster, op: int, fields: dict[str, Any]
) -> None:
    before = cluster.coordinator.locations.locations
    with pytest.raises(ConfigError):
        await cluster.call(ApiKey.ALTER_LOCATION, op=op, **fields)
    assert cluster.coordinator.locations.locations == before


async def test_of_two_changes_of_one_version_one_wins(cluster: Cluster, places: list[str]) -> None:
    version = cluster.coordinator.locations.locations.version
    outcomes = await asyncio.gather(
        alter(cluster, AlterOp.ADD, uri=places[2], expected_version=version),
        alter(cluster, AlterOp.DRAIN, location_id=1, expected_version=version),
        return_exceptions=True,
    )
    [conflict] = [each for each in outcomes if isinstance(each, ZuflussError)]
    assert conflict.code is ErrorCode.INVALID_UPDATE_VERSION_EXCEPTION
    assert cluster.coordinator.locations.locations.version == version + 1


async def test_of_two_coordinators_the_later_one_reconfigures(
    cluster: Cluster, places: list[str]
) -> None:
    later = await Coordinator.open(cluster.conf, cluster.store, COORDINATOR, cluster.clock)
    await later.attach(TABLET, cluster.tablet)
    await later.locations.alter(AlterOp.ADD, uri=places[2])
    with pytest.raises(ZuflussError) as refused:
        await set_configs(cluster, {STRATEGY: "WEIGHTED_ROUND_ROBIN", WEIGHTS: "2,1"})
    assert refused.value.code is ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION
    assert "remote.data.dirs.strategy" not in await configs(cluster)
    stored = await cluster.store.read(LOCATIONS_PATH)
    assert stored is not None
    assert len(Locations.from_json(stored.value).locations) == 3
    await later.stop()


# -- looking at them ------------------------------------------------------------------------------


async def test_a_probe_says_which_location_works(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "remote-b").rename(tmp_path / "away")
    (tmp_path / "remote-b").write_text("a file where the directory should be")
    found = await cluster.call(ApiKey.PROBE_LOCATION)
    works = {probe.location_id: not probe.HasField("error") for probe in found.probes}
    assert works == {1: True, 2: False}
    one = await cluster.call(ApiKey.PROBE_LOCATION, location_id=1)
    assert [probe.location_id for probe in one.probes] == [1]
    with pytest.raises(ZuflussError, match="location 7"):
        await cluster.call(ApiKey.PROBE_LOCATION, location_id=7)


async def test_what_servers_saw_is_listed_and_shown_as_metrics(cluster: Cluster) -> None:
    await lake_table(cluster)
    await tiered(cluster, 1, {0: 10})
    report = HealthReport(1, Health.DOWN, 7, 700, 3, 12.5, 0.0, "it is away")
    cluster.coordinator.locations.add_reports(9, lambda: [report])
    [one, two] = (await listed(cluster)).values()
    assert (one.live_files, two.live_files) == (1, 0)
    seen = {each.server_id: each.report for each in one.servers}
    assert (seen[1].placed_files, seen[1].health) == (1, Health.ACTIVE)
    assert HealthReport.from_proto(seen[9]) == report
    assert [each.server_id for each in two.servers] == [1]
    registry = cluster.coordinator.locations
    shown = [*registry_samples(registry)(), *location_samples(registry.storage)()]
    values = {(s.metric.name, s.labels): s.value for s in shown if isinstance(s, Sample)}
    assert values["zufluss_remote_live_files", ("1",)] == 1
    assert values["zufluss_remote_state", ("2",)] == AdminState.ACTIVE
    assert values["zufluss_remote_placed_files_total", ("1",)] == 1
    assert values["zufluss_remote_errors_total", ("1",)] == 0
    assert values["zufluss_remote_effective_weight", ("2",)] == 1
    assert values["zufluss_remote_registry_version", ()] == 1


async def test_offsets_files_follow_the_location_of_their_table(
    cluster: Cluster, tmp_path: Path
) -> None:
    for name, place in {"one": "a", "two": "b", "three": "a"}.items():
        path = TablePath("fluss", name)
        await lake_table(cluster, path)
        file = await tiered(cluster, 1, {0: 10}, path=path)
        assert file.startswith(f"{tmp_path}/remote-{place}/lake/fluss/{name}-")


async def test_credentials_of_stores_are_not_shown(tmp_path: Path) -> None:
    secrets = {"s3.secret-key": "hush", "s3.bucket.logs.session-token": "hush"}
    cluster = await LakeCluster(tmp_path / "meta", {"s3.region": "eu"} | secrets).start()
    shown = await configs(cluster)
    assert shown["s3.region"][0] == "eu"
    assert {shown[key][0] for key in secrets} == {"******"}
    await cluster.stop()

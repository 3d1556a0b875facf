"""A tablet server with a tag keeps its buckets, and gets no others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.support import Cluster, call
from tests.coordinator.wal.world import World, until
from zufluss.cluster import codec
from zufluss.cluster.examination import Severity
from zufluss.cluster.image import ClusterImage, TagsPut
from zufluss.errors import (
    AuthorizationError,
    ConfigError,
    ErrorCode,
    InvalidReplicationFactorError,
    ZuflussError,
)
from zufluss.meta.api import Put
from zufluss.model.rebalance import ServerTag
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

LEAVES = ServerTag.PERMANENT_OFFLINE
PAUSES = ServerTag.TEMPORARY_OFFLINE


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = await World(tmp_path).start()
    yield world
    await world.stop()


async def tag(world: World | Cluster, tag: int, servers: Collection[int]) -> None:
    request = m.AddServerTagRequest(server_ids=servers, server_tag=tag)
    await call(world.services, ApiKey.ADD_SERVER_TAG, request)


async def untag(world: World | Cluster, tag: int, servers: Collection[int]) -> None:
    request = m.RemoveServerTagRequest(server_ids=servers, server_tag=tag)
    await call(world.services, ApiKey.REMOVE_SERVER_TAG, request)


async def code_of(work: object) -> ErrorCode:
    with pytest.raises(ZuflussError) as refused:
        await work  # type: ignore[misc]
    return refused.value.code


async def test_a_new_table_has_no_bucket_at_a_tagged_server(world: World) -> None:
    for server_id in (1, 2, 3):
        await world.server(server_id)
    await tag(world, LEAVES, [2])
    buckets = await world.create_table(buckets=6)
    assert Counter(world.state(b).leader for b in buckets) == {1: 3, 3: 3}
    await untag(world, LEAVES, [2])
    await world.create_table("later", buckets=3)
    assert world.coordinator.image.leaders == {1: 4, 2: 1, 3: 4}


async def test_the_buckets_of_a_lost_server_do_not_go_to_a_tagged_one(world: World) -> None:
    lost = await world.server(1)
    for server_id in (2, 3):
        await world.server(server_id)
    buckets = await world.create_table(buckets=6)
    await tag(world, PAUSES, [3])
    lost.frozen = True
    await world.silent(lost)
    await until(lambda: not world.led(lost, buckets))
    assert Counter(world.state(b).leader for b in buckets) == {2: 4, 3: 2}


async def test_the_buckets_of_a_lost_server_wait_while_all_others_have_tags(world: World) -> None:
    lost = await world.server(1)
    await world.server(2)
    buckets = await world.create_table(buckets=2)
    await tag(world, LEAVES, [2])
    lost.frozen = True
    await world.silent(lost)
    await until(lambda: 1 in world.takeovers.problems)
    assert world.takeovers.problems[1] == "no other tablet server without a tag answers"
    await untag(world, LEAVES, [2])
    await until(lambda: not world.led(lost, buckets))


async def test_with_tags_everywhere_a_table_is_refused_and_the_error_names_the_way_out(
    world: World,
) -> None:
    await world.server(1)
    await tag(world, LEAVES, [1])
    with pytest.raises(InvalidReplicationFactorError, match="cluster tag remove"):
        await world.create_table(buckets=1)


async def test_tags_are_added_and_removed_for_all_servers_of_a_request_or_for_none(
    world: World,
) -> None:
    for server_id in (1, 2):
        await world.server(server_id)
    image = world.coordinator.image
    assert await code_of(tag(world, LEAVES, [1, 9])) is ErrorCode.SERVER_NOT_EXIST_EXCEPTION
    assert image.tags == {}
    await tag(world, LEAVES, [1])
    await tag(world, LEAVES, [1])
    exists = ErrorCode.SEVER_TAG_ALREADY_EXIST_EXCEPTION
    assert await code_of(tag(world, PAUSES, [2, 1])) is exists
    assert image.tags == {1: LEAVES}
    await tag(world, PAUSES, [2])
    differs = ErrorCode.SEVER_TAG_NOT_EXIST_EXCEPTION
    assert await code_of(untag(world, LEAVES, [1, 2])) is differs
    assert image.tags == {1: LEAVES, 2: PAUSES}
    await untag(world, LEAVES, [1, 7])
    assert image.tags == {2: PAUSES}


async def test_a_tag_that_does_not_exist_is_refused_with_those_that_do(world: World) -> None:
    await world.server(1)
    with pytest.raises(ConfigError, match=r"0 \(PERMANENT_OFFLINE\), 1 \(TEMPORARY_OFFLINE\)"):
        await tag(world, 2, [1])


async def test_tags_outlive_the_server_and_the_coordinator(world: World) -> None:
    server = await world.server(1)
    await tag(world, PAUSES, [1])
    await server.link.join()
    assert world.coordinator.image.tags == {1: PAUSES}
    await world.restart()
    assert world.coordinator.image.tags == {1: PAUSES}
    await untag(world, PAUSES, [1])
    await world.restart()
    assert world.coordinator.image.tags == {}


async def test_every_server_and_every_client_learns_the_tags(world: World) -> None:
    one = await world.server(1)
    await tag(world, PAUSES, [1])
    two = await world.server(2)
    for server in (one, two):
        await until(lambda server=server: server.tablet.image.tags == {1: PAUSES})
    answer = await call(world.services, ApiKey.GET_METADATA, m.MetadataRequest())
    by_id = {node.node_id: node for node in answer.tablet_servers}
    assert by_id[1].server_tag == PAUSES
    assert not by_id[2].HasField("server_tag")


async def test_a_tag_whose_change_was_not_stored_has_no_effect(cluster: Cluster) -> None:
    """Planted bug: the image changed before the commit."""
    await cluster.store.transact([Put("/coordinator/epoch", b"9")])
    assert await code_of(tag(cluster, LEAVES, [1])) is ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION
    assert cluster.image.tags == {}


async def test_only_those_who_operate_the_cluster_may_tag(tmp_path: Path) -> None:
    conf = {"security.protocol.map": "CLIENT:sasl", "super.users": "User:root"}
    cluster = await Cluster(tmp_path / "meta", conf).start()
    try:
        with pytest.raises(AuthorizationError, match=r"super\.users"):
            await tag(cluster, LEAVES, [1])
    finally:
        await cluster.stop()


def test_tags_travel_to_tablet_servers_with_the_other_changes() -> None:
    for tags in ({}, {1: LEAVES, 7: PAUSES}):
        request = codec.update_request([TagsPut(tags)], 1, 1)
        assert codec.changes_of(request) == [TagsPut(tags)]
    whole = ClusterImage()
    whole.apply([TagsPut({1: LEAVES})])
    copy = ClusterImage()
    copy.apply(whole.snapshot())
    assert copy.tags == {1: LEAVES}


async def test_a_tagged_server_that_still_leads_buckets_is_worth_a_look(world: World) -> None:
    for server_id in (1, 2):
        await world.server(server_id)
    await world.create_table(buckets=4)
    await tag(world, LEAVES, [1])
    (finding,) = world.coordinator.tags.findings()
    assert (finding.severity, finding.subject) == (Severity.WARNING, "tablet server 1")
    assert "leads 2" in finding.text


async def test_two_changes_of_tags_at_once_both_count(world: World) -> None:
    for server_id in (1, 2):
        await world.server(server_id)
    await asyncio.gather(tag(world, LEAVES, [1]), tag(world, PAUSES, [2]))
    assert world.coordinator.image.tags == {1: LEAVES, 2: PAUSES}

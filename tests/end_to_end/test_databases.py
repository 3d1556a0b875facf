"""pyfluss's database calls against a real server."""

from __future__ import annotations

import fluss
import pytest

from tests.end_to_end.helpers import IDS, create, descriptor, in_time, refused

Code = fluss.ErrorCode

BAD_NAMES = ["", ".", "..", "a b", "a/b", "a.b", "ü", "__hidden", "x" * 201]


async def test_the_database_fluss_is_there_from_the_start(admin: fluss.FlussAdmin) -> None:
    assert await admin.database_exists("fluss")
    assert "fluss" in await admin.list_databases()


async def test_a_created_database_is_listed_exists_and_goes_when_dropped(
    admin: fluss.FlussAdmin, database: str
) -> None:
    assert not await admin.database_exists(database)
    await in_time(admin.create_database(database))
    assert await admin.database_exists(database)
    assert database in await admin.list_databases()
    assert await admin.list_tables(database) == []
    await in_time(admin.drop_database(database))
    assert not await admin.database_exists(database)
    assert database not in await admin.list_databases()


async def test_a_database_keeps_its_comment_and_custom_properties(
    admin: fluss.FlussAdmin, database: str
) -> None:
    wanted = fluss.DatabaseDescriptor("für Bestellungen", {"owner": "ops", "leer": ""})
    await in_time(admin.create_database(database, wanted))
    info = await admin.get_database_info(database)
    assert info.database_name == database
    assert info.get_database_descriptor().comment == "für Bestellungen"
    assert info.get_database_descriptor().get_custom_properties() == {"owner": "ops", "leer": ""}
    assert info.modified_time >= info.created_time > 0


async def test_a_database_without_descriptor_has_no_comment(
    admin: fluss.FlussAdmin, database: str
) -> None:
    await in_time(admin.create_database(database))
    descriptor = (await admin.get_database_info(database)).get_database_descriptor()
    assert descriptor.comment is None
    assert descriptor.get_custom_properties() == {}


async def test_creating_a_database_twice_is_refused_unless_ignored(
    admin: fluss.FlussAdmin, database: str
) -> None:
    await in_time(admin.create_database(database, fluss.DatabaseDescriptor("first")))
    with refused(Code.DATABASE_ALREADY_EXIST):
        await in_time(admin.create_database(database))
    await in_time(
        admin.create_database(database, fluss.DatabaseDescriptor("second"), ignore_if_exists=True)
    )
    info = await admin.get_database_info(database)
    assert info.get_database_descriptor().comment == "first"


async def test_a_missing_database_is_refused_unless_ignored(
    admin: fluss.FlussAdmin, database: str
) -> None:
    with refused(Code.DATABASE_NOT_EXIST):
        await admin.get_database_info(database)
    with refused(Code.DATABASE_NOT_EXIST):
        await admin.list_tables(database)
    with refused(Code.DATABASE_NOT_EXIST):
        await admin.drop_database(database)
    await in_time(admin.drop_database(database, ignore_if_not_exists=True))


async def test_a_database_with_tables_is_dropped_only_by_cascade(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, database: str
) -> None:
    path = fluss.TablePath(database, "t")
    await in_time(admin.create_database(database))
    await create(conn, path)
    with refused(Code.DATABASE_NOT_EMPTY):
        await admin.drop_database(database, cascade=False)
    assert await admin.table_exists(path)
    await in_time(admin.drop_database(database, cascade=True))
    assert not await admin.database_exists(database)
    assert not await admin.table_exists(path)


async def test_a_database_made_again_is_empty(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, database: str
) -> None:
    path = fluss.TablePath(database, "t")
    await in_time(admin.create_database(database))
    first = (await create(conn, path)).get_table_info().table_id
    await in_time(admin.drop_database(database, cascade=True))
    await in_time(admin.create_database(database))
    assert await admin.list_tables(database) == []
    second = (await create(conn, path)).get_table_info().table_id
    assert second > first, "table ids are never used twice"


@pytest.mark.parametrize("name", BAD_NAMES)
async def test_a_bad_database_name_is_refused(admin: fluss.FlussAdmin, name: str) -> None:
    with refused(Code.INVALID_DATABASE_EXCEPTION):
        await in_time(admin.create_database(name))


@pytest.mark.parametrize("name", ["a", "A-z_0", "x" * 200, "_a", "-"])
async def test_an_unusual_but_allowed_database_name_works(
    admin: fluss.FlussAdmin, name: str
) -> None:
    await in_time(admin.create_database(name))
    assert await admin.database_exists(name)
    await in_time(admin.drop_database(name))


@pytest.mark.parametrize("name", [n for n in BAD_NAMES if n])
async def test_a_table_in_a_badly_named_database_is_refused(
    admin: fluss.FlussAdmin, name: str
) -> None:
    with refused(Code.INVALID_DATABASE_EXCEPTION):
        await in_time(admin.create_table(fluss.TablePath(name, "t"), descriptor(IDS)))


async def test_the_cluster_lists_a_coordinator_and_a_tablet_server(
    admin: fluss.FlussAdmin,
) -> None:
    nodes = await admin.get_server_nodes()
    assert sorted(n.server_type for n in nodes) == ["CoordinatorServer", "TabletServer"]
    assert len({n.uid for n in nodes}) == 2
    assert {n.uid[:3] for n in nodes} == {"cs-", "ts-"}
    assert all(n.host and n.port for n in nodes)

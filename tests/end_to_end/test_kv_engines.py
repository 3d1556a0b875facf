"""Merge engines, delete behaviours and changelog images through pyfluss, against the model."""

from __future__ import annotations

import datetime as dt
import itertools
import random
from typing import Any

import fluss
import pyarrow as pa
import pytest

from tests.end_to_end.helpers import end_offsets, refused
from tests.end_to_end.kv import changelog, create_keyed, delete, lookup, upsert
from tests.end_to_end.test_primary_key_tables import agrees
from tests.kv.model import Model, Rules

INT_MIN = -(2**31)
VERSION = "table.merge-engine.versioned.ver-column"
DELETES_DISABLED, INVALID_CONFIG = 57, 39


def properties(rules: Rules) -> dict[str, str]:
    """The properties of a table whose version column is `n`."""
    versioned = {VERSION: "n"} if rules.engine == "versioned" else {}
    return {**rules.properties, **versioned}


def variants() -> list[Rules]:
    """Every engine with every behaviour and image that can be created."""
    found = []
    for deletes, image in itertools.product(("ALLOW", "IGNORE"), ("FULL", "WAL")):
        found.append(Rules(3, (0,), deletes=deletes, image=image))  # type: ignore[arg-type]
    for image in ("FULL", "WAL"):
        found.append(Rules(3, (0,), "first_row", deletes="IGNORE", image=image))  # type: ignore[arg-type]
        found.append(Rules(3, (0,), "versioned", 2, INT_MIN, "IGNORE", image))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("rules", variants(), ids=lambda r: f"{r.engine}-{r.deletes}-{r.image}")
async def test_any_mix_is_as_the_model_says(
    conn: fluss.FlussConnection, path: fluss.TablePath, rules: Rules
) -> None:
    table = await create_keyed(conn, path, properties=properties(rules))
    rng, model = random.Random(f"{rules}"), Model(rules)
    for number in range(16):
        keys = [rng.randrange(6) for _ in range(rng.randint(1, 6))]
        if rng.random() < 0.7:
            rows = [(k, f"{number}", rng.choice([None, 1, 2, 3, -5])) for k in keys]
            model.upsert(*rows)
            await upsert(table, *rows)
        else:
            model.delete(*((k,) for k in keys))
            await delete(table, *([k] for k in keys))
    await agrees(conn, table, model, [(k,) for k in range(7)])


async def test_first_row_keeps_the_first_row(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create_keyed(conn, path, properties={"table.merge-engine": "first_row"})
    await upsert(table, [1, "first", 1], [1, "second", 2])
    await upsert(table, [1, "third", 3], [2, "other", 1])
    await delete(table, [1])
    assert await lookup(table, [1]) == {"id": 1, "text": "first", "n": 1}
    records = await changelog(table, 2)
    assert [(offset, kind, r["text"]) for offset, kind, r in records] == [
        (0, "+I", "first"),
        (1, "+I", "other"),
    ]
    assert (await end_offsets(conn.get_admin(), path))[0] == 3, "the delete took one offset"


OLD, OLD_UTC = dt.datetime.min, dt.datetime.min.replace(tzinfo=dt.UTC)
"""Older than every timestamp here; the least one of the protocol has no Python form."""
VERSIONS: dict[str, tuple[pa.DataType, Any, list[Any]]] = {
    "int": (pa.int32(), INT_MIN, [INT_MIN, 0, 300]),
    "bigint": (pa.int64(), -(2**63), [-(2**63), 0, 2**62]),
    "timestamp_ms": (pa.timestamp("ms"), OLD, [dt.datetime(1969, 1, 1), dt.datetime(2030, 1, 1)]),
    "timestamp_us": (
        pa.timestamp("us"),
        OLD,
        [dt.datetime(2030, 1, 1, 0, 0, 0, 1), dt.datetime(2030, 1, 1, 0, 0, 0, 2)],
    ),
    "timestamp_ltz_us": (
        pa.timestamp("us", "UTC"),
        OLD_UTC,
        [dt.datetime(2030, 1, 1, tzinfo=dt.UTC), dt.datetime(2031, 1, 1, tzinfo=dt.UTC)],
    ),
}


@pytest.mark.parametrize("name", VERSIONS)
async def test_a_versioned_table_takes_no_older_row(
    conn: fluss.FlussConnection, path: fluss.TablePath, name: str
) -> None:
    kind, least, versions = VERSIONS[name]
    schema = pa.schema([("id", pa.int32()), ("version", kind), ("text", pa.string())])
    table = await create_keyed(
        conn, path, schema, properties={"table.merge-engine": "versioned", VERSION: "version"}
    )
    model = Model(Rules(3, (0,), "versioned", 1, least, "IGNORE"))
    order = [None, None, versions[0], None, versions[-1], versions[0], versions[-1], *versions]
    for number, version in enumerate(order):
        model.upsert((1, version, f"{number}"))
        await upsert(table, [1, version, f"{number}"])
    assert model.rows[1,][2] == f"{len(order) - 1}", "an equal version replaces"
    await agrees(conn, table, model, [(1,), (2,)])


@pytest.mark.parametrize(
    "wrong",
    [
        {"table.merge-engine": "versioned"},
        {"table.merge-engine": "versioned", VERSION: "text"},
        {"table.merge-engine": "versioned", VERSION: "nope"},
        {"table.merge-engine": "first_row", "table.delete.behavior": "ALLOW"},
        {"table.merge-engine": "versioned", VERSION: "n", "table.delete.behavior": "ALLOW"},
        {"table.merge-engine": "last_row"},
        {"table.delete.behavior": "SOMETIMES"},
        {"table.changelog.image": "HALF"},
    ],
    ids=lambda p: "-".join(p.values()),
)
async def test_an_engine_that_cannot_work_is_refused_at_create(
    conn: fluss.FlussConnection, path: fluss.TablePath, wrong: dict[str, str]
) -> None:
    with refused(INVALID_CONFIG):
        await create_keyed(conn, path, properties=wrong)


@pytest.mark.parametrize("engine", ["default", "first_row", "versioned"])
async def test_deletes_that_are_disabled_are_refused_and_nothing_happens(
    conn: fluss.FlussConnection, path: fluss.TablePath, engine: Any
) -> None:
    rules = Rules(3, (0,), engine, 2, INT_MIN, "DISABLE")
    table = await create_keyed(conn, path, properties=properties(rules))
    await upsert(table, [1, "a", 1])
    with refused(DELETES_DISABLED):
        await delete(table, [1])
    with refused(DELETES_DISABLED):
        await delete(table, [2])
    assert await lookup(table, [1]) == {"id": 1, "text": "a", "n": 1}
    assert (await end_offsets(conn.get_admin(), path))[0] == 1


async def test_ignored_deletes_are_acknowledged_and_change_nothing(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create_keyed(conn, path, properties={"table.delete.behavior": "IGNORE"})
    await upsert(table, [1, "a", 1])
    await delete(table, [1], [2])
    assert await lookup(table, [1]) == {"id": 1, "text": "a", "n": 1}
    assert (await end_offsets(conn.get_admin(), path))[0] == 2


async def test_the_image_wal_leaves_the_old_rows_out(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create_keyed(conn, path, properties={"table.changelog.image": "WAL"})
    await upsert(table, [1, "a", 1], [2, "b", 2])
    await upsert(table, [1, "c", 3])
    await delete(table, [2])
    records = await changelog(table, 4)
    assert [(offset, kind, tuple(r.values())) for offset, kind, r in records] == [
        (0, "+U", (1, "a", 1)),
        (1, "+U", (2, "b", 2)),
        (2, "+U", (1, "c", 3)),
        (3, "-D", (2, "b", 2)),
    ]

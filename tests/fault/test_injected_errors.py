"""Shortage at every call: nothing acknowledged is lost, and no bucket stays broken.

MemoryError, EMFILE and ENOSPC are raised at one call after the other (`injection.py`) while a
server serves, opens its buckets, opens a failed bucket again, and stops. After each of them every
write is acknowledged in the same process in the end, a write that was refused for a shortage has
changed nothing, each acknowledged write is in its log once, and the rows are the changelog applied.
The same holds for a server that starts with the files as they are then.
"""

from __future__ import annotations

import random
import shutil
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from tests.counts import FULL, rounds
from tests.fault.injection import Injector, Point
from tests.fault.shortage_node import KEYED, LOG, Load, Node, serving
from tests.tablet.gateway import Gateway
from zufluss.log.manager import LogManager
from zufluss.tablet import reopen

HITS: Final = 5
"""Calls of one function that fail, one in each run; the last call besides."""

PARTS: Final = 8 if FULL else 1
"""Tests that the runs of a scene are divided into."""

Scene = Callable[[Path, Injector, Point | None], Awaitable[None]]
"""Starts a server, writes to it and checks it. The injector counts, or fails, some of its calls."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit files of 256 KiB, of which the load fills several; retries without long pauses."""
    defaults = LogManager.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "commit_file_bytes", 256 << 10)
    monkeypatch.setattr(reopen, "FIRST_SECONDS", 0.01)


# -- what the server does ---------------------------------------------------------------------


async def work(load: Load) -> None:
    """Append, put, delete, update partly, look up, flush, snapshot, evict, expire."""
    await load.append(0)
    await load.append(0)
    await load.append(0, 1)
    await load.append(1, size=30_000)
    await load.append(1, size=45_000)
    await load.put([(key, f"first {key}", key) for key in range(300)])
    await load.put([(key, f"second {key}", None) for key in range(0, 300, 2)])
    await load.delete(range(0, 300, 7))
    await load.put_texts({key: f"third {key}" for key in range(0, 300, 5)})
    await load.look_up(range(300))
    await load.snapshot()
    await load.put([(1, "one", 1)])
    await load.snapshot()
    await load.evict()
    await load.look_up([2, 3, 300])
    await load.put([(key, f"cold {key}", key) for key in range(100, 400)])
    await load.put_texts({key: f"cold {key} text" for key in (3, 9, 500)})
    await load.delete([4, 9, 501])
    load.expire()
    for number in range(6):
        await load.append(0, 1, size=9_000)
        await load.put([(600 + number, "long" * 2_000, number)])
    await load.look_up(range(600, 606))


async def more(load: Load) -> None:
    """Write to every bucket once more."""
    await load.append(0, 1)
    await load.append(0)
    await load.put([(1000, "more", 1), (1, "more", len(load.changes))])
    await load.delete([1000])


async def check_now_and_later(load: Load) -> None:
    """Check the server, and another one that begins with a copy of its files."""
    await load.node.until_open()
    await more(load)
    await load.check()
    node = load.node
    copy = node.root.with_name(f"{node.root.name}-copy")
    shutil.copytree(node.root, copy)
    await check_files(copy, load)
    load.node = node


async def check_files(root: Path, load: Load) -> None:
    """Check what a server makes of files that another one left."""
    async with serving(root, load.node.gateway) as load.node:
        await load.node.until_open()
        await load.check()
        await more(load)
        await load.check()


# -- where it fails ---------------------------------------------------------------------------


async def served(root: Path, injector: Injector, point: Point | None) -> None:
    """It fails while the server serves."""
    async with serving(root, Gateway()) as node:
        load = Load(node, injector)
        with injector.arming(point):
            await work(load)
        await check_now_and_later(load)


async def opened_again(root: Path, injector: Injector, point: Point | None) -> None:
    """It fails while buckets that failed are opened again."""
    async with serving(root, Gateway()) as node:
        load = Load(node, injector)
        await work(load)
        buckets = [node.replica(bucket) for bucket in ((LOG, 0), (LOG, 1), (KEYED, 0))]
        with injector.arming(point):
            for replica in buckets:
                assert replica is not None
                with suppress(MemoryError):
                    replica.fail("the test says so")
            await node.until_open()
            await more(load)
        assert node.replica((KEYED, 0)) not in buckets
        await check_now_and_later(load)


async def started(root: Path, injector: Injector, point: Point | None) -> None:
    """It fails while a server starts after a crash."""
    gateway = Gateway()
    first = root.with_name("first")
    async with serving(first, gateway) as node:
        load = Load(node, injector)
        await work(load)
        shutil.copytree(first, root)
    load.node = node = Node(root, gateway)
    with injector.arming(point):
        try:
            await node.start()
        except Exception:  # the process would end, and be started again
            with injector.paused():
                await node.server.close()
                load.node = node = Node(root, gateway)
                await node.start()
        await node.until_open()
    try:
        await check_now_and_later(load)
    finally:
        await node.stop()


async def stopped(root: Path, injector: Injector, point: Point | None) -> None:
    """It fails while the server stops."""
    node = Node(root, Gateway())
    await node.start()
    load = Load(node, injector)
    await work(load)
    with injector.arming(point):
        try:
            await node.stop()
        except Exception:  # the process ends
            traceback.print_exc()
    copy = root.with_name("copy")
    shutil.copytree(root, copy)
    await check_files(copy, load)


# -- every call -------------------------------------------------------------------------------


def points_of(injector: Injector, error: str) -> list[Point]:
    """Return some of the calls of each function that were counted, the first ones and the last."""
    points = []
    for (kind, name), count in sorted(injector.counts.items()):
        if kind == error:
            hits = {*range(1, min(count, HITS) + 1), count}
            points += [Point(error, name, hit) for hit in sorted(hits)]
    return points


async def failing(scene: Scene, root: Path, point: Point | None, injector: Injector) -> str | None:
    """Play a scene; return what went wrong."""
    root.mkdir()
    try:
        with injector.installed():
            await scene(root / "node", injector, point)
    except Exception:
        return f"{point}\n{injector.raised}\n{traceback.format_exc()}"
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return None


_counted: dict[Scene, Injector] = {}


async def counted(scene: Scene, root: Path) -> Injector:
    """Count the calls of a scene in which nothing fails."""
    if scene not in _counted:
        injector = Injector()
        assert await failing(scene, root, None, injector) is None
        _counted[scene] = injector
    return _counted[scene]


@pytest.mark.slow
@pytest.mark.timeout(7200 if FULL else 400)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("error", "sample"), [("memory", 2), ("EMFILE", 1), ("ENOSPC", 1)])
@pytest.mark.parametrize("scene", [served, opened_again, started, stopped])
async def test_a_shortage_at_any_call_loses_nothing_and_breaks_nothing(
    scene: Scene, error: str, sample: int, part: int, tmp_path: Path, rng: random.Random
) -> None:
    points = points_of(await counted(scene, tmp_path / "counted"), error)
    assert points
    if FULL:
        points = points[part::PARTS]
    else:
        points = rng.sample(points, min(rounds(sample, len(points)), len(points)))
    problems = []
    for number, point in enumerate(points):
        print(point)
        problem = await failing(scene, tmp_path / str(number), point, Injector())
        if problem is not None:
            print(problem)
            problems.append(problem)
    assert not problems, f"{len(problems)} of {len(points)}\n" + "\n\n".join(problems)

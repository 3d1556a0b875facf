"""What a tablet server removes from its data directory, and what is not its to remove."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tablet.support import TABLE, Tablet
from zufluss.errors import ConfigError
from zufluss.log.files import Files


async def test_what_the_server_did_not_name_stays(tmp_path: Path) -> None:
    """Somebody may have started it in a directory that holds other things."""
    foreign = ["a/b/log-archive", "a/b/c/log-2024", "a/b-1/log-x", "a/b-1/c/log-0", "empty"]
    for path in foreign:
        (tmp_path / path).mkdir(parents=True)
    for path in foreign[:4]:
        (tmp_path / path / "precious.txt").write_text("not yours")
    tablet = Tablet(tmp_path)
    tablet.server.claim("cluster")
    await tablet.start()
    await tablet.server.close()
    assert all((tmp_path / path).is_dir() for path in foreign)
    assert len(list(tmp_path.rglob("precious.txt"))) == 4


async def test_buckets_of_dropped_tables_go_with_their_directories(tmp_path: Path) -> None:
    left = ["db/t-3/log-0", "db/t-3/log-1.deleted", "old/p-4/2024$a-p2/log-5", "old/p-5"]
    for path in left:
        (tmp_path / path).mkdir(parents=True)
    tablet = await Tablet(tmp_path).start()
    await tablet.server.close()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name[0] != ".") == ["db"]
    assert [p.name for p in (tmp_path / "db").iterdir()] == [f"t-{TABLE}"]


@pytest.mark.parametrize("log", ["db/t-3/log-0", "db/t-3/2024-p1/log-0"])
async def test_logs_without_an_owner_are_not_taken_over(tmp_path: Path, log: str) -> None:
    (tmp_path / log).mkdir(parents=True)
    with pytest.raises(ConfigError, match="whose they are"):
        Tablet(tmp_path, Files()).server.claim("cluster")
    assert (tmp_path / log).exists()

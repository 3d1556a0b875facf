"""A real process, killed with SIGKILL while it changes the catalog."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from tests.coordinator.support import Cluster
from tests.paths import ROOT

RUNS = 6


def killed(directory: Path, run: int, lines: int) -> list[list[str]]:
    """What the process acknowledged until it was killed."""
    command = [sys.executable, "-m", "tests.coordinator.creator", str(directory), str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        seen = "".join(child.stdout.readline() for _ in range(lines))
        child.kill()
        seen += child.stdout.read()
    return [line.split() for line in seen.split("\n")[:-1]]


async def test_nothing_acknowledged_is_lost_and_no_id_is_given_twice(tmp_path: Path) -> None:
    """Acknowledged creates and drops hold; the assigned buckets are those of the tables."""
    chance = random.Random(7)
    said: dict[str, list[str]] = {"table": [], "dropping": [], "gone": [], "writer": [], "id": []}
    ids: list[int] = []
    for run in range(RUNS):
        for kind, word, *rest in killed(tmp_path, run, chance.randint(1, 60)):
            said[kind].append(word)
            ids += map(int, rest)
    cluster = await Cluster(tmp_path).start()
    found = set(cluster.image.table_names("fluss"))
    assert set(cluster.tablet.buckets) == {bucket for _, bucket, _ in cluster.image.buckets()}
    await cluster.stop()
    assert set(said["table"]) - set(said["dropping"]) <= found
    assert not set(said["gone"]) & found
    assert len(set(ids)) == len(ids) == len(said["table"])
    for kind in ("writer", "id"):
        assert len(set(said[kind])) == len(said[kind])

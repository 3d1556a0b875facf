"""A process that begins epochs and prints what was acknowledged; to be killed.

Lines: `epoch ID NUMBER EPOCH`, `releasing ID`, `released ID`.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from tests.coordinator.producer_cluster import ProducerCluster
from zufluss.obs import logging


async def main(directory: Path, seed: int) -> None:
    logging.configure("error")
    world = await ProducerCluster(directory).begin()
    chance = random.Random(seed)
    columns = {"a": 1, "b": 2, "c": 3}
    while True:
        name, column = chance.choice(list(columns.items()))
        made = (await world.init(name, column)).producer
        print("epoch", name, made.number, made.epoch, flush=True)
        if chance.random() < 0.2:
            print("releasing", name, flush=True)
            await world.release(made.epoch, producer_id=name)
            print("released", name, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))

"""A process that writes pairs into an embedded store and prints each acknowledged number.

Run by the crash test as `python writer.py DIRECTORY`, and killed with SIGKILL. It goes on where
the store ends, so that a second run continues the numbers of the first.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from zufluss.meta.api import Create, Put
from zufluss.meta.embedded import EmbeddedStore


async def main(directory: Path) -> None:
    store = await EmbeddedStore.open(directory)
    if await store.read("/next") is None:
        await store.transact([Create("/next", b"0")])
    counter = await store.read("/next")
    assert counter is not None
    number = int(counter.value)
    while True:
        await store.transact(
            [
                Create(f"/left/{number}", b"x" * (number % 700)),
                Put("/next", b"%d" % (number + 1)),
                Create(f"/right/{number}", b"y"),
            ]
        )
        print(number, flush=True)
        number += 1


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))

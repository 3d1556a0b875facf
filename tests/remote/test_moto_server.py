"""The S3 server of the tests creates an object once, however its threads take turns."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from zufluss.remote.errors import ObjectExistsError
from zufluss.remote.objects import Objects
from zufluss.remote.uri import parse_location
from zufluss.testing.s3 import S3Server

ROUNDS = 150
AT_ONCE = 8
SERVE = """
import sys
from zufluss.testing.moto_server import main
sys.setswitchinterval(1e-6)
main(["-H", "127.0.0.1", "-p", "0"])
"""


class HastyServer(S3Server):
    """Its threads interrupt each other all the time, as now and then on a busy machine."""

    def arguments(self) -> Sequence[str]:
        return [sys.executable, "-c", SERVE]


async def test_of_requests_that_create_one_object_at_once_one_wins() -> None:
    """With moto alone, about 3 of 100 rounds have two winners here."""
    with HastyServer() as s3:
        s3.bucket("once")
        place = parse_location("s3://once/root", "test")
        objects = Objects(place, s3.properties, sign_payload=False)

        async def create(path: str, number: int) -> bool:
            try:
                await objects.create(path, str(number).encode())
            except ObjectExistsError:
                return False
            return True

        for number in range(ROUNDS):
            path = f"wal/{number}"
            won = await asyncio.gather(*(create(path, i) for i in range(AT_ONCE)))
            assert sum(won) == 1
            assert await objects.get(path, limit=9) == str(won.index(True)).encode()

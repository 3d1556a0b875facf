"""S3 servers of other makers, for the tests of the shared log.

Tests use moto. With `ZUFLUSS_S3_SERVER=versitygw` or `=minio`, and a program of that name on the
path, the server of a test session is that one: its objects lie on the disk, and its conditional
puts are somebody else's code. Only tests that ask for nothing of moto's own can run on it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.servers import free_port
from zufluss.testing.process import ReadyProcess
from zufluss.testing.s3 import ACCESS_KEY, REGION, SECRET_KEY, S3Server

ENGINE: Final = os.environ.get("ZUFLUSS_S3_SERVER", "moto")
"""The S3 server that tests share."""
_READY: Final = re.compile(r"https?://127\.0\.0\.1:\d+")


class EngineServer(S3Server):
    """A server of another maker, with its objects in a directory."""

    def __init__(self, engine: str, directory: Path) -> None:
        ReadyProcess.__init__(
            self, _READY, {"MINIO_ROOT_USER": ACCESS_KEY, "MINIO_ROOT_PASSWORD": SECRET_KEY}
        )
        self._address = f"127.0.0.1:{free_port()}"
        self.endpoint = f"http://{self._address}"
        login = ["--access", ACCESS_KEY, "--secret", SECRET_KEY]
        self._arguments = {
            "versitygw": ["versitygw", *login, "--port", self._address, "posix", str(directory)],
            "minio": ["minio", "server", "--address", self._address, str(directory)],
        }[engine]

    def arguments(self) -> Sequence[str]:
        """The command line."""
        return self._arguments

    def became_ready(self, line: re.Match[str]) -> None:
        """Its address was chosen before."""

    def bucket(self, name: str) -> str:
        """Make a bucket, unless it is there; returns its URI."""
        import boto3  # takes a while, and moto needs none

        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )
        if name not in {each["Name"] for each in client.list_buckets()["Buckets"]}:
            client.create_bucket(Bucket=name)
        return f"s3://{name}"


def shared_server(directory: Path) -> S3Server:
    """The S3 server of a test session, not started."""
    return S3Server() if ENGINE == "moto" else EngineServer(ENGINE, directory)

"""A real S3 protocol in a process of its own, for tests: the server of moto.

    with S3Server() as s3:
        s3.bucket("logs")
        conf = Configuration.of({"remote.data.dirs": "s3://logs/zufluss", **s3.properties})

It needs the package `moto[server]`. Any credentials are accepted; the token service (STS) answers
at the same address. Objects live in the memory of that process.
"""

from __future__ import annotations

import re
import sys
import urllib.request
from collections.abc import Sequence
from typing import Final

from zufluss.testing.process import ReadyProcess

ACCESS_KEY: Final = "AKIAZUFLUSSTESTING00"
SECRET_KEY: Final = "not-a-secret"
REGION: Final = "us-east-1"

_READY = re.compile(r"Running on (http://\S+)")


class S3Server(ReadyProcess):
    """An S3 server on a free port of this host."""

    def __init__(self) -> None:
        super().__init__(_READY, {"PYTHONUNBUFFERED": "1"})
        self.endpoint = ""
        """Its address, once it runs."""

    def arguments(self) -> Sequence[str]:
        """The command line."""
        return [sys.executable, "-m", "zufluss.testing.moto_server", "-H", "127.0.0.1", "-p", "0"]

    def became_ready(self, line: re.Match[str]) -> None:
        """Take the address."""
        self.endpoint = line[1]

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.endpoint.rpartition(":")[2])

    @property
    def properties(self) -> dict[str, str]:
        """Cluster keys with which a server or a location reaches it."""
        return properties(self.endpoint)

    def bucket(self, name: str) -> str:
        """Make a bucket; returns its URI."""
        self._send("PUT", name)
        return f"s3://{name}"

    def refuse_credentials(self, refuse: bool) -> None:
        """From now on answer 403 to everything, or accept everything again."""
        self._send("POST", "moto-api/reset-auth", b"0" if refuse else b"inf")

    def _send(self, method: str, path: str, body: bytes | None = None) -> None:
        headers = {"Content-Type": "text/plain"}
        request = urllib.request.Request(
            f"{self.endpoint}/{path}", data=body, headers=headers, method=method
        )
        with urllib.request.urlopen(request) as answer:
            answer.read()


def properties(endpoint: str) -> dict[str, str]:
    """Cluster keys for an S3 server at an address, say that of a `FaultProxy` before it."""
    return {
        "s3.endpoint": endpoint,
        "s3.region": REGION,
        "s3.access-key": ACCESS_KEY,
        "s3.secret-key": SECRET_KEY,
        "s3.path-style-access": "true",
    }

"""A connection to ZooKeeper whose requests can be awaited: kazoo, and one request that it lacks.

kazoo keeps the connection in threads of its own, and connects again by itself. A request that was
under way when the connection ended fails; only its sender can find out what became of it.

Many nodes are read with one request (`MultiRead`, operation 22, ZooKeeper 3.6 and later). With a
request for each node, kazoo would need seconds for the tree of a large cluster.

| part of a multi read | layout, big-endian |
|---|---|
| header of an operation | type: i32, done: u8, error: i32 |
| GetData (4), GetChildren (8) | path: i32 length and UTF-8, watch: u8 |
| answer to GetData | data: i32 length (−1 for none) and bytes, stat: 68 bytes |
| answer to GetChildren | names: i32 count, each i32 length and UTF-8 |
| answer of an error (−1) | error: i32 |
| end | the header with type −1 and done 1 |
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import struct
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import structlog
from kazoo.client import KazooClient
from kazoo.exceptions import (
    EXCEPTIONS,
    ConnectionLoss,
    KazooException,
    NoNodeError,
    OperationTimeoutError,
    SessionExpiredError,
    SessionMovedError,
)
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.serialization import GetChildren, GetData, Sync, Transaction
from kazoo.protocol.states import KeeperState, ZnodeStat
from kazoo.security import OPEN_ACL_UNSAFE, make_acl, make_digest_acl

from zufluss.config import zookeeper_options
from zufluss.config.load import Configuration
from zufluss.errors import ConfigError
from zufluss.meta.api import MetaStoreError

log = structlog.get_logger(__name__)

CONNECT_SECONDS: Final = 20.0
"""How long a start waits for a connection."""
RECONNECT_SECONDS_MAX: Final = 1.0
"""The longest pause between two attempts to connect."""
READ_AT_ONCE: Final = 256
"""Nodes of one multi read: as each may have a megabyte, more could take too much memory."""
READS_UNDER_WAY: Final = 4
"""Multi reads that are under way at the same time."""

_HEADER: Final = struct.Struct("!iBi")
_INT: Final = struct.Struct("!i")
_STAT: Final = struct.Struct("!qqqqiiiqiiq")
_ERROR: Final = -1


@dataclass(frozen=True, slots=True)
class ZooKeeperAccess:
    """How a ZooKeeper is reached."""

    address: str
    """`host:port`, several separated by commas."""
    session_timeout_ms: int
    """How long ZooKeeper waits for a sign of life."""
    digest: str | None = field(default=None, repr=False)
    """`user:password` for digest authentication."""
    sasl: str | None = field(default=None, repr=False)
    """`user:password` for a login by SASL; without this and a digest there is no login."""
    tls: bool = False
    """Whether connections are encrypted."""
    tls_ca: str | None = None
    """A file with certificates of authorities, beside those of the system."""
    tls_certificate: str | None = None
    """A file with the client's own certificate."""
    tls_key: str | None = None
    """A file with the key of that certificate."""

    @classmethod
    def of(cls, conf: Configuration) -> ZooKeeperAccess:
        """The access that a configuration describes; `ConfigError` if it cannot be used."""
        address = conf.get(zookeeper_options.ZOOKEEPER_ADDRESS) or ""
        if "/" in address:
            raise ConfigError(
                f"zookeeper.address = {address!r} is not allowed; allowed: host:port, several "
                f"separated by commas; a path belongs into zookeeper.path.root"
            )
        logins = {
            option.key: login
            for option in (
                zookeeper_options.ZUFLUSS_ZOOKEEPER_DIGEST,
                zookeeper_options.ZUFLUSS_ZOOKEEPER_SASL,
            )
            if (login := conf.get(option)) is not None
        }
        for key, login in logins.items():
            if not all(login.partition(":")):
                raise ConfigError(f"{key} is not allowed; allowed: user:password")
        if len(logins) > 1:
            raise ConfigError(f"{' and '.join(logins)} are two logins; set one of them")
        sasl = conf.get(zookeeper_options.ZUFLUSS_ZOOKEEPER_SASL)
        if sasl is not None and importlib.util.find_spec("puresasl") is None:
            raise ConfigError(
                "zufluss.zookeeper.sasl needs a package that is not installed; "
                "pip install 'zufluss[zookeeper-sasl]'"
            )
        access = cls(
            address=address,
            session_timeout_ms=conf.get(zookeeper_options.ZOOKEEPER_CLIENT_SESSION_TIMEOUT),
            digest=conf.get(zookeeper_options.ZUFLUSS_ZOOKEEPER_DIGEST),
            sasl=sasl,
            tls=conf.get(zookeeper_options.ZUFLUSS_ZOOKEEPER_TLS),
            tls_ca=conf.get(zookeeper_options.ZUFLUSS_ZOOKEEPER_TLS_CA),
            tls_certificate=conf.get(zookeeper_options.ZUFLUSS_ZOOKEEPER_TLS_CERTIFICATE),
            tls_key=conf.get(zookeeper_options.ZUFLUSS_ZOOKEEPER_TLS_KEY),
        )
        if (access.tls_certificate is None) != (access.tls_key is None):
            raise ConfigError(
                "zufluss.zookeeper.tls.certificate and zufluss.zookeeper.tls.key go together; "
                "set both, or none"
            )
        return access


class NodeData(NamedTuple):
    """What a node holds."""

    data: bytes
    """Its data."""
    stat: ZnodeStat
    """The versions, times and number of children that ZooKeeper keeps of the node."""


NodeAnswer: TypeAlias = NodeData | list[str] | KazooException | None


class MultiRead(namedtuple("MultiRead", "operations")):
    """A request for many nodes; the answer has None for one that does not exist, or its error."""

    type = 22

    def serialize(self) -> bytes:
        """Encode the request."""
        parts = bytearray()
        for operation in self.operations:
            parts += _HEADER.pack(operation.type, 0, _ERROR)
            parts += operation.serialize()
        return bytes(parts + _HEADER.pack(_ERROR, 1, _ERROR))

    @classmethod
    def deserialize(cls, answer: bytes, offset: int) -> list[NodeAnswer]:
        """Decode the answer."""
        return list(_answers(answer, offset))


def _answers(answer: bytes, offset: int) -> Iterator[NodeAnswer]:
    while True:
        kind, done, _ = _HEADER.unpack_from(answer, offset)
        offset += _HEADER.size
        if done:
            return
        if kind == GetData.type:
            data, offset = _bytes(answer, offset)
            yield NodeData(data, ZnodeStat._make(_STAT.unpack_from(answer, offset)))
            offset += _STAT.size
        elif kind == GetChildren.type:
            (count,) = _INT.unpack_from(answer, offset)
            offset += _INT.size
            names: list[str] = []
            for _ in range(count):
                name, offset = _bytes(answer, offset)
                names.append(name.decode())
            yield names
        else:
            (code,) = _INT.unpack_from(answer, offset)
            offset += _INT.size
            yield None if code == NoNodeError.code else EXCEPTIONS[code]()


def _bytes(answer: bytes, offset: int) -> tuple[bytes, int]:
    (length,) = _INT.unpack_from(answer, offset)
    begin = offset + _INT.size
    end = begin + max(length, 0)
    return answer[begin:end], end


class ZooKeeperClient:
    """A connection to ZooKeeper. Open it with `ZooKeeperClient.open`."""

    def __init__(
        self, access: ZooKeeperAccess, kazoo: KazooClient, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.address = access.address
        """Where ZooKeeper is."""
        self.acl = OPEN_ACL_UNSAFE
        """The access rights of nodes that are created."""
        if access.digest is not None:
            user, _, password = access.digest.partition(":")
            self.acl = [make_digest_acl(user, password, all=True)]
        if access.sasl is not None:
            self.acl = [make_acl("sasl", access.sasl.partition(":")[0], all=True)]
        self._kazoo = kazoo
        self._loop = loop
        self._seen: tuple[int, bytes] | None = None

    @classmethod
    async def open(cls, access: ZooKeeperAccess) -> ZooKeeperClient:
        """Connect; `MetaStoreError` if no server answers in time, or the login is refused."""
        loop = asyncio.get_running_loop()
        # At DEBUG kazoo logs passwords, at INFO each attempt to connect.
        logger = logging.getLogger("zufluss.zookeeper")
        logger.setLevel(logging.WARNING)
        logger.addFilter(_NEWS)
        kazoo = KazooClient(
            access.address,
            timeout=access.session_timeout_ms / 1000,
            auth_data=[] if access.digest is None else [("digest", access.digest)],
            sasl_options=_sasl_options(access),
            connection_retry={
                "max_tries": -1,
                "delay": 0.05,
                "max_delay": RECONNECT_SECONDS_MAX,
            },
            use_ssl=access.tls,
            ca=access.tls_ca,
            certfile=access.tls_certificate,
            keyfile=access.tls_key,
            check_hostname=access.tls,
            logger=logger,
        )
        kazoo.add_listener(lambda state: log.info("zookeeper_connection", state=state.lower()))
        client = cls(access, kazoo, loop)
        try:
            await loop.run_in_executor(None, partial(kazoo.start, CONNECT_SECONDS))
        except KazooTimeoutError:
            raise MetaStoreError(
                f"no server of zookeeper.address = {access.address} let this one in within "
                f"{CONNECT_SECONDS:.0f} s; start ZooKeeper, or correct the address, the login or "
                f"the certificates"
            ) from None
        return client

    @property
    def is_over(self) -> bool:
        """Whether the connection ended for good: kazoo gave up, or the login was refused."""
        return self._kazoo.client_state in (KeeperState.CLOSED, KeeperState.AUTH_FAILED)

    async def send(self, request: Any) -> Any:
        """Send a request and wait for its answer; raises the exceptions of kazoo."""
        if not self._kazoo.connected:  # kazoo would keep it, and block at the 279th
            raise ConnectionLoss
        answer = self._kazoo.handler.async_result()
        future: asyncio.Future[Any] = self._loop.create_future()
        answer.rawlink(partial(self._answered, future))
        self._kazoo._call(request, answer)
        return await future

    def _answered(self, future: asyncio.Future[Any], answer: Any) -> None:
        """Hand an answer over to the event loop; called in a thread of kazoo."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_settle, future, answer)

    async def commit(self, operations: Sequence[Any]) -> list[Any]:
        """Carry out all operations or none; returns their results, which may be exceptions."""
        results: list[Any] = await self.send(Transaction(list(operations)))
        return results

    async def sync(self, path: str) -> None:
        """Wait until the connected server has everything that was committed before the call."""
        await self.send(Sync(path))

    async def data(self, paths: Sequence[str]) -> list[NodeData | None]:
        """The data of nodes, in the same order; None where there is no node."""
        return await self._read(lambda path: GetData(path, None), paths)

    async def children(self, paths: Sequence[str]) -> list[list[str] | None]:
        """The names below nodes, in the same order; None where there is no node."""
        return await self._read(lambda path: GetChildren(path, None), paths)

    async def _read(self, request: Callable[[str], Any], paths: Sequence[str]) -> list[Any]:
        if not paths:
            return []
        await self._see_everything(paths)
        session = self._seen
        pieces = [paths[at : at + READ_AT_ONCE] for at in range(0, len(paths), READ_AT_ONCE)]
        answers: list[Any] = []
        for at in range(0, len(pieces), READS_UNDER_WAY):
            some = pieces[at : at + READS_UNDER_WAY]
            reads = (self.send(MultiRead([request(path) for path in piece])) for piece in some)
            for answer in await asyncio.gather(*reads):
                answers += answer
        if self._kazoo.client_id != session:
            raise SessionMovedError  # what was read may be older than what was seen
        for answer in answers:
            if isinstance(answer, KazooException):
                raise answer
        return answers

    async def _see_everything(self, paths: Sequence[str]) -> None:
        """Wait, in a new session, until its server has what earlier sessions have seen.

        Within a session ZooKeeper sees to it; kazoo does not say to a new one what was seen.
        """
        session = self._kazoo.client_id
        if session is None or session != self._seen:
            await self.sync(paths[0])
            if session is None or self._kazoo.client_id != session:
                raise SessionMovedError  # which of the sessions was synced is not known
            self._seen = session

    async def close(self) -> None:
        """End the session; requests under way fail."""
        await self._loop.run_in_executor(None, self._end)

    def _end(self) -> None:
        self._kazoo.stop()
        self._kazoo.close()

    def __repr__(self) -> str:
        return f"ZooKeeperClient({self.address!r}, {self._kazoo.client_state})"


def _sasl_options(access: ZooKeeperAccess) -> dict[str, str] | None:
    if access.sasl is None:
        return None
    user, _, password = access.sasl.partition(":")
    return {"mechanism": "DIGEST-MD5", "username": user, "password": password}


class _News(logging.Filter):
    """Passes a message unless it is the same as the last one: kazoo connects again every second."""

    def __init__(self) -> None:
        super().__init__()
        self._last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log the record."""
        last, self._last = self._last, record.getMessage()
        return self._last != last


_NEWS: Final = _News()


def _settle(future: asyncio.Future[Any], answer: Any) -> None:
    if future.done():
        return
    if answer.exception is not None:
        future.set_exception(answer.exception)
    else:
        future.set_result(answer.value)


def is_passing(problem: KazooException) -> bool:
    """Whether a request that failed may succeed when the connection is back."""
    return isinstance(
        problem, ConnectionLoss | SessionExpiredError | SessionMovedError | OperationTimeoutError
    )

"""The metadata store on ZooKeeper, for clusters whose coordinator may run on any machine.

| node | data |
|---|---|
| ROOT/store | `zufluss metadata 1`: the format of what is below |
| ROOT/store/… | the paths of the store, see `znodes.py` |
| ROOT/writers/ID | of an open store: the token of its last transaction |

ROOT is `zookeeper.path.root`. Other nodes below ROOT are free for other uses, such as elections.

**A transaction** reads the nodes that it concerns, says no if it does not fit, and sends one
ZooKeeper transaction with the exact versions that it saw; if somebody was faster, it looks again.
The transactions of one store take turns.

**Unknown outcomes are resolved.** When the connection ends while a transaction is under way,
ZooKeeper may have it, or get it later. So each transaction also replaces the token in the store's
node of writers, on the condition that nobody did since the last one. To resolve an outcome, the
store writes another token on the same condition. Either that succeeds: the transaction did not
take place, cannot any more, and is tried again. Or the condition fails: the token says which of
the two was first. The caller learns nothing of all this, but has to wait until ZooKeeper answers:
a transaction that was sent is never given up, except when the store is closed.

**Limits.** A ZooKeeper transaction has at most a megabyte; one that has more is refused before it
is sent (`TransactionTooLargeError`). Reads, and transactions that were not sent yet, fail after
`ANSWER_SECONDS` without an answer, and have changed nothing then.

Several stores may be open on one root; `coordinator/ledger.py` sees to it that one of them writes.
A store that opened reads everything that was committed before; what others commit later it reads
after a while, and at once after its next transaction that they prevent.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NoReturn, TypeVar

import structlog
from kazoo.exceptions import (
    AuthFailedError,
    BadVersionError,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
)
from kazoo.protocol.serialization import (
    CheckVersion,
    SetData,
    Transaction,
)
from kazoo.protocol.serialization import (
    Create as CreateRequest,
)
from kazoo.protocol.serialization import (
    Delete as DeleteRequest,
)

from zufluss.meta import znodes
from zufluss.meta.api import (
    Create,
    Entry,
    MetaStoreError,
    Op,
    Put,
    StoreClosedError,
    TransactionTooLargeError,
    VersionedValue,
    check_ops,
    check_path,
)
from zufluss.meta.znodes import CheckNode, CreateNode, DeleteNode, Node, SetNode, Step
from zufluss.meta.zookeeper_client import (
    NodeData,
    ZooKeeperAccess,
    ZooKeeperClient,
    is_passing,
)

log = structlog.get_logger(__name__)

FORMAT: Final = b"zufluss metadata 1"
ANSWER_SECONDS: Final = 20.0
"""How long a request that has no effect waits for ZooKeeper."""
CLOSE_SECONDS: Final = 5.0
"""How long a store that is closed waits for the transactions under way."""
PAUSE_SECONDS: Final = 0.05
"""The pause before a request is sent again."""
TRANSACTION_BYTES_MAX: Final = 1_030_000
"""What ZooKeeper takes (`jute.maxbuffer`, 1,048,575 by default), less room for its own records."""
STEP_BYTES: Final = 32
"""How much larger a step may be in ZooKeeper's own records than in the request."""
TRIES_MAX: Final = 1_000
"""How often a transaction is tried; each time others were faster, or it got lost on its way."""
WRITERS_KEPT: Final = 32
"""Nodes of writers that stay when a store opens; each store that was not closed leaves one."""

T = TypeVar("T")


class ZooKeeperStore:
    """A `MetaStore` in ZooKeeper. Open it with `ZooKeeperStore.open`."""

    def __init__(self, client: ZooKeeperClient, root: str) -> None:
        self._client = client
        self._root = root
        self._store = f"{root}/store"
        self._turn = asyncio.Lock()
        self._under_way: set[asyncio.Task[int]] = set()
        self._tokens = _Tokens(f"{root}/writers/{uuid.uuid4().hex}")
        self._closing: asyncio.Future[None] | None = None
        self._given_up = False
        self._broken: str | None = None

    @classmethod
    async def open(cls, access: ZooKeeperAccess, root: str) -> ZooKeeperStore:
        """Connect, and create the nodes of the store if they do not exist.

        `MetaStoreError` if ZooKeeper does not answer, refuses the login, or has something else at
        the root.
        """
        check_path(root)
        store = cls(await ZooKeeperClient.open(access), root)
        try:
            await store._prepare()
        except BaseException:
            await store._client.close()
            raise
        return store

    # Reading

    async def read(self, path: str) -> VersionedValue | None:
        """The value of a path, or None."""
        self._check_open()
        check_path(path)
        [found] = await self._answer(lambda: self._client.data([self._node(path)]))
        value = None if found is None else self._value(path, found)
        return None if found is None or value is None else VersionedValue(value, found.stat.mzxid)

    async def children(self, path: str) -> list[str]:
        """The names one level below a path, sorted."""
        self._check_open()
        check_path(path, root=True)
        [names] = await self._answer(lambda: self._client.children([self._node(path)]))
        return sorted(names or ())

    async def tree(self, path: str) -> list[Entry]:
        """Every value at or below a path, sorted by path."""
        self._check_open()
        check_path(path, root=True)
        entries: list[Entry] = []
        level = [path]
        while level:
            nodes = await self._data(level)
            parents: list[str] = []
            for each, node in zip(level, nodes, strict=True):
                if node is None:
                    continue
                if each != "/" and (value := self._value(each, node)) is not None:
                    entries.append(Entry(each, value, node.stat.mzxid))
                if node.stat.numChildren:
                    parents.append(each)
            level = await self._below(parents)
        return sorted(entries, key=lambda entry: entry.path)

    async def _data(self, paths: Sequence[str]) -> list[NodeData | None]:
        nodes = [self._node(path) for path in paths]
        return await self._answer(lambda: self._client.data(nodes))

    async def _below(self, paths: Sequence[str]) -> list[str]:
        """The paths right below some paths."""
        nodes = [self._node(path) for path in paths]
        names = await self._answer(lambda: self._client.children(nodes))
        return [
            f"{'' if path == '/' else path}/{name}"
            for path, some in zip(paths, names, strict=True)
            for name in some or ()
        ]

    def _value(self, path: str, node: NodeData) -> bytes | None:
        try:
            return znodes.value_of(node.data)
        except ValueError as problem:
            raise MetaStoreError(
                f"the node {self._node(path)} in ZooKeeper was not written by a metadata store "
                f"({problem}): restore it from a backup"
            ) from None

    # Changing

    async def transact(self, ops: Sequence[Op]) -> None:
        """Apply all operations or none."""
        await self._commit(tuple(ops))

    async def compare_and_set(self, path: str, value: bytes, version: int | None) -> int:
        """Put a value when the path has this version (None: no value); its new version."""
        op: Op = Create(path, value) if version is None else Put(path, value, version)
        return await self._commit((op,))

    async def _commit(self, ops: tuple[Op, ...]) -> int:
        self._check_open()
        check_ops(ops)
        task = asyncio.ensure_future(self._in_turn(ops))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)  # a caller that is cancelled does not cancel the commit

    async def _in_turn(self, ops: tuple[Op, ...]) -> int:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            raise self._silent() from None
        try:
            if self._given_up:
                raise StoreClosedError(f"the metadata store {self!r} is closed")
            return await self._apply(ops) if ops else 0
        finally:
            self._turn.release()

    async def _apply(self, ops: tuple[Op, ...]) -> int:
        """Apply operations; returns the version of everything that they wrote."""
        self._check_usable()
        paths = znodes.touched(ops)
        fresh = False
        for _ in range(TRIES_MAX):
            nodes = dict(zip(paths, map(self._seen, paths, await self._data(paths)), strict=True))
            if (conflict := znodes.conflict(ops, nodes)) is not None:
                if fresh:
                    raise conflict
            elif (version := await self._send(znodes.steps_of(ops, nodes))) is not None:
                return version
            # What was read may be older than what another store committed.
            await self._answer(lambda: self._client.sync(self._store))
            fresh = True
        raise MetaStoreError(
            f"a transaction of {self!r} failed {TRIES_MAX} times, because others changed the "
            f"same paths or the connection was lost; nothing was changed, try again"
        )

    def _seen(self, path: str, node: NodeData | None) -> Node | None:
        if node is None:
            return None
        stat = node.stat
        has_value = self._value(path, node) is not None
        return Node(stat.version, stat.mzxid, stat.numChildren, has_value)

    async def _send(self, steps: Sequence[Step]) -> int | None:
        """Carry out steps; returns the version of what they wrote, None if they did not fit."""
        tokens = self._tokens
        if tokens.version is None:
            await self._create_writer()
        token = tokens.next()
        requests = [self._request(step) for step in steps]
        requests.append(SetData(tokens.node, token, tokens.version))
        self._check_size(requests)
        try:
            results = await self._client.commit(requests)
        except KazooException as problem:
            if self._client.is_over:
                self._break(f"the connection to ZooKeeper is over ({type(problem).__name__})")
            if not is_passing(problem):
                self._refuse(problem)
            return await self._resolve(token)
        failed = [result for result in results if isinstance(result, KazooException)]
        if not failed:
            tokens.version = results[-1].version
            return int(results[-1].mzxid)
        if isinstance(results[-1], NoNodeError | BadVersionError):
            tokens.version = None  # the node was cleaned up by others; nothing is under way
        elif refusal := next((each for each in failed if isinstance(each, NoAuthError)), None):
            self._refuse(refusal)
        return None

    async def _resolve(self, token: bytes) -> int | None:
        """Find out what became of a transaction; what `_send` returns."""
        tokens = self._tokens
        log.warning("metadata_transaction_in_doubt", zookeeper=self._client.address)
        while True:
            instead = tokens.next()
            try:
                [result] = await self._client.commit(
                    [SetData(tokens.node, instead, tokens.version)]
                )
                if not isinstance(result, KazooException):
                    tokens.version = result.version
                    log.info("metadata_transaction_resolved", took_place=False)
                    return None
                [found] = await self._client.data([tokens.node])
            except KazooException as problem:
                if self._client.is_over or not is_passing(problem):
                    self._break(f"ZooKeeper can no longer be asked ({type(problem).__name__})")
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if found is None:
                self._break(f"the node {tokens.node} was removed")
            if found.stat.version == tokens.version:  # not replaced: the first may still arrive
                self._break(f"it refuses to replace a token ({type(result).__name__})")
            tokens.version = found.stat.version
            took_place = found.data == token
            log.info("metadata_transaction_resolved", took_place=took_place)
            return int(found.stat.mzxid) if took_place else None

    async def _create_writer(self) -> None:
        """Create the node of this store's tokens."""
        tokens = self._tokens
        tokens.node = f"{self._root}/writers/{uuid.uuid4().hex}"
        await self._ensure(tokens.node, b"")
        [found] = await self._answer(lambda: self._client.data([tokens.node]))
        tokens.version = None if found is None else found.stat.version

    def _check_size(self, requests: Sequence[Any]) -> None:
        size = len(Transaction(requests).serialize()) + STEP_BYTES * len(requests)
        if size > TRANSACTION_BYTES_MAX:
            raise TransactionTooLargeError(
                f"a metadata transaction of {len(requests) - 1} steps has {size} bytes, ZooKeeper "
                f"takes at most {TRANSACTION_BYTES_MAX}; nothing was changed, change less at once"
            )

    def _request(self, step: Step) -> Any:
        node = self._node(step.path)
        match step:
            case CreateNode():
                return CreateRequest(node, step.data, self._client.acl, 0)
            case SetNode():
                return SetData(node, step.data, step.version)
            case DeleteNode():
                return DeleteRequest(node, step.version)
            case CheckNode():
                return CheckVersion(node, step.version)

    # Opening and closing

    async def _prepare(self) -> None:
        for path in [*znodes.parents_of(self._root), self._root, f"{self._root}/writers"]:
            await self._ensure(path, b"")
        await self._ensure(self._store, FORMAT)
        [found] = await self._answer(lambda: self._client.data([self._store]))
        if found is None or found.data != FORMAT:
            raise MetaStoreError(
                f"the node {self._store} in ZooKeeper is of something else, or of another version "
                f"of zufluss: choose another zookeeper.path.root"
            )
        await self._forget_writers()

    async def _ensure(self, node: str, data: bytes) -> None:
        """Create a node unless it exists."""

        async def create() -> None:
            try:
                await self._client.send(CreateRequest(node, data, self._client.acl, 0))
            except NodeExistsError:
                pass  # from a time before, or by this request, whose answer was lost

        await self._answer(create)

    async def _forget_writers(self) -> None:
        """Remove the oldest nodes of writers; who still needs one creates another."""
        above = f"{self._root}/writers"
        [names] = await self._answer(lambda: self._client.children([above]))
        nodes = [f"{above}/{name}" for name in names or ()]
        found = await self._answer(lambda: self._client.data(nodes))
        last = {node: each.stat.mzxid for node, each in zip(nodes, found, strict=True) if each}
        for node in sorted(last, key=last.__getitem__)[:-WRITERS_KEPT]:
            await self._remove(node)

    async def _remove(self, node: str) -> None:
        try:
            await self._client.send(DeleteRequest(node, -1))
        except NoNodeError:
            pass  # others do the same

    async def close(self) -> None:
        """Finish the calls under way, and end the session."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            if self._under_way:
                await asyncio.wait(self._under_way, timeout=CLOSE_SECONDS)
            self._given_up = True
            if self._tokens.version is not None and not self._under_way:
                await asyncio.wait_for(self._remove(self._tokens.node), CLOSE_SECONDS)
        except (KazooException, TimeoutError) as problem:
            log.info("metadata_writer_not_removed", reason=repr(problem))
        finally:
            await self._client.close()

    # Answers and refusals

    async def _answer(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask something without an effect, again when the connection was lost."""
        self._check_usable()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                while True:
                    try:
                        return await ask()
                    except KazooException as problem:
                        self._refuse_unless_passing(problem)
                    await asyncio.sleep(PAUSE_SECONDS)
        except TimeoutError:
            raise self._silent() from None

    def _silent(self) -> MetaStoreError:
        return MetaStoreError(
            f"ZooKeeper at {self._client.address} did not answer within {ANSWER_SECONDS:.0f} s; "
            f"nothing was changed, try again when it does"
        )

    def _refuse_unless_passing(self, problem: KazooException) -> None:
        """Raise unless the same request may succeed later."""
        if self._client.is_over and self._closing is not None:
            raise StoreClosedError(f"the metadata store {self!r} is closed") from problem
        if self._client.is_over or not is_passing(problem):
            self._refuse(problem)

    def _refuse(self, problem: KazooException) -> NoReturn:
        if isinstance(problem, NoAuthError | AuthFailedError):
            raise MetaStoreError(
                f"ZooKeeper at {self._client.address} does not let this server use "
                f"{self._root}; nothing was changed, correct zufluss.zookeeper.digest or "
                f"zufluss.zookeeper.sasl"
            ) from problem
        raise MetaStoreError(
            f"ZooKeeper at {self._client.address} refused a request ({type(problem).__name__}); "
            f"nothing was changed"
        ) from problem

    def _break(self, why: str) -> NoReturn:
        """Refuse everything from now on: what the store has may differ from what callers know."""
        self._broken = why
        raise MetaStoreError(
            f"whether a metadata transaction took place cannot be found out any more: {why}; "
            f"restart this server"
        )

    def _check_open(self) -> None:
        if self._closing is not None:
            raise StoreClosedError(f"the metadata store {self!r} is closed")

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise MetaStoreError(
                f"the metadata store cannot be used any more: {self._broken}; restart this server"
            )

    def _node(self, path: str) -> str:
        return self._store if path == "/" else self._store + path

    def __repr__(self) -> str:
        return f"ZooKeeperStore({self._client.address!r}, {self._root!r})"


class _Tokens:
    """The tokens of a store's transactions, and the node of the last one."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.version: int | None = None
        """The version of the node's data; None if the node has to be created."""
        self._last = 0

    def next(self) -> bytes:
        """A token that was not used before."""
        self._last += 1
        return b"%d" % self._last

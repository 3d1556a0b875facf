"""Sessions of the shared log, as the coordinator and tablet servers name them to each other.

With `zufluss.log.durability = remote` each registration of a tablet server begins a session of the
shared log (`log/shared`). What is acknowledged of a bucket is what its segments in remote storage
have, and behind them what one session has of it. `BucketState.wal` names that session.

| step | call | what it changes |
|---|---|---|
| a server registers | REGISTER_TABLET_SERVER | its former session is sealed; a new one begins |
| a bucket gets a leader | NOTIFY_LEADER_AND_ISR, with a `WalSource` | nothing yet: the leader reads the source |
| its own session has the end of the bucket | COMMIT_TAKEOVERS | `BucketState.wal` names that session |
| the first objects are not needed any more | COMMIT_WAL_FLOOR | the floor; then the objects are deleted |
| a bucket is handed over | RELEASE_BUCKET | its leader writes nothing any more; the session stays its source |
| a released bucket was not heard of | REPORT_RELEASED | the bucket gets a leader, if it has none |
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

from typing import Final, NamedTuple

from zufluss.model.table import TableBucket
from zufluss.wire import messages as m
from zufluss.wire.tables import bucket_from_proto, bucket_to_proto


class WalSession(NamedTuple):
    """The session of one registration of a tablet server."""

    server_id: int
    """The id of the server."""
    server_epoch: int
    """The epoch of the registration."""
    location_id: int
    """The remote location with the objects of the session."""


OPEN_END: Final = -1
"""The end of a live session as a source: as far as it goes when it is read."""


class WalSource(NamedTuple):
    """A session that has ended, or released a bucket, from its floor to there."""

    session: WalSession
    """The session."""
    floor: int
    """The first number that is there."""
    end: int
    """The number behind the last one; `OPEN_END` for who copies a bucket that goes on."""


class ReleasedBucket(NamedTuple):
    """A bucket that a live session has released, so that another one continues it."""

    bucket: TableBucket
    """The bucket."""
    leader_epoch: int
    """The epoch in which it was released."""
    end: int
    """The number of the session behind the entry that released it."""


class Takeover(NamedTuple):
    """A bucket whose end lies in the session of its leader."""

    bucket: TableBucket
    """The bucket."""
    leader_epoch: int
    """The epoch in which its leader took it over."""


def session_to_proto(session: WalSession) -> m.PbWalSession:
    """Encode a session."""
    return m.PbWalSession(
        server_id=session.server_id,
        server_epoch=session.server_epoch,
        location_id=session.location_id,
    )


class StandbyReport(NamedTuple):
    """What a tablet server tells of a bucket that it follows."""

    bucket: TableBucket
    """The bucket."""
    leader_epoch: int
    """The epoch of the leader that it follows."""
    caught_up: bool
    """Whether it had everything lately that its leader showed."""


def report_to_proto(report: StandbyReport) -> m.PbStandbyReport:
    """Encode a report."""
    return m.PbStandbyReport(
        bucket=bucket_to_proto(report.bucket),
        leader_epoch=report.leader_epoch,
        caught_up=report.caught_up,
    )


def report_from_proto(message: m.PbStandbyReport) -> StandbyReport:
    """Decode a report."""
    return StandbyReport(bucket_from_proto(message.bucket), message.leader_epoch, message.caught_up)


def session_from_proto(message: m.PbWalSession) -> WalSession:
    """Decode a session."""
    return WalSession(message.server_id, message.server_epoch, message.location_id)


def source_to_proto(source: WalSource) -> m.PbWalSource:
    """Encode a source."""
    return m.PbWalSource(**source.session._asdict(), floor=source.floor, end=source.end)


def source_from_proto(message: m.PbWalSource) -> WalSource:
    """Decode a source."""
    session = WalSession(message.server_id, message.server_epoch, message.location_id)
    return WalSource(session, message.floor, message.end)


def takeover_to_proto(takeover: Takeover) -> m.PbTakeover:
    """Encode a take-over."""
    return m.PbTakeover(bucket=bucket_to_proto(takeover.bucket), leader_epoch=takeover.leader_epoch)


def takeover_from_proto(message: m.PbTakeover) -> Takeover:
    """Decode a take-over."""
    return Takeover(bucket_from_proto(message.bucket), message.leader_epoch)


def released_to_proto(released: ReleasedBucket) -> m.PbReleasedBucket:
    """Encode a released bucket."""
    return m.PbReleasedBucket(
        bucket=bucket_to_proto(released.bucket),
        leader_epoch=released.leader_epoch,
        end=released.end,
    )


def released_from_proto(message: m.PbReleasedBucket) -> ReleasedBucket:
    """Decode a released bucket."""
    return ReleasedBucket(bucket_from_proto(message.bucket), message.leader_epoch, message.end)

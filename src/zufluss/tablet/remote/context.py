"""What everything that works with remote storage on a tablet server shares."""

from __future__ import annotations

from dataclasses import dataclass

from zufluss.cluster.remote import BucketRemote, RemoteGateway
from zufluss.config import table_options
from zufluss.log.files import Files
from zufluss.model.table import TableBucket
from zufluss.remote.placement import Policy, parse_policy
from zufluss.remote.storage import RemoteStorage
from zufluss.tablet.buckets import Buckets


@dataclass(frozen=True, slots=True)
class RemoteContext:
    """Remote storage as the buckets of one server use it."""

    buckets: Buckets
    storage: RemoteStorage
    """Reads and writes remote files."""
    gateway: RemoteGateway
    """Asks the coordinator what counts, and commits to it."""
    files: Files
    """The local disk."""

    async def bucket_remote(self, bucket: TableBucket) -> BucketRemote:
        """What a bucket has in remote storage, according to the coordinator."""
        remotes = await self.gateway.bucket_remotes([bucket])
        return remotes.get(bucket, BucketRemote(bucket))

    def policy(self, bucket: TableBucket) -> Policy:
        """The placement policy of a bucket's table."""
        info = self.buckets.tables[bucket.table_id].info
        return parse_policy(info.property(table_options.TABLE_ZUFLUSS_REMOTE_PLACEMENT))

    def home(self, bucket: TableBucket) -> int | None:
        """The id of the location that was chosen for a bucket's table or partition."""
        holder = self.buckets.image.holder(bucket)
        return None if holder is None else holder.remote_location

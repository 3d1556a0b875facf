"""Apache Iceberg as a lake format: the factory behind the entry point `iceberg`.

Parts are imported at first use: a Spark task that writes files never loads a catalog, and `import
zufluss` never loads pyiceberg. The version of pyiceberg is pinned, because `private.py` uses
undocumented parts of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zufluss.lake.base import (
    CommitterContext,
    LakeCapabilities,
    LakeMaintenance,
    LakeReader,
    LakeTableError,
    LakeWriter,
    VersionedSerde,
    WriterContext,
)
from zufluss.lake.iceberg.handle import IcebergCommittable, IcebergWriteResult
from zufluss.lake.iceberg.rules import validate

if TYPE_CHECKING:
    from zufluss.lake.iceberg.committer import IcebergCommitter
    from zufluss.model.table import TableInfo

FORMAT = "iceberg"
VERSION = 1
"""Version of the data between driver and tasks."""


class IcebergTiering:
    """The lake format `iceberg`."""

    format = FORMAT
    capabilities = LakeCapabilities(primary_key=True, empty_commit=True, compaction=True)

    def __init__(self) -> None:
        self.write_result_serde: VersionedSerde[IcebergWriteResult] = VersionedSerde(
            FORMAT, VERSION, IcebergWriteResult.to_bytes, IcebergWriteResult.from_bytes
        )
        self.committable_serde: VersionedSerde[IcebergCommittable] = VersionedSerde(
            FORMAT, VERSION, IcebergCommittable.to_bytes, IcebergCommittable.from_bytes
        )

    def validate_table(self, table: TableInfo) -> None:
        """`LakeTableError` when Iceberg cannot hold such a table."""
        validate(table)

    def create_writer(self, context: WriterContext) -> LakeWriter[IcebergWriteResult]:
        """The writer of one bucket and round."""
        from zufluss.lake.iceberg.writer import create_writer

        return create_writer(context)

    def create_committer(self, context: CommitterContext) -> IcebergCommitter:
        """The committer of one table."""
        from zufluss.lake.iceberg.committer import IcebergCommitter

        return IcebergCommitter(context)

    def create_reader(self, context: CommitterContext) -> LakeReader:
        """A reader of one table; `LakeTableError` when there is no lake table yet."""
        from zufluss.lake.iceberg.reader import IcebergReader

        return IcebergReader(context)

    def create_maintenance(self, context: CommitterContext) -> LakeMaintenance:
        """Housekeeping for one table."""
        from zufluss.lake.iceberg.maintenance import IcebergMaintenance

        return IcebergMaintenance(context)


__all__ = ["FORMAT", "IcebergTiering", "LakeTableError"]

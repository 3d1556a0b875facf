"""Handlers of the APIs that change the catalog.

The handlers turn messages into arguments. `catalog/catalog.py` and `zufluss.model` say what may be
changed, and in which order it is checked. Questions about the catalog are answered by
`cluster/metadata_service.py` and `cluster/cluster_service.py`, which tablet servers share.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from zufluss.cluster.image import TableEntry
from zufluss.config.load import Configuration
from zufluss.coordinator.catalog.catalog import Catalog
from zufluss.coordinator.lake.creation import LakeTableKeeper
from zufluss.errors import InvalidAlterTableError, InvalidDatabaseError
from zufluss.model import types
from zufluss.model.aggregate import AggFunction
from zufluss.model.alter import ConfigOp, NewColumn, PropertyChange, TableChanges, alter_table
from zufluss.model.table import DatabaseDescriptor
from zufluss.pacing import aside
from zufluss.wire import messages as m
from zufluss.wire.tables import path_from_proto, spec_from_proto

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext


class CoordinatorService:
    """Handlers of the APIs that change the catalog."""

    def __init__(
        self,
        conf: Configuration,
        catalog: Catalog,
        check_partitions: Callable[[Iterable[TableEntry]], Awaitable[None]],
        lake_tables: LakeTableKeeper,
    ) -> None:
        self._conf = conf
        self._catalog = catalog
        self._check_partitions = check_partitions
        self._lake_tables = lake_tables

    async def create_database(
        self, request: m.CreateDatabaseRequest, ctx: RequestContext
    ) -> m.CreateDatabaseResponse:
        """CREATE_DATABASE (1001)."""
        source = request.database_json
        descriptor = await aside(len(source), lambda: DatabaseDescriptor.from_json(source))
        await self._catalog.create_database(
            request.database_name,
            descriptor,
            ignore_if_exists=request.ignore_if_exists,
        )
        return m.CreateDatabaseResponse()

    async def alter_database(
        self, request: m.AlterDatabaseRequest, ctx: RequestContext
    ) -> m.AlterDatabaseResponse:
        """ALTER_DATABASE (1060)."""
        setting: dict[str, str] = {}
        resetting: list[str] = []
        for change in request.config_changes:
            if change.op_type == ConfigOp.SET and change.HasField("config_value"):
                setting[change.config_key] = change.config_value
            elif change.op_type == ConfigOp.DELETE:
                resetting.append(change.config_key)
            else:
                raise InvalidDatabaseError(
                    f"operation {change.op_type} on property {change.config_key!r} of a database "
                    f"is not possible; allowed: SET (0) with a value, DELETE (1)"
                )
        await self._catalog.alter_database(
            request.database_name,
            set_properties=setting,
            reset_properties=resetting,
            comment=request.comment if request.HasField("comment") else None,
            ignore_if_not_exists=request.ignore_if_not_exists,
        )
        return m.AlterDatabaseResponse()

    async def drop_database(
        self, request: m.DropDatabaseRequest, ctx: RequestContext
    ) -> m.DropDatabaseResponse:
        """DROP_DATABASE (1002)."""
        await self._catalog.drop_database(
            request.database_name,
            ignore_if_not_exists=request.ignore_if_not_exists,
            cascade=request.cascade,
        )
        return m.DropDatabaseResponse()

    async def create_table(
        self, request: m.CreateTableRequest, ctx: RequestContext
    ) -> m.CreateTableResponse:
        """CREATE_TABLE (1005): answered when the leaders, and the first auto partitions, are up.

        The lake table is there, too, or the answer says why not.
        """
        entry = await self._catalog.create_table(
            path_from_proto(request.table_path),
            request.table_json,
            ignore_if_exists=request.ignore_if_exists,
        )
        await self._check_partitions([entry])
        missing = self._lake_tables.missing(entry.info.table_id)
        return m.CreateTableResponse(lake_table_missing=missing)

    async def alter_table(
        self, request: m.AlterTableRequest, ctx: RequestContext
    ) -> m.AlterTableResponse:
        """ALTER_TABLE (1044): properties, or new columns at the end."""
        size = request.ByteSize()
        changes = await aside(size, lambda: _table_changes(request))
        entry = await self._catalog.alter_table(
            path_from_proto(request.table_path),
            lambda info: alter_table(info.descriptor, changes, self._conf),
            ignore_if_not_exists=request.ignore_if_not_exists,
            request_bytes=size,
        )
        if entry is not None:
            await self._check_partitions([entry])
            missing = self._lake_tables.missing(entry.info.table_id)
            return m.AlterTableResponse(lake_table_missing=missing)
        return m.AlterTableResponse()

    async def drop_table(
        self, request: m.DropTableRequest, ctx: RequestContext
    ) -> m.DropTableResponse:
        """DROP_TABLE (1006): answered when the disk is free."""
        await self._catalog.drop_table(
            path_from_proto(request.table_path),
            ignore_if_not_exists=request.ignore_if_not_exists,
        )
        return m.DropTableResponse()

    async def create_partition(
        self, request: m.CreatePartitionRequest, ctx: RequestContext
    ) -> m.CreatePartitionResponse:
        """CREATE_PARTITION (1036): answered when the leaders are up."""
        await self._catalog.create_partition(
            path_from_proto(request.table_path),
            spec_from_proto(request.partition_spec),
            # The protocol's name for the flag is a slip; it means: ignore if it exists.
            ignore_if_exists=request.ignore_if_not_exists,
        )
        return m.CreatePartitionResponse()

    async def drop_partition(
        self, request: m.DropPartitionRequest, ctx: RequestContext
    ) -> m.DropPartitionResponse:
        """DROP_PARTITION (1037): answered when the disk is free."""
        await self._catalog.drop_partition(
            path_from_proto(request.table_path),
            spec_from_proto(request.partition_spec),
            ignore_if_not_exists=request.ignore_if_not_exists,
        )
        return m.DropPartitionResponse()


def _table_changes(request: m.AlterTableRequest) -> TableChanges:
    return TableChanges.of_columns(
        properties=[
            PropertyChange(
                change.config_key,
                change.config_value if change.HasField("config_value") else None,
                change.op_type,
            )
            for change in request.config_changes
        ],
        add=[_new_column(column) for column in request.add_columns],
        drop=[column.column_name for column in request.drop_columns],
        rename=[column.old_column_name for column in request.rename_columns],
        modify=[column.column_name for column in request.modify_columns],
    )


def _new_column(message: m.PbAddColumn) -> NewColumn:
    return NewColumn(
        name=message.column_name,
        data_type=types.from_json(_json(message)),
        comment=message.comment if message.HasField("comment") else None,
        position=message.column_position_type,
        agg_function=_agg_function(message) if message.HasField("agg_function_type") else None,
    )


def _json(message: m.PbAddColumn) -> Any:
    try:
        return json.loads(message.data_type_json)
    except (ValueError, RecursionError) as problem:
        raise InvalidAlterTableError(
            f"the type of column {message.column_name!r:.80} is not valid JSON: {problem}"
        ) from None


def _agg_function(message: m.PbAddColumn) -> AggFunction:
    parameters = {pair.key: pair.value for pair in message.agg_function_params}
    return AggFunction.named(message.agg_function_type, parameters)

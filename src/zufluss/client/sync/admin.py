"""The administrative calls for synchronous code, derived from `AsyncAdmin`."""

from __future__ import annotations

from zufluss.client.admin import AsyncAdmin
from zufluss.client.sync.facade import Facade, opens, waits
from zufluss.client.sync.lease import KvSnapshotLease


class Admin(Facade[AsyncAdmin]):
    """The administrative calls; `connection.admin` returns this object.

    >>> connection.admin.create_table("fluss.events", "id BIGINT, name STRING")  # doctest: +SKIP
    """

    create_database = waits(AsyncAdmin.create_database)
    drop_database = waits(AsyncAdmin.drop_database)
    list_databases = waits(AsyncAdmin.list_databases)
    database_exists = waits(AsyncAdmin.database_exists)
    database_info = waits(AsyncAdmin.database_info)
    alter_database = waits(AsyncAdmin.alter_database)
    create_table = waits(AsyncAdmin.create_table)
    drop_table = waits(AsyncAdmin.drop_table)
    list_tables = waits(AsyncAdmin.list_tables)
    table_exists = waits(AsyncAdmin.table_exists)
    table_info = waits(AsyncAdmin.table_info)
    table_schema = waits(AsyncAdmin.table_schema)
    alter_table = waits(AsyncAdmin.alter_table)
    create_partition = waits(AsyncAdmin.create_partition)
    drop_partition = waits(AsyncAdmin.drop_partition)
    list_partitions = waits(AsyncAdmin.list_partitions)
    list_offsets = waits(AsyncAdmin.list_offsets)
    list_all_offsets = waits(AsyncAdmin.list_all_offsets)
    lake_snapshot = waits(AsyncAdmin.lake_snapshot)
    no_lake_snapshot = waits(AsyncAdmin.no_lake_snapshot)
    latest_kv_snapshots = waits(AsyncAdmin.latest_kv_snapshots)
    list_kv_snapshots = waits(AsyncAdmin.list_kv_snapshots)
    take_kv_snapshots = waits(AsyncAdmin.take_kv_snapshots)
    kv_snapshot_metadata = waits(AsyncAdmin.kv_snapshot_metadata)
    kv_snapshot_lease = opens(AsyncAdmin.kv_snapshot_lease, KvSnapshotLease)
    kv_snapshot_leases = waits(AsyncAdmin.kv_snapshot_leases)
    kv_snapshot_lease_usage = waits(AsyncAdmin.kv_snapshot_lease_usage)
    drop_kv_snapshot_lease = waits(AsyncAdmin.drop_kv_snapshot_lease)
    list_kv_scans = waits(AsyncAdmin.list_kv_scans)
    end_kv_scans = waits(AsyncAdmin.end_kv_scans)
    list_producers = waits(AsyncAdmin.list_producers)
    drop_producer = waits(AsyncAdmin.drop_producer)
    server_nodes = waits(AsyncAdmin.server_nodes)
    describe_servers = waits(AsyncAdmin.describe_servers)
    examine_servers = waits(AsyncAdmin.examine_servers)
    add_server_tag = waits(AsyncAdmin.add_server_tag)
    remove_server_tag = waits(AsyncAdmin.remove_server_tag)
    plan_rebalance = waits(AsyncAdmin.plan_rebalance)
    rebalance = waits(AsyncAdmin.rebalance)
    rebalance_progress = waits(AsyncAdmin.rebalance_progress)
    cancel_rebalance = waits(AsyncAdmin.cancel_rebalance)
    locations = waits(AsyncAdmin.locations)
    alter_location = waits(AsyncAdmin.alter_location)
    retire_lost_location = waits(AsyncAdmin.retire_lost_location)
    probe_locations = waits(AsyncAdmin.probe_locations)
    location_files = waits(AsyncAdmin.location_files)
    sweep_locations = waits(AsyncAdmin.sweep_locations)
    verify_location = waits(AsyncAdmin.verify_location)
    cluster_configs = waits(AsyncAdmin.cluster_configs)
    alter_cluster_configs = waits(AsyncAdmin.alter_cluster_configs)

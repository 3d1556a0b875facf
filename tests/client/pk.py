"""Helpers for tests of primary-key tables: a table per test on the worker's server."""

from __future__ import annotations

import itertools
import secrets
from typing import Any

from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table

_NUMBERS = itertools.count()
_RUN = secrets.token_hex(3)


def create_table(conn: Connection, schema: Any, **options: Any) -> Table:
    """A new table that no other test knows."""
    name = f"fluss.pk_{_RUN}_{next(_NUMBERS)}"
    conn.admin.create_table(name, schema, **options)
    return conn.table(name)


def upsert(table: Table, *inputs: Any, columns: list[str] | None = None) -> None:
    """Write every input with one writer."""
    with table.upsert(columns) as writer:
        for data in inputs:
            writer.write(data)


def delete(table: Table, *inputs: Any) -> None:
    """Delete every input with one writer."""
    with table.upsert() as writer:
        for data in inputs:
            writer.delete(data)

"""Brings a catalog of an older version into the layout of today (`records.py`).

| format | what is different |
|---|---|
| 1 | the states of all buckets of a table or partition are one value, at `…/buckets` |

The steps are transactions of one or more tables each, and the new number of the format is the last
one. A start that is interrupted goes on at the next one; an older zufluss, which could not read a
part of the catalog, refuses the whole by the number of the format once everything is done.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import structlog

from zufluss.coordinator import records
from zufluss.coordinator.ledger import Ledger
from zufluss.meta.api import PORTION_BYTES, Entry, Op, Put, op_bytes

log = structlog.get_logger(__name__)

_BUCKETS: Final = re.compile(r"/tables/\d+(/partitions/\d+)?/buckets")


async def upgrade(ledger: Ledger, entries: Sequence[Entry]) -> bool:
    """Upgrade a catalog if it is of an older version; returns whether it was."""
    if ledger.form == records.FORMAT:
        return False
    pending: list[Op] = []
    size = holders = 0
    for entry in entries:
        if _BUCKETS.fullmatch(entry.path):
            ops = records.upgrade_buckets(entry.path, entry.value)
            size += sum(map(op_bytes, ops))
            if size > PORTION_BYTES:
                await ledger.commit(pending)
                pending, size = [], sum(map(op_bytes, ops))
            pending += ops
            holders += 1
    await ledger.commit(pending)
    await ledger.commit([Put(records.FORMAT_PATH, records.number(records.FORMAT))])
    log.info("catalog_upgraded", before=ledger.form, now=records.FORMAT, tables=holders)
    return True

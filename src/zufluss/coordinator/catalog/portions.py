"""Creations and drops that are too large for one transaction of the metadata store.

| change | first transaction | then | last transaction |
|---|---|---|---|
| creation of a large table or partition | its id, and the note of a drop | what lies below its value | its value; the note goes |
| drop of a large table or partition | its value goes, and the note comes | the cleaner deletes what lay below, then the note | |
| drop of a database with many tables | some tables | more tables | the last tables and the database |

So a table or partition exists as a whole or not at all, wherever the process dies: the cleaner
(`remote/cleaner.py`) deletes what a note says is incomplete.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

from collections.abc import Sequence

from zufluss.cluster.image import TableEntry
from zufluss.coordinator import records
from zufluss.coordinator.ledger import Ledger
from zufluss.meta.api import PORTION_BYTES, Delete, Op, fits_a_transaction, op_bytes


async def create(
    ledger: Ledger, take_id: Sequence[Op], home: Sequence[Op], creation: records.CatalogChange
) -> None:
    """Commit the creation of a large table or partition; a failure may leave its note."""
    await ledger.commit([*take_id, creation.note])
    await ledger.commit_in_portions(creation.rest)
    await ledger.commit([*home, *creation.decisive, Delete(creation.note.path)])


async def drop(ledger: Ledger, change: records.CatalogChange) -> None:
    """Commit the drop of a table or partition; the cleaner deletes the rest of a large one."""
    whole = fits_a_transaction(change.all)
    await ledger.commit(change.all if whole else change.decisive)


def drops(
    changes: Sequence[tuple[TableEntry, records.CatalogChange]],
) -> list[tuple[list[Op], list[TableEntry]]]:
    """The operations that drop tables, in transactions with the tables that each one drops."""
    everything = [op for _, change in changes for op in change.all]
    if fits_a_transaction(everything):
        return [(everything, [table for table, _ in changes])]
    transactions: list[tuple[list[Op], list[TableEntry]]] = []
    room = 0
    for table, change in changes:
        size = sum(map(op_bytes, change.decisive))
        if size > room or not transactions:
            transactions.append(([], []))
            room = PORTION_BYTES
        transactions[-1][0].extend(change.decisive)
        transactions[-1][1].append(table)
        room -= size
    return transactions

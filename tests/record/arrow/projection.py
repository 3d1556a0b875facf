"""The projection of one batch in plain steps: the oracle of `Projector.project_all`."""

from __future__ import annotations

from zufluss.record.arrow.project import Projector
from zufluss.record.header import BatchHeader, Buffer


def project(
    projector: Projector, view: Buffer, pos: int, header: BatchHeader, columns: tuple[int, ...]
) -> list[Buffer]:
    """Project the batch at `pos`; returns new bytes, then views into `view`."""
    data = memoryview(view)
    if header.record_count == 0:
        return [data[pos : pos + header.size]]
    prefix, pieces = projector.plan(view, pos, header, columns)
    result: list[Buffer] = [prefix]
    for piece in pieces:
        if isinstance(piece, tuple):
            begin = pos + piece[0]
            result.append(data[begin : begin + piece[1]])
        else:
            result.append(piece)
    return result

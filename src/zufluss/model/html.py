"""Small HTML tables for notebooks: values are escaped, nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

CELL_CHARACTERS_MAX: Final = 200
"""Longer values are cut."""
ROWS_MAX: Final = 200
"""Further rows are counted, not shown."""

_CELL: Final = ' style="text-align:left"'


def html_table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None
) -> str:
    """A table with a title; columns in which no row has a value are left out."""
    shown = [[_text(value) for value in row] for row in rows]
    kept = [i for i in range(len(headers)) if any(row[i] for row in shown)]
    head = "".join(f"<th{_CELL}>{escape(headers[i])}</th>" for i in kept)
    body = "".join(
        "<tr>" + "".join(f"<td{_CELL}>{escape(row[i])}</td>" for i in kept) + "</tr>"
        for row in shown[:ROWS_MAX]
    )
    more = len(shown) - ROWS_MAX
    if more > 0:
        body += f'<tr><td{_CELL} colspan="{len(kept)}">… and {more} more</td></tr>'
    caption = "" if title is None else f"<div><b>{escape(title)}</b></div>"
    return f"{caption}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= CELL_CHARACTERS_MAX else text[: CELL_CHARACTERS_MAX - 1] + "…"

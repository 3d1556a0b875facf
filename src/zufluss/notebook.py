"""Arrow tables as HTML in notebooks: `%load_ext zufluss.notebook`.

Tables, schemas, scans and single rows of zufluss show themselves. A lookup of several keys and
`to_arrow()` return a `pyarrow.Table`, which shows its buffers as text and cannot have a subclass,
so its display is a matter of the notebook. Whoever loads this extension changes it for every Arrow
table of the notebook; nothing else does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zufluss.model.html import ROWS_MAX, html_table

if TYPE_CHECKING:
    import pyarrow as pa


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext zufluss.notebook`."""
    shell.display_formatter.formatters["text/html"].for_type_by_name(
        "pyarrow.lib", "Table", arrow_html
    )


def unload_ipython_extension(shell: Any) -> None:
    """Called by `%unload_ext zufluss.notebook`."""
    shell.display_formatter.formatters["text/html"].pop("pyarrow.lib.Table", None)


def arrow_html(table: pa.Table) -> str:
    """The first rows of a table; large ones are never converted as a whole."""
    columns = [
        ["NULL" if value is None else value for value in column.to_pylist()]
        for column in table.slice(0, ROWS_MAX).columns
    ]
    count = f"{table.num_rows} row{'' if table.num_rows == 1 else 's'}"
    shown = f", the first {ROWS_MAX} are shown" if table.num_rows > ROWS_MAX else ""
    return html_table(table.column_names, zip(*columns, strict=True), f"{count}{shown}")

"""Runs the code cells of a notebook in order, as Jupyter would, and notes what they give.

    python -m tests.examples.notebook examples/tour.ipynb

writes the outputs into the notebook. Jupyter itself is not needed.
"""

from __future__ import annotations

import ast
import io
import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

INDENT = 1
"""As Jupyter writes notebooks."""


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The same notebook with the outputs of a run."""
    names: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            outputs = list(outputs_of("".join(cell["source"]), names, number))
            cell = {**cell, "execution_count": number, "outputs": outputs}
        cells.append(cell)
    return {**notebook, "cells": cells}


def outputs_of(source: str, names: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """What a cell prints, and the value of its last line."""
    code = ast.parse(source)
    last = code.body.pop() if isinstance(code.body[-1], ast.Expr) else None
    value = None
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, f"cell {number}", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    if printed.getvalue():
        yield {"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())}
    if value is not None:
        forms = {"text/plain": lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            forms["text/html"] = lines(value._repr_html_())
        yield {
            "data": forms,
            "execution_count": number,
            "metadata": {},
            "output_type": "execute_result",
        }


def lines(text: str) -> list[str]:
    """Text as notebooks keep it."""
    return text.splitlines(keepends=True)


def text_of(notebook: dict[str, Any]) -> str:
    """The file."""
    return json.dumps(notebook, indent=INDENT, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(text_of(executed(json.loads(path.read_text()))))

"""A catalog whose answers wait, after their effect, while the file `hang` lies in its warehouse."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from zufluss.lake.iceberg.hadoop import HadoopCatalog


class HangingCatalog(HadoopCatalog):
    """A directory of lake tables; the process that creates tables imports it by its name."""

    def create_table(self, *args: Any, **options: Any) -> Any:
        table = super().create_table(*args, **options)
        hang = Path(self.properties["warehouse"].removeprefix("file://")) / "hang"
        while hang.exists():
            time.sleep(0.02)
        return table

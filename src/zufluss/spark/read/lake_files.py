"""The lake's part of a union read: parquet files through Spark's own reader, without Python.

Files without deletes are read plainly. Files with deletes are anti-joined with their delete files
on the number of the file and the position of the row: the join key is one integer, so a million
deletes take some megabytes and not a million paths.

A path has two spellings in Spark. The reader takes the path itself, with pattern characters
escaped. `_metadata.file_path` is a URI in which Java escaped the characters it considers illegal.
We take the URIs from Spark (`inputFiles`) rather than know the rules; only the number of slashes
behind `file:` varies. A row whose file has no number fails the read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import pyarrow as pa

from zufluss.lake.base import LakeError, LakeFile
from zufluss.spark.types import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

POSITION_BITS: Final = 40
"""The bits of a row's position in the join key; the file's number stands above them."""

_PATTERN = re.compile(r"([\[\]{}*?\\])")
_KEY: Final = "__zufluss_row"
_NUMBER: Final = "__zufluss_file"
_URI: Final = "__zufluss_uri"


def read_files(spark: SparkSession, files: Sequence[LakeFile], schema: StructType) -> DataFrame:
    """The live rows of some files, at least one; columns that a file lacks are null."""
    plain = [file for file in files if not file.deletes]
    changed = [file for file in files if file.deletes]
    if not changed:
        return _read(spark, [file.path for file in plain], schema)
    live = _without_deletes(spark, changed, schema)
    if not plain:
        return live
    return _read(spark, [file.path for file in plain], schema).unionAll(live)


def _read(spark: SparkSession, paths: Sequence[str], schema: StructType) -> DataFrame:
    return spark.read.schema(schema).parquet(*(spark_path(path) for path in paths))


def spark_path(path: str) -> str:
    """A path of the lake as Spark's readers take it.

    >>> spark_path("s3://lake/t/a[1].parquet")
    's3a://lake/t/a\\\\[1\\\\].parquet'
    """
    if path.startswith("s3://"):
        path = "s3a://" + path.removeprefix("s3://")
    return _PATTERN.sub(r"\\\1", path)


def same_path(path: str) -> str:
    """The normal form of all spellings of one path.

    >>> {same_path(p) for p in ("/t/a b", "file:/t/a b", "file:///t/a b")}
    {'file:/t/a b'}
    """
    if path.startswith("/"):
        return f"file:{path}"
    path = re.sub(r"^file:/+", "file:/", path)
    return re.sub(r"^s3[an]?://", "s3a://", path)


def _without_deletes(
    spark: SparkSession, files: Sequence[LakeFile], schema: StructType
) -> DataFrame:
    from pyspark.sql import functions as F

    rows = _read(spark, [file.path for file in files], schema)
    numbers = {same_path(file.path): at for at, file in enumerate(files)}
    uris = _numbered(spark, {uri: numbers[name] for uri, name in _uris(rows, numbers).items()})
    columns = [F.col(quoted(name)) for name in schema.names]
    about = [F.col("_metadata.file_path").alias(_URI), F.col("_metadata.row_index").alias(_KEY)]
    placed = rows.select(*columns, *about).join(F.broadcast(uris), _URI, "left")
    unknown = F.concat(F.lit("deletes cannot be applied to file "), F.col(_URI))
    number = F.coalesce(F.col(_NUMBER), F.raise_error(unknown).cast("bigint"))
    keyed = placed.select(*columns, _row_key(number, F.col(_KEY)).alias(_KEY))
    return keyed.join(_deleted(spark, files), _KEY, "left_anti").select(*columns)


def _uris(rows: DataFrame, numbers: dict[str, int]) -> dict[str, str]:
    """The normal form of each file, by the URI that Spark has for it."""
    uris = {spelled for uri in rows.inputFiles() for spelled in (uri, same_path(uri))}
    names = {uri: same_path(unquote(uri)) for uri in uris}
    strange = set(numbers) ^ set(names.values())
    if strange:
        raise LakeError(
            f"file {min(strange)} has deletes, and Spark does not know it by this name; please "
            "report the location of the warehouse"
        )
    return names


def _deleted(spark: SparkSession, files: Sequence[LakeFile]) -> DataFrame:
    """The join keys of deleted rows. Delete files may spell paths as the lake once did."""
    from pyspark.sql import functions as F

    paths = list(dict.fromkeys(path for file in files for path in file.deletes))
    numbers = {file.path: at for at, file in enumerate(files)}
    numbers |= {same_path(file.path): at for at, file in enumerate(files)}
    spelled = _numbered(spark, numbers)
    deletes = spark.read.schema("file_path STRING, pos BIGINT").parquet(*map(spark_path, paths))
    named = deletes.join(F.broadcast(spelled), deletes.file_path == spelled[_URI])
    return named.select(_row_key(F.col(_NUMBER), F.col("pos")).alias(_KEY))


def _row_key(number: Column, position: Column) -> Column:
    from pyspark.sql import functions as F

    return F.shiftleft(number, POSITION_BITS).bitwiseOR(position)


def _numbered(spark: SparkSession, numbers: dict[str, int]) -> DataFrame:
    columns = [pa.array(list(numbers)), pa.array(list(numbers.values()), pa.int64())]
    return spark.createDataFrame(pa.table(columns, names=[_URI, _NUMBER]))

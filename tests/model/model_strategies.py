"""Hypothesis strategies for types, columns and schemas."""

from __future__ import annotations

from hypothesis import strategies as st

from zufluss.model import types as t
from zufluss.model.schema import Column, Schema

NAMES = st.one_of(
    st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True),
    st.text(min_size=1, max_size=6).filter(lambda s: s.isprintable()),
)
NULLABLE = st.booleans()
COMMENTS = st.none() | st.text(max_size=10).filter(lambda s: s.isprintable() or not s)


def _decimal(draw: st.DrawFn) -> t.DataType:
    precision = draw(st.integers(1, 38))
    scale = draw(st.integers(0, precision))
    return t.DecimalType(precision=precision, scale=scale, nullable=draw(NULLABLE))


SCALARS = st.one_of(
    st.builds(
        lambda base, nullable: base.as_nullable(nullable),
        st.sampled_from(
            [
                t.BOOLEAN,
                t.TINYINT,
                t.SMALLINT,
                t.INTEGER,
                t.BIGINT,
                t.FLOAT,
                t.DOUBLE,
                t.STRING,
                t.BYTES,
                t.DATE,
            ]
        ),
        NULLABLE,
    ),
    st.builds(
        t.LengthType,
        root=st.sampled_from([t.Root.CHAR, t.Root.BINARY]),
        length=st.integers(1, 2**31 - 1),
        nullable=NULLABLE,
    ),
    st.builds(
        t.TemporalType,
        root=st.sampled_from([t.Root.TIME, t.Root.TIMESTAMP, t.Root.TIMESTAMP_LTZ]),
        precision=st.integers(0, 9),
        nullable=NULLABLE,
    ),
    st.composite(_decimal)(),
)


def _nested(inner: st.SearchStrategy[t.DataType]) -> st.SearchStrategy[t.DataType]:
    fields = st.lists(
        st.builds(t.RowField, NAMES, inner, COMMENTS), min_size=1, max_size=3, unique_by=_name
    )
    return st.one_of(
        st.builds(t.ArrayType, element=inner, nullable=NULLABLE),
        st.builds(
            lambda key, value, nullable: t.MapType(
                key=key.as_nullable(False), value=value, nullable=nullable
            ),
            inner,
            inner,
            NULLABLE,
        ),
        st.builds(t.RowType, fields=fields.map(tuple), nullable=NULLABLE),
    )


def _name(field: t.RowField | Column) -> str:
    return field.name


TYPES = st.recursive(SCALARS, _nested, max_leaves=6)
COLUMNS = st.lists(
    st.builds(Column, NAMES, TYPES, COMMENTS), min_size=1, max_size=6, unique_by=_name
)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """A schema, with a primary key of scalar columns or without."""
    columns = draw(COLUMNS)
    scalars = [c.name for c in columns if c.data_type.root not in t.NESTED]
    key = draw(st.lists(st.sampled_from(scalars), unique=True, max_size=2)) if scalars else []
    return Schema(tuple(columns), tuple(key))

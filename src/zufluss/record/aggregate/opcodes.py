"""Numbers that the fold kernels and the Python code around them share.

An operation says what a put does with the values of one column. `registry.py` chooses it by the
column's aggregation function and the mode of the put; `column_fold.py` carries it out.

| column of `ops` | content |
|---|---|
| OP | the operation |
| BY | MAX_BY, MIN_BY: the column whose values are compared |
| WRAP | 1 = an integer beyond its type loses its upper bits, 0 = it is a fault |
"""

from __future__ import annotations

KEEP, KEY, LAST, LAST_SET, FIRST_SET, MAX, MIN, MAX_BY, MIN_BY = range(9)
SUM, SUBTRACT, PRODUCT, DIVIDE, COUNT, UNCOUNT, ASSIGN, OUTSIDE = range(9, 17)
AS_CAME = (KEY, LAST, LAST_SET, FIRST_SET, MAX, MIN, MAX_BY, MIN_BY, SUM, PRODUCT)
"""Operations whose state after the first value of a key is that value, NULL or not."""

OP, BY, WRAP = range(3)
OPS_LINE = 3
"""Numbers in a line of `ops`."""

INSERT, UPDATE_BEFORE, UPDATE_AFTER, DELETE = 1, 2, 3, 4
"""Change types, as in the log format."""

NO_ROW, UNCHANGED = -1, -2
"""In place of the number of a row: there is none; the key's row is the stored one."""

OVERFLOWS, BY_ZERO, INEXACT, NO_STATE, NULL_STATE = range(1, 6)
FAULTS = {
    OVERFLOWS: "the value is beyond {0}",
    BY_ZERO: "a product cannot be divided by 0 to take that back",
    INEXACT: "the product is not a multiple of the value to be taken back",
    NO_STATE: "there is no product that a value could be taken back from",
    NULL_STATE: "it is NOT NULL, and nothing is left of it",
}
"""Messages of the faults; {0} is the type of the column."""

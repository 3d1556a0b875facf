"""A lookup that fails for a reason nobody thought of is answered: a client never waits for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.kv import lookup_request
from tests.tablet.keyed import keyed
from tests.tablet.support import TABLE, Connection
from zufluss.errors import ErrorCode
from zufluss.kv.table import KvTable


async def test_a_row_that_cannot_be_given_to_clients_is_an_error_and_not_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a value has 5 bytes, more than the type holds")

    async with keyed(tmp_path) as tablet:
        await tablet.put((1, "a"))
        monkeypatch.setattr(KvTable, "for_clients", fail)
        request = lookup_request(TABLE, [tablet.codec.key((1,))])
        request.buckets_req.add(bucket_id=0)
        connection = Connection()
        sent = connection.send(tablet.server.lookup.handle, request)
        assert await connection.answer(sent) is ErrorCode.UNKNOWN_SERVER_ERROR

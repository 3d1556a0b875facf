"""Permissions to overwrite rows of tables with a merge engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.end_to_end.guarded import guarded_properties, listener_ports, logged_in
from tests.end_to_end.kv import PUT_VERSION, Codec, create_by_hand, kv_batch, put_request, values_of
from tests.end_to_end.raw import RawClient
from tests.end_to_end.test_kv_bad_input import SMALL
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.model.merge import MergeMode
from zufluss.testing.server import DevServer
from zufluss.wire.api import ApiKey

CODEC = Codec(SMALL)
FIRST_ROW = {"table.merge-engine": "first_row"}
UNSUPPORTED = ErrorCode.UNSUPPORTED_VERSION


def overwrite(raw: RawClient, table_id: int, number: int, mode: int = MergeMode.OVERWRITE) -> int:
    """Put a row of key 1 in a mode; the error code of the bucket, or of the request."""
    request = put_request(table_id, kv_batch([CODEC.put((1, "x", number))]))
    request.agg_mode = mode
    try:
        (entry,) = raw.call(ApiKey.PUT_KV, request, PUT_VERSION).buckets_resp
    except ZuflussError as e:
        return int(e.code)
    return int(entry.error_code)


def overwrite_deletes(raw: RawClient, table_id: int) -> int:
    """Delete key 1 by an overwrite; the error code of the bucket."""
    request = put_request(table_id, kv_batch([CODEC.delete((1,))]))
    request.agg_mode = MergeMode.OVERWRITE
    (entry,) = raw.call(ApiKey.PUT_KV, request, PUT_VERSION).buckets_resp
    return int(entry.error_code)


def state(raw: RawClient, table_id: int) -> int | None:
    row = CODEC.value(values_of(raw, table_id, [CODEC.key((1,))])[0])
    return None if row is None else row[2]


def test_only_named_users_overwrite_where_users_have_names(
    new_server: Callable[..., DevServer],
) -> None:
    ports = listener_ports()
    users = {"super.users": "User:admin", "zufluss.overwrite.users": "User:loader; User:somebody"}
    new_server(guarded_properties(ports, "admin", "loader", "bob") | users)
    with (
        RawClient(ports["OPEN"]) as stranger,
        logged_in(ports["SECURE"], "admin") as admin,
        logged_in(ports["SECURE"], "loader") as loader,
        logged_in(ports["SECURE"], "bob") as bob,
    ):
        first = create_by_hand(admin, "first", SMALL, FIRST_ROW)
        plainly = create_by_hand(admin, "plainly", SMALL)
        assert overwrite(bob, first, 1, MergeMode.AGGREGATE) == 0
        for nobody in (bob, stranger):
            assert overwrite(nobody, first, 9) == ErrorCode.AUTHORIZATION_EXCEPTION
            assert state(nobody, first) == 1, "nothing was written"
            assert overwrite(nobody, plainly, 9) == 0, "there is no engine to put it past"
            assert overwrite_deletes(nobody, plainly) == 0
        for number, somebody in enumerate((loader, admin), 2):
            assert overwrite(somebody, first, number) == 0
            assert state(bob, first) == number


def test_everybody_overwrites_where_no_users_are_named(
    new_server: Callable[..., DevServer],
) -> None:
    """Fluss's sinks undo by overwrites, with and without a login; Fluss has no such permission."""
    ports = listener_ports()
    new_server(guarded_properties(ports, "admin", "bob") | {"super.users": "User:admin"})
    with RawClient(ports["OPEN"]) as stranger, logged_in(ports["SECURE"], "bob") as bob:
        first = create_by_hand(bob, "first", SMALL, FIRST_ROW)
        for number, somebody in enumerate((bob, stranger), 1):
            assert overwrite(somebody, first, number) == 0
            assert state(bob, first) == number
            assert overwrite_deletes(somebody, first) == 0


def test_an_empty_list_leaves_overwrites_to_super_users(
    new_server: Callable[..., DevServer],
) -> None:
    ports = listener_ports()
    users = {"super.users": "User:admin", "zufluss.overwrite.users": ""}
    new_server(guarded_properties(ports, "admin", "bob") | users)
    with (
        logged_in(ports["SECURE"], "admin") as admin,
        logged_in(ports["SECURE"], "bob") as bob,
    ):
        first = create_by_hand(admin, "first", SMALL, FIRST_ROW)
        plainly = create_by_hand(admin, "undeleted", SMALL, {"table.delete.behavior": "DISABLE"})
        for table_id in (first, plainly):
            assert overwrite(bob, table_id, 1) == ErrorCode.AUTHORIZATION_EXCEPTION
            assert overwrite_deletes(bob, table_id) == ErrorCode.AUTHORIZATION_EXCEPTION
            assert overwrite(admin, table_id, 1) == 0
            assert overwrite_deletes(admin, table_id) == 0


@pytest.mark.parametrize("behavior", ["IGNORE", "DISABLE"])
@pytest.mark.parametrize("engine", [None, "first_row"])
def test_an_overwrite_deletes_whatever_the_table_says_of_deletes(
    raw: RawClient, engine: str | None, behavior: str
) -> None:
    """As on Fluss: sinks take new rows back by overwrites, whatever the table is."""
    options = {} if engine is None else {"table.merge-engine": engine}
    options["table.delete.behavior"] = behavior
    table_id = create_by_hand(raw, f"undone_{engine}_{behavior}", SMALL, options)
    assert overwrite(raw, table_id, 1, MergeMode.AGGREGATE) == 0
    assert overwrite_deletes(raw, table_id) == 0
    assert state(raw, table_id) is None


@pytest.mark.parametrize("mode", [3, 99, 101, -1, 2**31 - 1])
def test_an_unknown_mode_is_refused_and_without_names_everybody_overwrites(
    dev_server: DevServer, raw: RawClient, mode: int
) -> None:
    table_id = create_by_hand(raw, f"modes_{mode % 2**32}", SMALL, FIRST_ROW)
    assert overwrite(raw, table_id, 1, mode) == UNSUPPORTED
    assert state(raw, table_id) is None
    assert overwrite(raw, table_id, 1) == 0
    assert overwrite(raw, table_id, 2) == 0
    assert state(raw, table_id) == 2


@pytest.mark.parametrize("mode", [MergeMode.MERGE_STATE, MergeMode.RETRACT])
def test_states_and_retracts_are_for_aggregation_tables(raw: RawClient, mode: MergeMode) -> None:
    table_id = create_by_hand(raw, f"not_aggregated_{mode}", SMALL)
    assert overwrite(raw, table_id, 1, mode) == UNSUPPORTED
    assert state(raw, table_id) is None

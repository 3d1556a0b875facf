"""Handlers by name: only methods that handle requests are exposed, each API once."""

from __future__ import annotations

from typing import Any

import pytest

from zufluss.net.services import Services
from zufluss.wire.api import ApiKey


class Handlers:
    """A service with one handler and a method of its own."""

    async def create_table(self, request: Any, context: Any) -> None:
        """CREATE_TABLE."""

    async def settle(self) -> None:
        """Named like no API."""


class Internal:
    """Not a service, although a method has the name of an API."""

    async def create_table(self, path: str, table_json: bytes) -> None:
        """Creates a table, past all checks of the handler."""


def test_a_method_named_like_an_api_answers_it() -> None:
    services = Services()
    services.attach(Handlers())
    assert list(services.handlers) == [ApiKey.CREATE_TABLE]


def test_an_object_that_is_no_service_is_not_attached_by_accident() -> None:
    services = Services()
    with pytest.raises(TypeError, match="is not its handler"):
        services.attach(Internal())
    with pytest.raises(TypeError, match="no handler"):
        services.attach(object())
    assert not services.handlers


def test_an_api_has_one_handler() -> None:
    services = Services()
    services.attach(Handlers())
    with pytest.raises(ValueError, match="CREATE_TABLE has a handler already"):
        services.attach(Handlers())
    with pytest.raises(ValueError, match="CREATE_TABLE has a handler already"):
        services.register_raw(ApiKey.CREATE_TABLE, lambda *_: None)

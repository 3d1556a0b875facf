"""Listeners and SASL: which clients are served, and which addresses they get.

One server with three listeners: an open one, one that asks for a password, and one that is
advertised under another name.
"""

from __future__ import annotations

from collections.abc import Iterator

import fluss
import pytest

from tests.conftest import SERVERS
from tests.end_to_end.guarded import guarded_properties, listener_ports
from tests.end_to_end.helpers import append, connect, connected, create, ids, in_time, read_arrow
from tests.end_to_end.raw import RawClient, versions_request
from tests.servers import WarmServer
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, ApiKey
from zufluss.wire.sasl import build_plain

AUTHENTICATION = 46


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    return listener_ports("OPEN", "SECURE", "NAMED")


@pytest.fixture(scope="module")
def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ports: dict[str, int]
) -> Iterator[DevServer]:
    """The server with the three listeners."""
    named = {"advertised.listeners": f"NAMED://localhost:{ports['NAMED']}"}
    properties = guarded_properties(ports, "admin", "alice") | named
    server = WarmServer(tmp_path_factory.mktemp("guarded"), properties)
    request.config.stash.setdefault(SERVERS, []).append(server)
    with server:
        yield server


def sasl(user: str, password: str) -> dict[str, str]:
    return {
        "security_protocol": "sasl",
        "security_sasl_mechanism": "PLAIN",
        "security_sasl_username": user,
        "security_sasl_password": password,
    }


@pytest.fixture
def secure(guarded: DevServer, ports: dict[str, int]) -> Iterator[RawClient]:
    """A bare connection to the listener that asks for a password."""
    with RawClient(ports["SECURE"]) as client:
        yield client


def authenticate(client: RawClient, token: bytes, mechanism: str = "PLAIN") -> int:
    request = m.AuthenticateRequest(protocol=mechanism, token=token)
    return client.error_code(ApiKey.AUTHENTICATE, request)


@pytest.mark.parametrize("user", ["admin", "alice"])
async def test_the_right_password_opens_everything(
    guarded: DevServer, ports: dict[str, int], user: str
) -> None:
    address = f"127.0.0.1:{ports['SECURE']}"
    async with connected(address, **sasl(user, f"{user}-secret")) as conn:
        path = fluss.TablePath("fluss", f"of_{user}")
        table = await create(conn, path)
        await append(table, ids(0, 10))
        assert (await read_arrow(table)).num_rows == 10
        assert path.table_name in await conn.get_admin().list_tables("fluss")


@pytest.mark.parametrize(
    ("user", "password"),
    [
        ("admin", "Pa55word"),
        ("admin", "alice-secret"),
        ("nobody", "admin-secret"),
        ("ADMIN", "admin-secret"),
    ],
)
async def test_a_wrong_password_or_user_is_refused(
    guarded: DevServer, ports: dict[str, int], user: str, password: str
) -> None:
    with pytest.raises(fluss.FlussError) as caught:
        await connect(f"127.0.0.1:{ports['SECURE']}", **sasl(user, password))
    assert password not in str(caught.value)


async def test_a_client_without_a_password_is_refused_on_the_secure_listener(
    guarded: DevServer, ports: dict[str, int]
) -> None:
    with pytest.raises(fluss.FlussError):
        await connect(f"127.0.0.1:{ports['SECURE']}")


async def test_a_client_with_a_password_is_refused_on_the_open_listener(
    guarded: DevServer, ports: dict[str, int]
) -> None:
    with pytest.raises(fluss.FlussError):
        await connect(f"127.0.0.1:{ports['OPEN']}", **sasl("admin", "admin-secret"))


@pytest.mark.parametrize(
    ("listener", "host", "login"),
    [
        ("OPEN", "127.0.0.1", {}),
        ("SECURE", "127.0.0.1", sasl("admin", "admin-secret")),
        ("NAMED", "localhost", {}),
    ],
)
async def test_metadata_names_the_listener_the_client_came_through(
    guarded: DevServer, ports: dict[str, int], listener: str, host: str, login: dict[str, str]
) -> None:
    async with connected(f"127.0.0.1:{ports[listener]}", **login) as conn:
        nodes = await in_time(conn.get_admin().get_server_nodes())
    assert {(n.host, n.port) for n in nodes} == {(host, ports[listener])}


async def test_all_listeners_show_the_same_tables(
    guarded: DevServer, ports: dict[str, int]
) -> None:
    async with (
        connected(f"127.0.0.1:{ports['OPEN']}") as plain,
        connected(f"127.0.0.1:{ports['SECURE']}", **sasl("alice", "alice-secret")) as secret,
    ):
        path = fluss.TablePath("fluss", "shared")
        await append(await create(plain, path), ids(0, 3))
        assert (await read_arrow(await in_time(secret.get_table(path)))).num_rows == 3


@pytest.mark.parametrize(
    "key", [k for k in ApiKey if k not in (ApiKey.API_VERSIONS, ApiKey.AUTHENTICATE)]
)
def test_nothing_is_answered_before_authentication(secure: RawClient, key: ApiKey) -> None:
    for body in (b"", b"\xff\xff\xff", APIS[key].request().SerializePartialToString()):
        assert secure.error_code(key, body) == AUTHENTICATION
    assert secure.alive(), "API_VERSIONS is answered to everybody"


def test_an_unknown_key_before_authentication_is_refused_too(secure: RawClient) -> None:
    assert secure.error_code(9999, b"") == AUTHENTICATION


def test_authentication_may_be_tried_again_on_the_same_connection(secure: RawClient) -> None:
    assert authenticate(secure, build_plain("admin", "wrong")) == AUTHENTICATION
    listing = m.ListDatabasesRequest()
    assert secure.error_code(ApiKey.LIST_DATABASES, listing) == AUTHENTICATION
    assert authenticate(secure, build_plain("admin", "admin-secret")) == 0
    assert secure.error_code(ApiKey.LIST_DATABASES, listing) == 0


def test_a_failed_second_login_takes_the_first_one_back(secure: RawClient) -> None:
    assert authenticate(secure, build_plain("admin", "admin-secret")) == 0
    assert authenticate(secure, build_plain("admin", "wrong")) == AUTHENTICATION
    assert secure.error_code(ApiKey.LIST_DATABASES, m.ListDatabasesRequest()) == AUTHENTICATION


@pytest.mark.parametrize(
    "token",
    [
        b"",
        b"\x00",
        b"admin",
        b"\x00admin",
        b"\x00admin\x00",
        b"\x00\x00admin-secret",
        b"\x00admin\x00admin-secret\x00",
        b"bob\x00admin\x00admin-secret",
        b"\x00\xff\xfe\x00admin-secret",
        b"\x00" * 10_000,
    ],
    ids=repr,
)
def test_a_malformed_token_is_refused(secure: RawClient, token: bytes) -> None:
    assert authenticate(secure, token) == AUTHENTICATION
    assert secure.alive()


def test_an_unknown_mechanism_is_refused(secure: RawClient) -> None:
    token = build_plain("admin", "admin-secret")
    assert authenticate(secure, token, "SCRAM-SHA-256") == AUTHENTICATION


def test_authenticating_on_an_open_listener_is_refused_and_it_stays_usable(
    guarded: DevServer, ports: dict[str, int]
) -> None:
    with RawClient(ports["OPEN"]) as client:
        assert authenticate(client, build_plain("admin", "admin-secret")) == AUTHENTICATION
        assert client.error_code(ApiKey.LIST_DATABASES, m.ListDatabasesRequest()) == 0


def test_requests_pipelined_behind_a_login_are_served(secure: RawClient) -> None:
    token = build_plain("alice", "alice-secret")
    secure.begin(ApiKey.API_VERSIONS, versions_request())
    login = secure.begin(ApiKey.AUTHENTICATE, m.AuthenticateRequest(protocol="PLAIN", token=token))
    listing = secure.begin(ApiKey.LIST_DATABASES, m.ListDatabasesRequest())
    assert secure.answer(login).error is None
    assert secure.answer(listing).error is None


def test_no_password_is_printed_by_the_server(guarded: DevServer, secure: RawClient) -> None:
    authenticate(secure, build_plain("admin", "not-the-secret"))
    authenticate(secure, build_plain("admin", "admin-secret"))
    assert "secret" not in guarded.log()

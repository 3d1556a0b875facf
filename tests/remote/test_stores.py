"""The configuration reaches the constructors of stores; secrets stay hidden.

Google Cloud Storage and Azure cannot be reached from a test; their arguments are compared.
"""

import asyncio
import logging
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from zufluss.config.load import Configuration
from zufluss.config.stores import STORE_KEYS, is_store_key, store_key_of_variable
from zufluss.errors import ConfigError
from zufluss.remote.objects import ObjectMissingError, Objects
from zufluss.remote.stores import open_store, store_arguments, store_properties
from zufluss.remote.uri import LocationUri, parse_location
from zufluss.testing.s3 import ACCESS_KEY
from zufluss.testing.s3 import properties as properties_at


def uri(text: str) -> LocationUri:
    return parse_location(text, "test")


def config_of(text: str, properties: dict[str, str]) -> dict[str, object]:
    found = store_arguments(uri(text), store_properties(properties, uri(text)), 7000, 2)
    return {**found, **found.pop("config")}


def test_s3_keys_reach_the_store() -> None:
    arguments = config_of(
        "s3://logs/x",
        {
            "s3.endpoint": "http://minio:9000",
            "s3.access-key": "id",
            "s3.secret-key": "secret",
            "s3.session-token": "token",
        },
    )
    assert arguments["bucket"] == "logs"
    assert arguments["endpoint"] == "http://minio:9000"
    assert arguments["access_key_id"] == "id"
    assert arguments["secret_access_key"] == "secret"
    assert arguments["session_token"] == "token"
    assert arguments["region"] == "us-east-1"
    assert arguments["virtual_hosted_style_request"] is False
    assert arguments["client_options"]["allow_http"] is True
    assert arguments["client_options"]["read_timeout"] == timedelta(seconds=7)
    assert arguments["retry_config"] == {
        "max_retries": 2,
        "retry_timeout": timedelta(seconds=7),
    }


def test_without_keys_s3_uses_the_credential_chain_and_encrypted_connections() -> None:
    arguments = config_of("s3://logs/x", {})
    assert "access_key_id" not in arguments
    assert "region" not in arguments
    assert arguments["client_options"]["allow_http"] is False


def test_the_keys_of_a_bucket_win_over_the_general_ones() -> None:
    properties = {
        "s3.endpoint": "http://a",
        "s3.region": "eu-west-1",
        "s3.bucket.my.logs.endpoint": "http://b",
        "s3.bucket.my.access-key": "other",
        "gs.token": "t",
    }
    assert store_properties(properties, uri("s3://my.logs/x")) == {
        "s3.endpoint": "http://b",
        "s3.region": "eu-west-1",
    }
    assert store_properties(properties, uri("s3://my/x")) == {
        "s3.endpoint": "http://a",
        "s3.region": "eu-west-1",
        "s3.access-key": "other",
    }
    assert store_properties(properties, uri("/data")) == {}


def test_the_spelling_of_fluss_with_dots_is_understood() -> None:
    properties = {"s3.access.key": "id", "s3.path.style.access": "false"}
    arguments = config_of("s3://logs", properties)
    assert arguments["access_key_id"] == "id"
    assert arguments["virtual_hosted_style_request"] is True


def test_google_keys_reach_the_store() -> None:
    arguments = config_of("gs://logs/x", {"gs.service-account": "/key.json", "s3.region": "r"})
    assert arguments["bucket"] == "logs"
    assert arguments["service_account"] == "/key.json"
    assert "region" not in arguments


@pytest.mark.parametrize("text", ["az://logs/x", "abfss://logs@acc.dfs.core.windows.net/x"])
def test_azure_keys_reach_the_store(text: str) -> None:
    arguments = config_of(text, {"azure.account": "acc", "azure.account-key": "a2V5"})
    assert arguments["container_name"] == "logs"
    assert arguments["account_name"] == "acc"
    assert arguments["account_key"] == "a2V5"


@pytest.mark.parametrize(
    ("text", "properties", "kind"),
    [
        ("gs://logs/x", {"gs.token": "t"}, "GCSStore"),
        ("az://logs/x", {"azure.account": "a", "azure.account-key": "a2V5"}, "AzureStore"),
        ("abfss://logs@a.dfs.core.windows.net/x", {"azure.sas-token": "s=1"}, "AzureStore"),
        ("s3://logs/x", {"s3.region": "eu-west-1"}, "S3Store"),
    ],
)
def test_a_store_can_be_made_without_reaching_it(
    text: str, properties: dict[str, str], kind: str
) -> None:
    assert type(open_store(uri(text), properties, 1000, retries=0)).__name__ == kind


def test_a_bad_property_names_the_location_and_not_the_secret() -> None:
    properties = {"azure.account": "a", "azure.account-key": "$ecret"}
    with pytest.raises(ConfigError, match="az://logs/x") as caught:
        open_store(uri("az://logs/x"), properties, 1000, retries=0)
    assert "$ecret" not in caught.value.message


def test_path_style_access_must_be_true_or_false() -> None:
    with pytest.raises(ConfigError, match="path-style-access = 'ja'"):
        config_of("s3://logs", {"s3.path-style-access": "ja"})


def test_memory_is_one_store_for_the_process() -> None:
    assert open_store(uri("memory://one/x"), {}, 1, retries=0) is open_store(
        uri("memory://one/y"), {}, 1, retries=0
    )


def test_store_keys_are_known_to_the_configuration_and_hide_secrets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        conf = Configuration.load(
            environ={
                "ZUFLUSS_S3_SECRET_KEY": "hush",
                "ZUFLUSS_S3_BUCKET_MY__LOGS_SESSION_TOKEN": "hush",
            },
            overrides={"s3.endpoint": "http://a", "s3.bucket.my-logs.access-key": "hush"},
        )
    assert not caplog.records
    assert conf.store_settings() == {
        "s3.secret-key": "hush",
        "s3.bucket.my-logs.session-token": "hush",
        "s3.endpoint": "http://a",
        "s3.bucket.my-logs.access-key": "hush",
    }
    shown = {row.key: row.value for row in conf.effective()}
    assert shown["s3.endpoint"] == "http://a"
    assert "hush" not in repr(conf)
    assert "hush" not in shown.values()


@pytest.mark.parametrize("key", ["s3.endpiont", "s3.bucket.x.region2", "s3.bucket.endpoint.", "s3"])
def test_an_unknown_store_key_is_a_warning(key: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Configuration.of({key: "x"})
    assert key in caplog.text


def test_every_key_has_an_environment_variable() -> None:
    for key in STORE_KEYS:
        name = "ZUFLUSS_" + key.upper().replace(".", "_").replace("-", "_")
        assert store_key_of_variable(name) == key
        assert is_store_key(key)
    assert store_key_of_variable("ZUFLUSS_S3_BUCKET_A_B_ENDPOINT") == "s3.bucket.a.b.endpoint"
    assert store_key_of_variable("ZUFLUSS_S3_BUCKET_ENDPOINT") is None
    assert store_key_of_variable("ZUFLUSS_S3_NOTHING") is None


def test_a_bucket_with_keys_of_its_own_gets_no_token_of_others() -> None:
    properties = {
        "s3.access-key": "general",
        "s3.secret-key": "general",
        "s3.session-token": "general",
        "s3.bucket.own.access-key": "own",
        "s3.bucket.own.secret-key": "own",
    }
    assert store_properties(properties, uri("s3://own/x")) == {
        "s3.access-key": "own",
        "s3.secret-key": "own",
    }


async def test_configured_keys_are_not_mixed_with_a_token_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "stale")
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(ObjectMissingError):
            await Objects(uri("s3://logs/x"), properties_at(endpoint)).get("a", limit=1)
    assert ACCESS_KEY.encode() in heads[0]
    assert b"stale" not in heads[0]


@pytest.fixture
def digests() -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and the digests of the bodies that it was sent."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            seen.append(self.headers["x-amz-content-sha256"])
            self.send_response(200)
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_payload_with_checksums_of_its_own_is_not_signed(
    digests: tuple[str, list[str]],
) -> None:
    """The digest costs more CPU time than the rest of a large put."""
    endpoint, seen = digests
    for sign in (True, False):
        objects = Objects(uri("s3://logs/x"), properties_at(endpoint), sign_payload=sign)
        await objects.create("a", b"data")
    assert len(seen[0]) == 64
    assert seen[1] == "UNSIGNED-PAYLOAD"

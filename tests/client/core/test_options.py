"""The options of a connection."""

from __future__ import annotations

import pytest

from zufluss.client.core.options import ClientOptions, parse_bootstrap
from zufluss.errors import ConfigError


def test_options_have_fluss_keys_and_forms() -> None:
    options = ClientOptions.of(
        {"client.writer.batch-size": "4mb", "client.writer.batch-timeout": "1s"}
    )
    assert (options.batch_bytes, options.batch_timeout_ms) == (4 << 20, 1000)
    assert options.credentials is None


@pytest.mark.parametrize(
    "secret",
    [
        {"client.security.sasl.username": "alice", "client.security.sasl.password": "s3cret"},
        {
            "client.security.sasl.jaas.config": "org.apache.fluss.security.auth.sasl.plain."
            'PlainLoginModule required username="alice" password="s3cret";'
        },
    ],
)
def test_credentials_come_from_two_keys_or_from_jaas(secret: dict[str, str]) -> None:
    options = ClientOptions.of({"client.security.protocol": "SASL", **secret})
    assert options.credentials is not None
    assert (options.credentials.username, options.credentials.password) == ("alice", "s3cret")
    assert "s3cret" not in repr(options)


def test_sasl_without_a_user_is_refused() -> None:
    with pytest.raises(ConfigError, match="username"):
        ClientOptions.of({"client.security.protocol": "sasl"})


def test_idempotence_needs_all_acknowledgements() -> None:
    with pytest.raises(ConfigError, match="acks"):
        ClientOptions.of({"client.writer.acks": "1"})
    off = {"client.writer.acks": "1", "client.writer.enable-idempotence": "false"}
    assert ClientOptions.of(off).acks == 1


@pytest.mark.parametrize("text", ["", "localhost", "localhost:", ":9123", "a:b", "a:70000", "a:0"])
def test_a_bootstrap_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        parse_bootstrap(text)

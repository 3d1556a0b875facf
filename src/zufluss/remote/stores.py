"""obstore stores of locations, created from an address and the properties of its file system.

Properties are cluster keys (`config/stores.py`). Properties of one bucket override general ones:
`s3.bucket.NAME.endpoint` is `s3.endpoint` for bucket NAME, so two locations may lie in two object
stores. Without credentials the store uses its default chain: environment, web identity, instance.

`memory://NAME` is one store for the whole process, for tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from zufluss.config.load import Configuration
from zufluss.config.stores import STORE_KEYS, bucket_prefix, canonical
from zufluss.errors import ConfigError
from zufluss.remote.uri import AZURE, GS, MEMORY, S3, LocationUri

if TYPE_CHECKING:
    from obstore.store import MemoryStore

TRIES: Final = 3
"""How often a request is sent at most, repetitions included."""

REGION: Final = "us-east-1"
"""Default region of a store with its own endpoint: most ignore it, but signatures contain it."""

_WHOLE_TRANSFER: Final = timedelta(days=1)
"""Time limit of a whole answer. The time limit between reads detects a silent server."""

UNSIGNED: Final = {"s3.unsigned-payload": "true"}
"""A property that no user sets: S3 requests are signed without a digest of the body, which costs
more CPU time than everything else of a large put. For objects with checksums of their own."""

_S3_CONFIG: Final = {
    "s3.endpoint": "endpoint",
    "s3.region": "region",
    "s3.access-key": "access_key_id",
    "s3.secret-key": "secret_access_key",
    "s3.session-token": "session_token",
    "s3.unsigned-payload": "unsigned_payload",
}
_S3_KEYS: Final = {"s3.access-key", "s3.secret-key", "s3.session-token"}
_GS_CONFIG: Final = {
    "gs.endpoint": "base_url",
    "gs.service-account": "service_account",
    "gs.service-account-key": "service_account_key",
    "gs.token": "bearer_token",
}
_AZURE_CONFIG: Final = {
    "azure.account": "account_name",
    "azure.account-key": "account_key",
    "azure.endpoint": "endpoint",
    "azure.client-id": "client_id",
    "azure.client-secret": "client_secret",
    "azure.tenant-id": "tenant_id",
    "azure.sas-token": "sas_key",
}

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def store_properties(source: Configuration | Mapping[str, str], uri: LocationUri) -> dict[str, str]:
    """Return the properties for an address; those of its bucket override general ones.

    The keys are spelled as `config/stores.py` declares them.
    """
    settings = source.store_settings() if isinstance(source, Configuration) else source
    special, prefix = bucket_prefix(uri.authority), _key_prefix(uri)
    general = {canonical(key): value for key, value in settings.items()}
    own = {
        canonical("s3." + key.removeprefix(special)): value
        for key, value in settings.items()
        if key.startswith(special)
    }
    if own.keys() & _S3_KEYS:  # key, secret and token belong together: all of the bucket, or none
        general = {key: value for key, value in general.items() if key not in _S3_KEYS}
    merged = general | own if uri.scheme == S3 else general
    return {key: merged[key] for key in STORE_KEYS if key.startswith(prefix) and key in merged}


def open_store(
    uri: LocationUri, properties: Mapping[str, str], timeout_ms: int, *, retries: int
) -> Any:
    """Return the obstore store of an address's file system; paths begin at its root."""
    if uri.scheme == MEMORY:
        from obstore.store import MemoryStore

        with _memory_lock:
            return _memory.setdefault(uri.authority, MemoryStore())
    arguments = store_arguments(uri, properties, timeout_ms, retries)
    try:
        return _factory(uri)(**arguments)
    except Exception as problem:
        raise ConfigError(
            f"cannot use the location {uri} with the properties it is given: "
            f"{str(problem).partition(chr(10))[0]}"
        ) from None


def store_arguments(
    uri: LocationUri, properties: Mapping[str, str], timeout_ms: int, retries: int
) -> dict[str, Any]:
    """Return the arguments of the store's constructor."""
    timeout = timedelta(milliseconds=timeout_ms)
    container, config = _config(uri, properties)
    endpoint = str(config.get("endpoint", config.get("base_url", "")))
    return {
        **container,
        "config": config,
        **_own_keys(config),
        "client_options": {
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": min(timeout, timedelta(seconds=5)),
            "read_timeout": timeout,
            "timeout": max(timeout, _WHOLE_TRANSFER),
        },
        "retry_config": {"max_retries": retries, "retry_timeout": timeout},
    }


def _config(uri: LocationUri, properties: Mapping[str, str]) -> tuple[dict[str, str], Any]:
    if uri.scheme == S3:
        return {"bucket": uri.authority}, _s3_config(properties)
    if uri.scheme == GS:
        return {"bucket": uri.authority}, _renamed(properties, _GS_CONFIG)
    container, _, host = uri.authority.partition("@")
    config = _renamed(properties, _AZURE_CONFIG)
    if host:
        config["account_name"] = host.partition(".")[0]
    return {"container_name": container}, config


def _s3_config(properties: Mapping[str, str]) -> dict[str, Any]:
    config: dict[str, Any] = _renamed(properties, _S3_CONFIG)
    if "endpoint" in config:
        config.setdefault("region", REGION)
    path_style = properties.get("s3.path-style-access", "true").lower()
    if path_style not in ("true", "false"):
        raise ConfigError(f"s3.path-style-access = {path_style!r} is not allowed: true or false")
    config["virtual_hosted_style_request"] = path_style == "false"
    return config


def _own_keys(config: Mapping[str, str]) -> dict[str, Any]:
    """Return a provider of S3 keys without token, or the store adds one of the environment."""
    if "secret_access_key" not in config or "session_token" in config:
        return {}
    names = ("access_key_id", "secret_access_key")
    keys = {name: config.get(name) for name in names} | {"token": None, "expires_at": None}
    return {"credential_provider": lambda: keys}


def _renamed(properties: Mapping[str, str], names: Mapping[str, str]) -> dict[str, Any]:
    return {name: properties[key] for key, name in names.items() if properties.get(key)}


def _factory(uri: LocationUri) -> Callable[..., Any]:
    from obstore.store import AzureStore, GCSStore, S3Store

    return S3Store if uri.scheme == S3 else GCSStore if uri.scheme == GS else AzureStore


def _key_prefix(uri: LocationUri) -> str:
    """Return the prefix of a scheme's properties."""
    return "azure." if uri.scheme in AZURE else f"{uri.scheme}."

"""Cluster keys of object stores: addresses and credentials of the file systems of locations.

A key applies to all locations of a kind; `s3.bucket.NAME.KEY` is `s3.KEY` for one bucket. Fluss's
names are used where Fluss has one; its spelling with `.` for `-` is accepted, too, so that a
`server.yaml` made for Fluss works.

The environment variable of a key is `ZUFLUSS_` and the key in capitals with `_` for `.` and `-`. In
the name of a bucket `_` stands for `.` and `__` for `-`: `ZUFLUSS_S3_BUCKET_MY__LOGS_ENDPOINT` is
`s3.bucket.my-logs.endpoint`.
"""

from __future__ import annotations

import re
from typing import Final

STORE_KEYS: Final = {
    "s3.endpoint": "The address of an S3-compatible store; Amazon's by default.",
    "s3.region": "The region of the buckets.",
    "s3.access-key": "The access key; without it, the credential chain of AWS.",
    "s3.secret-key": "The secret of the access key.",
    "s3.session-token": "The token that belongs to temporary keys.",
    "s3.path-style-access": "Buckets in the path of an address (`true`) or in its host (`false`).",
    "s3.assumed.role.arn": "The role that clients get for reading, limited to what they read.",
    "s3.assumed.role.sts.endpoint": "The address of the token service; Amazon's by default.",
    "gs.endpoint": "The address of the store; Google's by default.",
    "gs.service-account": "The file with the key of a service account.",
    "gs.service-account-key": "The key of a service account, JSON.",
    "gs.token": "An access token.",
    "azure.account": "The storage account, for `az://`; `abfs://` has it in the address.",
    "azure.account-key": "The key of the account.",
    "azure.endpoint": "The address of the store; Azure's by default.",
    "azure.client-id": "The id of a service principal.",
    "azure.client-secret": "The secret of a service principal.",
    "azure.tenant-id": "The tenant of a service principal.",
    "azure.sas-token": "A shared access signature.",
}
"""Every key with its description."""

SECRET_KEYS: Final = frozenset({
    "s3.access-key",
    "s3.secret-key",
    "s3.session-token",
    "gs.service-account-key",
    "gs.token",
    "azure.account-key",
    "azure.client-secret",
    "azure.sas-token",
})  # fmt: skip
"""Keys whose values are never shown."""

_BUCKET: Final = r"s3\.bucket\.[A-Za-z0-9][A-Za-z0-9._-]*"
_SPELLINGS: Final = {s: key for key in STORE_KEYS for s in (key, key.replace("-", "."))}
_VARIABLES: Final = {
    "ZUFLUSS_" + key.upper().replace(".", "_").replace("-", "_"): key for key in STORE_KEYS
}
_OF_BUCKETS: Final = sorted((s for s in _SPELLINGS if s.startswith("s3.")), key=len)[::-1]
"""Spellings of keys that can be set per bucket, the longest first: some are suffixes of others."""


def bucket_prefix(bucket: str) -> str:
    """Returns the prefix of the keys of one bucket."""
    return f"s3.bucket.{bucket}."


def canonical(key: str) -> str:
    """The declared spelling of a key; other keys are returned unchanged."""
    return _SPELLINGS.get(key, key)


def is_store_key(key: str) -> bool:
    """Whether a cluster key is a property of object stores or of one bucket."""
    return general_key(key) is not None


def general_key(key: str) -> str | None:
    """The declared key of a key for all buckets or for one; None if there is none."""
    if canonical(key) in STORE_KEYS:
        return canonical(key)
    for spelling in _OF_BUCKETS:
        if re.fullmatch(_BUCKET + re.escape(spelling.removeprefix("s3")), key):
            return canonical(spelling)
    return None


def is_store_secret(key: str) -> bool:
    """Whether the value of a key must not be shown."""
    return general_key(key) in SECRET_KEYS


def store_key_of_variable(name: str) -> str | None:
    """The key of an environment variable, None if it is not one of object stores."""
    if name in _VARIABLES:
        return _VARIABLES[name]
    for key in map(canonical, _OF_BUCKETS):
        ending = key.removeprefix("s3").upper().replace(".", "_").replace("-", "_")
        match = re.fullmatch(rf"ZUFLUSS_S3_BUCKET_(.+){ending}", name)
        if match is not None:
            bucket = match[1].lower().replace("__", "-").replace("_", ".")
            return bucket_prefix(bucket) + key.removeprefix("s3.")
    return None

"""Cluster keys of object stores: how the file systems of remote locations are reached.

They are the same for all locations of a kind; `s3.bucket.NAME.KEY` is `s3.KEY` for one bucket. The
names are Fluss's where it has one, and its spelling with `.` for `-` is understood too, since a
`server.yaml` made for Fluss should do.

The environment variable of a key is `ZUFLUSS_` and the key in capitals with `_` for `.` and `-`. In
the name of a bucket, which nobody knows beforehand, `_` stands for `.` and `__` for `-`:
`ZUFLUSS_S3_BUCKET_MY__LOGS_ENDPOINT` is `s3.bucket.my-logs.endpoint`.
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
"""Spellings of keys that a bucket may have of its own, the longest first: some end others."""


def bucket_prefix(bucket: str) -> str:
    """Returns the prefix of the keys of one bucket."""
    return f"s3.bucket.{bucket}."


def canonical(key: str) -> str:
    """The key as it is declared; other keys as they are."""
    return _SPELLINGS.get(key, key)


def is_store_key(key: str) -> bool:
    """Whether a cluster key is a property of object stores or of one bucket."""
    return general_key(key) is not None


def general_key(key: str) -> str | None:
    """The declared key behind a key of all buckets or of one; None if there is none."""
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

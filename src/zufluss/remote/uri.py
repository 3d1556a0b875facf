"""Addresses of locations: one spelling for each place, checked before anything is written there.

Two locations must never overlap, and the address of a place must always be the same text. So an
address is normalised once: no trailing slash, no doubled slashes, one spelling of each scheme.

| spelling | becomes |
|---|---|
| `/data/remote`, `file:/data/remote` | `file:///data/remote` |
| `remote` | `file://` + the working directory + `/remote` |
| `s3a://bucket/path/` | `s3://bucket/path` |
| `abfss://container@account.dfs.core.windows.net/path` | unchanged |

Nothing is percent-decoded: the text is the name of the directory or the key.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

from zufluss.errors import ConfigError

FILE: Final = "file"
MEMORY: Final = "memory"
S3: Final = "s3"
GS: Final = "gs"
AZURE: Final = ("az", "abfs", "abfss")

SCHEMES: Final = (FILE, S3, GS, *AZURE, MEMORY)
"""Schemes of locations; `memory` is for tests, its objects live in this process."""
MEMORY_VARIABLE: Final = "ZUFLUSS_TEST_MEMORY_LOCATIONS"
"""Tests set this environment variable for servers that have locations in memory."""

_SAME: Final = {"s3a": S3, "s3n": S3, "gcs": GS}
_URI = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?://(?P<authority>[^/]*))?(?P<path>/.*)?")
_AUTHORITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_AZURE_AUTHORITY = re.compile(r"[A-Za-z0-9$][A-Za-z0-9-]*(@[A-Za-z0-9][A-Za-z0-9.-]*)?")

_SECRET = re.compile(r"(?<=://)[^@?#]*:[^@?#]*@|(?<=[?#]).+", re.DOTALL)
"""A user with password, and a signature: neither belongs in an address or in a message."""


class LocationUri(NamedTuple):
    """The normalised address of a location, or of a path in one."""

    scheme: str
    """One of `SCHEMES`."""
    authority: str
    """Bucket or container; empty for files."""
    path: str
    """Path with a leading and without a trailing slash; empty for the root."""

    @property
    def fs_key(self) -> str:
        """The file system: `scheme://authority`."""
        return f"{self.scheme}://{self.authority}"

    @property
    def text(self) -> str:
        """The address in its one spelling."""
        return self.fs_key + self.path

    def contains(self, other: LocationUri) -> bool:
        """Whether the other address is this one or lies below it."""
        below = f"{other.path}/".startswith(f"{self.path}/")
        return below and _same_file_system(self, other)

    def __str__(self) -> str:
        return self.text


def _same_file_system(one: LocationUri, other: LocationUri) -> bool:
    """Whether two addresses may be in one file system.

    Azure has several schemes and host names for one account, and `az` does not name the account.
    """
    if one.scheme not in AZURE or other.scheme not in AZURE:
        return one.fs_key == other.fs_key
    (container, _, host), (same, _, another) = (
        x.authority.lower().partition("@") for x in (one, other)
    )
    accounts = {x.partition(".")[0] for x in (host, another) if x}
    return container == same and len(accounts) < 2


def parse_location(text: str, what: str) -> LocationUri:
    """Parse an address; `what` names the option or argument in the message of an error."""
    stripped = text.strip()
    if not stripped:
        raise ConfigError(f"{what} is empty; allowed: a path, or a URI of {_schemes()}")
    if re.search(r"[?#\x00-\x1f]", stripped):
        raise _bad(what, text, "`?`, `#` and control characters are not allowed")
    match = _URI.fullmatch(stripped)
    if match is None:
        return _normalised(what, text, FILE, "", str(Path(stripped).absolute()))
    scheme = match["scheme"].lower()
    return _normalised(
        what, text, _SAME.get(scheme, scheme), match["authority"] or "", match["path"] or ""
    )


def parse_durable_location(text: str, what: str) -> LocationUri:
    """Parse the address of a place that a server is to keep files in.

    Memory is refused, since acknowledged rows would be gone after a restart.
    """
    uri = parse_location(text, what)
    if uri.scheme == MEMORY and MEMORY_VARIABLE not in os.environ:
        reason = f"memory is lost when the server stops; allowed: a path, or a URI of {_schemes()}"
        raise _bad(what, text, reason)
    return uri


def _normalised(what: str, text: str, scheme: str, authority: str, path: str) -> LocationUri:
    if scheme not in SCHEMES:
        raise _bad(what, text, f"scheme {scheme!r} is not known; allowed: {_schemes()}")
    segments = [segment for segment in path.split("/") if segment not in ("", ".")]
    if ".." in segments:
        raise _bad(what, text, "`..` is not allowed; write the resolved path")
    if scheme == FILE:
        if authority:
            raise _bad(what, text, "a file has no host; write file:///path")
        if not segments:
            raise _bad(what, text, "it must name a directory below `/`")
    else:
        _check_authority(what, text, scheme, authority)
    return LocationUri(scheme, authority, "".join(f"/{segment}" for segment in segments))


def _check_authority(what: str, text: str, scheme: str, authority: str) -> None:
    pattern = _AZURE_AUTHORITY if scheme in AZURE else _AUTHORITY
    if not pattern.fullmatch(authority):
        raise _bad(
            what,
            text,
            f"{scheme}:// is not followed by the name of a bucket or container; write "
            f"{scheme}://name/path, credentials and ports belong in the properties of the store",
        )


def _schemes() -> str:
    return ", ".join(scheme for scheme in SCHEMES if scheme != MEMORY)


def _bad(what: str, text: str, reason: str) -> ConfigError:
    return ConfigError(f"{what} has {_SECRET.sub('***', text)!r:.300}: {reason}")

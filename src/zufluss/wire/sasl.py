"""SASL/PLAIN: the token on the wire, the users in the configuration, and the check between them.

A PLAIN token is `authzid NUL user NUL password`, in UTF-8. A client leaves authzid empty or repeats
the user; acting for somebody else is refused. Users come from a JAAS text in the form that Fluss's
`security.sasl.plain.jaas.config` has:

    org.apache.fluss.security.auth.sasl.plain.PlainLoginModule required
        user_admin="admin-secret" user_alice="alice-secret";

Exactly one login module, closed by a semicolon; values in double or single quotes with backslash
escapes, or bare words; `//` and `/* */` comments.

Secrets stay secret: no message quotes the text, a token or a password, and the check takes the same
time and gives the same answer for an unknown user as for a wrong password.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from zufluss.errors import AuthenticationError, ConfigError

MECHANISM: Final = "PLAIN"
PLAIN_LOGIN_MODULE: Final = "org.apache.fluss.security.auth.sasl.plain.PlainLoginModule"
TOKEN_BYTES_MAX: Final = 16 * 1024
"""Longer tokens are refused unread."""

_USER_PREFIX: Final = "user_"
_CONTROL_FLAGS: Final = ("required", "requisite", "sufficient", "optional")
_JAAS_KEY: Final = "security.sasl.plain.jaas.config"
_LEXEME: Final = re.compile(
    r"""
      (?P<space> \s+ | //[^\n]* | /\*.*?\*/ )
    | (?P<word>  [^\s"'=;/]+ )
    | "(?P<double> (?: [^"\\\r\n] | \\[^\r\n] )* )"
    | '(?P<single> (?: [^'\\\r\n] | \\[^\r\n] )* )'
    | (?P<mark>  [=;] )
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE: Final = re.compile(r"\\([0-3]?[0-7]{1,2}|.)")
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}


@dataclass(frozen=True, slots=True)
class PlainToken:
    """The three parts of a PLAIN token."""

    authzid: str
    """Whom the client wants to act as; empty for itself."""
    user: str
    """The user that the client claims to be."""
    password: str = field(repr=False)
    """What proves it."""


@dataclass(frozen=True, slots=True)
class JaasEntry:
    """A JAAS text taken apart."""

    login_module: str
    """A Java class name; it only says which mechanism the options belong to."""
    control_flag: str
    """In lower case; without a meaning when there is one login module."""
    options: Mapping[str, str] = field(repr=False)
    """For a server `user_<name>`, for a client `username` and `password`."""


def build_plain(user: str, password: str) -> bytes:
    """The token with the user and password of a client."""
    if not user or not password or "\0" in user + password:
        raise ConfigError(
            "client.security.sasl.username and client.security.sasl.password must both be set, "
            "and have no NUL character"
        )
    return b"\0" + user.encode() + b"\0" + password.encode()


def parse_plain(token: bytes) -> PlainToken:
    """Take a client's token apart."""
    if len(token) > TOKEN_BYTES_MAX:
        raise AuthenticationError(
            f"the PLAIN token has {len(token)} bytes, allowed are {TOKEN_BYTES_MAX}"
        )
    try:
        parts = token.decode("utf-8").split("\0")
    except UnicodeDecodeError:
        raise AuthenticationError("the PLAIN token is not UTF-8") from None
    if len(parts) != 3:
        raise AuthenticationError(
            f"a PLAIN token has 3 parts (authzid, user, password) between NUL bytes, got "
            f"{len(parts)}"
        )
    authzid, user, password = parts
    if not user or not password:
        raise AuthenticationError("a PLAIN token needs a user and a password, neither empty")
    return PlainToken(authzid, user, password)


class PlainAuthenticator:
    """Knows the users of a server and checks tokens against them."""

    def __init__(self, users: Mapping[str, str]) -> None:
        # Keyed digests have one length, so that comparing them says nothing about a password's.
        self._key = secrets.token_bytes(32)
        self._digests = {user: self._digest(password) for user, password in users.items()}
        self._nobody = secrets.token_bytes(32)

    @classmethod
    def from_jaas(cls, text: str) -> PlainAuthenticator:
        """An authenticator for the users of a JAAS text."""
        return cls(users_from_jaas(text))

    def authenticate(self, token: bytes) -> str:
        """The user that the token proves; AuthenticationError if it proves none."""
        plain = parse_plain(token)
        expected = self._digests.get(plain.user, self._nobody)
        if not hmac.compare_digest(expected, self._digest(plain.password)):
            raise AuthenticationError("user or password is wrong")
        if plain.authzid not in ("", plain.user):
            raise AuthenticationError(
                f"user '{plain.user}' asks to act as another user; leave the authorization id empty"
            )
        return plain.user

    def _digest(self, password: str) -> bytes:
        return hmac.digest(self._key, password.encode("utf-8", "surrogatepass"), "sha256")

    def __repr__(self) -> str:
        return f"PlainAuthenticator(users={sorted(self._digests)})"


def users_from_jaas(text: str) -> dict[str, str]:
    """User names and passwords of a server's JAAS text; ConfigError when there are none."""
    entry = parse_jaas(text)
    if entry.login_module != PLAIN_LOGIN_MODULE:
        raise _bad(f"its login module is not {PLAIN_LOGIN_MODULE}, the only one supported")
    users = {
        key.removeprefix(_USER_PREFIX): value
        for key, value in entry.options.items()
        if key.startswith(_USER_PREFIX)
    }
    if not users:
        raise _bad(f'it declares no user; add options like {_USER_PREFIX}alice="a secret"')
    for user, password in users.items():
        if not user or not password:
            raise _bad("it declares a user whose name or password is empty")
    return users


def parse_jaas(text: str) -> JaasEntry:
    """Take a JAAS text apart: one login module, a control flag, options, a semicolon."""
    lexemes = _lexemes(text)
    if len(lexemes) < 3 or [kind for kind, _ in lexemes[:2]] != ["text", "text"]:
        raise _bad("it does not start with a login module and a control flag")
    module, flag = lexemes[0][1], lexemes[1][1].lower()
    if flag not in _CONTROL_FLAGS:
        raise _bad(f"its control flag is none of {', '.join(_CONTROL_FLAGS)}")
    if ("mark", ";") not in lexemes:
        raise _bad("it does not end with a semicolon")
    stop = lexemes.index(("mark", ";"))
    if stop != len(lexemes) - 1:
        raise _bad("something follows its semicolon; one login module is allowed")
    return JaasEntry(module, flag, _options(lexemes[2:stop]))


def _options(lexemes: list[tuple[str, str]]) -> dict[str, str]:
    options: dict[str, str] = {}
    for at in range(0, len(lexemes), 3):
        number = at // 3 + 1
        triple = lexemes[at : at + 3]
        if [kind for kind, _ in triple] != ["text", "mark", "text"]:
            raise _bad(f'its option {number} is not of the form name="value"')
        name, value = triple[0][1], triple[2][1]
        if name in options:
            raise _bad(f"its option {number} repeats the name of an earlier one")
        options[name] = value
    return options


def _lexemes(text: str) -> list[tuple[str, str]]:
    """Words and quoted texts as `text`, `=` and `;` as `mark`; space and comments fall away."""
    lexemes: list[tuple[str, str]] = []
    position = 0
    while position < len(text):
        match = _LEXEME.match(text, position)
        if match is None:
            raise _bad(f"an open quote, an open comment or a stray '/' at character {position + 1}")
        position = match.end()
        kind = match.lastgroup
        if kind == "mark" or kind == "word":
            lexemes.append(("mark" if kind == "mark" else "text", match[0]))
        elif kind != "space":
            lexemes.append(("text", _ESCAPE.sub(_unescape, match[0][1:-1])))
    return lexemes


def _unescape(match: re.Match[str]) -> str:
    escape = match[1]
    if escape[0] in "01234567":
        return chr(int(escape, 8))
    return _ESCAPED.get(escape, escape)


def _bad(reason: str) -> ConfigError:
    return ConfigError(
        f"{_JAAS_KEY} cannot be used: {reason} (the value is secret and not shown). Expected: "
        f'{PLAIN_LOGIN_MODULE} required user_<name>="<password>" ...;'
    )

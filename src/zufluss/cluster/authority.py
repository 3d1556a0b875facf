"""Who may do everything, as `super.users` names them.

`super.users` is Fluss's: principals with semicolons between, each a type and a name, such as
`User:admin;User:root`. The only type is `User`: somebody who came in with a password. Who came in
without one has no name, and is never among them.
"""

from __future__ import annotations

from typing import Final

from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.errors import ConfigError

_USER: Final = "User"


class Authority:
    """Answers who may do what nobody else may."""

    def __init__(self, conf: Configuration) -> None:
        self._super_users = super_users(conf.get(options.SUPER_USERS) or "")

    def is_super(self, principal: str | None) -> bool:
        """Whether a principal may do everything; None is who came in without authentication."""
        return principal is not None and principal in self._super_users

    def __repr__(self) -> str:
        return f"Authority(super_users={sorted(self._super_users)})"


def super_users(text: str) -> frozenset[str]:
    """The names in a list of principals; `ConfigError` for one that is no `User:NAME`."""
    return frozenset(_name(part.strip()) for part in text.split(";") if part.strip())


def _name(principal: str) -> str:
    kind, _, name = principal.partition(":")
    if kind != _USER or not name.strip():
        raise ConfigError(
            f"{options.SUPER_USERS.key}: {principal!r:.200} is no principal; write "
            f"{_USER}:NAME, with semicolons between several"
        )
    return name.strip()

"""Users with special permissions, as the configuration names them.

| option                    | its users may                                               |
|---------------------------|-------------------------------------------------------------|
| `super.users`             | do everything                                               |
| `zufluss.overwrite.users` | put rows past the merge engine of a table; unset: everybody |

The form is Fluss's: principals separated by semicolons, each a type and a name, such as
`User:admin;User:root`. The only type is `User`: somebody who logged in with a password. A user who
logged in without a password has no name, and is never among them. If no listener asks for a
password, nobody has a name, and everybody may overwrite.

Fluss has no such permission, and the sinks of its Flink connector overwrite when they undo. So only
a list that is set restricts somebody, then also those who never logged in.
"""

from __future__ import annotations

from typing import Final

from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.config.option import Option
from zufluss.errors import ConfigError

_USER: Final = "User"


class Authority:
    """Says which principals have special permissions."""

    def __init__(self, conf: Configuration) -> None:
        self._super_users = users(conf, options.SUPER_USERS)
        listed = conf.get(options.ZUFLUSS_OVERWRITE_USERS) is not None
        named = self._super_users | users(conf, options.ZUFLUSS_OVERWRITE_USERS)
        self._overwriters = named if listed else None
        self._named = "sasl" in conf.get(options.SECURITY_PROTOCOL_MAP).values()

    def is_super(self, principal: str | None) -> bool:
        """Whether a principal may do everything; None is a user without authentication."""
        return principal is not None and principal in self._super_users

    def may_operate(self, principal: str | None) -> bool:
        """Whether a principal may change how servers work; everybody without authentication."""
        return not self._named or self.is_super(principal)

    def may_overwrite(self, principal: str | None) -> bool:
        """Whether a principal may put rows past the merge engine of a table."""
        if self._overwriters is None or not self._named:
            return True
        return principal is not None and principal in self._overwriters

    def __repr__(self) -> str:
        overwriters = "everybody" if self._overwriters is None else sorted(self._overwriters)
        return f"Authority(super_users={sorted(self._super_users)}, overwriters={overwriters})"


def users(conf: Configuration, option: Option[str | None]) -> frozenset[str]:
    """The names in a list of principals; `ConfigError` for one that is not `User:NAME`."""
    parts = (part.strip() for part in (conf.get(option) or "").split(";"))
    return frozenset(_name(part, option) for part in parts if part)


def _name(principal: str, option: Option[str | None]) -> str:
    kind, _, name = principal.partition(":")
    if kind != _USER or not name.strip():
        raise ConfigError(
            f"{option.key}: {principal!r:.200} is not a principal; write "
            f"{_USER}:NAME, with semicolons between several"
        )
    return name.strip()

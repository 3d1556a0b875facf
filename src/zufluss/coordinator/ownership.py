"""Who may use a lease or a producer: its owner, or a super user, and only in its present epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from zufluss.errors import AuthorizationError, ZuflussError

IsSuper = Callable[[str | None], bool]
"""Whether a principal may use what belongs to others."""


class Owned(Protocol):
    """Something that belongs to a principal, and that a new epoch takes away from older callers."""

    @property
    def owner(self) -> str | None:
        """The principal that made it; None without authentication."""

    @property
    def epoch(self) -> int:
        """The present epoch."""

    @property
    def title(self) -> str:
        """How messages call it, such as `lease 'a'`."""

    def fenced(self, epoch: int) -> ZuflussError:
        """The error for a call of another epoch."""


class Ownership:
    """Checks of owners and epochs, shared by leases and producers."""

    def __init__(self, is_super: IsSuper) -> None:
        self._is_super = is_super

    def is_owner(self, thing: Owned, principal: str | None) -> bool:
        """Whether a principal owns a thing, or is a super user."""
        return thing.owner == principal or self._is_super(principal)

    def check_owner(self, thing: Owned, principal: str | None) -> None:
        """`AuthorizationError` unless a principal owns a thing, or is a super user."""
        if not self.is_owner(thing, principal):
            raise AuthorizationError(
                f"{thing.title} belongs to {thing.owner or 'an unknown user'}, not to "
                f"{principal or 'an unknown user'}; take an id of your own"
            )

    def check(self, thing: Owned, principal: str | None, epoch: int | None) -> None:
        """As `check_owner`; also raise `fenced` for a call of another epoch. None is any epoch."""
        self.check_owner(thing, principal)
        if epoch is not None and epoch != thing.epoch:
            raise thing.fenced(epoch)

    def __repr__(self) -> str:
        return "Ownership()"

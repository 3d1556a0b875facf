"""Owners and epochs of leases and producers are checked by the same rules."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from zufluss.coordinator.ownership import Ownership
from zufluss.errors import AuthorizationError, ProducerFencedError


@dataclass
class Thing:
    owner: str | None
    epoch: int = 3
    title: str = "thing 'a'"

    def fenced(self, epoch: int) -> ProducerFencedError:
        return ProducerFencedError(f"{self.title} has epoch {self.epoch}, not {epoch}")


OWNERSHIP = Ownership(lambda principal: principal == "root")


@pytest.mark.parametrize("principal", ["ann", "root"])
def test_the_owner_and_super_users_pass(principal: str) -> None:
    OWNERSHIP.check(Thing("ann"), principal, None)


@pytest.mark.parametrize("principal", ["bob", None])
def test_nobody_else_passes(principal: str | None) -> None:
    assert not OWNERSHIP.is_owner(Thing("ann"), principal)
    with pytest.raises(AuthorizationError, match="thing 'a' belongs to ann, not to"):
        OWNERSHIP.check_owner(Thing("ann"), principal)


def test_without_authentication_everybody_is_the_owner() -> None:
    OWNERSHIP.check(Thing(None), None, 3)


@pytest.mark.parametrize("principal", ["ann", "root"])
@pytest.mark.parametrize("epoch", [2, 4])
def test_a_call_of_another_epoch_is_fenced_whoever_calls(principal: str, epoch: int) -> None:
    with pytest.raises(ProducerFencedError, match=f"epoch 3, not {epoch}"):
        OWNERSHIP.check(Thing("ann"), principal, epoch)


def test_a_stranger_learns_nothing_of_the_epoch() -> None:
    """The owner is checked before the epoch."""
    with pytest.raises(AuthorizationError):
        OWNERSHIP.check(Thing("ann"), "bob", 2)

"""Options that were changed in the running cluster, as the coordinator sends them to servers.

A tablet server puts them over what it was started with. Secrets of the lake are not among them:
only the coordinator and tiering services use the catalog.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zufluss.config.lake import is_lake_key, is_secret
from zufluss.wire import messages as m


@dataclass(frozen=True, slots=True)
class DynamicConfigs:
    """All options that were changed in the running cluster, and not taken back."""

    version: int
    """Another one after each change; 0 before the first one."""
    values: Mapping[str, str]
    """The text of each option by its key."""

    @classmethod
    def for_tablets(cls, version: int, dynamic: Mapping[str, str]) -> DynamicConfigs:
        """What tablet servers get of the options of the cluster."""
        secrets = {k for k, v in dynamic.items() if is_lake_key(k) and is_secret(k, v)}
        return cls(version, {k: v for k, v in dynamic.items() if k not in secrets})

    @classmethod
    def from_proto(cls, message: m.PbDynamicConfigs) -> DynamicConfigs:
        """Decode."""
        return cls(message.version, {each.key: each.value for each in message.configs})

    def to_proto(self) -> m.PbDynamicConfigs:
        """Encode."""
        configs = [m.PbKeyValue(key=key, value=value) for key, value in self.values.items()]
        return m.PbDynamicConfigs(version=self.version, configs=configs)

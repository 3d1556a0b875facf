"""Retention of a tablet server follows an option that was changed in the running cluster."""

from __future__ import annotations

from pathlib import Path

from tests.tablet.support import TABLE, Tablet
from zufluss.cluster.configs import DynamicConfigs

ROLL = "log.retention.roll-active-segment.enabled"
LONG_AFTER = 1 << 50


async def test_whether_the_segment_being_written_goes_is_asked_in_each_round(
    tmp_path: Path,
) -> None:
    tablet = await Tablet(
        tmp_path, buckets=1, conf={ROLL: "false"}, properties={"table.log.ttl": "1ms"}
    ).start()
    log = tablet.server.buckets.replica(TABLE, None, 0).log

    async def kept_after_retention() -> int:
        connection, request = await tablet.produce(0)
        await connection.produced(request)
        tablet.server.logs.expire(LONG_AFTER)
        return log.log_end_offset - log.log_start_offset

    assert await kept_after_retention() == 3
    await tablet.server.update_configs(DynamicConfigs(1, {ROLL: "true"}))
    assert await kept_after_retention() == 0
    await tablet.server.update_configs(DynamicConfigs(2, {}))
    assert await kept_after_retention() == 3, "the option of the start counts again"
    await tablet.server.close()

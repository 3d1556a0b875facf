"""A reader in a process of its own: it leases a table, prints the lease id, and waits to be killed.

python -m tests.end_to_end.leases.job BOOTSTRAP TABLE DURATION
"""

from __future__ import annotations

import signal
import sys

import zufluss


def main() -> None:
    """SIGINT leaves the block, as Ctrl-C does; SIGKILL leaves nothing."""
    bootstrap, table, duration = sys.argv[1:]
    with (
        zufluss.connect(bootstrap) as conn,
        conn.admin.kv_snapshot_lease(table, duration=duration) as lease,
    ):
        print(f"leased {lease.lease_id}", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()

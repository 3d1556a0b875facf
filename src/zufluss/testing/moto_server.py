"""moto's server with conditional puts that are atomic: `python -m zufluss.testing.moto_server`.

moto looks whether an object exists and creates it afterwards, each request in a thread of its own.
So of two requests at once with `If-None-Match: *` both can win, now and then on a busy machine. A
location like that is rightly refused for the shared log, and rows in it could be lost. Here such
requests take turns. The arguments are those of `moto.server`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

_TURN = threading.Lock()


def main(arguments: Sequence[str]) -> None:
    """Serve until stopped."""
    from moto.s3.responses import S3Response
    from moto.server import main as serve

    put_object = S3Response.put_object

    def in_turn(self: Any) -> Any:
        if "If-None-Match" not in self.headers:
            return put_object(self)
        with _TURN:
            return put_object(self)

    S3Response.put_object = in_turn  # type: ignore[method-assign]
    serve([*arguments])


if __name__ == "__main__":
    main(sys.argv[1:])

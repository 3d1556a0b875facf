"""The remote log of a fake cluster's bucket: its batches as segments in some location."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from crc32c import crc32c

from tests.client.fake import FakeLog
from zufluss.record.header import iter_headers
from zufluss.remote.layout import segment_file
from zufluss.remote.objects import Objects
from zufluss.wire import messages as m

DIRECTORY = "log/fluss/t-7/0"


@dataclass
class Uploaded:
    segment_id: str
    start: int
    end: int
    data: bytes

    @property
    def path(self) -> str:
        return segment_file(DIRECTORY, self.segment_id, self.start, ".log")


@dataclass
class RemoteBucket:
    """Batches of a fake log in a location, in segments of some batches."""

    objects: Objects
    segments: list[Uploaded] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    """The offsets that were asked for."""
    at_once: int = 64
    """Segments in one answer."""
    checksums: bool = True
    """The answer has the checksums of the files."""

    @property
    def directory(self) -> str:
        return self.objects.full_path(DIRECTORY)

    async def upload(self, log: FakeLog, batches_each: int = 1, leave: int = 0) -> None:
        """Upload all batches but the last `leave`."""
        batches = log.batches[: len(log.batches) - leave]
        for first in range(0, len(batches), batches_each):
            part = [batch for _, batch in batches[first : first + batches_each]]
            headers = [next(iter_headers(batch))[1] for batch in part]
            found = Uploaded(
                str(uuid.uuid4()), headers[0].base_offset, headers[-1].next_offset, b"".join(part)
            )
            await self.objects.put(found.path, found.data)
            self.segments.append(found)

    def info(self, offset: int) -> m.PbRemoteLogFetchInfo | None:
        """What a server would answer, with an index of every batch."""
        self.asked.append(offset)
        wanted = [s for s in self.segments if s.end > offset][: self.at_once]
        if not wanted:
            return None
        answer = m.PbRemoteLogFetchInfo(remote_log_tablet_dir=self.directory)
        for position, header in iter_headers(wanted[0].data):
            if header.base_offset <= offset:
                answer.first_start_pos = position
        for segment in wanted:
            answer.remote_log_segments.add(
                remote_log_segment_id=segment.segment_id,
                remote_log_start_offset=segment.start,
                remote_log_end_offset=segment.end,
                segment_size_in_bytes=len(segment.data),
                crc32c=crc32c(segment.data) if self.checksums else None,
            )
        return answer

"""What the server of text owes one client: replies, and parts of answers that its line may not take yet.

All of one turn of the loop goes out in one piece. A client that reads slowly stalls no other and takes little: while
its line is full its parts wait here and are joined, to one for each sample; answers go out all the same, as there is an
end to them.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop

from gpuinfer.central.caller import Caller
from gpuinfer.central.lines import ClientLines
from gpuinfer.central.wire import Kind, Record, pack, part_to_wire
from gpuinfer.engine.streaming import Unread
from gpuinfer.generation import Part


class Outgoing:
    """All methods belong to the loop."""

    def __init__(self, lines: ClientLines, caller: Caller, loop: AbstractEventLoop) -> None:
        self._lines, self._caller, self._loop = lines, caller, loop
        self._replies: list[bytes] = []
        self._unread: dict[int, Unread] = {}  # by the number of the request
        self._due = False

    def part(self, number: int, part: Part) -> None:
        unread = self._unread.get(number)
        if unread is None:
            unread = self._unread[number] = Unread()
        unread.add(part)
        self._flush_soon()

    def reply(self, number: int, record: bytes) -> None:
        """The end of a request, after the last of its parts."""
        self._replies += [*self._parts(number), record]
        self._flush_soon()

    def drop(self, number: int) -> None:
        """Nobody reads this answer any more."""
        self._unread.pop(number, None)

    def _flush(self) -> None:
        self._due = False
        data, self._replies = self._replies, []
        if not self._caller.stuck:  # else with the next part, or with the end
            for number in tuple(self._unread):
                data += self._parts(number)
        if data:
            self._lines.send(self._caller, b"".join(data))

    def _parts(self, number: int) -> list[bytes]:
        unread, packed = self._unread.pop(number, None), []
        while unread:
            packed.append(pack(Record(Kind.PART, number=number, body=part_to_wire(unread.take()))))
        return packed

    def _flush_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._flush)

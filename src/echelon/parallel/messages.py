"""What ranks that share no memory send one another by gloo: columns of activations, hidden states, and what rank 0 tells, signed.

Tensors go with the hash of the plan that they belong to, so that ranks which run different passes notice.
"""

from __future__ import annotations

import hmac
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GatherOptions

from echelon.errors import RankError
from echelon.model.patches.split import Parts
from echelon.parallel.group import AGAIN, NUM_SENT
from echelon.parallel.meeting import Meeting

HASH_BYTES, LENGTH_BYTES, SIGNATURE_BYTES = 8, 8, 16
HEAD = LENGTH_BYTES + SIGNATURE_BYTES
FRAME = 8192  # bytes of the first piece of a message, in which most plans fit
MOST_BYTES = 1 << 28  # of a message


class Told:
    """What rank 0 tells all others, in order, each signed with its number."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self._number = meeting, 0
        others = [meeting.rank] if meeting.rank else range(1, meeting.size)
        self._groups = [meeting.group(f"told {rank}", 0, rank) for rank in others]  # one each: a busy rank keeps no other waiting
        self._under_way: deque[list[tuple[Any, Tensor]]] = deque()

    def tell(self, message: bytes) -> None:
        """Send it; returns before it has come."""
        self._number += 1
        while self._under_way and (len(self._under_way) >= NUM_SENT or self._under_way[0][-1][0].is_completed()):
            for work, _ in self._under_way.popleft():
                self._meeting.wait(work)
        framed = len(message).to_bytes(LENGTH_BYTES, "little") + self._signature(message) + message
        whole = torch.frombuffer(bytearray(framed.ljust(FRAME, b"\0")), dtype=torch.uint8)
        pieces = [piece for piece in (whole[:FRAME], whole[FRAME:]) if len(piece)]
        self._under_way.append([(group.broadcast(piece, 0), piece) for group in self._groups for piece in pieces])

    def next(self) -> bytes:
        """The next one, on any other rank.

        Raises
        ------
        RankError  it is damaged, or signed by somebody else
        """
        self._number += 1
        frame = self._received(FRAME)
        length = int.from_bytes(frame[:LENGTH_BYTES], "little")
        if length > MOST_BYTES:
            raise RankError(f"message {self._number} of rank 0 has {length:,} bytes, and at most {MOST_BYTES:,} are read; {AGAIN}")
        rest = HEAD + length - FRAME
        message = (frame + self._received(rest) if rest > 0 else frame)[HEAD : HEAD + length]
        if not hmac.compare_digest(frame[LENGTH_BYTES:HEAD], self._signature(message)):
            raise RankError(f"message {self._number} is not what rank 0 has signed; {AGAIN}")
        return message

    def _received(self, count: int) -> bytes:
        piece = torch.empty(count, dtype=torch.uint8)
        self._meeting.wait(self._groups[0].broadcast(piece, 0))
        return piece.numpy().tobytes()

    def _signature(self, message: bytes) -> bytes:
        return hmac.digest(self._meeting.key, self._number.to_bytes(8, "little") + message, "sha256")[:SIGNATURE_BYTES]


class RankLink:
    """A rank's way to others in a pass."""

    def __init__(self, meeting: Meeting) -> None:
        self.rank, self.size, self.is_connected = meeting.rank, meeting.size, False
        self._meeting, self._plan_hash = meeting, 0

    @contextmanager
    def connected(self, plan_hash: int) -> Iterator[None]:
        """Inside, all ranks run the pass of one plan."""
        self.is_connected, self._plan_hash = True, plan_hash
        try:
            yield
        finally:
            self.is_connected = False

    def _headed(self, count: int, plan_hash: int) -> Tensor:
        """Room for so many bytes behind the hash of the plan."""
        buffer = torch.zeros(HASH_BYTES + count, dtype=torch.uint8)
        buffer[:HASH_BYTES] = torch.frombuffer(bytearray(plan_hash.to_bytes(HASH_BYTES, "little")), dtype=torch.uint8)
        return buffer

    def _check(self, buffer: Tensor, rank: int, plan_hash: int) -> None:
        if int.from_bytes(buffer[:HASH_BYTES].numpy().tobytes(), "little") != plan_hash:
            raise RankError(f"rank {rank} runs another plan than rank {self.rank}; {AGAIN}")


class GroupExchange(RankLink):
    """Gathers of columns, as `Exchange` describes them."""

    inside = None

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(meeting)
        self._group = meeting.group("columns", *range(self.size))

    def gathered(self, own: Tensor, parts: Parts) -> Tensor:
        """This rank's columns [..., n] → [..., whole], those of all ranks."""
        sent = self._sent(own, parts)
        whole = torch.empty(self.size * len(sent), dtype=torch.uint8)
        self._meeting.wait(self._group._allgather_base(whole, sent))
        return self._put_together(whole.view(self.size, -1), own, parts)

    def gathered_by_first(self, own: Tensor, parts: Parts) -> Tensor:
        """The same on rank 0; others get room [..., whole] that holds anything."""
        sent, options = self._sent(own, parts), GatherOptions()
        options.rootRank = 0
        whole = torch.empty(0 if self.rank else self.size, len(sent), dtype=torch.uint8)
        self._meeting.wait(self._group.gather([] if self.rank else [list(whole)], [sent], options))
        return own.new_empty(*own.shape[:-1], parts[0].whole) if self.rank else self._put_together(whole, own, parts)

    def _sent(self, own: Tensor, parts: Parts) -> Tensor:
        """Bytes of own [..., n], filled up to the columns of the rank that has most, as gloo gathers equally many of each."""
        shape = (*own.shape[:-1], _widest(parts))
        buffer = self._headed(math.prod(shape) * own.itemsize, self._plan_hash)
        buffer[HASH_BYTES:].view(own.dtype).view(shape)[..., : own.shape[-1]] = own
        return buffer

    def _put_together(self, whole: Tensor, own: Tensor, parts: Parts) -> Tensor:
        """Bytes of all ranks [size, …] → [..., whole]."""
        out = own.new_empty(*own.shape[:-1], parts[0].whole)
        for rank, (part, sent) in enumerate(zip(parts, whole, strict=True)):
            self._check(sent, rank, self._plan_hash)
            count = part.last - part.first
            columns = sent[HASH_BYTES:].view(own.dtype).view(*own.shape[:-1], _widest(parts))
            out[..., part.first : part.last] = columns[..., :count]
        return out


def _widest(parts: Parts) -> int:
    return max(part.last - part.first for part in parts)


class GroupHandover(RankLink):
    """Hidden states from each stage to the next, and from the last to rank 0."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(meeting)
        self._before = (self.rank - 1) % self.size
        # in the order of their numbers, in which no rank waits for one that waits for it
        ways = {r: meeting.group(f"from {r}", r, (r + 1) % self.size) for r in sorted({self.rank, self._before})}
        self._out, self._in = ways[self.rank], ways[self._before]
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    def send(self, states: Tensor, plan_hash: int) -> None:
        """Hand on states [T, columns] in the pass of a plan; returns before they have come."""
        while len(self._under_way) >= NUM_SENT:
            self._meeting.wait(self._under_way.popleft()[0])
        buffer = self._headed(states.nbytes, plan_hash)
        buffer[HASH_BYTES:].view(states.dtype).view(states.shape).copy_(states)
        self._under_way.append((self._out.broadcast(buffer, 0), buffer))

    def receive(self, into: Tensor, plan_hash: int) -> Tensor:
        """Wait for what the rank before hands on in the pass of a plan, as many states [T, columns] as `into` holds, which is returned."""
        buffer = torch.empty(HASH_BYTES + into.nbytes, dtype=torch.uint8)
        self._meeting.wait(self._in.broadcast(buffer, 0))
        self._check(buffer, self._before, plan_hash)
        return into.copy_(buffer[HASH_BYTES:].view(into.dtype).view(into.shape))

    def fits(self, states: Tensor) -> bool:  # noqa: ARG002
        """Do states [T, columns] go in one piece? All do."""
        return True

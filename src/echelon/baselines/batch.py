"""The batch of a strategy whose keys and values lie in a rectangle; the legend of shapes stands in `echelon.batch`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from echelon.batch import PassInputs


@dataclass(frozen=True)
class PaddedBatch(PassInputs):
    """New tokens of B rows whose keys and values lie in a rectangle, for masked attention of the framework. n: most new tokens of a row.

    tokens          int32[T']    rows padded to n tokens each (T' = B · n, pads are 0), or concatenated (T' = T)
    positions       int32[T']    as in any batch; a pad repeats its row's last
    written         int64[T]     indices into T' of the real tokens
    slots           int64[T]     line · num_slots + slot that each of them is written to
    lines           [first, end) of the lines that the rows are, and
    columns         [first, end) of their slots that attention loads
    gathered        int64[B, W]  instead of lines and columns: the slots to copy together before attention; or None
    key_positions   int32[B, W]  position of the token in each loaded slot; −1: dead
    query_positions int32[B, n]  position of each query; a pad repeats its row's last, so that it sees something
    queries         int64[B, n]  indices into T' of the queries; None where T' is the rectangle itself
    outputs         int64[T']    where concatenated tokens find their output in the rectangle, with `queries`
    num_live        slots that hold a token of their row
    num_reserved    slots that no other row can use while these run
    masks           what attention has worked out about this batch, shared by all layers
    """

    written: Tensor
    slots: Tensor
    lines: tuple[int, int]
    columns: tuple[int, int]
    gathered: Tensor | None
    key_positions: Tensor
    query_positions: Tensor
    queries: Tensor | None
    outputs: Tensor | None
    num_live: int
    num_reserved: int
    masks: dict[Any, Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.written)

    def for_attention(self, device: torch.device) -> PaddedBatch:
        """Copy what attention reads to this device, and share `masks`; what the model is fed stays where it is."""
        if self.slots.device == device:
            return self
        names = ("written", "slots", "gathered", "key_positions", "query_positions", "queries", "outputs")
        moved: dict[str, Any] = {name: None if (t := getattr(self, name)) is None else t.to(device) for name in names}
        return replace(self, **moved)

    def check(self) -> None:
        """Every query sees a key, and every new token its own slot once."""
        visible = (self.key_positions[:, None] >= 0) & (self.key_positions[:, None] <= self.query_positions[..., None])
        assert bool(visible.any(-1).all()), "a query sees nothing"
        assert len(set(self.slots.tolist())) == len(self.slots) == self.num_tokens

"""Tokens for the caller's streamers, as soon as they are known to stay."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor
from transformers.generation import BaseStreamer

from echelon.errors import RequestError


class BatchStreamer(BaseStreamer):  # type: ignore[misc]
    """One streamer for the batch, which is given what `generate` gives it: the prompts [B, n], then a token of every row at a time [B]. Or
    a list of one a row, each of which is given its own prompt [1, n] and tokens [1] as the row gets them, and ended when that ends.
    """

    def __init__(self, streamers: Any) -> None:
        self._is_by_row = isinstance(streamers, (list, tuple))
        self._streamers: list[Any] = list(streamers) if self._is_by_row else [streamers]
        for streamer in self._streamers:
            if not callable(getattr(streamer, "put", None)) or not callable(getattr(streamer, "end", None)):
                raise RequestError(f"streamer is a {type(streamer).__name__}; it must have put and end, or be a list of such, one a row")
        self._num_shown = [0] * len(self._streamers)
        self._has_ended = [False] * len(self._streamers)

    def put(self, value: Tensor) -> None:
        """The prompts [B, n], from `generate`."""
        if self._is_by_row and len(value) != len(self._streamers):
            raise RequestError(f"streamer is a list of {len(self._streamers)}, and the batch has {len(value)} rows; give one for each")
        for streamer, prompt in zip(self._streamers, value[:, None] if self._is_by_row else [value], strict=True):
            streamer.put(prompt)

    def show(self, rows: SequenceOf[SequenceOf[int]], is_over: SequenceOf[bool], pad: int) -> None:
        """Hand on what the rows' new tokens `rows` have more than before. A row that is over is filled with `pad` for a common streamer."""
        if self._is_by_row:
            for i, (row, over) in enumerate(zip(rows, is_over, strict=True)):
                self._show_row(i, row, over)
            return
        longest = max(map(len, rows))
        while (at := self._num_shown[0]) < longest and all(len(row) > at or over for row, over in zip(rows, is_over, strict=True)):
            self._streamers[0].put(torch.tensor([row[at] if len(row) > at else pad for row in rows]))
            self._num_shown[0] += 1

    def _show_row(self, i: int, row: SequenceOf[int], is_over: bool) -> None:
        for token in row[self._num_shown[i] :]:
            self._streamers[i].put(torch.tensor([token]))
        self._num_shown[i] = len(row)
        if is_over and not self._has_ended[i]:
            self._end(i)

    def end(self) -> None:
        """End those that have not been ended."""
        for i in range(len(self._streamers)):
            if not self._has_ended[i]:
                self._end(i)

    def _end(self, i: int) -> None:
        self._has_ended[i] = True
        self._streamers[i].end()

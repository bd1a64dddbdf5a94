"""A model, its keys and values, and the rows in them: feed spans of tokens, get logits. The forward pass over packed tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.batch import PassInputs, RaggedBatch, Span
from echelon.kv.cache import KVCache, KVStorage
from echelon.model import pack as unpadded
from echelon.model.attention import CONTEXT_KEYWORD, AttentionContext, CachedAttention
from echelon.model.hidden_states import HiddenStateReader
from echelon.model.load.loading import LoadedModel
from echelon.model.patches.rope import coded_positions
from echelon.ops import ROWS_PER_CALL, devices
from echelon.sampling import SamplingParams
from echelon.stats import Occupancy, Usage


@dataclass(frozen=True)
class Draws:
    """Sampling in a chain of passes: parameters of each row, and the noise keys of each pass and row (`sampling.noise_key`)."""

    params: Sequence[SamplingParams]
    noise_keys: Sequence[Sequence[int]]


class CapturedPasses(Protocol):
    """Passes of one model as CUDA graphs; see `model.graphs.programs`."""

    @property
    def num_captures(self) -> int:
        """Graphs captured so far."""

    def run(self, batch: Any, reader: HiddenStateReader | None) -> tuple[Tensor, Tensor | None, int] | None: ...
    def chain(self, batches: Sequence[Any], width: int, draws: Draws | None) -> tuple[Tensor, list[int]] | None: ...


def forward(
    loaded: LoadedModel, reader: HiddenStateReader | None, tokens: Tensor, positions: Tensor, logit_rows: Tensor, context: AttentionContext
) -> tuple[Tensor, Tensor | None]:
    """Run the model on what lies on its device: logits [R, V] and hidden states [T, F] for tokens and positions int [T], logit_rows [R]."""
    with reader.reading() if reader else nullcontext() as states:
        output = loaded.model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=logit_rows, **{CONTEXT_KEYWORD: context}
        )
    logits: Tensor = output.logits[0]
    return logits, reader.joined(states, len(tokens)) if reader and states is not None else None


BatchT = TypeVar("BatchT", bound=PassInputs)


class Runner(ABC, Generic[BatchT]):
    """Runs the batches of one strategy. Slots for every position must have been reserved in `cache.tables`."""

    cache: KVStorage
    hidden_state_reader: HiddenStateReader | None = None  # what a drafter asks to see of every pass
    captured: CapturedPasses | None = None  # passes as CUDA graphs, of ragged batches alone

    def __init__(self, loaded: LoadedModel, cache: KVStorage) -> None:
        self.loaded, self.cache, self.usage = loaded, cache, Usage()

    @abstractmethod
    def pack(self, spans: Sequence[Span]) -> BatchT:
        """Pack all spans into one batch."""

    @abstractmethod
    def attention(self, batch: BatchT) -> AttentionContext:
        """Return what answers the attention layers of a pass over `batch`."""

    @abstractmethod
    def occupancy(self, batch: BatchT) -> Occupancy:
        """Count what a pass over `batch` holds and loads."""

    def positions(self, batch: BatchT) -> Tensor:
        """Positions int32[T] that the model is fed."""
        return batch.positions

    @torch.inference_mode()
    def chain(self, batches: Sequence[BatchT], width: int, draws: Draws | None) -> Tensor | None:
        """Run a pass a batch without the host between them, in one captured graph; None where that cannot be, and then nothing has run.

        Batch k + 1 replaces its tokens by those chosen from batch k, the likeliest or by `draws`. Rows must be sorted by draft length,
        longest first, because a later batch may drop rows from the end. Returns chosen tokens int64 [len(batches), B] among `width` ids,
        −1 where a drawn one has none.
        """
        if self.captured is None:
            return None
        self.cache.apply_copies()
        replayed = self.captured.chain(batches, width, draws)
        if replayed is None:
            return None
        tokens, num_inputs = replayed
        for batch, count in zip(batches, num_inputs, strict=True):
            self.count(batch, batch.num_tokens, count)
        return tokens

    def num_lanes(self, num_tokens: int) -> int:  # noqa: ARG002
        """How many passes are best under way at a time, each over some of the rows, where all rows together feed so many tokens."""
        return 1

    def begin(self, batch: BatchT) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Begin one pass; what is returned waits for what `run` gives. Passes that are under way hold rows of their own each, and are
        waited for in the order in which they began.
        """
        return partial(self.run, batch)

    def num_cached(self, row: int) -> int:
        """Tokens of the row that have keys and values."""
        return self.cache.tables.num_cached(row)

    def feed(self, spans: Sequence[Span]) -> Tensor:
        """Pack and run spans whose tokens are known to stay: they count as cached at once. Logits [R, V]."""
        logits, _ = self.run(self.pack(spans))
        for span in spans:
            self.cache.tables.advance(span.row, span.start + len(span.tokens))
        return logits

    @torch.inference_mode()
    def run(self, batch: BatchT) -> tuple[Tensor, Tensor | None]:
        """Run one pass over every row: logits [R, V] of `batch.logit_rows`, float32 from kernels of ours, else in the model's dtype; and
        with a `hidden_state_reader` the hidden states [T, len(names) · d] of every new token, drafted ones included.

        Both are on the model's device, and may be overwritten by the next pass; the batch is on the host, and what the device needs of it
        goes there once, here and in attention.

        Without kernels of ours the packed tokens are filled up to full calls of ROWS_PER_CALL, so that the framework's element-wise
        operations see the same shapes.
        """
        self.cache.apply_copies()
        if self.captured and (replayed := self.captured.run(batch, self.hidden_state_reader)):
            logits, hidden_states, num_inputs = replayed
            self.count(batch, batch.num_tokens, num_inputs)
            return logits, hidden_states
        device = self.cache.device
        tokens, positions, logit_rows = (x.to(device) for x in (batch.tokens, self.positions(batch), batch.logit_rows))
        missing = 0 if devices.has_kernels(tokens) else -len(tokens) % ROWS_PER_CALL
        if missing:
            tokens, positions = F.pad(tokens, (0, missing)), F.pad(positions, (0, missing))
        logits, hidden_states = forward(self.loaded, self.hidden_state_reader, tokens, positions, logit_rows, self.attention(batch))
        self.count(batch, batch.num_tokens)
        return logits, None if hidden_states is None else hidden_states[: batch.num_tokens]

    def count(self, batch: BatchT, num_tokens: int, num_replayed: int | None = None) -> None:
        """Count one pass with `num_tokens` real ones; `num_replayed`: rows that a graph fed in it, padding included."""
        occupancy = self.occupancy(batch)
        if num_replayed is not None:
            occupancy = replace(occupancy, num_inputs=num_replayed)
            self.usage.num_replays += 1
        self.usage.count(num_tokens, occupancy, self.cache.bytes_per_slot)
        self.usage.layout_seconds, self.cache.seconds = self.usage.layout_seconds + self.cache.seconds, 0.0
        self.usage.num_captures = self.captured.num_captures if self.captured else 0

    def commit(self, row: int, num_known: int, path: Sequence[int] = (), num_held: int = 0) -> None:
        """Keep the first `num_known` tokens of the row and, of the drafted ones after them, the accepted path; give the rest back, but for
        the room of the row's first `num_held` tokens.
        """
        self.cache.tables.commit(row, num_known + len(path), num_held)


class ModelRunner(Runner[RaggedBatch]):
    """Runs ragged batches over blocks, as CUDA graphs where they are captured."""

    cache: KVCache

    def pack(self, spans: Sequence[Span]) -> RaggedBatch:
        return unpadded.pack(spans, self.cache.tables)

    def attention(self, batch: RaggedBatch) -> AttentionContext:
        return CachedAttention(batch, self.cache)

    def occupancy(self, batch: RaggedBatch) -> Occupancy:
        return unpadded.occupancy(batch, self.cache)

    def positions(self, batch: RaggedBatch) -> Tensor:
        return coded_positions(batch, self.loaded.original_context)

    def commit(self, row: int, num_known: int, path: Sequence[int] = (), num_held: int = 0) -> None:
        """Close the gaps that rejected branches of a tree leave, then as above."""
        first = next((i for i, node in enumerate(path) if node != i), len(path))
        if first < len(path):
            self.cache.tables.move(row, [num_known + node for node in path[first:]], num_known + first)
        super().commit(row, num_known, path, num_held)

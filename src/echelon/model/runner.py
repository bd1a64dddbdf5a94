"""A model, its cache and the rows in it: feed spans of tokens, get logits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.baselines.rectangle import RectangleCache
from echelon.batch import RaggedBatch, Span
from echelon.kv.cache import KVCache
from echelon.model import pack as unpadded
from echelon.model.attention import STEP_KEYWORD, CachedStep, Step
from echelon.model.hidden_states import Taps
from echelon.model.load.loading import LoadedModel
from echelon.model.patches.rope import coded_positions
from echelon.ops import ROWS_PER_CALL, devices
from echelon.stats import Load, Usage

if TYPE_CHECKING:
    from echelon.model.graphs.programs import Captured  # imports Triton


@dataclass(frozen=True)
class Draws:
    """How tokens are drawn in a chain of passes: parameters of each row, and the noise keys of each pass and row (`sampling.noise_key`)."""

    temperature: Sequence[float]
    top_k: Sequence[int]
    top_p: Sequence[float]
    min_p: Sequence[float]
    noise_keys: Sequence[Sequence[int]]


def launch(
    loaded: LoadedModel, taps: Taps | None, tokens: Tensor, positions: Tensor, logit_rows: Tensor, step: Step
) -> tuple[Tensor, Tensor | None]:
    """The model, from what lies on its device: logits [R, V] and taps [T, F] for tokens and positions [T] and logit_rows [R]."""
    with taps.reading() if taps else nullcontext() as found:
        output = loaded.model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=logit_rows, **{STEP_KEYWORD: step}
        )
    logits: Tensor = output.logits[0]
    return logits, taps.joined(found, len(tokens)) if taps and found is not None else None


class ModelRunner:
    """Runs ragged batches. Slots for every position must have been reserved in `cache.tables`."""

    cache: KVCache | RectangleCache
    taps: Taps | None = None  # what a drafter asks to see of every pass
    captured: Captured | None = None  # passes as CUDA graphs

    def __init__(self, loaded: LoadedModel, cache: KVCache | RectangleCache) -> None:
        self.loaded, self.cache, self.usage = loaded, cache, Usage()

    def capture(self) -> None:
        """From now on passes that can be are captured as CUDA graphs; the cache must have a null block."""
        from echelon.model.graphs.programs import captured  # imports Triton

        assert isinstance(self.cache, KVCache)
        self.captured = captured(self.loaded, self.cache)

    def num_cached(self, row: int) -> int:
        return self.cache.tables.num_cached(row)

    def pack(self, spans: Sequence[Span]) -> RaggedBatch:
        assert isinstance(self.cache, KVCache)
        return unpadded.pack(spans, self.cache.tables)

    def step(self, batch: RaggedBatch) -> Step:
        """What answers the attention layers of a pass over `batch`."""
        assert isinstance(self.cache, KVCache)
        return CachedStep(batch, self.cache)

    def load(self, batch: RaggedBatch) -> Load:
        """What a pass over `batch` holds and loads."""
        assert isinstance(self.cache, KVCache)
        return unpadded.load(batch, self.cache)

    def feed(self, spans: Sequence[Span]) -> Tensor:
        """Pack and run spans whose tokens are known to stay: they count as cached at once. Logits [R, V]."""
        logits, _ = self.run(self.pack(spans))
        for span in spans:
            self.cache.tables.advance(span.row, span.start + len(span.tokens))
        return logits

    @torch.inference_mode()
    def run(self, batch: RaggedBatch) -> tuple[Tensor, Tensor | None]:
        """One pass over every row: logits [R, V] of `batch.logit_rows`, float32 from kernels of ours, else in the model's dtype; and with
        `taps` the hidden states [T, len(taps) · d] of every new token, drafted ones included. Both are on the model's device, and may be
        overwritten by the next pass; the batch is on the host, and what the device needs of it goes there once, here and in the step.

        Without kernels of ours the packed tokens are filled up to full calls of ROWS_PER_CALL, so that the framework's element-wise
        operations see the same shapes.
        """
        self.cache.apply_copies()
        replayed = self.captured.run(batch, self.taps) if self.captured else None
        if replayed is not None:
            self.count(batch, batch.num_tokens, replayed.num_inputs)
            return replayed.logits, replayed.taps
        device = self.cache.device
        tokens, positions, logit_rows = (
            x.to(device) for x in (batch.tokens, coded_positions(batch, self.loaded.original_context), batch.logit_rows)
        )
        missing = 0 if devices.has_kernels(tokens) else -len(tokens) % ROWS_PER_CALL
        inputs = F.pad(tokens, (0, missing)), F.pad(positions, (0, missing))
        logits, taps = launch(self.loaded, self.taps, *inputs, logit_rows, self.step(batch))
        self.count(batch, batch.num_tokens)
        return logits, None if taps is None else taps[: batch.num_tokens]

    @torch.inference_mode()
    def chain(self, batches: Sequence[RaggedBatch], width: int, draws: Draws | None) -> Tensor | None:
        """A pass a batch without the host between them, in one captured graph; None where that cannot be, and then nothing has run.

        The first batch has a row of logits for every row of it; each later one feeds, to the first of these rows, the tokens that the one
        before has chosen, whatever tokens it holds: the likeliest, or by `draws`. Returns chosen tokens int64 [len(batches), B] among
        `width` ids, −1 where a drawn one has none; a row that is fed no longer gets anything.
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

    def count(self, batch: RaggedBatch, num_tokens: int, num_replayed: int | None = None) -> None:
        """One pass with `num_tokens` real ones; `num_replayed`: rows that a graph fed in it, padding included."""
        load = self.load(batch)
        if num_replayed is not None:
            load = replace(load, num_inputs=num_replayed)
            self.usage.num_replays += 1
        self.usage.count(num_tokens, load, self.cache.bytes_per_slot)
        self.usage.layout_seconds = self.cache.seconds
        self.usage.num_captures = self.captured.num_captures if self.captured else 0

    def commit(self, row: int, num_known: int, path: Sequence[int] = ()) -> None:
        """Keep the first `num_known` tokens of the row and, of the drafted ones after them, the accepted path; give the rest back."""
        first = next((i for i, node in enumerate(path) if node != i), len(path))
        if first < len(path):
            assert isinstance(self.cache, KVCache), "trees need blocks"
            self.cache.tables.move(row, [num_known + node for node in path[first:]], num_known + first)
        self.cache.tables.commit(row, num_known + len(path))

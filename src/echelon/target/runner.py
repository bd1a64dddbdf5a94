"""A model, its cache and the rows in it: feed spans of tokens, get logits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.batch import RaggedBatch, Span
from echelon.kv.cache import KVCache
from echelon.kv.rectangle import RectangleCache
from echelon.layouts import unpadded
from echelon.ops import ROWS_PER_CALL, devices
from echelon.stats import Load, Usage
from echelon.target.attention import STEP_KEYWORD, CachedStep, Step
from echelon.target.loading import LoadedModel
from echelon.target.rope import coded_positions
from echelon.target.taps import Taps


class ModelRunner:
    """Runs ragged batches. Slots for every position must have been reserved in `cache.tables`."""

    cache: KVCache | RectangleCache
    taps: Taps | None = None  # what a drafter asks to see of every pass

    def __init__(self, loaded: LoadedModel, cache: KVCache | RectangleCache) -> None:
        self.loaded, self.cache, self.usage = loaded, cache, Usage()

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
        `taps` the hidden states [T, len(taps) · d] of every new token, drafted ones included. Both are on the model's device; the batch is
        on the host, and what the device needs of it goes there once, here and in the step.

        Without kernels of ours the packed tokens are filled up to full calls of ROWS_PER_CALL, so that the framework's element-wise
        operations see the same shapes.
        """
        self.cache.apply_copies()
        device = self.cache.device
        tokens, positions, logit_rows = (
            x.to(device) for x in (batch.tokens, coded_positions(batch, self.loaded.original_context), batch.logit_rows)
        )
        missing = 0 if devices.has_kernels(tokens) else -len(tokens) % ROWS_PER_CALL
        with self.taps.reading() if self.taps else nullcontext() as found:
            output = self.loaded.model(
                input_ids=F.pad(tokens, (0, missing))[None],
                position_ids=F.pad(positions, (0, missing))[None],
                use_cache=False,
                logits_to_keep=logit_rows,
                **{STEP_KEYWORD: self.step(batch)},
            )
        logits: Tensor = output.logits[0]
        self.usage.count(batch.num_tokens, self.load(batch), self.cache.bytes_per_slot)
        self.usage.layout_seconds = self.cache.seconds
        return logits, self.taps.joined(found, batch.num_tokens) if self.taps and found is not None else None

    def commit(self, row: int, num_known: int, path: Sequence[int] = ()) -> None:
        """Keep the first `num_known` tokens of the row and, of the drafted ones after them, the accepted path; give the rest back."""
        first = next((i for i, node in enumerate(path) if node != i), len(path))
        if first < len(path):
            assert isinstance(self.cache, KVCache), "trees need blocks"
            self.cache.tables.move(row, [num_known + node for node in path[first:]], num_known + first)
        self.cache.tables.commit(row, num_known + len(path))

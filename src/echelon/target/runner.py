"""A model, its cache and the rows in it: feed spans of tokens, get logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.batch import RaggedBatch, Span
from echelon.kv.cache import KVCache
from echelon.layouts import unpadded
from echelon.ops import ROWS_PER_CALL
from echelon.target.attention import STEP_KEYWORD, CachedStep
from echelon.target.loading import LoadedModel
from echelon.target.rope import coded_positions


class ModelRunner:
    """Runs ragged batches. Slots for every position must have been reserved in `cache.tables`."""

    def __init__(self, loaded: LoadedModel, cache: KVCache) -> None:
        self.loaded, self.cache = loaded, cache

    def num_cached(self, row: int) -> int:
        return self.cache.tables.num_cached(row)

    def pack(self, spans: Sequence[Span]) -> RaggedBatch:
        return unpadded.pack(spans, self.cache.tables)

    def feed(self, spans: Sequence[Span]) -> Tensor:
        """Pack and run spans whose tokens are known to stay: they count as cached at once. Logits [R, V]."""
        logits = self.run(self.pack(spans))
        for span in spans:
            self.cache.tables.advance(span.row, span.start + len(span.tokens))
        return logits

    @torch.inference_mode()
    def run(self, batch: RaggedBatch) -> Tensor:
        """One pass over every row: logits [R, V] of `batch.logit_rows`, float32 from compiled kernels, else in the model's dtype.

        The packed tokens are filled up to full calls of ROWS_PER_CALL, so that element-wise operations see the same shapes;
        compiled layers skip what was filled up.
        """
        self.cache.apply_copies()
        missing = -batch.num_tokens % ROWS_PER_CALL
        with self.loaded.rows.filled_up(batch.num_tokens, batch.num_tokens + missing):
            output = self.loaded.model(
                input_ids=F.pad(batch.tokens, (0, missing))[None],
                position_ids=F.pad(coded_positions(batch, self.loaded.original_context), (0, missing))[None],
                use_cache=False,
                logits_to_keep=batch.logit_rows,
                **{STEP_KEYWORD: CachedStep(batch, self.cache)},
            )
        logits: Tensor = output.logits[0]
        return logits

    def commit(self, row: int, num_cached: int) -> None:
        """Keep the first `num_cached` tokens of the row, give the rest back."""
        self.cache.tables.commit(row, num_cached)

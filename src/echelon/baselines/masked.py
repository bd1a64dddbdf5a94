"""Attention of the framework (SDPA) with an explicit mask over rectangular keys and values: for strategies that need no kernel of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.baselines.layout import PaddedBatch
from echelon.baselines.lines import LineTables
from echelon.baselines.rectangle import RectangleCache
from echelon.batch import Span
from echelon.errors import UnsupportedModelError
from echelon.model.attention import LayerCall
from echelon.model.load.loading import LoadedModel
from echelon.model.runner import Runner
from echelon.stats import Occupancy

Pack = Callable[[Sequence[Span], LineTables], PaddedBatch]


class MaskedAttention:
    """Write the batch's keys and values into the rectangle, then attend with a mask made from positions."""

    def __init__(self, batch: PaddedBatch, cache: RectangleCache) -> None:
        self.batch, self.cache = batch.for_attention(cache.device), cache

    def attend(self, call: LayerCall) -> Tensor:
        """Return [T', H, Dv] for `call`, zeros for tokens that are padding."""
        refuse_softcap_and_sinks(call)
        batch = self.batch
        self.cache.write(call.layer, call.key[batch.written], call.value[batch.written], batch.slots)
        keys, values = self._loaded(call.layer)
        num_rows, widest = batch.query_positions.shape
        heads, size, kv_heads = call.query.shape[1], call.query.shape[2], keys.shape[2]
        group = heads // kv_heads
        query = call.query[: num_rows * widest] if batch.queries is None else call.query[batch.queries.flatten()]
        # the heads that share keys lie side by side as queries, so that keys and values are neither repeated nor read more than once
        folded = query.to(keys.dtype).view(num_rows, widest, kv_heads, group, size).transpose(1, 2).reshape(num_rows, kv_heads, -1, size)
        mask = self._mask(call.window, group, keys.dtype)
        count = folded.shape[2]
        if count == 1 and not query.is_cuda:  # on the CPU the framework reads keys for one query at a quarter of the speed for two
            folded = folded.expand(-1, -1, 2, -1)
        out = F.scaled_dot_product_attention(folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=call.scale)
        out = out[:, :, :count].reshape(num_rows, kv_heads, widest, group, -1).transpose(1, 2).reshape(num_rows * widest, heads, -1)
        out = (out if batch.outputs is None else out[batch.outputs]).to(call.query.dtype)
        return F.pad(out, (0, 0, 0, 0, 0, len(call.query) - len(out)))

    def _loaded(self, layer: int) -> tuple[Tensor, Tensor]:
        """Load keys and values [B, W, Hkv, D] of the rows: a view, or a copy where the strategy copies."""
        batch = self.batch
        if batch.gathered is not None:
            return self.cache.gather(layer, batch.gathered)
        where = (slice(*batch.lines), slice(*batch.columns))
        return self.cache.keys[layer][where], self.cache.values[layer][where]

    def _mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """[B, 1, n · group, W], 0 where a query sees a key and −∞ elsewhere; made once for all layers alike."""
        key = (window, group, dtype)
        if key not in self.batch.masks:
            keys, queries = self.batch.key_positions[:, None], self.batch.query_positions[..., None]
            visible = (keys >= 0) & (keys <= queries)
            if window is not None:
                visible &= keys > queries - window
            mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
            mask = mask.repeat_interleave(group, 1)[:, None]
            if mask.is_cuda:  # lines that do not start at multiples of 16 bytes the framework would copy in every layer
                mask = F.pad(mask, (0, -mask.shape[3] % 8))[..., : mask.shape[3]]
            self.batch.masks[key] = mask
        return self.batch.masks[key]


def refuse_softcap_and_sinks(call: LayerCall) -> None:
    """Raise `UnsupportedModelError` for what SDPA lacks: it takes a mask and a scale; a window is a mask."""
    for name, value in (("caps its attention scores (softcap)", call.softcap), ("has attention sinks", call.sinks)):
        if value is not None:
            raise UnsupportedModelError(f"layer {call.layer} {name}, which the framework's attention cannot do; use strategy='unpadded'")


class MaskedRunner(Runner[PaddedBatch]):
    """Runs batches over a rectangular cache; `pack` is the strategy's layout."""

    cache: RectangleCache

    def __init__(self, loaded: LoadedModel, cache: RectangleCache, pack: Pack) -> None:
        super().__init__(loaded, cache)
        self._pack = pack

    def pack(self, spans: Sequence[Span]) -> PaddedBatch:
        return self._pack(spans, self.cache.tables)

    def attention(self, batch: PaddedBatch) -> MaskedAttention:
        self.cache.scrub()
        return MaskedAttention(batch, self.cache)

    def occupancy(self, batch: PaddedBatch) -> Occupancy:
        tensors = (batch.slots, batch.key_positions, batch.gathered, batch.queries, batch.outputs, *batch.masks.values())
        index_bytes = sum(t.nbytes for t in tensors if t is not None)
        return Occupancy(len(batch.tokens), batch.num_reserved, batch.key_positions.numel(), batch.num_live, index_bytes)

"""Passes of a model as CUDA graphs: one pass, or a chain of passes in which each reads the tokens that the one before has chosen.

The results are the bits of passes run one launch after another: where all operations are invariant, a token's result depends on no other
token, and so padding changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from echelon.batch import RaggedBatch
from echelon.kv.cache import KVCache
from echelon.model.attention import LayerCall, record_layers
from echelon.model.graphs.buckets import Bucket, bucket_of, common
from echelon.model.graphs.buffers import Buffers, Inputs, PassValues, table_width
from echelon.model.graphs.graphs import Graphs, Outputs
from echelon.model.hidden_states import HiddenStateReader
from echelon.model.load.loading import LoadedModel
from echelon.model.patches.experts import is_experts
from echelon.model.patches.rope import coded_positions
from echelon.model.runner import Draws, forward
from echelon.ops.triton.attention import plan_key, planned_attention
from echelon.ops.triton.plan import PlanKey, plan_tables
from echelon.ops.triton.sample import draw_columns, draw_rows

logger = logging.getLogger("echelon")
MOST_TOKENS = 512  # with more, a layer of a 7B model keeps a large device busy for longer than the host takes to launch it
TOKEN_COLUMNS = (torch.int32, torch.int32, torch.int32, torch.int64)  # tokens, positions, those that the model is given, slots
DRAWN = (torch.float32, torch.int32, torch.float64, torch.float32)  # `draw_columns` without the keys
Launch = Callable[[Inputs, Tensor], tuple[Tensor, Tensor | None]]  # one pass over these tokens


class PlannedAttention:
    """`CachedAttention` by plans that lie on the device already."""

    def __init__(self, inputs: Inputs, cache: KVCache) -> None:
        self._inputs, self._cache = inputs, cache

    def attend(self, call: LayerCall) -> Tensor:
        self._cache.write(call.layer, call.key, call.value, self._inputs.slots)
        keys, values = self._cache.keys[call.layer], self._cache.values[call.layer]
        plan = self._inputs.plans[plan_key(call.query, keys.shape[1], call.window)]
        size = self._cache.block_size
        return planned_attention(call.query, keys, values, plan, size, call.scale, call.window, call.softcap, call.sinks)


class Captured:
    """The graphs of one model. No graph refers back to this object, so that dropping it frees their memory and the cache at once."""

    def __init__(self, loaded: LoadedModel, cache: KVCache) -> None:
        self._loaded, self.cache = loaded, cache
        keys: list[PlanKey] = []  # of the plans that the layers need
        record_layers(loaded.model, lambda call: keys.append(plan_key(call.query, call.key.shape[1], call.window)))
        self.keys = tuple(dict.fromkeys(keys))
        self.graphs = Graphs(cache.device)

    @property
    def num_captures(self) -> int:
        """Graphs captured so far."""
        return self.graphs.num_captures

    def launch(self, reader: HiddenStateReader | None = None) -> Launch:
        """The eager pass: what a graph captures, and what runs while none is captured."""
        return partial(_launch, self._loaded, self.cache, reader)

    def run(self, batch: RaggedBatch, reader: HiddenStateReader | None) -> tuple[Tensor, Tensor | None, int] | None:
        """Logits [R, V] and hidden states [T, F] of one pass, always with the same reader, and how many rows it fed, padding included;
        None where it is to be run eagerly.
        """
        if not 0 < len(batch.logit_rows) <= batch.num_tokens <= MOST_TOKENS:
            return None
        values = self._values(batch)
        bucket = bucket_of(batch, values.tables)
        outputs = self.graphs.run(
            bucket,
            lambda: _OnePass(*self._buffers([bucket]), self.launch(reader)),
            lambda program: program.buffers.fill([values], [self._pads], (), [batch.block_table.numpy()]),
        )
        if outputs is None:
            return None
        logits, *found = outputs
        return logits[: len(batch.logit_rows)], found[0][: batch.num_tokens] if found else None, bucket.num_tokens

    def chain(self, batches: Sequence[RaggedBatch], width: int, draws: Draws | None) -> tuple[Tensor, list[int]] | None:
        """`ModelRunner.chain`, and how many rows each pass fed, padding included; None as in `run`."""
        if batches[0].num_tokens > MOST_TOKENS:
            return None
        passes = [self._values(batch) for batch in batches]
        first, *later = (bucket_of(batch, values.tables) for batch, values in zip(batches, passes, strict=True))
        if later:
            again = common([*later, Bucket(first.num_logits, first.num_logits, 1, later[0].plans)])
            later = [again] * len(later)
        buckets = [first, *later]
        rows = first.num_logits
        columns = () if draws is None else draw_columns(draws.params, draws.noise_keys)
        shapes = [] if draws is None else [*(((rows,), dtype) for dtype in DRAWN), ((len(batches), rows), torch.int64)]
        outputs = self.graphs.run(
            (*buckets, width, draws is None),
            lambda: _ChainOfPasses(*self._buffers(buckets, shapes), self.launch(), width),
            lambda program: program.buffers.fill(passes, [self._pads] * len(passes), columns, [batches[0].block_table.numpy()]),
        )
        if outputs is None:
            return None
        return outputs[0][:, : batches[0].num_rows], [b.num_tokens for b in buckets]

    @property
    def _pads(self) -> tuple[Any, ...]:
        """Padding has token and position 0; its keys and values go to the null slots."""
        return 0, 0, 0, self.cache.null_slots

    def _values(self, batch: RaggedBatch) -> PassValues[NDArray[Any]]:
        coded = coded_positions(batch, self._loaded.original_context)
        columns = tuple(column.numpy() for column in (batch.tokens, batch.positions, coded, batch.slots))
        return PassValues(columns, batch.logit_rows.numpy(), tuple(plan_tables(batch, key) for key in self.keys))

    def _buffers(
        self, buckets: Sequence[Bucket], columns: Sequence[tuple[tuple[int, ...], torch.dtype]] = ()
    ) -> tuple[Buffers, list[tuple[Tensor, Inputs]]]:
        """Memory of passes over the same rows, the first over all of them; and what each of them reads: its tokens, and the rest."""
        size = self.cache.block_size
        table = buckets[0].num_tokens, table_width(buckets, size)
        buffers = Buffers(buckets, TOKEN_COLUMNS, columns, [table], self.cache.device)
        inputs = []
        for i in range(len(buckets)):
            tokens, positions, coded, slots = buffers.columns_of(i)
            inputs.append((tokens, buffers.inputs(i, self.keys, buffers.block_tables[0], positions, coded, slots)))
        return buffers, inputs


def _launch(
    loaded: LoadedModel, cache: KVCache, reader: HiddenStateReader | None, inputs: Inputs, tokens: Tensor
) -> tuple[Tensor, Tensor | None]:
    return forward(loaded, reader, tokens, inputs.positions, inputs.logit_rows, PlannedAttention(inputs, cache))


@dataclass(frozen=True)
class _OnePass:
    buffers: Buffers
    passes: list[tuple[Tensor, Inputs]]
    launch: Launch

    def forward(self) -> Outputs:
        ((tokens, inputs),) = self.passes
        logits, hidden_states = self.launch(inputs, tokens)
        return (logits,) if hidden_states is None else (logits, hidden_states)


@dataclass(frozen=True)
class _ChainOfPasses(_OnePass):
    width: int

    def forward(self) -> Outputs:
        chosen: list[Tensor] = []
        for i, (tokens, inputs) in enumerate(self.passes):
            logits, _ = self.launch(inputs, chosen[-1].clamp_min(0).int() if chosen else tokens)
            chosen.append(self._choose(F.pad(logits, (0, self.width - logits.shape[-1]), value=-torch.inf), i))
        return (torch.stack(chosen),)

    def _choose(self, logits: Tensor, index: int) -> Tensor:
        if not self.buffers.columns:
            return logits.argmax(-1)
        temperature, top_k, top_p, log_min_p, noise_keys = self.buffers.columns
        return draw_rows(logits.float(), temperature, top_k, top_p, log_min_p, noise_keys[index])


def captured(loaded: LoadedModel, cache: KVCache) -> Captured | None:
    """The graphs of a model, or None where its passes wait for the device."""
    if any(is_experts(module) for module in loaded.model.modules()):
        logger.info("%s runs without CUDA graphs: which experts a step needs is known on the host alone", loaded.name)
        return None
    return Captured(loaded, cache)

"""Prompts read once for all methods: their keys and values are computed alone, kept, and written into each method's cache.

A run that measures decoding alone need not read 24 prompts of 512 tokens again for every strategy and round. What is written lies where the
strategy's own layout would have put it.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon import LLM, SamplingParams
from echelon.batch import Span
from echelon.bench.clock import time_parts
from echelon.bench.latency import sequence_of
from echelon.bench.phases import Recorder, Sums
from echelon.bench.throughput import DecodingMethod, Prompts, Run, ThroughputResult, display_name, engine_result
from echelon.bench.verify import STRATEGY_SETTINGS
from echelon.errors import ConfigError
from echelon.memory.pool import available_memory, num_blocks_for
from echelon.model.load.loading import LoadedModel
from echelon.model.runner import Runner
from echelon.ops.slots import gather_slots
from echelon.sequence import Sequence
from echelon.sizes import mebibytes
from echelon.stats import Stats

PIECE = 512  # prompt tokens a pass
HEADROOM = 1.2  # over the caches, for activations and logits
BLOCK = 16


@dataclass(frozen=True)
class Prefix:
    """A prompt without its last token, which the first step feeds. keys[layer], values[layer]: [len(tokens), num_kv_heads, size]."""

    tokens: list[int]
    keys: list[Tensor]
    values: list[Tensor]

    def first(self, count: int) -> Prefix:
        """Its first `count` tokens, which see nothing of what follows them; no copy."""
        return Prefix(self.tokens[:count], [k[:count] for k in self.keys], [v[:count] for v in self.values])


def bytes_per_token(*models: LoadedModel) -> int:
    """Keys and values of one token in all layers of all models (whose numerics, which the engine is told, do not matter here)."""
    plans = [LLM(m, max_num_seqs=1, max_model_len=2, numerics="fast").memory_plan for m in models]
    return sum(p.block_bytes // p.block_size for p in plans)


def check_memory(num_bytes: int, what: str, device: torch.device) -> None:
    """Refuse what would not fit beside what is in memory already, so that nothing swaps or is killed half way.

    Raises
    ------
    ConfigError
    """
    needed, available = int(num_bytes * HEADROOM), available_memory(device)
    if needed > available:
        raise ConfigError(f"{what} needs {mebibytes(needed)}, available are {mebibytes(available)}; take fewer or shorter rows")


def read_prefixes(loaded: LoadedModel, prompts: SequenceOf[SequenceOf[int]], **settings: Any) -> list[Prefix]:
    """Each prompt alone through the unpadded engine, which gives every row the same bits in any batch; `settings` are the engine's."""
    llm = LLM(loaded, max_num_seqs=1, max_model_len=max(map(len, prompts)) + 1, **settings)
    with llm.exclusive() as engine:
        return [_read(engine.target, row, list(prompt[:-1])) for row, prompt in enumerate(prompts)]


def _read(runner: Runner[Any], row: int, tokens: list[int]) -> Prefix:
    tables, cache = runner.cache.tables, runner.cache
    tables.reserve(row, len(tokens))
    slots = []
    for start in range(0, len(tokens), PIECE):
        span = Span(row, start, tokens[start : start + PIECE], 0, len(tokens))
        batch = runner.pack([span])
        slots.append(batch.slots)
        runner.run(batch)
        tables.advance(row, start + len(span.tokens))
    where = (torch.cat(slots) if slots else torch.zeros(0, dtype=torch.int64)).to(cache.device)
    prefix = Prefix(tokens, [gather_slots(k, where) for k in cache.keys], [gather_slots(v, where) for v in cache.values])
    tables.release(row)
    return prefix


def write_prefixes(runner: Runner[Any], rows: SequenceOf[int], prefixes: SequenceOf[Prefix]) -> None:
    """Give `rows` their prompts' keys and values, in the slots where this runner's strategy reads prompts to.

    The cache is empty, so that rows take its lines in order.
    """
    tables, cache = runner.cache.tables, runner.cache
    assert not tables.row_ids
    held = [(row, p) for row, p in zip(rows, prefixes, strict=True) if p.tokens]
    for row, prefix in held:
        has_room = tables.reserve(row, len(prefix.tokens))
        assert has_room, f"no room for the prompt of row {row}"
    if not held:
        return
    slots = runner.pack([Span(row, 0, p.tokens, 0, len(p.tokens)) for row, p in held]).slots.to(cache.device)
    for layer in range(len(cache.keys)):
        keys, values = (torch.cat([getattr(p, kind)[layer] for _, p in held]) for kind in ("keys", "values"))
        cache.write(layer, keys, values, slots)
    for row, prefix in held:
        tables.advance(row, len(prefix.tokens))


def begin(
    llm: LLM, prompts: SequenceOf[SequenceOf[int]], params: SamplingParams, prefixes: SequenceOf[Prefix], first_row: int = 0
) -> list[Sequence]:
    """Requests of one static batch in the engine, the target's prompts read already; rows are numbered from `first_row` on."""
    rows = range(first_row, first_row + len(prompts))
    sequences = [sequence_of(llm, row, prompt, params) for row, prompt in zip(rows, prompts, strict=True)]
    write_prefixes(llm.engine.target, rows, prefixes)
    for sequence in sequences:
        llm.engine.add(sequence)
    return sequences


def decode(
    llm: LLM, prompts: SequenceOf[SequenceOf[int]], params: SamplingParams, prefixes: SequenceOf[Prefix], first_row: int = 0
) -> tuple[list[list[int]], Recorder]:
    """Run one static batch to its end, the target's prompts read already: token ids, and what the steps added up to.

    A draft model reads the prompts itself in the first step, which then counts as no decoding step.
    """
    recorder = Recorder(llm.stats)
    with llm.exclusive() as engine:
        sequences = begin(llm, prompts, params, prefixes, first_row)
        recorder.start()
        reads_prompts = len(llm.storage.runners) > 1
        while engine.has_work:
            engine.step()
            recorder(reads_prompts)
            reads_prompts = False
    return [s.output_tokens for s in sequences], recorder


class PrefilledRun:
    """A method on one static batch whose prompts are read already: a contender of `throughput.measure`.

    The engine is built for each run and given up after it, so that of many methods only one holds a cache. `settings` are the engine's.
    Each engine runs `num_rehearsals` times before it is measured: on a device kernels are compiled when they are first met, and steps
    captured when they are met again.
    """

    def __init__(
        self,
        method: DecodingMethod,
        target: LoadedModel,
        draft: LoadedModel | None,
        prefixes: SequenceOf[Prefix],
        max_model_len: int,
        num_rehearsals: int = 0,
        **settings: Any,
    ) -> None:
        self.name = display_name(method.name, method.strategy)
        self._num_rehearsals, self._settings = num_rehearsals, settings
        self._method, self._target, self._draft, self._prefixes = method, target, draft, prefixes
        self._max_model_len = max_model_len
        self._decode, self._stats = Sums(), Stats()

    def warm_up(self, prompts: Prompts, params: SamplingParams) -> None:
        """Two rows: enough to load code, and no large cache; rehearsals do more."""
        if not self._num_rehearsals:
            decode(self._engine(len(prompts[:2])), prompts[:2], params, self._prefixes[: len(prompts[:2])])

    def run(self, prompts: Prompts, params: SamplingParams) -> Run:
        llm = self._engine(len(prompts))
        for _ in range(self._num_rehearsals + 1):
            outputs, recorder = decode(llm, prompts, params, self._prefixes[: len(prompts)])
        self._decode += recorder.decode
        self._stats = llm.stats
        return Run(outputs, recorder.whole["seconds"], (recorder.decode["tokens"], recorder.decode["seconds"]))

    def result(self, batch_size: int, runs: SequenceOf[Run]) -> ThroughputResult:
        """Acceptance is the last run's; all of them draft and accept the same."""
        return engine_result(self._method, batch_size, runs, self._stats, self._decode)

    def _engine(self, num_rows: int) -> LLM:
        if self._target.device.type != "cpu":
            gc.collect()  # engines before this one: what they hold on a device nothing else would free in time
        config = self._method.config
        models = [self._target, *([self._draft] if config and config["method"] == "draft_model" and self._draft else [])]
        num_drafted = (config or {}).get("num_speculative_tokens", 0)
        num_slots = self._max_model_len + BLOCK + num_drafted
        num_slots += BLOCK * (1 + num_blocks_for(1 + num_drafted, BLOCK))  # that strategies with dead slots keep free besides
        num_bytes = (num_rows * num_slots + BLOCK) * bytes_per_token(*models)  # captured passes take a block for themselves
        check_memory(num_bytes, f"{self.name} with {num_rows} rows of {num_slots} tokens", self._target.device)
        llm = LLM(
            self._target,
            config,
            self._draft,
            max_num_seqs=num_rows,
            max_model_len=self._max_model_len,
            block_size=BLOCK,
            kv_cache_memory_bytes=num_bytes,
            refill=False,
            enable_prefix_caching=False,
            **self._settings,
            **STRATEGY_SETTINGS[self._method.strategy],
        )
        for storage in (*llm.engine.target.cache.keys, *llm.engine.target.cache.values):
            storage.zero_()  # the operating system hands out memory at the first touch, which is no part of decoding
        time_parts(llm)
        if self._method.prepare is not None:
            self._method.prepare(llm)
        return llm

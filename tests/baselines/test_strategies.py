"""Every batching strategy gives the text of plain decoding alone, is what it says it is, and counts what it pads."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import toys
from test_decoders import DECODERS, GREEDY, PROMPTS, by_transformers, model

from echelon import LLM, ConfigError, EngineConfig, SamplingParams, UnsupportedModelError
from echelon.baselines import layout as rectangles
from echelon.baselines.layout import PaddedBatch
from echelon.baselines.lines import LineTables
from echelon.baselines.rectangle import RectangleCache
from echelon.baselines.selection import SameLength, prompts_apart
from echelon.batch import Span
from echelon.kv.cache import LayerShape
from echelon.stats import Usage

STRATEGIES: dict[str, dict[str, Any]] = {
    "unpadded": {},
    "padded": {"strategy": "padded"},
    "pad kv": {"strategy": "padded", "pad": "kv"},
    "pad inputs": {"strategy": "padded", "pad": "inputs"},
    "realign": {"strategy": "realign"},
    "grouped": {"strategy": "realign", "grouping": "same_length"},
}
RECTANGLES = [name for name in STRATEGIES if name != "unpadded"]
LENGTHS = toys.PROMPT_LENGTHS * 2 if toys.PROVE else (1, 17, 5, 33, 64, 5, 16, 90, 17)
NUM_TOKENS = toys.NUM_TOKENS if toys.PROVE else 18
BATCHES = [1, 4, 8, 32] if toys.PROVE else [1, 4, 8]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "min_p": 0.01},
}
NUM_SPECULATIVE_TOKENS = 4


@cache
def target() -> Any:
    return toys.llama()


@cache
def draft() -> Any:
    return toys.noisy_copy(target(), 0.05)


def params(mode: str) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=NUM_TOKENS, seed=100 + i, **PARAMS[mode]) for i in range(len(LENGTHS))]


@cache
def truth(mode: str) -> list[list[int]]:
    """Plain decoding of each row alone, unpadded."""
    llm = LLM(toys.adopted(target()), max_num_seqs=1)
    return [llm.generate([p], [q])[0].outputs[0].token_ids for p, q in zip(toys.prompts(LENGTHS), params(mode), strict=True)]


def build(strategy: str, drafter: str | None, batch_size: int, **settings: Any) -> LLM:
    config = {"method": drafter, "num_speculative_tokens": NUM_SPECULATIVE_TOKENS} if drafter else None
    small = toys.adopted(draft()) if drafter == "draft_model" else None
    settings = {"max_num_seqs": batch_size, "max_num_batched_tokens": 256, **STRATEGIES[strategy], **settings}
    return toys.watch(LLM(toys.adopted(target()), config, small, **settings))


def texts(llm: LLM, mode: str) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(toys.prompts(LENGTHS), params(mode))]


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize(("batch_size", "refill"), [(b, True) for b in BATCHES] + [(BATCHES[-2], False), (BATCHES[-1], False)])
@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_changes_no_token(strategy: str, drafter: str, batch_size: int, refill: bool, mode: str) -> None:
    llm = build(strategy, drafter, batch_size, refill=refill)
    assert texts(llm, mode) == truth(mode)
    assert llm.stats.num_accepted_tokens > 0
    assert llm.stats.acceptance_rate < 1.0
    toys.assert_all_blocks_free(llm)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plain_decoding_in_a_batch(strategy: str) -> None:
    llm = build(strategy, None, 4)
    assert texts(llm, "sampled") == truth("sampled")
    assert {o.num_cached_tokens for o in llm.generate(toys.prompts((9, 3)), [SamplingParams(max_tokens=2)] * 2)} == {0}


@pytest.mark.parametrize("strategy", RECTANGLES)
def test_prompts_in_pieces_and_few_lines(strategy: str) -> None:
    """Pieces of 6 tokens a row, and memory for 3 lines where 4 rows may run."""
    probe = build(strategy, "draft_model", 4)
    small = probe.memory_plan.block_bytes * 3
    llm = build(strategy, "draft_model", 4, max_num_batched_tokens=24, kv_cache_memory_bytes=small)
    assert llm.get_counters()["num_kv_blocks"] == 3
    assert texts(llm, "sampled") == truth("sampled")


@pytest.mark.parametrize("strategy", RECTANGLES)
def test_samples_logprobs_and_a_row_that_leaves(strategy: str) -> None:
    """Requests with several samples, prompt logprobs and draft limits of their own, beside a stream that is dropped."""
    asked = [
        SamplingParams(max_tokens=12, seed=1, n=3, temperature=0.8, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=20, seed=2, num_speculative_tokens=1),
        SamplingParams(max_tokens=3, temperature=0.0, num_speculative_tokens=0),
    ]
    prompts = toys.prompts((17, 40, 3))
    llm = build(strategy, "draft_model", 4)
    for _ in zip(range(3), llm.stream(prompts, asked), strict=False):
        pass
    toys.assert_all_blocks_free(llm)
    alone = LLM(toys.adopted(target()), max_num_seqs=1)
    for out, prompt, wanted in zip(llm.generate(prompts, asked), prompts, asked, strict=True):
        expected = alone.generate([prompt], wanted)[0]
        assert [c.token_ids for c in out.outputs] == [c.token_ids for c in expected.outputs]
        if wanted.prompt_logprobs is not None:
            assert [list(p) for p in out.prompt_logprobs[1:]] == [list(p) for p in expected.prompt_logprobs[1:]]  # type: ignore[index,arg-type]
            assert out.outputs[0].cumulative_logprob == pytest.approx(expected.outputs[0].cumulative_logprob, abs=1e-3)


# What the strategies are


def entries(llm: LLM) -> list[tuple[set[int], set[int]]]:
    """Per step: rows that were left after the step before, and rows that came in."""
    seen: list[tuple[set[int], set[int]]] = []
    plan = llm.engine.scheduler.next_step

    def planned(*args: Any) -> Any:
        before = {s.id for s in llm.engine.scheduler.running}
        step = plan(*args)
        seen.append((before, {s.id for s in llm.engine.scheduler.running} - before))
        return step

    llm.engine.scheduler.next_step = planned  # type: ignore[method-assign]
    texts(llm, "greedy")
    return seen


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_static_batches_are_static_and_others_are_not(strategy: str) -> None:
    size = {"group_window": 5} if strategy == "grouped" else {}
    static = entries(build(strategy, "ngram", 4, refill=False, max_num_batched_tokens=4096, **size))
    assert all(not before for before, new in static if new)
    assert sum(bool(new) for _, new in static) == -(-len(LENGTHS) // (5 if strategy == "grouped" else 4))
    refilled = entries(build(strategy, "ngram", 4, refill=True, **size))
    assert any(before and new for before, new in refilled)


def test_a_static_batch_fills_over_several_steps() -> None:
    """Unpadded, where prompts exceed the token budget of a step: the batch forms in several steps, then it is closed."""
    llm = build("unpadded", None, 4, refill=False, max_num_batched_tokens=40)
    seen = entries(llm)
    assert max(len(before) for before, _ in seen) == 4
    members: set[int] = set()
    for before, new in seen:
        members = members if before else set()
        assert not new or before == members, "a row joined a batch that others had left"
        members |= new


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_groups_have_equal_lengths(drafter: str) -> None:
    llm = build("grouped", drafter, 2, group_window=8)
    pack, kinds = llm.engine.target.pack, set()
    plan = llm.engine.scheduler.next_step
    is_group: list[bool] = []

    def planned(*args: Any) -> Any:
        before = llm.stats.num_group_choices, llm.stats.num_group_hits
        step = plan(*args)
        assert llm.stats.num_group_choices == before[0] + 1
        is_group.append(llm.stats.num_group_hits > before[1])
        if is_group[-1]:
            assert len({len(r.sequence) for r in step.rows}) == len({r.start for r in step.rows}) == 1
            assert len(step.rows) == min(2, len(llm.engine.scheduler.running))
        return step

    def packed(spans: list[Span]) -> PaddedBatch:
        batch: Any = pack(spans)
        pads = batch.key_positions[:, 0] < 0
        assert not (is_group[-1] and pads.any()), "a group of equal lengths is padded on the left"
        kinds.add((is_group[-1], bool(pads.any())))
        return batch

    llm.engine.scheduler.next_step = planned  # type: ignore[method-assign]
    llm.engine.target.pack = packed  # type: ignore[method-assign]
    assert texts(llm, "greedy") == truth("greedy")
    assert kinds >= {(True, False), (False, True)}
    stats = llm.stats
    assert (stats.num_group_choices, stats.num_group_hits) == (len(is_group), is_group.count(True))
    assert 0.0 < stats.group_rate < 1.0


class Row:
    def __init__(self, length: int, cached: int) -> None:
        self.length, self.cached = length, cached

    def __len__(self) -> int:
        return self.length


def test_selection() -> None:
    a, b, c, d, e = (Row(9, 8), Row(7, 6), Row(9, 0), Row(7, 6), Row(3, 2))

    def cached(row: Any) -> int:
        return int(row.cached)

    rows: Any = [a, b, c, d, e]
    usage = Usage()
    assert prompts_apart(rows, cached) == [c]
    assert prompts_apart([a, b], cached) == [a, b]  # type: ignore[list-item]
    assert SameLength(2, usage)(rows, cached) == [b, d], "the KV state is part of the key"
    assert (usage.num_group_choices, usage.num_group_hits) == (1, 1)
    assert SameLength(3, usage)(rows, cached) == [c]
    assert (usage.num_group_choices, usage.num_group_hits) == (2, 1)
    assert SameLength(3, usage)([b, d], cached) == [b, d]  # type: ignore[list-item]
    assert (usage.num_group_choices, usage.num_group_hits) == (3, 2)
    assert SameLength(2, usage)([a, b, e], cached) == [a, b]  # type: ignore[list-item]


# Where tokens lie

LAYOUTS: dict[str, Callable[..., PaddedBatch]] = {
    "padded": rectangles.pack,
    "pad kv": rectangles.pack_kv,
    "pad inputs": rectangles.pack_inputs,
    "realign": rectangles.pack_realigned,
    "grouped": rectangles.pack_group,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_query_finds_its_own_text(layout: str) -> None:
    """Random rows enter, are fed, rejected and leave; the key at position p of a row is always its token at p, at any time."""
    rng = np.random.default_rng(3)
    tables = LineTables(5, 48, 4)
    storage = RectangleCache([LayerShape(1, 1, 1)], tables, torch.float32, torch.device("cpu"))
    known: dict[int, list[int]] = {}
    num_rows = moved = 0
    for _ in range(400):
        if len(known) < 5 and rng.random() < 0.4:
            known[num_rows] = rng.integers(1, 1000, rng.integers(1, 20)).tolist()
            assert tables.reserve(num_rows, len(known[num_rows]))
            num_rows += 1
        chosen = [row for row in known if rng.random() < 0.8]
        if not chosen:
            continue
        rng.shuffle(chosen)
        spans, texts_ = [], {}
        for row in chosen:
            start = tables.num_cached(row)
            end = int(rng.integers(start + 1, len(known[row]) + 1))  # sometimes a piece
            drafted = rng.integers(1, 1000, rng.integers(0, 5)).tolist() if end == len(known[row]) else []
            spans.append(Span(row, start, known[row][start:end] + drafted, 1 + len(drafted), len(known[row]), len(drafted)))
            texts_[row] = known[row][:end] + drafted
        batch = LAYOUTS[layout](spans, tables)
        batch.check()
        storage.apply_copies()
        inputs = batch.tokens[batch.written].float()[:, None, None]
        storage.write(0, inputs, inputs, batch.slots)
        if batch.gathered is None:
            keys = storage.keys[0][slice(*batch.lines), slice(*batch.columns)][..., 0, 0]
        else:
            keys = storage.gather(0, batch.gathered)[0][..., 0, 0]
        for text, line, positions in zip(_by_line(texts_, tables), keys.tolist(), batch.key_positions.tolist(), strict=True):
            assert [int(k) for k, p in zip(line, positions, strict=True) if p >= 0] == text
            assert sorted(p for p in positions if p >= 0) == list(range(len(text)))
        fed = [texts_[s.row][p] for s in spans for p in range(len(texts_[s.row]))[-s.num_logits :]]
        assert batch.tokens[batch.logit_rows].tolist() == fed, "logits in the order of the spans"
        for span in spans:
            kept = int(rng.integers(0, span.num_drafted + 1))
            cached = span.start + len(span.tokens) - span.num_drafted + kept
            tables.commit(span.row, cached)
            known[span.row] = texts_[span.row][:cached] + (known[span.row][cached:] or [int(rng.integers(1, 1000))])
            if len(known[span.row]) > 40 or rng.random() < 0.05:
                tables.release(span.row)
                del known[span.row]
        storage.check()
        moved = tables.num_moved_lines
    assert num_rows > 20
    assert moved > 0 or layout == "grouped"


def _by_line(by_row: dict[int, list[int]], tables: LineTables) -> list[list[int]]:
    rows = sorted(by_row, key=lambda row: int(tables.lines([row])[0]))
    return [by_row[row] for row in rows]


def rectangle(contents: list[int], num_slots: int = 32) -> LineTables:
    """Rows 0, 1, … with so many cached tokens, fed at once."""
    tables = LineTables(len(contents), num_slots, 4)
    spans = []
    for row, length in enumerate(contents):
        tables.reserve(row, length)
        spans.append(Span(row, 0, [0] * length, 0, length))
    rectangles.pack_realigned(spans, tables)
    for row, length in enumerate(contents):
        tables.commit(row, length)
    return tables


def after(row: int, tables: LineTables, *drafted: int) -> Span:
    """The row's next step: one known token and drafted ones."""
    start = tables.num_cached(row)
    return Span(row, start, [1, *drafted], 1 + len(drafted), start + 1, len(drafted))


def test_equal_acceptance_moves_nothing() -> None:
    """Corollaries B.2 and B.3 of EQSPEC: no shift for a row alone, or where all rows accept equally many."""
    tables = rectangle([9, 4, 6])
    for _ in range(3):
        rectangles.pack_realigned([after(row, tables, 2, 3) for row in range(3)], tables)
        for row in range(3):
            tables.commit(row, tables.num_cached(row) + 2)
    assert tables.num_moved_lines == 0
    rectangles.pack_realigned([after(row, tables) for row in range(3)], tables)
    tables.commit(0, 16)
    for row in (1, 2):
        tables.commit(row, tables.num_cached(row))
    rectangles.pack_realigned([after(row, tables) for row in range(3)], tables)
    assert tables.num_moved_lines == 2, "the rows that kept less are shifted, the longest stays"


def test_padded_rows_share_one_start_and_keep_dead_slots() -> None:
    tables = rectangle([5, 5])
    rectangles.pack([after(0, tables, 2, 3, 4), after(1, tables)], tables)
    tables.commit(0, 8)
    tables.commit(1, 6)
    batch = rectangles.pack([after(0, tables), after(1, tables, 2)], tables)
    assert (batch.slots % tables.num_slots).tolist() == [8, 8, 9]
    assert batch.key_positions[1].tolist() == [0, 1, 2, 3, 4, 5, -1, -1, 6, 7]
    assert len(batch.tokens) == 4
    assert batch.num_live == 9 + 8
    assert batch.key_positions.numel() == 20


# What is counted


def test_padding_is_counted() -> None:
    usage = {}
    for strategy in STRATEGIES:
        llm = build(strategy, "ngram", 8)
        texts(llm, "greedy")
        usage[strategy] = llm.stats.target
        assert llm.stats.target.num_tokens == llm.stats.num_input_tokens
        assert llm.get_counters()["target"]["num_inputs"] == llm.stats.target.num_inputs
    inputs = {name: u.padded_input_share for name, u in usage.items()}
    kv = {name: u.padded_kv_share for name, u in usage.items()}
    assert inputs["unpadded"] == inputs["pad kv"] == kv["unpadded"] == 0.0
    assert all(inputs[name] > 0.1 for name in ("padded", "pad inputs", "realign", "grouped"))
    assert kv["padded"] > kv["realign"] > 0.0
    assert kv["pad kv"] > kv["pad inputs"] > 0.0
    assert usage["realign"].layout_seconds > 0.0
    assert usage["grouped"].layout_seconds > 0.0
    assert usage["unpadded"].kv_bytes_touched < usage["realign"].kv_bytes_touched < usage["padded"].kv_bytes_touched
    assert usage["unpadded"].largest_kv_bytes_reserved < usage["padded"].largest_kv_bytes_reserved
    per_slot = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, size, float32
    assert usage["padded"].kv_bytes_touched == usage["padded"].num_touched * per_slot
    assert usage["unpadded"].index_bytes > 0


def test_the_draft_model_runs_under_the_same_strategy() -> None:
    llm = build("padded", "draft_model", 4)
    texts(llm, "greedy")
    assert llm.stats.draft.padded_kv_share > 0.05
    assert llm.stats.draft.num_passes > llm.stats.target.num_passes
    assert type(llm.engine.drafter.unguarded._runner) is type(llm.engine.target)  # type: ignore[attr-defined]


def test_dead_slots_stay_finite() -> None:
    """Without poison: masked attention multiplies what dead slots hold by zero, so that must never be NaN or infinite."""
    llm = LLM(toys.adopted(target()), {"method": "ngram", "num_speculative_tokens": 5}, max_num_seqs=4, strategy="padded")
    llm.generate(toys.prompts(LENGTHS), params("greedy"))
    assert all(bool(torch.isfinite(s).all()) for c in toys.caches(llm) for s in (*c.keys, *c.values))


# Refusals


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": "padding"}, "realign"),
        ({"pad": "kv"}, "padded"),
        ({"strategy": "realign", "pad": "inputs"}, "padded"),
        ({"strategy": "padded", "grouping": "same_length"}, "realign"),
        ({"strategy": "realign", "group_window": 8}, "same_length"),
        ({"strategy": "realign", "grouping": "same_length", "group_window": 3, "max_num_seqs": 4}, "raise it"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**settings)


CANNOT = {"gemma2": "softcap", "gpt-oss": "sinks", "phi3-longrope": "LongRoPE"}


@pytest.mark.parametrize("strategy", RECTANGLES if toys.PROVE else ["padded", "grouped"])
@pytest.mark.parametrize("name", [n for n in DECODERS if n not in CANNOT])
def test_every_architecture_under_every_strategy(name: str, strategy: str) -> None:
    """Windows are part of the mask; learned and rotary positions, mixtures."""
    small = toys.adopted(toys.noisy_copy(model(name), 0.03))
    config = {"method": "draft_model", "num_speculative_tokens": 4}
    llm = toys.watch(LLM(toys.adopted(model(name)), config, small, max_num_seqs=4, **STRATEGIES[strategy]))
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == by_transformers(name)


@pytest.mark.parametrize("name", CANNOT)
def test_what_a_mask_cannot_say_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{CANNOT[name]}.*unpadded"):
        LLM(toys.adopted(model(name)), strategy="padded")

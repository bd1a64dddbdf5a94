"""Steps as CUDA graphs, on a card and with graphs that are not there (support/card.py, recorded.py): the tokens of the eager engine.

Attention and drawing run as Triton kernels, interpreted; kernels of the CPU stand in for the others.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import captures
import toys
from captures import DRAFTERS, MODES, VOCABULARY, check, engine, windowed
from recorded import Recorder

from echelon import ConfigError, SamplingParams
from echelon.batch import Span
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.memory.pool import plan_kv
from echelon.model.attention import record_layers
from echelon.model.graphs import buckets, graphs
from echelon.model.graphs import programs as captured
from echelon.model.graphs.buckets import filled_up, power_up
from echelon.model.graphs.programs import MOST_TOKENS
from echelon.model.hidden_states import HiddenStateReader
from echelon.model.runner import Draws, ModelRunner
from echelon.ops.slots import scatter_slots
from echelon.ops.triton import sample as triton_sample
from echelon.sampling import Sampler, noise_key

DIGITS = buckets.DIGITS
pytestmark = captures.NEEDED


@pytest.fixture(scope="module")
def there() -> Iterator[Recorder]:
    with captures.card_with_graphs() as card:
        yield card


CELLS = [("llama", d, ("greedy", "sampled")[i % 2], b) for d in DRAFTERS for i, b in enumerate((1, 3, 5))]
CELLS += [("llama", d, "sampled", 5) for d in ("draft_model", "head")]
CELLS += [("opt", "none", "sampled", 3), ("opt", "ngram", "greedy", 5), ("opt", "draft_model", "sampled", 5), ("opt", "head", "greedy", 3)]


@pytest.mark.parametrize(("name", "drafter", "mode", "batch_size"), CELLS)
def test_replayed_steps_give_the_tokens_of_eager_ones(there: Recorder, name: str, drafter: str, mode: str, batch_size: int) -> None:
    llm, before = engine(name, mode, drafter, max_num_seqs=batch_size), there.num_replays
    check(llm, name, mode)
    usage = llm.stats.target
    assert 0 < usage.num_captures < usage.num_replays == usage.num_passes
    assert usage.padded_input_share > 0.01
    if drafter == "draft_model":
        draft = llm.stats.draft
        assert 0 < draft.num_captures < draft.num_replays == draft.num_passes > there.num_replays - before - usage.num_replays
    elif drafter == "head":
        assert llm.stats.draft.num_replays == 0 < llm.stats.num_accepted_tokens


@pytest.mark.parametrize("mode", MODES)
def test_a_chain_drafts_what_pass_after_pass_would(there: Recorder, mode: str) -> None:
    """Rows near their ends have drafts of other lengths."""
    counts = []
    for enforce_eager in (True, False):
        llm = engine("llama", mode, "draft_model", max_num_seqs=5, enforce_eager=enforce_eager)
        llm.engine.ahead = None
        check(llm, "llama", mode)
        counts.append((llm.stats.acceptance, llm.stats.draft.num_tokens, llm.stats.draft.num_passes))
    assert counts[0] == counts[1]
    assert len({drafted for drafted, _ in counts[0][0]}) > 2


def test_what_a_chain_cannot_do_is_drafted_pass_by_pass(there: Recorder) -> None:
    """A request that changes logits; single passes are replayed all the same."""
    llm = engine("llama", "greedy", "draft_model", max_num_seqs=3)
    params = SamplingParams(max_tokens=6, temperature=0.0, logit_bias={7: 3.0})
    before = there.num_replays
    outputs = llm.generate(toys.prompts((3, 4)), params)
    usage = [llm.stats.target, llm.stats.draft]
    assert there.num_replays - before == sum(u.num_replays for u in usage) == sum(u.num_passes for u in usage)
    plain = engine("llama", "greedy", "none", enforce_eager=True).generate(toys.prompts((3, 4)), params)
    assert [r.outputs[0].token_ids for r in outputs] == [r.outputs[0].token_ids for r in plain]


def test_few_graphs_are_kept_and_large_passes_are_not_captured(there: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MOST_TOKENS", 6)
    llm = engine("llama", "greedy", "ngram", max_num_seqs=3)
    llm.engine.target.captured.graphs._most = 2
    check(llm, "llama", "greedy")
    usage = llm.stats.target
    assert len(llm.engine.target.captured.graphs._kept) == 2 < usage.num_captures < usage.num_replays < usage.num_passes


def test_a_bucket_is_captured_when_it_comes_again(there: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "EAGER_USES", 1)
    llm = engine("llama", "greedy", "draft_model", max_num_seqs=1)
    check(llm, "llama", "greedy")
    for usage in (llm.stats.target, llm.stats.draft):
        assert 0 < usage.num_captures < usage.num_replays < usage.num_passes


def test_a_model_that_waits_for_the_device_runs_eagerly(there: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    llm = engine("llama", "greedy", "none", max_num_seqs=3)
    handle = llm.target.model.model.norm.register_forward_hook(lambda _m, _i, output: output * float(output.abs().max() > 0))
    try:
        check(llm, "llama", "greedy")
    finally:
        handle.remove()
    assert llm.stats.target.num_replays == llm.stats.target.num_captures == 0
    assert len([r for r in caplog.records if "without CUDA graphs" in r.message and "waits for the device" in r.message]) == 1


def test_models_whose_experts_the_host_chooses_are_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    for name in ("is_transposed", "has_gate", "has_bias", "down_proj", "num_experts", "_apply_gate"):
        setattr(model[0], name, None)
    loaded: Any = SimpleNamespace(model=model, name="toy")
    with caplog.at_level(logging.INFO, "echelon"):
        assert captured.captured(loaded, None) is None  # type: ignore[arg-type]
    assert "which experts a step needs" in caplog.text


@pytest.fixture
def kernels(there: Recorder, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    captures.use_kernels(monkeypatch)
    return there


def runner(captures: bool) -> ModelRunner:
    """Rows of 19 and 6 tokens, with keys and values at random; all other slots hold NaN."""
    loaded, tables, generator = windowed(), BlockTables(16, 4, 8), torch.Generator().manual_seed(0)
    cache = KVCache(record_layers(loaded.model), tables, torch.float32, loaded.device, captures)
    for storage in (*cache.keys, *cache.values):
        storage.fill_(torch.nan)
    for row, length in enumerate((19, 6)):
        assert tables.reserve(row, 32)
        slots = (torch.tensor(tables.blocks(row))[:, None] * 4 + torch.arange(4)).flatten()[:length].to(loaded.device)
        for storage in (*cache.keys, *cache.values):
            scatter_slots(storage, slots, torch.randn(length, 1, 16, generator=generator).to(loaded.device))
    one = ModelRunner(loaded, cache)
    if captures:
        one.captured = captured.captured(loaded, cache)
    return one


def assert_same_memory(eager: ModelRunner, replayed: ModelRunner) -> None:
    """Keys and values, null block apart."""
    storages = ((*one.cache.keys, *one.cache.values) for one in (eager, replayed))
    assert all(torch.equal(one.nan_to_num(99.0), other[:-1].nan_to_num(99.0)) for one, other in zip(*storages, strict=True))


def spans() -> Iterator[list[Span]]:
    """Rows that feed one token or several; trees, fed in two passes."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(0, VOCABULARY, count).tolist()

    for _ in range(2):
        yield [Span(0, 19, tokens(1), 1, 20), Span(1, 6, tokens(4), 4, 7, 3)]
    for parents in ((-1, -1, 0, 1), (-1, 0, 0, 2)):
        yield [Span(0, 20, tokens(5), 5, 21, 4, parents), Span(1, 10, tokens(2), 1, 11, 1, (-1,))]
        yield [Span(0, 25, tokens(2), 2, 21, 2, (*parents, 3, 3)), Span(1, 12, tokens(3), 3, 15)]


@torch.inference_mode()
def test_a_replay_gives_the_bits_of_an_eager_pass(kernels: Recorder) -> None:
    """Logits, hidden states, keys and values, with merged and resumed splits, windows and trees."""
    eager, replayed = runner(False), runner(True)
    eager.hidden_state_reader = replayed.hidden_state_reader = HiddenStateReader(eager.loaded.model, ("layer:1", "last"))
    for batch_spans in spans():
        expected, got = (one.run(one.pack(batch_spans)) for one in (eager, replayed))
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True) if a is not None and b is not None)
        assert expected[0].shape == got[0].shape and got[1] is not None and bool(got[0].isfinite().all())
    assert_same_memory(eager, replayed)
    usage = replayed.usage
    assert usage.num_replays == usage.num_passes == 6 > usage.num_captures
    assert usage.num_tokens == eager.usage.num_tokens == eager.usage.num_inputs < usage.num_inputs
    alive = weakref.ref(replayed.cache)
    gc.disable()  # nothing must be left for it
    del replayed
    gc.enable()
    assert alive() is None, "the cache outlives its runner"


@torch.inference_mode()
def test_a_chain_feeds_what_it_chose(kernels: Recorder) -> None:
    """The tokens of passes one after another, and their keys and values."""
    eager, replayed = runner(False), runner(True)
    lens, depths = (20, 7), (3, 2)
    for seed in range(2):
        keys = [[noise_key(seed, 0, length + place) for length in lens] for place in range(3)]
        draws = Draws([SamplingParams(temperature=0.8), SamplingParams(temperature=0.0)], keys)
        fed = [Span(row, n - 1, [seed + row], 1, n) for row, n in enumerate(lens)]
        later = [[Span(row, lens[row] + place, [0], 1, lens[row]) for row in (0, 1) if depths[row] > place + 1] for place in range(2)]
        tokens = replayed.chain([replayed.pack(s) for s in (fed, *later)], VOCABULARY, draws)
        assert tokens is not None and tokens.shape == (3, 2)
        for place, following in enumerate([*later, []]):
            samplers = [Sampler(params, seed) for params in draws.params]
            positions = [n + place for n in lens]
            rows = list(eager.run(eager.pack(fed))[0])
            expected = triton_sample.sample_rows(rows, samplers[: len(fed)], positions[: len(fed)])
            assert expected == tokens[place, : len(fed)].tolist()
            fed = [replace(s, tokens=expected[s.row : s.row + 1]) for s in following]
    assert replayed.usage.num_replays == 6 == replayed.usage.num_passes and replayed.captured.num_captures == 1
    assert_same_memory(eager, replayed)


def test_padding_is_little_and_buckets_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "DIGITS", DIGITS)
    sizes = [filled_up(count) for count in range(1, MOST_TOKENS + 1)]
    assert all(count <= size and (size - count) / size <= 0.12 for count, size in enumerate(sizes, 1))
    assert sizes[:17] == [*range(1, 17), 18] and sizes[-1] == MOST_TOKENS and filled_up(0) == 0
    assert len(set(sizes)) == 56 and all(size in sizes for size in (8, 16, 24, 32, 40, 64, 96, 128, 256))
    assert [power_up(n) for n in (0, 1, 8, 9, 64, 65)] == [0, 8, 8, 16, 64, 128]


def test_the_null_block_is_within_the_bounds_of_the_pool(there: Recorder) -> None:
    cpu = torch.device("cpu")
    assert plan_kv(10, 8, 4, 64, 800, cpu).num_blocks == plan_kv(10, 8, 4, 64, 800, cpu, num_null_blocks=1).num_blocks + 1 == 10
    with pytest.raises(ConfigError, match="at least 160"):
        plan_kv(10, 8, 4, 64, 100, cpu, num_null_blocks=1)
    cache = engine("llama", "greedy", "none").engine.target.cache
    assert list(cache.null_slots) == list(range(cache.tables.pool.num_blocks * 8, cache.num_blocks * 8))
    assert len(cache.keys[0]) == cache.tables.pool.num_blocks + 1 == cache.num_blocks

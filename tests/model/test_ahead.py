"""Steps that are launched before the last one is settled give the tokens of steps one after another (stand-ins: tests/support/captures.py).

What the device has found reaches the host when it is waited for and no sooner, and blocks that no row has are poisoned after every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import captures
import toys
from captures import DRAFTERS, LENGTHS, MODES, NUM_TOKENS, check, engine, served, truth, windowed
from recorded import Recorder

from echelon import LLM, SamplingParams
from echelon.batch import Span
from echelon.kv.blocks import BlockTables
from echelon.model import pack as unpadded
from echelon.model.graphs.ahead import DeviceStep
from echelon.ops.slots import scatter_slots
from echelon.ops.triton.plan import DevicePlan, PlanKey, plan_attention, plan_tables
from echelon.sequence import PlannedRow
from echelon.stats import StepRecord

pytestmark = captures.NEEDED
AHEAD = ("none", "draft_model")  # drafters that the device does not need the host for


@pytest.fixture(scope="module")
def there() -> Iterator[Recorder]:
    with captures.card_with_graphs() as card:
        yield card


def launched(llm: LLM) -> list[list[PlannedRow]]:
    """Grows by the rows of every step that is launched ahead."""
    ahead, steps = llm.engine.ahead, list[list[PlannedRow]]()
    assert ahead is not None
    launch = ahead.launch

    def noted(plan: Any) -> Any:
        step = launch(plan)
        if step is not None:
            steps.append(list(plan.rows))
        return step

    ahead.launch = noted  # type: ignore[method-assign]
    return steps


def asked(mode: str, **changes: Any) -> list[SamplingParams]:
    return [SamplingParams(**{"max_tokens": n, "seed": 100 + i} | MODES[mode] | changes) for i, n in enumerate(NUM_TOKENS)]


def both(mode: str, drafter: str, params: Any, **settings: Any) -> tuple[list[Any], list[Any], LLM, list[list[PlannedRow]]]:
    """Outputs of eager steps, one after another, and of steps that run ahead."""
    outputs: list[list[Any]] = []
    for enforce_eager in (True, False):
        llm = engine("llama", mode, drafter, max_num_seqs=6, enforce_eager=enforce_eager, **settings)
        steps = [] if enforce_eager else launched(llm)
        outputs.append([o for r in llm.generate(toys.prompts(LENGTHS, seed=5), params) for o in r.outputs])
        toys.assert_all_blocks_free(llm)
    return outputs[0], outputs[1], llm, steps


def tokens(outputs: list[Any]) -> list[Any]:
    return [(o.token_ids, o.finish_reason) for o in outputs]


@pytest.mark.parametrize("drafter", AHEAD)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_size", [1, 2, 6])
def test_a_step_starts_where_the_one_in_flight_will_end(there: Recorder, mode: str, drafter: str, batch_size: int) -> None:
    """With places for some rows only, others enter as they end: then a step is planned with everything known."""
    llm = engine("llama", mode, drafter, max_num_seqs=batch_size)
    steps = launched(llm)
    check(llm, "llama", mode)
    following = sum(row.pending_row >= 0 for rows in steps for row in rows)
    assert following > len(steps) / 2, "few steps begin where another ends"
    usage = llm.stats.target
    fed = llm.stats.num_input_tokens
    assert usage.num_tokens == fed < usage.num_inputs and usage.num_replays == usage.num_passes
    assert {row.shortest == row.longest for rows in steps for row in rows} == ({True} if drafter == "none" else {True, False})


@pytest.mark.parametrize("mode", MODES)
def test_drafts_are_those_of_a_draft_model_that_is_asked(there: Recorder, mode: str) -> None:
    """Of what it drafts after a text, as much is kept."""
    kept: list[dict[tuple[int, int], tuple[int, int]]] = []
    for is_ahead in (False, True):
        llm, found = engine("llama", mode, "draft_model", max_num_seqs=6), dict[tuple[int, int], tuple[int, int]]()

        def noted(step: StepRecord, found: Any = found) -> None:
            for row, kept, count in zip(step.rows, step.verdict, step.num_emitted, strict=True):
                found[row.sequence.id, len(row.sequence) - count] = kept.num_draft_tokens, len(kept.path)

        llm.engine.observers.append(noted)
        llm.engine.ahead = llm.engine.ahead if is_ahead else None
        llm.generate(toys.prompts(LENGTHS, seed=5), asked(mode, max_tokens=30))
        kept.append(found)
    both_saw = kept[0].keys() & kept[1].keys()
    assert len(both_saw) > 0.8 * len(kept[0]) and {kept[0][at][1] for at in both_saw} == {0, 1, 2, 3}
    for at in both_saw:
        count = min(drafted for drafted, _ in (kept[0][at], kept[1][at]))
        assert min(kept[0][at][1], count) == min(kept[1][at][1], count)


def test_only_what_the_device_can_do_alone_runs_ahead(there: Recorder) -> None:
    assert all(engine("llama", "greedy", drafter).engine.ahead is None for drafter in DRAFTERS.keys() - set(AHEAD))
    assert engine("llama", "greedy", "none", enforce_eager=True).engine.ahead is None
    draft = served("llama", noise=0.02)
    for config in ({"confidence_threshold": 0.5}, {"acceptance": "rejection"}, {"tree": "dynamic", "tree_top_k": 2, "tree_depth": 2}):
        llm = LLM(served("llama"), DRAFTERS["draft_model"] | config, draft, block_size=8, kv_cache_memory_bytes=1 << 18)
        assert llm.engine.ahead is None


@pytest.mark.parametrize("changes", [{"logprobs": 1}, {"logit_bias": {7: 3.0}}, {"prompt_logprobs": 0}])
def test_steps_whose_logits_the_host_must_see_do_not(there: Recorder, changes: dict[str, Any]) -> None:
    """While such a row is there; prompts' logits are needed as long as they are read."""
    params = asked("greedy", max_tokens=14)
    params[1] = params[1].model_copy(update=changes | {"max_tokens": 3})
    eager, ahead, _, steps = both("greedy", "draft_model", params)
    assert tokens(eager) == tokens(ahead)
    assert steps and (any(row.sequence.num_prompt_tokens == LENGTHS[1] for row in steps[0]) == ("prompt_logprobs" in changes))


@pytest.mark.parametrize("drafter", AHEAD)
@pytest.mark.parametrize("mode", MODES)
def test_rows_that_end_in_flight_cost_a_step_and_no_more(there: Recorder, monkeypatch: pytest.MonkeyPatch, mode: str, drafter: str) -> None:
    """They end at a token that the host learns of when the next step is on its way."""
    ends = sorted({text[len(text) // 2] for text in truth("llama", mode)})[:2]
    landed, count = list[int | None](), DeviceStep._count
    monkeypatch.setattr(DeviceStep, "_count", lambda self, lengths: (landed.extend(lengths), count(self, lengths)))
    eager, ahead, llm, steps = both(mode, drafter, asked(mode, stop_token_ids=tuple(ends)))
    assert tokens(eager) == tokens(ahead)
    assert sum(o.finish_reason == "stop" for o in ahead) >= 2
    assert 0 < landed.count(None) <= len(ahead) and len(landed) == sum(len(rows) for rows in steps)
    assert llm.stats.target.num_tokens == llm.stats.num_input_tokens, "what was fed in vain counts as padding"


@pytest.mark.parametrize("drafter", AHEAD)
@pytest.mark.parametrize("mode", MODES)
def test_a_place_without_a_token_ends_the_row_as_in_plain_decoding(there: Recorder, mode: str, drafter: str) -> None:
    """The model overflows where its likeliest token is one of certain ones, and a draft model does too."""

    def overflow(_module: Any, _inputs: Any, output: Any) -> Any:
        output.logits = torch.where(output.logits.argmax(-1, keepdim=True) % 7 == 3, torch.nan, output.logits)
        return output

    handles = [loaded.model.register_forward_hook(overflow) for loaded in (served("llama"), served("llama", noise=0.02))]
    try:
        eager, ahead, _, steps = both(mode, drafter, asked(mode))
    finally:
        for handle in handles:
            handle.remove()
    assert tokens(eager) == tokens(ahead) and steps
    assert [str(o.error) for o in eager] == [str(o.error) for o in ahead]
    assert any("overflow" in str(o.error) for o in ahead)


@pytest.mark.parametrize("mode", MODES)
def test_rows_draft_as_much_as_they_ask_for(there: Recorder, mode: str) -> None:
    """One of them nothing at all."""
    params = [p.model_copy(update={"num_speculative_tokens": i % 4}) for i, p in enumerate(asked(mode, max_tokens=9))]
    eager, ahead, llm, steps = both(mode, "draft_model", params)
    assert tokens(eager) == tokens(ahead)
    assert {row.max_draft_tokens for rows in steps for row in rows} == {0, 1, 2, 3}
    assert llm.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("drafter", AHEAD)
def test_where_blocks_are_lacking_rows_wait(there: Recorder, drafter: str) -> None:
    block = engine("llama", "greedy", drafter, block_size=4).memory_plan.block_bytes
    llm = engine("llama", "greedy", drafter, max_num_seqs=6, block_size=4, kv_cache_memory_bytes=10 * block)
    steps = launched(llm)
    check(llm, "llama", "greedy")
    assert steps and llm.stats.num_preemptions > 0


@pytest.mark.parametrize("drafter", AHEAD)
def test_a_text_may_fill_the_context(there: Recorder, drafter: str) -> None:
    for limit in (13, 14, 17):
        params = asked("sampled", max_tokens=60)
        eager, ahead, _, steps = both("sampled", drafter, params, max_model_len=limit)
        assert tokens(eager) == tokens(ahead) and steps
        assert all(o.finish_reason == "length" for o in ahead)


@pytest.mark.parametrize("drafter", AHEAD)
@pytest.mark.parametrize("mode", MODES)
def test_a_row_may_go_and_come_back_in_flight(there: Recorder, mode: str, drafter: str) -> None:
    """Aborted while its step is under way, and added again as it was: what lands is not its own any more."""
    params = asked(mode, max_tokens=40)
    llm = engine("llama", mode, drafter, max_num_seqs=6)
    rows = [s for p, q in zip(toys.prompts(LENGTHS, seed=5), params, strict=True) for s in llm.inputs.samples(p, q, watch_text=False)]
    for sequence in rows:
        llm.engine.add(sequence)
    gone = 0
    while llm.engine.has_work:
        llm.engine.step()
        if llm.engine.in_flight and gone < len(rows):
            sequence, gone = rows[gone], gone + 1
            if not sequence.is_finished:
                llm.engine.abort(sequence)
                llm.engine.add(sequence)
    toys.assert_all_blocks_free(llm)
    plain = engine("llama", mode, "none", max_num_seqs=6, enforce_eager=True).generate(toys.prompts(LENGTHS, seed=5), params)
    assert gone == len(rows) and [s.output_tokens for s in rows] == [r.outputs[0].token_ids for r in plain]


def test_a_plan_holds_all_that_any_length_sees(there: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer that sees everything, and of one with a window."""
    captures.use_small_tiles(monkeypatch)
    llm = LLM(windowed(), block_size=4, kv_cache_memory_bytes=1 << 18)
    rows = []
    for place, length in enumerate((3, 14, 15, 16, 22, 23)):
        (sequence,) = llm.inputs.samples(list(range(length)), SamplingParams(), watch_text=False)
        rows.append(PlannedRow(sequence, length - 1, 1, 3, 3, num_pending=(1, 4), pending_row=place))
        assert llm.engine.target.cache.tables.reserve(sequence.id, length + 7)
    assert llm.engine.ahead is not None
    own = llm.engine.ahead._target_pass(rows)
    keys = llm.engine.target.captured.keys  # type: ignore[union-attr]
    assert {key.window for key in keys} == {None, 11}
    for key, tables in zip(keys, own.values.tables, strict=True):
        for token, (row, offset) in enumerate(zip(*(column.tolist() for column in own.values.columns[:2]), strict=True)):
            items = [item for item in tables.items.tolist() if item[1] <= token < item[2]]
            planned = {place for item in items for place in range(item[3], item[4])}
            for length in range(rows[row].shortest, rows[row].longest + 1):
                position = length + offset
                assert planned >= set(range(max(0, position - (key.window or 99) + 1), position + 1))


@pytest.mark.parametrize("window", [None, 11, 40])
def test_a_plan_for_longer_texts_gives_the_same_bits(there: Recorder, monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """Whatever is found out to be shorter, by as much as is allowed for."""
    captures.use_kernels(monkeypatch)
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, torch.nan, **options))
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for _ in range(6):
        starts, slack, new = rng.integers(0, 60, 3), rng.integers(0, 16, 3), rng.integers(1, 5, 3)
        surplus = rng.integers(0, slack + 1)  # by which the longest exceeds the true one
        tables = BlockTables(3 * 22, 4, 22)
        keys, values = (torch.full((66, 1, 4, 16), torch.nan) for _ in range(2))
        for row, length in enumerate(starts + new):
            assert tables.reserve(row, int(length + surplus[row]))
            slots = (np.array(tables.blocks(row))[:, None] * 4 + np.arange(4)).ravel()[:length]
            for storage in (keys, values):
                scatter_slots(storage, torch.from_numpy(slots), torch.randn(int(length), 1, 16, generator=generator))
        true, longest = (
            unpadded.pack([Span(r, int(s), [0] * int(n), 0, int(s) + 1) for r, (s, n) in enumerate(zip(first, new, strict=True))], tables)
            for first in (starts, starts + surplus)
        )
        query = torch.randn(true.num_tokens, 2, 16, generator=generator)
        inputs = [x.to("cuda") for x in (query, keys, values)]
        plans = [plan_attention(true, PlanKey(8, window), torch.device("cuda"))]
        late = plan_tables(longest, PlanKey(8, window), np.repeat(np.minimum(slack, starts + surplus), new).astype(np.int32))
        parts = [torch.from_numpy(part).to("cuda") for part in (late.items, late.late, late.paths, late.merges, late.bases)]
        plans.append(DevicePlan(*parts, late.num_states, longest.block_table.to("cuda"), true.positions.to("cuda")))  # type: ignore[arg-type]
        exact, found = (captures.PLANNED_ATTENTION(*inputs, plan, 4, 0.25, window) for plan in plans)
        assert torch.equal(exact, found) and bool(exact.isfinite().all())

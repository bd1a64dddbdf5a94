"""The promise with "auto": how much is drafted and verified changes no text, whoever decides it; under other rules, no neighbour does."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import plans
import pytest
import toys
from test_heads_lossless import MODES, head, params, target, truth

from echelon import LLM, ConfigError, SamplingParams
from echelon.adaptive.cost_files import CostRecord, read_costs, write_costs
from echelon.adaptive.cost_table import CostCurve, CostTable
from echelon.bench.verify import STRATEGY_SETTINGS
from echelon.kv.blocks import BlockPool
from echelon.ops import compiled
from echelon.stats import StepRecord

AUTO: dict[str, Any] = {"num_speculative_tokens": "auto"}
TREE: dict[str, Any] = AUTO | {"max_speculative_tokens": 12, "tree": "dynamic", "tree_top_k": 3, "tree_depth": 4}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", **AUTO},
    "model": {"method": "draft_model", **AUTO},
    "model, tree": {"method": "draft_model", **TREE},
    "head": {"method": "eagle", **AUTO, "max_speculative_tokens": 5},
    "head, tree": {"method": "eagle", **TREE},
    "head, static tree": {"method": "eagle", **AUTO, "max_speculative_tokens": 12, "tree": "static"},
    "heads, tree": {"method": "medusa", **TREE},
}
CHEAP = CostTable(
    step=CostCurve(tokens=(1, 64), milliseconds=(10.0, 11.0)), key_ms=1e-4, drafting=CostCurve(tokens=(1,), milliseconds=(0.1,))
)
DEAR = CostTable(
    step=CostCurve(tokens=(1, 8, 64), milliseconds=(10.0, 14.0, 98.0)), drafting=CostCurve(tokens=(1, 8), milliseconds=(1.0, 3.0))
)
NEVER = CostTable(step=CostCurve(tokens=(1, 64), milliseconds=(1.0, 6400.0)), drafting=CostCurve(tokens=(1,), milliseconds=(100.0,)))
KINDS = {"eagle": "autoregressive", "medusa": "independent"}


@cache
def draft() -> Any:
    return toys.adopted(toys.noisy_copy(target(), 0.05))


def adaptive_llm(drafter: str, mode: str, changes: dict[str, Any] | None = None, **settings: Any) -> LLM:
    config = DRAFTERS[drafter] | (changes or {})
    own = None
    if config["method"] in KINDS:
        own = head(KINDS[config["method"]], mode)
        config = config | {"method": own.method}
    given = draft() if config["method"] == "draft_model" else None
    settings = {"block_size": 8, "kv_cache_memory_bytes": 1 << 22} | settings
    return toys.watch(LLM(toys.adopted(target()), config, given, own, **settings))


def frozen(tmp_path: Path, table: CostTable) -> dict[str, str]:
    return {"cost_table": str(write_costs(tmp_path / "costs.json", CostRecord(key={}, table=table)))}


def texts(llm: LLM, rows: slice, mode: str) -> list[list[int]]:
    found = [r.outputs[0].token_ids for r in llm.generate(toys.prompts()[rows], params(mode)[rows])]
    toys.assert_all_blocks_free(llm)
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_size", [1, 3, 8, 17])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_adapting_changes_no_token(drafter: str, batch_size: int, mode: str, tmp_path: Path) -> None:
    """By costs at which drafting pays, and in the largest batch by those of this machine."""
    rows, is_measured = toys.few(batch_size == 1), batch_size == 17
    llm = adaptive_llm(drafter, mode, {} if is_measured else frozen(tmp_path, CHEAP), max_num_seqs=batch_size)
    assert texts(llm, rows, mode) == truth(mode)[rows]
    assert is_measured or llm.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_size", [3, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_random_plans_change_no_token(drafter: str, batch_size: int, mode: str) -> None:
    llm = adaptive_llm(drafter, mode, max_num_seqs=batch_size)
    controller = plans.at_random(llm, seed=batch_size)
    assert texts(llm, slice(None), mode) == truth(mode)
    assert controller.num_cut > 0
    assert llm.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("strategy", [s for s in STRATEGY_SETTINGS if s != "unpadded"])
@pytest.mark.parametrize(("drafter", "plan"), [*product(("ngram", "model"), ("auto", "random")), ("head, tree", "auto")])
def test_other_strategies_adapt_too(drafter: str, strategy: str, plan: str, tmp_path: Path) -> None:
    """Chains in rectangles; heads and trees on blocks. Their costs are measured too, with keys before them, and decide nothing here."""
    assert adaptive_llm(drafter, "sampled", max_num_seqs=5, **STRATEGY_SETTINGS[strategy]).measure_costs().table.step.tokens
    llm = adaptive_llm(drafter, "sampled", frozen(tmp_path, CHEAP), max_num_seqs=5, **STRATEGY_SETTINGS[strategy])
    if plan == "random":
        plans.at_random(llm, seed=1)
    assert texts(llm, slice(None), "sampled") == truth("sampled")
    assert llm.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rows_that_rest_take_no_blocks_for_drafts(drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are those taken again and again that a drafter's unread tokens will need."""
    llm = adaptive_llm(drafter, "greedy", frozen(tmp_path, NEVER), max_num_seqs=4)
    plans: list[tuple[int, bool, int]] = []  # rows, whether they have room for drafts, and blocks that were taken
    taken, allocate = 0, BlockPool.allocate

    def counted(pool: BlockPool) -> int:
        nonlocal taken
        taken += 1
        return allocate(pool)

    def planned(*given: Any, next_step: Any = llm.engine.scheduler.next_step) -> Any:
        nonlocal taken
        taken, plan = 0, next_step(*given)
        plans.append((len(plan.rows), any(row.max_draft_tokens for row in plan.rows), taken))
        return plan

    monkeypatch.setattr(BlockPool, "allocate", counted)
    monkeypatch.setattr(llm.engine.scheduler, "next_step", planned)
    llm.generate(toys.prompts()[:4], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True), use_tqdm=False)
    quiet = [count for num_rows, has_room, count in plans[12:56] if num_rows == 4 and not has_room]
    assert len(quiet) >= 30, "one step in four decides"
    num_tables = len(llm.engine.scheduler.blocks.tables)
    assert sum(quiet) <= num_tables * 4 * (44 // llm.engine.target.cache.block_size + 1)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("table", [CHEAP, DEAR], ids=["cheap", "dear"])
def test_a_frozen_table_gives_the_same_plan(table: CostTable, drafter: str, tmp_path: Path) -> None:
    """Given a table, lengths of drafts and pieces of prompts follow from requests alone."""
    found = []
    for _ in range(2):
        llm = adaptive_llm(drafter, "sampled", frozen(tmp_path, table), max_num_seqs=5)
        steps: list[Any] = []

        def noted(step: StepRecord, steps: list[Any] = steps) -> None:
            steps.append([(row.num_new, kept.num_draft_tokens) for row, kept in zip(step.rows, step.verdict, strict=True)])

        llm.engine.observers.append(noted)
        assert texts(llm, slice(None), "sampled") == truth("sampled")
        found.append(steps)
    assert found[0] == found[1]


def test_costs_decide(tmp_path: Path) -> None:
    """Where tokens are cheap the same drafter drafts much, where they are dear little."""
    drafted = []
    for table in (CHEAP, DEAR):
        llm = adaptive_llm("model", "greedy", frozen(tmp_path, table), max_num_seqs=17)
        texts(llm, slice(None), "greedy")
        drafted.append(llm.stats.num_draft_tokens)
    assert drafted[1] < drafted[0] / 3


@pytest.mark.parametrize("drafter", ["ngram", "model", "head, tree"])
def test_a_row_sheds_its_draft_before_any_is_preempted(drafter: str, tmp_path: Path) -> None:
    changes = frozen(tmp_path, CHEAP)
    block_bytes = adaptive_llm(drafter, "greedy", changes).memory_plan.block_bytes
    llm = adaptive_llm(drafter, "greedy", changes, max_num_seqs=8, kv_cache_memory_bytes=block_bytes * 24)
    short: list[bool] = []

    def noted(step: StepRecord) -> None:
        if step.num_preempted:
            short.append(any(kept.num_draft_tokens for kept in step.verdict))

    llm.engine.observers.append(noted)
    assert texts(llm, slice(None), "greedy") == truth("greedy")
    assert short
    assert not any(short)


@pytest.mark.parametrize(
    ("drafter", "acceptance"), [("model", "rejection"), ("model", "typical"), ("ngram", "rejection"), ("head, tree", "typical")]
)
def test_under_other_rules_no_neighbour_changes_a_text(drafter: str, acceptance: str, tmp_path: Path) -> None:
    changes = frozen(tmp_path, CHEAP) | {"acceptance": acceptance}
    if drafter == "head, tree":
        changes["max_speculative_tokens"] = 12
    rows = toys.few(True)
    alone = texts(adaptive_llm(drafter, "sampled", changes, max_num_seqs=1), rows, "sampled")
    llm = adaptive_llm(drafter, "sampled", changes, max_num_seqs=17)
    assert texts(llm, slice(None), "sampled")[rows] == alone
    assert len({pair[0] for pair in llm.stats.acceptance}) > 2, "lengths should differ"


def test_requests_have_their_own_most() -> None:
    llm = adaptive_llm("model", "greedy", max_num_seqs=8)
    asked = [p.model_copy(update={"num_speculative_tokens": i % 2}) for i, p in enumerate(params("greedy"))]
    longest: dict[int, int] = {}

    def noted(step: StepRecord) -> None:
        for row, kept in zip(step.rows, step.verdict, strict=True):
            most = row.sequence.params.num_speculative_tokens
            assert most is not None
            longest[most] = max(longest.get(most, 0), kept.num_draft_tokens)

    llm.engine.observers.append(noted)
    assert [r.outputs[0].token_ids for r in llm.generate(toys.prompts(), asked)] == truth("greedy")
    assert longest[0] == 0
    assert longest[1] <= 1


def test_a_drafter_that_lagged_is_drafted_with_again(tmp_path: Path) -> None:
    """Two hundred tokens without a draft, then drafts of a head whose state is that of the whole text."""
    llm = adaptive_llm("head", "greedy", frozen(tmp_path, CHEAP), max_num_seqs=2)
    controller = llm.engine.controller
    assert controller is not None
    planned, num_steps = controller.planned, 0

    def later(rows: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        return planned(rows) if num_steps > 20 else plans.without_drafts(rows)

    controller.planned = later  # type: ignore[method-assign]
    rows = slice(10, 12)
    assert texts(llm, rows, "greedy") == truth("greedy")[rows]
    assert llm.stats.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_speculative_tokens": 3, "max_speculative_tokens": 8}, "belongs to num_speculative_tokens = 'auto'"),
        ({"num_speculative_tokens": 3, "cost_table": "x.json"}, "belongs to num_speculative_tokens = 'auto'"),
        ({"num_speculative_tokens": "auto", "cost_table": "nowhere.json"}, "cannot read the cost table 'nowhere.json'"),
        ({"num_speculative_tokens": "often"}, "num_speculative_tokens"),
        ({"num_speculative_tokens": "auto", "max_speculative_tokens": 0}, "max_speculative_tokens"),
    ],
)
def test_what_does_not_go_together_is_said(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(toys.adopted(target()), {"method": "ngram", **changes})


def test_a_table_of_a_drafter_that_takes_time_charges_nothing_for_copying(tmp_path: Path) -> None:
    controller = adaptive_llm("ngram", "greedy", frozen(tmp_path, CHEAP)).engine.controller
    assert controller is not None
    assert CHEAP.drafting is not None
    assert (controller.table.drafting, controller.table.start_ms, controller.table.step) == (None, 0.0, CHEAP.step)


def test_a_torn_cost_table_is_said_and_one_in_the_cache_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torn = tmp_path / "torn.json"
    torn.write_text('{"key": {}, "table"')
    with pytest.raises(ConfigError, match="is no JSON"):
        adaptive_llm("ngram", "greedy", {"cost_table": str(torn)})
    torn.write_text("[1]")
    with pytest.raises(ConfigError, match="holds no cost table"):
        adaptive_llm("ngram", "greedy", {"cost_table": str(torn)})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    adaptive_llm("ngram", "greedy")
    (kept,) = (tmp_path / "echelon" / "costs").glob("*.json")
    before = kept.read_bytes()
    adaptive_llm("ngram", "greedy")
    assert kept.read_bytes() == before
    kept.write_text("{")
    adaptive_llm("ngram", "greedy")
    assert read_costs(kept).table.step.tokens


def test_costs_of_other_kernels_do_not_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for fingerprint, num_kept in (("old", 1), ("new", 2), ("old", 2)):
        monkeypatch.setattr(compiled, "fingerprint", lambda own=fingerprint: own)
        adaptive_llm("ngram", "greedy")
        assert len(list((tmp_path / "echelon" / "costs").glob("*.json"))) == num_kept


def test_a_named_table_must_have_what_the_drafter_costs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = CostTable(step=CostCurve(tokens=(1, 8), milliseconds=(1.0, 2.0)))
    with pytest.raises(ConfigError, match="has no times of drafting, which 'draft_model' needs"):
        adaptive_llm("model", "greedy", frozen(tmp_path, table))
    adaptive_llm("ngram", "greedy", frozen(tmp_path, table))
    assert not caplog.records
    other = write_costs(tmp_path / "other.json", CostRecord(key={"model": "another", "processor": "another"}, table=table))
    adaptive_llm("ngram", "greedy", {"cost_table": str(other)})
    assert [r.message for r in caplog.records] == [f"the cost table {str(other)!r} was measured with another model"]


@pytest.mark.parametrize("drafter", ["ngram", "model", "head, tree"])
def test_a_table_of_the_same_drafter_serves_other_lengths_in_silence(
    drafter: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = adaptive_llm(drafter, "greedy").measure_costs()
    path = write_costs(tmp_path / "costs.json", record)
    adaptive_llm(drafter, "greedy", {"cost_table": str(path), "max_speculative_tokens": 3})
    assert "the cost table" not in caplog.text
    for name in ("drafter", "drafter_quantization", "drafter_shapes"):
        caplog.clear()
        other = write_costs(path, record.model_copy(update={"key": record.key | {name: "another"}}))
        adaptive_llm(drafter, "greedy", {"cost_table": str(other)})
        assert (f"the cost table {str(other)!r} was measured with another drafter" in caplog.text) == (drafter != "ngram")


@pytest.mark.parametrize("drafter", ["ngram", "model", "head, tree"])
def test_measuring_costs_is_no_served_work(drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = adaptive_llm(drafter, "greedy", max_num_seqs=3)
    assert measured.stats.target.num_passes == measured.stats.draft.num_passes == 0
    texts(measured, toys.few(False), "greedy")
    before = measured.get_counters()
    measured.measure_costs()
    assert measured.get_counters() == before and before["target"]["num_passes"] > 0


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 48), (2, 16), (3, 11), (4, 16), (5, 9)])
def test_costs_are_measured_in_blocks_of_any_size(
    block_size: int, num_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    per_token = adaptive_llm("ngram", "greedy").memory_plan.block_bytes // 8
    llm = adaptive_llm(
        "ngram",
        "greedy",
        block_size=block_size,
        max_num_seqs=4,
        max_model_len=24,
        kv_cache_memory_bytes=num_blocks * block_size * per_token,
    )
    assert llm.memory_plan.num_blocks == num_blocks and llm.engine.controller is not None
    toys.assert_all_blocks_free(llm)


def test_chances_and_costs_are_reported(tmp_path: Path) -> None:
    llm = adaptive_llm("model", "greedy", frozen(tmp_path, CHEAP), max_num_seqs=8)
    texts(llm, slice(None), "greedy")
    found = llm.get_counters()["adaptive"]
    assert found["num_proposed_tokens"] >= llm.stats.num_draft_tokens > 0
    assert found["predicted_ms"] > 0.0
    assert found["measured_ms"] > 0.0
    assert found["regret"] < 1.0
    assert np.isfinite(found["prediction_error"])
    assert LLM(toys.adopted(target())).get_counters()["adaptive"] is None


def test_sampling_parameters_are_those_of_plain_decoding() -> None:
    """Penalties and forbidden tokens change logits along a path; adapting leaves the text."""
    asked = [SamplingParams(max_tokens=16, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4)] * 6
    expected = [r.outputs[0].token_ids for r in LLM(toys.adopted(target())).generate(toys.prompts()[:6], asked)]
    for drafter in DRAFTERS:
        llm = adaptive_llm(drafter, "greedy", max_num_seqs=4)
        assert [r.outputs[0].token_ids for r in llm.generate(toys.prompts()[:6], asked)] == expected

"""The ladder: what is given up for a budget, in which order, and that it is as little as the budget asks for."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from echelon import LLM, ConfigError, EngineConfig, SamplingParams, SpeculativeConfig
from echelon.cli import app, join_dotted
from echelon.cli.shared import ENGINE
from echelon.kv.cache import LayerShape
from echelon.memory import residents as residents_module
from echelon.memory.footprint import Footprint
from echelon.memory.ladder import PLANNED_LEN, PLANNED_ROWS, Fitting, _ladder, fitted
from echelon.memory.plan import HeadFootprint, MemoryPlan, Residents, plan_memory
from echelon.memory.residents import PlannedModels
from echelon.memory.step_speeds import UNKNOWN
from echelon.server import http as serving
from echelon.sizes import gibibytes, parse_bytes

CONTEXT, MIB = 8192, 2**20
ROUNDED = {"kv_cache_dtype", "quantization"}
SIZES = {None: 2000, "int8": 1020, "int4": 580}  # MiB of weights
BITS = {None: 16, "int8": 8, "int4": 4}
TREE = SpeculativeConfig(method="medusa", model="head", tree="dynamic")
CHAIN = SpeculativeConfig(method="draft_model", model="draft")


def residents(config: EngineConfig, spec: SpeculativeConfig | None) -> Residents:
    """A model of a billion parameters, a draft model of a twentieth, and heads of 40 MiB for each token that they draft."""

    def footprint(name: str, weights: int, layers: int) -> Footprint:
        shapes = (LayerShape(4, 64, 64),) * layers
        return Footprint(name, weights * MIB, 0, 0, shapes, torch.bfloat16, 60_000, 32_000, CONTEXT, config.quantization)

    target = footprint("target", SIZES[config.quantization], 22)
    draft = footprint("draft", 100, 4) if spec is not None and spec.method == "draft_model" else None
    head = HeadFootprint(40 * MIB * min(5, spec.longest_path), 0, 4096) if spec is not None and spec.is_head else None
    return Residents(target, draft, head, runtime=500 * MIB)


def plan_of(config: EngineConfig, spec: SpeculativeConfig | None) -> MemoryPlan:
    return plan_memory(config, spec, residents(config, spec), config.max_model_len or CONTEXT)


def unmeasured(_before: object, _after: object) -> str:
    return UNKNOWN


def fit(mebibytes: int, spec: SpeculativeConfig | None = None, may_round: set[str] = ROUNDED, **settings: Any) -> Fitting:
    return fitted(EngineConfig(memory=mebibytes * MIB, **settings), spec, mebibytes * MIB, plan_of, CONTEXT, may_round, unmeasured)


def said(fitting: Fitting) -> list[str]:
    return [rung.what for rung in fitting.rungs]


def test_where_there_is_room_texts_grow_before_rows() -> None:
    sizes = [(f.config.max_model_len, f.config.max_num_seqs) for f in map(fit, (3300, 3600, 4000, 8000, 20000, 40000))]
    assert sizes[0][0] is not None and PLANNED_LEN <= sizes[0][0] < CONTEXT and sizes[0][1] == PLANNED_ROWS
    assert sizes == sorted(sizes) and sizes[-1] == (CONTEXT, 64)
    assert all(not f.rungs for f in map(fit, (3300, 40000)))
    rows = [fit(size, max_model_len=512).config.max_num_seqs for size in (2700, 2800, 3300, 40000)]
    assert rows == sorted(rows) and rows[0] < rows[1] < rows[2] and rows[-1] == 64, (
        "texts that stay as long as they are leave room for rows"
    )


def test_rungs_come_in_their_order() -> None:
    whole = [said(fit(size)) for size in (2900, 2150, 1700, 1300, 1250, 1215)]
    assert whole[0] == ["keys and values in 8 bits"]
    assert whole[1] == [*whole[0], "weights in 8 bits"]
    assert whole[2] == [*whole[1], "weights in 4 bits"]
    assert whole[3][:3] == whole[2] and whole[3][3].endswith("at once")
    assert whole[4][:3] == whole[2] and whole[4][3] == "1 row at once" and len(whole[4]) in (4, 5)
    assert whole[5][4].startswith("texts of")


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_drafts_go_first_and_are_not_given_up_in_vain(spec: SpeculativeConfig) -> None:
    full = plan_of(EngineConfig(max_num_seqs=PLANNED_ROWS, max_model_len=PLANNED_LEN), spec).total_bytes // MIB + 1
    fewer = fit(full - 3, spec)
    assert fewer.spec is not None and fewer.spec.most_tokens < spec.most_tokens
    assert len(fewer.rungs) == 1 and ("drafted" in said(fewer)[0] or "nodes" in said(fewer)[0])
    smaller = fit(full - 700, spec)
    assert smaller.config.quantization == "int8" and smaller.spec == spec, "what 8 bits free is enough for all of the draft"


def test_heads_go_after_nodes() -> None:
    full = plan_of(EngineConfig(max_num_seqs=PLANNED_ROWS, max_model_len=PLANNED_LEN), TREE).total_bytes // MIB + 1
    steps = [said(fit(full - less, TREE, set())) for less in (2, 40, 80, 120, 160)]
    assert steps[0][0].endswith("nodes of a tree")
    assert steps[-1][0] == "16 nodes of a tree" and steps[-1][1].endswith("heads")
    depths = [f.spec.tree_depth for less in (2, 80, 120, 160) if (f := fit(full - less, TREE, set())).spec]
    assert depths == sorted(depths, reverse=True) and depths[-1] < depths[0]


def test_a_kept_prefix_goes_before_anything_else() -> None:
    def plan(config: EngineConfig, spec: SpeculativeConfig | None) -> MemoryPlan:
        found = plan_of(config, spec)
        return MemoryPlan(found.terms | {"boundary states": 50 * MIB * config.enable_prefix_caching}, 0, found.pool)

    full = plan(EngineConfig(max_num_seqs=4, max_model_len=4096), CHAIN).total_bytes
    found = fitted(EngineConfig(), CHAIN, full - MIB, plan, CONTEXT, ROUNDED, unmeasured)
    assert said(found) == ["no prefix cache"] and "--no-enable-prefix-caching" in found.flags()


def test_drafts_come_back_before_kept_prefixes_do() -> None:
    """Where a rung below has freed enough for either of them."""

    def plan(config: EngineConfig, spec: SpeculativeConfig | None) -> MemoryPlan:
        found = plan_of(config, spec)
        return MemoryPlan(found.terms | {"boundary states": 60 * MIB * config.enable_prefix_caching}, 0, found.pool)

    full = plan(EngineConfig(max_num_seqs=4, max_model_len=4096, quantization="int8"), TREE).total_bytes
    without = plan(EngineConfig(max_num_seqs=4, max_model_len=4096, quantization="int8", enable_prefix_caching=False), TREE).total_bytes
    some = fitted(EngineConfig(), TREE, full - MIB, plan, CONTEXT, {"quantization"}, unmeasured)
    assert without < full - MIB and some.spec == TREE and said(some) == ["no prefix cache", "weights in 8 bits"]
    both = fitted(EngineConfig(), TREE, full, plan, CONTEXT, {"quantization"}, unmeasured)
    assert both.spec == TREE and said(both) == ["weights in 8 bits"]


@pytest.mark.parametrize(("copy", "rungs"), [("self:int8", []), ("self:int4", ["weights in 8 bits"])])
def test_a_model_is_not_rounded_to_the_bits_of_its_own_copy(copy: str, rungs: list[str]) -> None:
    spec = SpeculativeConfig(method="draft_model", model=copy, num_speculative_tokens=4)
    choices = _ladder(EngineConfig(max_num_seqs=4, max_model_len=4096), spec, {"quantization"}, ROUNDED)
    assert [what for rung in choices for what, *_ in rung] == rungs


def test_texts_are_shortened_to_the_next_64_tokens() -> None:
    """Of 1,000 tokens to 960, not to 896."""
    for planned, shorter in ((1000, 960), (1024, 960), (961, 960), (960, 896)):
        (rung,) = _ladder(EngineConfig(max_num_seqs=1, max_model_len=planned), None, {"max_model_len"}, set())
        assert rung[0][0] == f"texts of {shorter} tokens"


def test_probabilities_are_planned_for_what_a_draft_model_draws_alone() -> None:
    """A look-up proposes with certainty, by whatever rule drafts are kept."""
    config, more = EngineConfig(max_num_seqs=4, max_model_len=512), dict[str, int]()
    for method, model in (("ngram", None), ("draft_model", "draft")):
        exact, rejection = (
            plan_of(config, SpeculativeConfig(method=method, model=model, num_speculative_tokens=3, acceptance=acceptance))
            for acceptance in ("exact", "rejection")
        )
        more[method] = rejection.total_bytes - exact.total_bytes
    assert more == {"ngram": 0, "draft_model": 4 * 3 * 8 * residents(config, None).target.vocab_size}


def test_a_length_beyond_the_context_is_refused_with_a_budget_too() -> None:
    with pytest.raises(ConfigError, match=f"max_model_len = {CONTEXT + 1} exceeds the model's context of {CONTEXT} tokens"):
        fit(40_000, max_model_len=CONTEXT + 1)
    loaded = toys.adopted(toys.llama())
    with pytest.raises(ConfigError, match="exceeds the model's context"):
        PlannedModels(EngineConfig(), None, loaded).plan(EngineConfig(max_model_len=toys.CONTEXT + 1), None)


@pytest.mark.parametrize("budget", [{"memory": "1GiB"}, {"gpu_memory_utilization": 0.9}])
def test_a_budget_that_is_not_free_is_said_before_anything_is_loaded(
    budget: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlannedModels, "within_reach", 100 * MIB)
    monkeypatch.setattr("echelon.build.load_model", None)
    with pytest.raises(ConfigError, match=f"{next(iter(budget))} = .* plans .* and 100.0 MiB are free on cpu; lower it"):
        LLM(folder, **budget)


ALL = {"enable_prefix_caching": True, "kv_cache_dtype": "auto", "quantization": None, "max_num_seqs": 4, "max_model_len": 4096}


@pytest.mark.parametrize(
    ("free", "less", "rungs"),
    [
        ("enable_prefix_caching", 40, ["no prefix cache"]),
        ("kv_cache_dtype", 100, ["keys and values in 8 bits"]),
        ("quantization", 900, ["weights in 8 bits"]),
        ("quantization", 1300, ["weights in 8 bits", "weights in 4 bits"]),
        ("max_num_seqs", 80, ["3 rows at once"]),
        ("max_model_len", 1, ["texts of 4,032 tokens"]),
        ("drafts", 1, ["44 nodes of a tree"]),
        ("drafts", 80, ["16 nodes of a tree", "4 heads"]),
    ],
)
def test_each_rung_alone(free: str, less: int, rungs: list[str]) -> None:
    """Everything else is set, and stays."""

    def plan(config: EngineConfig, spec: SpeculativeConfig | None) -> MemoryPlan:
        found = plan_of(config, spec)
        return MemoryPlan(found.terms | {"boundary states": 50 * MIB * config.enable_prefix_caching}, 0, found.pool)

    asked = EngineConfig(**{name: value for name, value in ALL.items() if name != free})
    spec = TREE if free == "drafts" else SpeculativeConfig(method="medusa", model="head", tree="dynamic", num_speculative_tokens=16)
    full = plan(EngineConfig(**ALL), spec).total_bytes
    found = fitted(asked, spec, full - less * MIB, plan, CONTEXT, ROUNDED, unmeasured)
    if free == "max_num_seqs":
        assert len(found.rungs) == 1 and found.config.max_num_seqs == 3
    elif free == "max_model_len":
        assert said(found)[-1].startswith("texts of") and found.config.max_model_len is not None and found.config.max_model_len < 4096
    assert said(found)[: len(rungs)] == rungs
    assert sum(rung.freed for rung in found.rungs) == full - found.plan.total_bytes >= less * MIB
    assert {name for name in ALL if getattr(found.config, name) != ALL[name]} == ({free} if free != "drafts" else set())


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"max_num_seqs": 6}, "max_num_seqs"),
        ({"max_model_len": 3000}, "max_model_len"),
        ({"quantization": "int8"}, "quantization"),
        ({"kv_cache_dtype": "auto"}, "kv_cache_dtype"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching"),
    ],
)
def test_what_is_set_stays(settings: dict[str, Any], changed: str) -> None:
    found = fit(1900, CHAIN, **settings)
    assert getattr(found.config, changed) == settings[changed] and found.rungs


def test_a_fixed_number_of_drafted_tokens_stays() -> None:
    spec = SpeculativeConfig(method="draft_model", model="draft", num_speculative_tokens=5)
    assert fit(1400, spec).spec == spec
    capped = SpeculativeConfig(method="draft_model", model="draft", max_speculative_tokens=5)
    assert fit(1400, capped).spec == capped


@given(
    sizes=st.lists(st.integers(1200, 30_000), min_size=2, max_size=5),
    drafts=st.sampled_from([None, CHAIN, TREE]),
    length=st.sampled_from([None, 512, 4096]),
)
def test_less_memory_never_gives_more(sizes: list[int], drafts: SpeculativeConfig | None, length: int | None) -> None:
    own = {} if length is None else {"max_model_len": length}
    found = []
    for size in sorted(sizes, reverse=True):
        try:
            fitting = fit(size, drafts, **own)
        except ConfigError:
            found.append(None)
            continue
        assert fitting.plan.total_bytes <= size * MIB and fitting == fit(size, drafts, **own), "it fits, and again"
        config = fitting.config
        bits = BITS[config.quantization], 16 if config.kv_cache_dtype == "auto" else 8
        found.append((config.max_num_seqs, config.max_model_len, *bits))
    for more, less in pairwise(found):
        assert less is None or (more is not None and all(a >= b for a, b in zip(more, less, strict=True))), (more, less)


def test_a_refusal_says_what_would_fit() -> None:
    with pytest.raises(
        ConfigError, match=r"100 rows of 4,096 tokens need .*; \d+ rows of 4,096 tokens or 100 rows of [\d,]+ tokens would fit"
    ):
        fit(4000, None, set(), max_num_seqs=100, max_model_len=4096)
    with pytest.raises(ConfigError, match=r"hold no engine: one row of 128 tokens needs .*, or a smaller model"):
        fit(600)
    with pytest.raises(ConfigError) as refused:
        fit(4000, None, set(), max_num_seqs=100, max_model_len=4096)
    rows = int(str(refused.value).split("; ")[1].split(" rows")[0])
    assert fit(4000, None, set(), max_num_seqs=rows, max_model_len=4096)
    with pytest.raises(ConfigError):
        fit(4000, None, set(), max_num_seqs=rows + 1, max_model_len=4096)


@pytest.fixture(autouse=True)
def process_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process of tests takes depends on the tests before."""
    monkeypatch.setattr(residents_module, "process_bytes", lambda *_: 500 * MIB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    toys.llama(hidden_size=256, num_attention_heads=16, intermediate_size=512).bfloat16().save_pretrained(path)
    return path


def test_flags_are_those_that_the_verb_has(folder: Path) -> None:
    """Of a chat neither rows nor prefixes; what a shell would read otherwise is quoted."""
    tree = {"method": "ngram", "prompt_lookup_source": "prompt"}
    found = LLM(folder, tree, memory="1GiB", dtype="bfloat16").fitting
    assert found is not None
    every, own = found.flags(), found.flags(ENGINE)
    assert any(flag.startswith("--max-num-seqs") for flag in every) and not any(flag.startswith("--max-num-seqs") for flag in own)
    static = replace(found, spec=SpeculativeConfig(method="eagle", tree="static", speculative_token_tree=((0,), (0, 0)), model="a b"))
    words = shlex.split(" ".join(static.flags()))
    assert words[words.index("--speculative-config.model") + 1] == "a b"
    assert json.loads(words[words.index("--speculative-config.speculative_token_tree") + 1]) == [[0], [0, 0]]


def test_flags_make_the_same_engine(folder: Path) -> None:
    asked = ("--dtype", "bfloat16", "--max-num-seqs", "4", "--max-model-len", str(toys.CONTEXT))
    whole = json.loads(run("plan", str(folder), "--json", *asked).stdout)
    by_memory = LLM(folder, {"method": "ngram"}, memory=whole["total_bytes"] - MIB, dtype="bfloat16", max_num_seqs=4)
    assert by_memory.fitting is not None and by_memory.fitting.rungs
    words = [w for flag in by_memory.fitting.flags() for w in flag.split(" ", 1)]
    settings: dict[str, Any] = {"dtype": "bfloat16"}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        if not flag.startswith("--speculative"):
            settings[flag[2:].replace("-", "_")] = int(value) if value.isdecimal() else value
    by_flags = LLM(folder, by_memory.speculative_config, **settings)
    assert by_flags.config == by_memory.config
    assert by_flags.storage.plan.num_blocks == by_memory.storage.plan.num_blocks
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    texts = [[o.outputs[0].token_ids for o in llm.generate(toys.prompts((1, 5, 9)), params)] for llm in (by_memory, by_flags)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("drafts", [[], ["--speculative-config.method", "ngram"]], ids=["plain", "ngram"])
def test_a_server_with_the_flags_is_the_same_server(drafts: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[LLM] = []
    monkeypatch.setattr(serving, "serve_until_signal", lambda llm, *_: served.append(llm))
    asked = ("--dtype", "bfloat16", "--max-num-seqs", "4", "--max-model-len", str(toys.CONTEXT))
    whole = json.loads(run("plan", str(folder), "--json", *asked, *drafts).stdout)
    budget = ("--dtype", "bfloat16", "--memory", str(whole["total_bytes"] - MIB // 4))
    flags = json.loads(run("plan", str(folder), "--json", *budget, *drafts).stdout)["flags"]
    for words in ([*budget, *drafts], ["--dtype", "bfloat16", *(word for flag in flags for word in flag.split(" ", 1))]):
        assert run("serve", str(folder), "--port", "0", *words).exit_code == 0
    by_memory, by_flags = served
    assert by_memory.fitting is not None and by_memory.fitting.rungs and by_flags.fitting is None
    assert by_flags.config == by_memory.config and by_flags.speculative_config == by_memory.speculative_config
    assert by_flags.storage.plan.num_blocks == by_memory.storage.plan.num_blocks


def run(*words: str) -> Any:
    return CliRunner().invoke(app, join_dotted(list(words)), catch_exceptions=True)


def test_the_command_says_where_the_bytes_go(folder: Path) -> None:
    said = json.loads(run("plan", str(folder), "--json", "--max-num-seqs", "3", "--max-model-len", "64", "--turns", "4").stdout)
    assert said["total_bytes"] == sum(said["terms"].values()) and said["fits"] is True and said["flags"] == []
    assert (said["max_num_seqs"], said["max_model_len"], said["tokens_per_turn"]) == (3, 64, 16)
    assert said["terms"]["keys and values"] == 3 * 64 * 2 * 2 * 2 * 16 * 2  # rows, tokens, layers, keys and values, heads, numbers, bytes
    fitted = json.loads(run("plan", str(folder), "--json", "--memory", "2GiB").stdout)
    assert fitted["fits"] and any(flag.startswith("--kv-cache-memory-bytes") for flag in fitted["flags"])
    assert "keys and values" in run("plan", str(folder)).stdout
    bounds = run("plan", str(folder), "--speculation", "--speculative-config.method", "ngram", "--json")
    assert [b["shape"] for b in json.loads(bounds.stdout)["speculation"]] == ["none", "1 tokens", "2 tokens", "4 tokens", "8 tokens"]


@pytest.mark.parametrize("memory", ["8 G", "8G", "-5", "0", "NaN", "1e99GiB", "", "8GiBs", True, 1.5])
def test_what_is_no_amount_of_memory_is_refused(memory: Any) -> None:
    with pytest.raises(ConfigError, match="memory"):
        EngineConfig(memory=memory)


@pytest.mark.parametrize(
    ("text", "count"), [("8GiB", 2**33), ("8GB", 8 * 10**9), ("512MiB", 2**29), ("2e9", 2 * 10**9), ("1.5KiB", 1536), (7, 7)]
)
def test_gigabytes_are_powers_of_ten_and_gibibytes_of_two(text: Any, count: int) -> None:
    assert parse_bytes(text, "memory") == count
    assert EngineConfig(memory=text).budget(0) == count
    assert gibibytes(2**33) == "8.00 GiB"


def test_one_budget_at_a_time() -> None:
    assert EngineConfig(gpu_memory_utilization=0.5).budget(1000) == 500
    for both in ({"memory": "1GiB", "gpu_memory_utilization": 0.5}, {"memory": "1GiB", "kv_cache_memory_bytes": 10**9}):
        with pytest.raises(ConfigError, match="leave all but one out"):
            EngineConfig(**both)
    with pytest.raises(ConfigError, match="unpadded"):
        EngineConfig(memory="1GiB", strategy="padded")

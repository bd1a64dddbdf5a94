"""Plans for a CUDA device, beside what lies on a card that is not there (tests/support/card.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import card
import toys

from echelon import LLM, EngineConfig, load_model
from echelon.heads.checkpoints import build_head, save_head
from echelon.memory.footprint import footprint_of
from echelon.memory.plan import DEVICE_RUNTIME, Residents, captured_bytes, plan_memory
from echelon.memory.pool import plan_kv
from echelon.memory.residents import PlannedModels
from echelon.model.patches.linear import weight_bytes
from echelon.ops import compiled, devices
from echelon.speculative_config import SpeculativeConfig, speculative

SMALL = 60_000  # bytes of vectors, which are counted in float32 too
DRAFTS = {"plain": None, "chain": {"method": "draft_model"}, "tree": {"method": "eagle", "tree": "dynamic", "num_speculative_tokens": 8}}


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[card.Card]:
    if torch.cuda.is_available() or not compiled.is_built():
        pytest.skip("a device measures by itself; without kernels of the CPU nothing can stand in")
    there = card.stand_in(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=1 << 31, name="a card"))
    monkeypatch.setattr(devices, "chosen_device", lambda _name: card.CUDA)
    with there:
        yield there


@pytest.mark.parametrize("kind", DRAFTS)
def test_what_lies_on_a_device_is_what_is_planned_for_it(kind: str, there: card.Card, tmp_path: Path) -> None:
    model, drafts = tmp_path / "model", DRAFTS[kind]
    toys.llama().bfloat16().save_pretrained(model)
    if drafts is not None and drafts["method"] == "eagle":
        save_head(build_head("eagle", toys.llama()).bfloat16(), tmp_path / "head", toys.llama().bfloat16())
    if drafts is not None:
        drafts = drafts | {"model": str(tmp_path / "head" if "tree" in drafts else model)}
    settings = {"max_num_seqs": 3, "max_model_len": 64}
    models = PlannedModels(EngineConfig(**settings), speculative(drafts), model)
    plan = models.plan(EngineConfig(**settings), speculative(drafts))
    assert models.device == card.CUDA and models.may_round == set() and models.memory == 1 << 31
    assert plan.terms["runtime"] == DEVICE_RUNTIME and plan.terms["tokenizer"] == plan.loading == 0
    storage = LLM(model, drafts, **settings).storage
    target, *others = (weight_bytes(runner.loaded.model) for runner in storage.runners)
    assert storage.runners[0].loaded.device == card.CUDA
    assert target <= plan.terms["target weights"] <= target + SMALL
    head = sum(p.nbytes for p in storage.head.head.parameters()) if storage.head is not None else 0
    drafting = sum(others) + head
    assert drafting <= plan.terms["draft weights"] <= drafting + SMALL
    caches = [*(r.cache for r in storage.runners), *([storage.head_cache] if storage.head_cache is not None else [])]
    kept = sum(t.nbytes for c in caches for t in (*c.keys, *c.values, c.boundaries))
    assert kept == sum(plan.terms[name] for name in ("keys and values", "nodes in flight", "boundary states"))
    assert all(there.holds(t) for c in caches for t in (*c.keys, *c.values))


def test_a_budget_of_a_device_is_kept_by_the_engine(there: card.Card, tmp_path: Path) -> None:
    toys.llama().bfloat16().save_pretrained(tmp_path)
    llm = LLM(tmp_path, gpu_memory_utilization=0.5)
    assert llm.fitting is not None and llm.fitting.budget == 1 << 30 and llm.fitting.plan.total_bytes <= 1 << 30
    assert llm.storage.plan.num_blocks == llm.fitting.plan.pool.num_blocks


def test_captured_passes_are_counted_with_their_block() -> None:
    footprint = footprint_of(toys.adopted(toys.llama()))
    spec = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    config = EngineConfig(max_num_seqs=4, max_model_len=64)
    eager, captured = (Residents(footprint, runtime=DEVICE_RUNTIME, captures=captures) for captures in (False, True))
    plans = [plan_memory(config, spec, residents, 64) for residents in (eager, captured)]
    assert captured_bytes(config, spec, eager) == 0
    sizes = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)  # of four rows with three drafted tokens
    assert captured_bytes(config, spec, captured) == sum(sizes) * 4 * footprint.vocab_size + 16 * footprint.pass_bytes
    assert plans[1].pool.num_blocks == plans[0].pool.num_blocks + 1
    pinned = plan_kv(footprint.bytes_per_token(), 16, 4, 64, plans[1].pool.kv_bytes, torch.device("cpu"), num_null_blocks=1)
    assert pinned.num_blocks == plans[0].pool.num_blocks, "rows lose no block to the one that no row gets"
    wide = plan_memory(EngineConfig(max_num_seqs=2048, max_model_len=64), spec, captured, 64)
    assert wide.terms["captured passes"] < 64 * 512 * 4 * footprint.vocab_size, "wider passes are not captured"


def test_a_loaded_model_is_planned_on_its_device(there: card.Card, tmp_path: Path) -> None:
    toys.llama().bfloat16().save_pretrained(tmp_path)
    config = EngineConfig(max_num_seqs=2, max_model_len=64)
    by_name, loaded = (PlannedModels(config, None, m).plan(config, None) for m in (tmp_path, load_model(tmp_path, device="cuda")))
    assert loaded.terms["target weights"] <= by_name.terms["target weights"] <= loaded.terms["target weights"] + SMALL
    different = {name for name in loaded.terms if loaded.terms[name] != by_name.terms[name]}
    assert different <= {"target weights"}

"""A plan beside the peak of a process that loads a model and fills every row; wrong headers are refused before anything is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import toys
from safetensors.torch import load_file, save_file

from benchmarks import memory
from benchmarks.hard_limits import in_process
from benchmarks.memory_document import is_met
from echelon import LLM, ConfigError, EngineConfig, ModelLoadError, load_model
from echelon.memory.footprint import Outline
from echelon.memory.pool import plan_kv
from echelon.memory.residents import PlannedModels
from echelon.speculative_config import speculative


@pytest.mark.parametrize("setting", ["chain", "int8"])
def test_a_plan_is_never_under_the_peak_and_little_over(setting: str) -> None:
    assert is_met(in_process("peak", "embedded", setting))


def test_the_goal_is_judged_both_ways() -> None:
    mebibyte = 2**20
    for total, met in ((1000, True), (999, False), (1128, True), (1129, False)):
        assert is_met({"total_bytes": total * mebibyte, "peak": 1000 * mebibyte}) is met
    assert is_met({"total_bytes": 10_400 * mebibyte, "peak": 10_000 * mebibyte}), "5 % of a large one"


def test_buffers_of_trees_are_those_of_the_digest() -> None:
    found = memory.trees()
    assert found["Medusa stock"]["logits of nodes"] == 6 * 64 * 32000 * 2
    assert sum(found["ours planned"].values()) < 0.36 * sum(found["Medusa stock"].values())


def test_where_a_step_leaves_no_room_for_keys_and_values_what_it_takes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.memory.pool.available_memory", lambda _: 2**20)
    said = r"beside the 3\.0 MiB of a step 0\.0 MiB may be taken for keys and values, less than one block of 16 tokens \(0\.0 MiB\); lower"
    with pytest.raises(ConfigError, match=said):
        plan_kv(1000, 16, 4, 64, "auto", torch.device("cpu"), working_bytes=3 * 2**20)


def test_headers_that_lie_are_refused(tmp_path: Path) -> None:
    toys.llama().bfloat16().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name][:-8].contiguous()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match="has shape"):
        Outline.of(str(tmp_path))
    raw = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ModelLoadError, match="torn"):
        Outline.of(str(tmp_path))


def test_a_model_of_numbers_that_its_files_cannot_fill_is_refused(tmp_path: Path) -> None:
    toys.llama().bfloat16().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10_000}))
    with pytest.raises(ModelLoadError):
        Outline.of(str(tmp_path))


def test_a_loaded_model_is_not_counted_twice(tmp_path: Path) -> None:
    loaded = toys.adopted(toys.llama())
    first = PlannedModels(EngineConfig(), None, loaded)
    assert first.plan(EngineConfig(max_model_len=64), None).terms["target weights"] > 0
    assert first.may_round == {"kv_cache_dtype"}, "its weights are as they are"
    llm = LLM(loaded, memory="64GiB")
    assert llm.fitting is not None and llm.fitting.config.quantization is None and not llm.fitting.rungs
    path = tmp_path / "model"
    toys.llama().bfloat16().save_pretrained(path)
    own = {"method": "draft_model", "model": "self:int4"}
    for model in (load_model(path), path):
        terms = PlannedModels(EngineConfig(), speculative(own), model).plan(EngineConfig(max_model_len=64), speculative(own)).terms
        assert 0 < terms["draft weights"] < terms["target weights"], "its own copy, loaded or not"
    llm = LLM(loaded, {"method": "draft_model"}, loaded, gpu_memory_utilization=1.0)
    assert llm.fitting is not None and llm.fitting.plan.terms["draft weights"] == llm.fitting.plan.terms["target weights"]

"""What is said of the speed of settings that are given up, by costs that were kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import toys

from echelon import EngineConfig, SpeculativeConfig
from echelon.adaptive.cost_files import CostRecord, key_of_model, machine_key, write_costs
from echelon.adaptive.cost_table import CostCurve, CostTable
from echelon.inputs import cache_folder
from echelon.memory.lower_bound import least_memory
from echelon.memory.residents import PlannedModels
from echelon.memory.step_speeds import UNKNOWN
from echelon.model.load.loading import LoadedModel

DRAFTS = SpeculativeConfig(method="draft_model", model="draft", max_speculative_tokens=3)
STEPS = CostCurve(tokens=(1, 4, 16, 64), milliseconds=(10.0, 12.0, 20.0, 52.0))


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests measure models of these shapes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def loaded() -> LoadedModel:
    return toys.adopted(toys.llama())


@pytest.fixture
def kept(loaded: LoadedModel) -> None:
    """Costs of this model: its steps, those with a draft model, and with keys and values in 8 bits; and of another model's."""
    folder = cache_folder() / "costs"
    folder.mkdir(parents=True, exist_ok=True)
    key = machine_key(loaded.device) | {"model": key_of_model(loaded.model, loaded.model.dtype, None), "settings": "keys in auto, a pool"}

    def keep(name: str, factor: float, drafting: CostCurve | None = None, **other: str) -> None:
        table = CostTable(
            step=CostCurve(tokens=STEPS.tokens, milliseconds=tuple(factor * t for t in STEPS.milliseconds)), drafting=drafting
        )
        write_costs(folder / f"{name}.json", CostRecord(key=key | other, table=table))

    keep("steps", 1.0)
    keep("rounded", 0.5, settings="keys in int8, a pool")
    keep("drafts", 1.0, CostCurve(tokens=(1,), milliseconds=(2.0,)), drafter="draft_model, chain, 8, None, 0")
    keep("another", 100.0, model="LlamaForCausalLM, torch.float32, None, 0")


def settings(**changed: Any) -> EngineConfig:
    return EngineConfig(**{"max_num_seqs": 4, "max_model_len": 64} | changed)


def test_what_has_not_been_measured_is_not_guessed(loaded: LoadedModel) -> None:
    models = PlannedModels(settings(), None, loaded)
    assert models.speeds.lost((settings(), None), (settings(max_num_seqs=1), None)) == UNKNOWN
    assert "not measured" in least_memory(models, settings(), SpeculativeConfig(method="ngram"))[1].pays


@pytest.mark.usefixtures("kept")
def test_measured_costs_say_what_each_rung_does(loaded: LoadedModel) -> None:
    lost = PlannedModels(settings(), None, loaded).speeds.lost
    plain = settings(), None
    assert lost(plain, (settings(max_num_seqs=1), None)) == "30% of the tokens a second", "a quarter of the rows, steps of 10 ms after 12"
    assert lost(plain, (settings(kv_cache_dtype="int8"), None)) == "a full step takes 0.50 of the time"
    assert lost(plain, (settings(quantization="int8"), None)) == UNKNOWN, "no step of these weights was measured"
    assert lost(plain, (settings(max_model_len=32), None)) == "as fast, while texts last"
    assert lost(plain, (settings(enable_prefix_caching=False), None)) == "1,000 tokens are read in 676 ms"
    fewer = DRAFTS.model_copy(update={"max_speculative_tokens": 1})
    drawn = 12 + 8 * (4 / 12)  # of 8 tokens
    assert lost((settings(), DRAFTS), (settings(), fewer)) == f"a full step takes {(drawn + 2) / (20 + 3 * 2):.2f} of the time"


@pytest.mark.usefixtures("kept")
def test_drafts_pay_by_the_costs_of_the_model_that_is_planned(loaded: LoadedModel) -> None:
    models = PlannedModels(settings(), None, loaded)
    none, one, two, four, eight = least_memory(models, settings(), SpeculativeConfig(method="ngram"))
    assert none.method == "none" and {one.method, two.method, four.method, eight.method} == {"ngram"}
    assert (one.pays, four.pays) == ("1.07 tokens a step", "1.27 tokens a step")
    assert none.bytes < one.bytes < two.bytes < four.bytes < eight.bytes
    assert {found.method for found in least_memory(models, settings(), None)} == {"none", "ngram"}, "what needs no model of its own"

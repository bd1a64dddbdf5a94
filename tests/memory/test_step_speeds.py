"""What is said of the speed of settings that are given up, by costs that were kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import published
import pytest
import toys

from echelon import LLM, EngineConfig, SpeculativeConfig
from echelon.adaptive.cost_files import CostRecord, all_costs, key_of_drafter, key_of_model, key_of_steps, shapes_of, write_costs
from echelon.adaptive.cost_table import CostCurve, CostTable
from echelon.inputs import cache_folder
from echelon.memory.lower_bound import least_memory
from echelon.memory.residents import PlannedModels
from echelon.memory.step_speeds import UNKNOWN, milliseconds
from echelon.model.load.loading import LoadedModel, load_model
from echelon.ops import compiled
from echelon.speculative_config import speculative

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
    model = key_of_model(loaded.model, loaded.model.dtype, None)

    def keep(name: str, factor: float, drafting: CostCurve | None = None, served: EngineConfig | None = None, **other: str) -> None:
        key = key_of_steps(served or settings(), loaded.device, model) | {"pool": "one that bounds nothing"}
        table = CostTable(
            step=CostCurve(tokens=STEPS.tokens, milliseconds=tuple(factor * t for t in STEPS.milliseconds)), drafting=drafting
        )
        write_costs(folder / f"{name}.json", CostRecord(key=key | other, table=table))

    keep("steps", 1.0)
    keep("rounded", 0.5, served=settings(kv_cache_dtype="int8"))
    of_another = key_of_drafter("draft_model", shapes="another's") | {"drafts": "chain, 3"}
    keep("drafts", 1.0, CostCurve(tokens=(1,), milliseconds=(2.0,)), **of_another)
    keep("another", 100.0, model="LlamaForCausalLM, torch.float32, None, 0")
    keep("padded", 100.0, served=settings(strategy="padded"))
    keep("two ranks", 100.0, served=settings(tensor_parallel_size=2))


def settings(**changed: Any) -> EngineConfig:
    return EngineConfig(**{"max_num_seqs": 4, "max_model_len": 64} | changed)


def test_what_has_not_been_measured_is_not_guessed(loaded: LoadedModel) -> None:
    models = PlannedModels(settings(), None, loaded)
    assert models.speeds.lost((settings(), None), (settings(max_num_seqs=1), None)) == UNKNOWN
    assert "not measured" in least_memory(models, settings(), SpeculativeConfig(method="ngram"))[1].pays


@pytest.mark.usefixtures("kept")
def test_measured_costs_say_what_each_rung_does(loaded: LoadedModel) -> None:
    lost = PlannedModels(settings(), None, loaded).speeds.lost
    plain, fewer = (settings(), None), DRAFTS.model_copy(update={"max_speculative_tokens": 1})
    assert lost(plain, (settings(max_num_seqs=1), None)) == "30% of the tokens a second", "a quarter of the rows, steps of 10 ms after 12"
    assert lost(plain, (settings(kv_cache_dtype="int8"), None)) == "a full step takes 0.50 of the time"
    assert lost(plain, (settings(quantization="int8"), None)) == UNKNOWN, "no step of these weights was measured"
    assert lost(plain, (settings(max_model_len=32), None)) == "as fast, while texts last"
    assert lost(plain, (settings(enable_prefix_caching=False), None)) == "1,000 tokens are read in 676 ms"
    drawn = 12 + 8 * (4 / 12)  # of 8 tokens
    assert lost((settings(), DRAFTS), (settings(), fewer)) == UNKNOWN, "no model is known that drafts"
    keep_drafts_of(loaded)
    lost = PlannedModels(settings(), DRAFTS, loaded, loaded).speeds.lost
    assert lost((settings(), DRAFTS), (settings(), fewer)) == f"a full step takes {(drawn + 2) / (20 + 3 * 2):.2f} of the time"


def keep_drafts_of(draft: LoadedModel, quantization: str | None = None, drafts: str = "chain, 3") -> CostRecord:
    """The costs that are kept of another draft model, as those of this one."""
    record = next(record for record in all_costs() if "drafter" in record.key)
    own = key_of_drafter("draft_model", quantization, shapes_of(draft.model)) | {"drafts": drafts}
    record = record.model_copy(update={"key": record.key | own})
    write_costs(cache_folder() / "costs" / f"{quantization} {drafts}.json", record)
    return record


@pytest.mark.usefixtures("kept")
def test_drafts_pay_by_the_costs_of_the_model_that_is_planned(loaded: LoadedModel) -> None:
    models = PlannedModels(settings(), None, loaded)
    none, one, two, four, eight = least_memory(models, settings(), SpeculativeConfig(method="ngram"))
    assert none.method == "none" and {one.method, two.method, four.method, eight.method} == {"ngram"}
    assert (one.pays, four.pays) == ("1.07 tokens a step", "1.27 tokens a step")
    assert none.bytes < one.bytes < two.bytes < four.bytes < eight.bytes
    assert {found.method for found in least_memory(models, settings(), None)} == {"none", "ngram"}, "what needs no model of its own"


def test_the_most_that_may_be_drafted_is_among_the_shapes(loaded: LoadedModel) -> None:
    """Whether or not it is a usual number, and where a tree is smaller than all of these."""
    copies = SpeculativeConfig(method="ngram", max_speculative_tokens=5)
    found = least_memory(PlannedModels(settings(), copies, loaded), settings(), copies)
    assert [least.shape for least in found] == ["none", "1 tokens", "2 tokens", "4 tokens", "5 tokens"]
    tree = SpeculativeConfig(method="draft_model", model="draft", tree="dynamic", max_speculative_tokens=4)
    found = least_memory(PlannedModels(settings(), tree, loaded, loaded), settings(), tree)
    assert [least.shape for least in found] == ["none", "4 tokens"]


def test_a_level_of_a_tree_is_priced_by_its_rows() -> None:
    """As it is measured: whatever its width, which is the drafter's own."""
    costs = CostTable(step=STEPS, drafting=CostCurve(tokens=(1, 4, 8), milliseconds=(1.0, 2.0, 9.0)), start_ms=3.0)
    spec = SpeculativeConfig(method="draft_model", model="draft", tree="dynamic", tree_top_k=4, tree_depth=5, num_speculative_tokens=8)
    step = float(costs.step_ms(np.array([4 * 9]), 0, np.array([0.0]))[0])
    assert milliseconds(costs, settings(), spec) == pytest.approx(step + 3.0 + 5 * 2.0)


@pytest.mark.usefixtures("kept")
def test_costs_of_another_draft_model_do_not_serve(loaded: LoadedModel) -> None:
    drafts = speculative({"method": "draft_model", "max_speculative_tokens": 3})
    assert PlannedModels(settings(), drafts, loaded, loaded).speeds.table(settings(), drafts) is None
    for quantization, shape in (("int8", "chain"), (None, "dynamic 4 5 None"), (None, "chain")):
        record = keep_drafts_of(loaded, quantization, f"{shape}, 8")
        found = PlannedModels(settings(), drafts, loaded, loaded).speeds.table(settings(), drafts)
        is_own = (quantization, shape) == (None, "chain")
        assert found == (record.table if is_own else None), "in other bits, and with wider levels, drafting takes another time"


@pytest.mark.skipif(not compiled.is_built(), reason="a model's own copy is rounded")
@pytest.mark.usefixtures("kept")
def test_what_drafts_without_having_been_measured_pays_from_nowhere_known(loaded: LoadedModel, tmp_path: Path) -> None:
    """A model's own copy in 4 bits, and a head that is not loaded, by the costs of a draft model or another head."""
    loaded.model.save_pretrained(tmp_path / "m")
    keep_drafts_of(loaded)
    found = least_memory(PlannedModels(settings(), None, tmp_path / "m"), settings(), None)
    assert {least.method for least in found} == {"none", "ngram", "draft_model"}
    assert all("not measured" in least.pays for least in found if least.method == "draft_model")
    (record,) = [record for record in all_costs() if record.key.get("drafter_shapes") == shapes_of(loaded.model)]
    write_costs(cache_folder() / "costs" / "head.json", record.model_copy(update={"key": record.key | {"drafter": "eagle"}}))
    head = SpeculativeConfig(method="eagle", model="head")
    assert PlannedModels(settings(), head, loaded).speeds.table(settings(), head) is None


DRAFTERS: list[dict[str, Any] | None] = [None, {"method": "ngram"}, {"method": "draft_model", "model": "self:int4"}]


@pytest.mark.parametrize("config", DRAFTERS, ids=["plain", "copies", "own copy"])
@pytest.mark.parametrize("kind", ["gptq", "bfloat16", "int8"])
def test_costs_that_an_engine_has_kept_are_found_for_its_plan(kind: str, config: dict[str, Any] | None, tmp_path: Path) -> None:
    if kind == "gptq" and config is not None and "model" in config:
        pytest.skip("what is published in integers has no copy in fewer")
    model = toys.llama(hidden_size=64, intermediate_size=128).bfloat16()
    published.publish(model, kind, tmp_path / "m") if kind == "gptq" else model.save_pretrained(tmp_path / "m")
    chosen: dict[str, Any] = {"quantization": "int8"} if kind == "int8" else {}
    drafts = speculative(config)
    LLM(tmp_path / "m", config or {"method": "ngram"}, max_num_seqs=4, max_model_len=64, **chosen)
    asked = settings(**chosen)
    for planned in (tmp_path / "m", load_model(tmp_path / "m", **chosen)):
        assert PlannedModels(asked, drafts, planned).speeds.table(asked, drafts) is not None

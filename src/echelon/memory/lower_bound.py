"""SpecMemo's lower bound: the least memory that a drafter runs in, and in which it is faster than plain decoding."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.adaptive.cost_table import CostTable
from echelon.config import EngineConfig
from echelon.memory.residents import PlannedModels
from echelon.memory.step_speeds import milliseconds
from echelon.speculative_config import SpeculativeConfig

SHAPES = {False: (1, 2, 4, 8), True: (16, 32, 44, 64)}  # drafted tokens of chains, and of trees


@dataclass(frozen=True)
class LeastMemory:
    """One shape of a method's drafts: the bytes of an engine with one row of it, and from how many tokens a step it is faster than plain
    decoding, as far as steps have been measured here.
    """

    method: str
    shape: str
    bytes: int
    pays: str


def least_memory(models: PlannedModels, config: EngineConfig, spec: SpeculativeConfig | None) -> list[LeastMemory]:
    """Plain decoding, and every shape of drafts that `spec` allows, each with one row of the planned length; without `spec` of the methods
    that need no model or head of their own.
    """
    alone = config.model_copy(update={"max_num_seqs": 1, "kv_cache_memory_bytes": "auto"})
    found = [LeastMemory("none", "none", models.plan(alone, None).total_bytes, "always: plain decoding")]
    copies = ["self:int4"] if config.quantization != "int4" and "quantization" in models.may_round else []
    own = [SpeculativeConfig(method="ngram"), *(SpeculativeConfig(method="draft_model", model=copy) for copy in copies)]
    for method in [spec] if spec is not None else own:
        found += _of_method(models, alone, method)
    return found


def _of_method(models: PlannedModels, alone: EngineConfig, spec: SpeculativeConfig) -> list[LeastMemory]:
    found = []
    costs = models.speeds.table(alone, spec)
    smaller = [n for n in SHAPES[spec.grows_trees] if n < spec.most_tokens] if spec.is_adaptive else []
    shapes = [*smaller, spec.most_tokens]
    for count in shapes:
        drafting = spec.model_copy(update={"max_speculative_tokens": count}) if spec.is_adaptive else spec
        total = models.plan(alone, drafting).total_bytes
        found.append(LeastMemory(spec.method, f"{count} tokens", total, _pays(costs, alone, drafting)))
    return found


def _pays(costs: CostTable | None, alone: EngineConfig, drafting: SpeculativeConfig) -> str:
    if costs is None:
        return "not measured here: run the engine once with num_speculative_tokens = 'auto'"
    return f"{milliseconds(costs, alone, drafting) / milliseconds(costs, alone, None):.2f} tokens a step"

"""What giving something up is expected to cost in speed, by the costs that steps have had on this machine."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from echelon.adaptive.cost_files import all_costs, key_of_model, machine_key
from echelon.adaptive.cost_table import CostTable
from echelon.config import EngineConfig, SpeculativeConfig
from echelon.methods import METHODS

READ_AGAIN = 1000  # tokens of a prompt
UNKNOWN = "its speed has not been measured here"


class StepSpeeds:
    """Costs of a model's steps that have been kept on this machine.

    model  the target's module; `dtype` as it is served
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._model, self._dtype, self._here = model, dtype, machine_key(device)

    def table(self, config: EngineConfig, spec: SpeculativeConfig | None) -> CostTable | None:
        """The newest costs of steps with such weights, keys and values, and of drafting where something is made to draft; None where they
        have not been measured.
        """
        wanted = self._here | {"model": key_of_model(self._model, self._dtype, config.quantization)}
        kept = [
            record
            for record in reversed(all_costs())
            if wanted.items() <= record.key.items() and f"keys in {config.kv_cache_dtype}," in record.key.get("settings", "")
        ]
        if spec is None or METHODS[spec.method].needs == "nothing":
            return kept[0].table.model_copy(update={"drafting": None, "start_ms": 0.0}) if kept else None
        drafting = [record.table for record in kept if record.key.get("drafter", "").startswith(f"{spec.method},")]
        return drafting[0] if drafting else None

    def lost(self, before: tuple[EngineConfig, SpeculativeConfig | None], after: tuple[EngineConfig, SpeculativeConfig | None]) -> str:
        """What is expected of the speed after settings have changed: of prefixes that are not kept the time to read them, of fewer rows all
        tokens together, and of the rest the time of a full step, in which all that may be drafted is verified.
        """
        (config, _), (changed, _) = before, after
        was, now = self.table(*before), self.table(*after)
        if config.max_model_len != changed.max_model_len:
            return "as fast, while texts last"
        if was is None or now is None:
            return UNKNOWN
        if config.enable_prefix_caching != changed.enable_prefix_caching:
            return f"{READ_AGAIN:,} tokens are read in {float(was.step_ms(np.array([READ_AGAIN]), 0, np.array([0]))[0]):,.0f} ms"
        taken = milliseconds(now, *after) / milliseconds(was, *before)
        if config.max_num_seqs != changed.max_num_seqs:
            return f"{changed.max_num_seqs / config.max_num_seqs / taken:.0%} of the tokens a second"
        return f"a full step takes {taken:.2f} of the time"


def milliseconds(costs: CostTable, config: EngineConfig, spec: SpeculativeConfig | None) -> float:
    """Of a step in which every row verifies all that it may draft, with the drafting."""
    rows, count = config.max_num_seqs, spec.most_tokens if spec is not None else 0
    total = float(costs.step_ms(np.array([rows * (1 + count)]), 0, np.array([0.0]))[0])
    if spec is not None and costs.drafting is not None:
        levels = [rows, *[rows * spec.widest_level] * (spec.longest_path - 1)]
        total += costs.start_ms + float(costs.level_ms(np.array(levels)).sum())
    return total

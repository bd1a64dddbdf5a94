"""What giving something up is expected to cost in speed, by the costs that steps have had on this machine."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from echelon.adaptive.cost_files import all_costs, key_of_drafter, key_of_model, key_of_steps, shapes_of
from echelon.adaptive.cost_table import CostTable
from echelon.config import EngineConfig, SpeculativeConfig, most_drafted
from echelon.methods import METHODS

READ_AGAIN = 1000  # tokens of a prompt
UNKNOWN = "its speed has not been measured here"


class ServedModel(NamedTuple):
    """A module, the type it is served in, and the integers of its linear layers, where that is settled."""

    module: nn.Module
    dtype: torch.dtype
    quantization: str | None

    def key(self, quantization: str | None) -> str:
        """As cost tables have it; in such integers where nothing else is settled."""
        return key_of_model(self.module, self.dtype, self.quantization or quantization)


class StepSpeeds:
    """Costs of the target's steps that have been kept on this machine; `draft`: a model that drafts beside it."""

    def __init__(self, device: torch.device, target: ServedModel, draft: ServedModel | None = None) -> None:
        self._device, self._target, self._draft = device, target, draft

    def table(self, config: EngineConfig, spec: SpeculativeConfig | None) -> CostTable | None:
        """The newest costs of steps with such weights, keys and values, and of drafting where something is made to draft; None where they
        have not been measured.
        """
        wanted = key_of_steps(config, self._device, self._target.key(config.quantization))
        drafts = spec is not None and METHODS[spec.method].needs != "nothing"
        if spec is not None and drafts:
            wanted |= {"drafter": spec.method} if self._draft is None else self._key_of_draft(spec.method, self._draft)
        kept = (record.table for record in reversed(all_costs()) if wanted.items() <= record.key.items())
        table = next(kept, None)
        return table if table is None or drafts else table.without_drafting()

    @staticmethod
    def _key_of_draft(method: str, draft: ServedModel) -> dict[str, str]:
        return key_of_drafter(method, draft.quantization, shapes_of(draft.module, draft.dtype))

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
    rows, count = config.max_num_seqs, most_drafted(spec)
    total = float(costs.step_ms(np.array([rows * (1 + count)]), 0, np.array([0.0]))[0])
    return total if spec is None else total + float(costs.drafting_ms(rows, np.array(spec.longest_path)))

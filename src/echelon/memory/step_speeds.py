"""What giving something up is expected to cost in speed, by the costs that steps have had on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from echelon.adaptive.cost_files import CostRecord, all_costs, grows_as, key_of_model, key_of_steps
from echelon.adaptive.cost_table import CostTable
from echelon.config import EngineConfig
from echelon.methods import METHODS
from echelon.speculative_config import SpeculativeConfig, most_drafted

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
    """Costs of the target's steps that have been kept on this machine; `drafter_key`: what drafts by settings, as `key_of_drafter` has it,
    None where its shapes are not known.
    """

    def __init__(
        self, device: torch.device, target: ServedModel, drafter_key: Callable[[SpeculativeConfig], dict[str, str] | None]
    ) -> None:
        self._device, self._target, self._drafter_key = device, target, drafter_key

    def table(self, config: EngineConfig, spec: SpeculativeConfig | None) -> CostTable | None:
        """The newest costs of steps with such weights, keys and values, and of drafting where something is made to draft; None where they
        have not been measured.
        """
        wanted = key_of_steps(config, self._device, self._target.key(config.quantization))
        if spec is None or METHODS[spec.method].needs == "nothing":
            table = next((record.table for record in _kept(wanted)), None)
            return None if table is None else table.without_drafting()
        drafter = self._drafter_key(spec)
        if drafter is None:
            return None
        return next((record.table for record in _kept(wanted | drafter) if grows_as(spec, record.key)), None)

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


def _kept(wanted: dict[str, str]) -> Iterator[CostRecord]:
    """The records of these costs, the newest first."""
    return (record for record in reversed(all_costs()) if wanted.items() <= record.key.items())


def milliseconds(costs: CostTable, config: EngineConfig, spec: SpeculativeConfig | None) -> float:
    """Of a step in which every row verifies all that it may draft, with the drafting."""
    rows, count = config.max_num_seqs, most_drafted(spec)
    total = float(costs.step_ms(np.array([rows * (1 + count)]), 0, np.array([0.0]))[0])
    return total if spec is None else total + float(costs.drafting_ms(rows, np.array(spec.longest_path)))

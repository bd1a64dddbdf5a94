"""What steps and drafting of an engine cost here: the table it decides by is measured, kept, or named by the configuration."""

from __future__ import annotations

import logging

from echelon.adaptive.cost_files import (
    CostRecord,
    kept_costs,
    key_of_drafter,
    key_of_drafts,
    key_of_model,
    key_of_steps,
    read_costs,
    shapes_of,
)
from echelon.adaptive.cost_table import CostTable
from echelon.adaptive.measure import TOKENS, measured_steps, pool_of, reach_of, with_drafting
from echelon.config import EngineConfig
from echelon.drafters.base import Drafter, LevelDrafter
from echelon.errors import ConfigError
from echelon.inputs import shown
from echelon.model.load.loading import LoadedModel
from echelon.speculative_config import SpeculativeConfig
from echelon.stats import Usage
from echelon.storage import Storage

logger = logging.getLogger("echelon")


def costs_of(config: EngineConfig, spec: SpeculativeConfig, storage: Storage, drafter: Drafter) -> CostTable:
    """The table that the configuration names, or what this machine takes."""
    if spec.cost_table is not None:
        return _named_costs(config, spec, storage, drafter)
    target, reach = storage.runners[0], _reach(config, spec)
    with target.usage.uncounted(), usage_of(drafter).uncounted():
        steps = kept_costs(_keys(_steps_key(config, storage), reach), lambda: measured_steps(target, reach))
        if not isinstance(drafter, LevelDrafter):
            return steps
        key = _costs_key(config, spec, storage)
        return kept_costs(_keys(key, reach), lambda: with_drafting(steps, target, drafter, reach))


def _named_costs(config: EngineConfig, spec: SpeculativeConfig, storage: Storage, drafter: Drafter) -> CostTable:
    """The table in the file that `spec` names. One of another machine may be replayed here; of other models it is said.

    Raises
    ------
    ConfigError  it is none, or says nothing of drafting, which takes time
    """
    record, steps, drafts = read_costs(spec.cost_table or ""), _steps_key(config, storage), _drafter_key(spec, storage)
    has_times = isinstance(drafter, LevelDrafter)
    if has_times and record.table.drafting is None:
        raise ConfigError(
            f"the cost table {shown(str(spec.cost_table))} has no times of drafting, which {spec.method!r} needs; `echelon bench step "
            "--cost-table FILE` with the same --speculative-config writes one that has"
        )
    other = ["model"] if record.key.get("model", steps["model"]) != steps["model"] else []
    is_told = record.key.get("drafter_shapes") is not None  # older tables have it all in one
    if has_times and is_told and any(record.key.get(name, value) != value for name, value in drafts.items()):
        other.append("drafter")
    if other:
        logger.warning("the cost table %s was measured with another %s", shown(str(spec.cost_table)), " and ".join(other))
    return record.table if has_times else record.table.without_drafting()


def measured_costs(config: EngineConfig, spec: SpeculativeConfig, storage: Storage, drafter: Drafter) -> CostRecord:
    """What steps and drafting take now."""
    target, reach = storage.runners[0], _reach(config, spec)
    with target.usage.uncounted(), usage_of(drafter).uncounted():
        table = measured_steps(target, reach)
        if isinstance(drafter, LevelDrafter):
            table = with_drafting(table, target, drafter, reach)
    return CostRecord(key=_keys(_costs_key(config, spec, storage), reach)[0], table=table)


def usage_of(drafter: Drafter) -> Usage:
    """Where passes that draft are counted."""
    return drafter.usage if drafter.usage is not None else Usage()


def _reach(config: EngineConfig, spec: SpeculativeConfig) -> int:
    return reach_of(config.max_num_seqs * (1 + spec.most_tokens))


def _keys(key: dict[str, str], reach: int) -> list[dict[str, str]]:
    """Tables that reach as far, or further, serve."""
    return [key | {"reach": str(n)} for n in TOKENS if n >= reach]


def _steps_key(config: EngineConfig, storage: Storage) -> dict[str, str]:
    """What decides how long a step takes; a table is kept by it."""
    target = storage.runners[0]
    return key_of_steps(config, target.loaded.device, model_key(target.loaded)) | {"pool": pool_of(target)}


def _costs_key(config: EngineConfig, spec: SpeculativeConfig, storage: Storage) -> dict[str, str]:
    """The same with what drafts, and how its drafts grow."""
    return _steps_key(config, storage) | _drafter_key(spec, storage) | key_of_drafts(spec)


def _drafter_key(spec: SpeculativeConfig, storage: Storage) -> dict[str, str]:
    """What drafts: a model, a head, or nothing that has weights."""
    if storage.head is not None:
        return key_of_drafter(spec.method, spec.quantization, shapes_of(storage.head.head))
    drafts = [runner.loaded for runner in storage.runners[1:]]
    return key_of_drafter(spec.method, drafts[0].quantization, shapes_of(drafts[0].model)) if drafts else key_of_drafter(spec.method)


def model_key(target: LoadedModel) -> str:
    """Class, types and shapes of a model."""
    return key_of_model(target.model, target.model.dtype, target.quantization)

"""Cost tables on disk: what was measured of a model on a machine is kept in the user's cache folder, and need not be measured again."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import torch

from echelon.adaptive.cost_table import CostTable
from echelon.config import EngineConfig
from echelon.errors import ConfigError, EchelonError
from echelon.inputs import cache_folder, first_line, write_text
from echelon.ops import compiled
from echelon.ops.devices import cpu_name
from echelon.release import version
from echelon.settings import Settings
from echelon.speculative_config import SpeculativeConfig

logger = logging.getLogger("echelon")
FORM = "3"  # of what is measured; tables of another form are measured anew


class CostRecord(Settings):
    """A table, and what it was measured on and with: `key` is printed, and decides which table serves."""

    key: dict[str, str]
    table: CostTable


def machine_key(device: torch.device) -> dict[str, str]:
    """What of this machine and its software decides how long a step takes."""
    is_device = device.type == "cuda"
    return {
        "form": FORM,
        "echelon": version(),
        "torch": torch.__version__,
        "processor": torch.cuda.get_device_name(device) if is_device else cpu_name(),
        "isa": compiled.isa() if compiled.is_built() and not is_device else "none",
        "kernels": compiled.fingerprint() if not is_device else "none",
        "threads": str(torch.get_num_threads()),
    }


def key_of_model(module: torch.nn.Module, dtype: torch.dtype, quantization: str | None) -> str:
    """Class, types and shapes of a model that is served in `dtype`, with its weights in integers where `quantization` says so."""
    return f"{type(module).__name__}, {dtype}, {quantization}, {shapes_of(module, dtype)}"


def key_of_steps(config: EngineConfig, device: torch.device, model: str) -> dict[str, str]:
    """What decides how long a step takes: this machine, the `key_of_model`, and the settings."""
    strategy = " ".join((config.strategy, config.pad, config.grouping))
    ranks = f"{config.tensor_parallel_size} ranks, {config.pipeline_parallel_size} stages"
    storage = f"blocks of {config.block_size}, keys in {config.kv_cache_dtype}"
    settings = f"numerics {config.numerics}, eager {config.enforce_eager}, {ranks}, {storage}"
    return machine_key(device) | {"model": model, "strategy": strategy, "settings": settings}


def key_of_drafter(method: str, quantization: str | None = None, shapes: str = "none") -> dict[str, str]:
    """What decides how long drafting takes, besides: the method, the integers of the weights that draft, and their `shapes_of`."""
    return {"drafter": method, "drafter_quantization": str(quantization), "drafter_shapes": shapes}


def key_of_drafts(spec: SpeculativeConfig) -> dict[str, str]:
    """How drafts grow, and how far: drafting is measured at the width of a level."""
    return {"drafts": f"{_shape_of(spec)}, {spec.most_tokens}"}


def grows_as(spec: SpeculativeConfig, key: Mapping[str, str]) -> bool:
    """Whether costs of this key are of drafts of the shape of `spec`, however many tokens they have."""
    return key.get("drafts", "").rpartition(", ")[0] == _shape_of(spec)


def _shape_of(spec: SpeculativeConfig) -> str:
    return f"{spec.tree} {spec.tree_top_k} {spec.tree_depth} {spec.speculative_token_tree}" if spec.grows_trees else spec.tree


def shapes_of(module: torch.nn.Module, dtype: torch.dtype | None = None) -> str:
    """A short hash of names, shapes and types of its parameters, or of `dtype` for all: models of the same shapes cost the same."""
    lines = [f"{name} {tuple(p.shape)} {dtype or p.dtype}" for name, p in module.named_parameters()]
    return hashlib.sha256("\n".join([type(module).__name__, *lines]).encode()).hexdigest()[:16]


def kept_costs(keys: SequenceOf[Mapping[str, str]], measure: Callable[[], CostTable]) -> CostTable:
    """The table that was kept for one of `keys`, or one that is measured now and kept for the first of them. A folder that cannot be used
    does no harm.
    """
    table = next((found for key in keys if (found := _kept(key)) is not None), None)
    if table is None:
        logger.info("measuring what steps cost here")
        table = measure()
        _keep(CostRecord(key=dict(keys[0]), table=table))
    return table


def _kept(key: Mapping[str, str]) -> CostTable | None:
    try:
        if not (path := _path(key)).exists():
            return None
        record = read_costs(path)
    except (EchelonError, OSError, RuntimeError) as error:  # no such home, no permission, no table
        logger.warning("no cost table is kept (%s); it is measured again", first_line(error))
        return None
    return record.table if record.key == dict(key) else None


def _keep(record: CostRecord) -> None:
    try:
        path = _path(record.key)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            write_costs(partial, record, "XDG_CACHE_HOME").replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except (EchelonError, OSError, RuntimeError) as error:
        logger.warning("the cost table is not kept: %s", first_line(error))


def all_costs() -> list[CostRecord]:
    """What is kept in the user's cache folder, oldest first; what cannot be read is left out."""
    found = []
    try:
        paths = sorted(_folder().glob("*.json"), key=lambda p: p.stat().st_mtime_ns)
    except (OSError, RuntimeError):  # no such home, no permission
        return []
    for path in paths:
        try:
            found.append(read_costs(path))
        except ConfigError:
            continue
    return found


def read_costs(path: str | Path) -> CostRecord:
    """A cost table as `write_costs` writes it.

    Raises
    ------
    ConfigError  the file cannot be read, or is none
    """
    remedy = "`echelon bench step --cost-table FILE` writes one"
    try:
        given = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the cost table {str(path)!r}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is no JSON ({first_line(error)}); {remedy}") from error
    try:
        return CostRecord(**given)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{str(path)!r} holds no cost table ({first_line(error)}); {remedy}") from error


def write_costs(path: Path, record: CostRecord, chosen_by: str = "--cost-table") -> Path:
    """Write a table as JSON; where that fails, the error says what chooses the place."""
    return write_text(path, json.dumps(record.model_dump(), indent=1) + "\n", chosen_by)


def _folder() -> Path:
    return cache_folder() / "costs"


def _path(key: Mapping[str, str]) -> Path:
    return _folder() / f"{hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:24]}.json"

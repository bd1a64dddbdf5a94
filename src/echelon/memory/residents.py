"""What is in memory beside an engine's own: models and heads by name, of which nothing is read, or as they are loaded."""

from __future__ import annotations

import os
import re
from functools import cached_property

import psutil
import torch

from echelon.adaptive.cost_files import key_of_drafter, shapes_of
from echelon.checkpoint.folder import Folder
from echelon.checkpoint.tensors import WEIGHTS, open_weights, weight_headers
from echelon.config import EngineConfig
from echelon.drafters.heads import attach_head
from echelon.errors import ConfigError
from echelon.heads.base import Head
from echelon.heads.checkpoints import NOT_OF_THE_HEAD, bare_name
from echelon.inputs import name_of
from echelon.memory.footprint import HOST, Footprint, Outline, footprint_of, is_packed_on, tile_bytes
from echelon.memory.ladder import Fitting, fitted
from echelon.memory.plan import (
    DEVICE_RUNTIME,
    HeadFootprint,
    MemoryPlan,
    Residents,
    are_captured,
    footprint_of_head,
    plan_memory,
    process_bytes,
)
from echelon.memory.pool import available_memory
from echelon.memory.step_speeds import ServedModel, StepSpeeds
from echelon.methods import METHODS, head_class
from echelon.model.load.loading import LoadedModel
from echelon.model.patches.linear import weight_bytes
from echelon.model.patches.packing import BITS
from echelon.ops import compiled, cpu, devices
from echelon.speculative_config import SpeculativeConfig

LOOKED_UP = {"rows", "clover_embed_tokens.weight"}  # tables of a head that nothing multiplies by (Clover's and Clover-2's)
OUTPUT = "lm_head.weight"  # the target's own, which files of Clover-2 have too
KEYS_AND_VALUES = ("k_proj.weight", "v_proj.weight")
_PLACE = re.compile(r"(?:^|\.)(\d+)\.")  # of a tensor whose network serves one place of a draft
Source = str | os.PathLike[str] | LoadedModel


class PlannedModels:
    """The target and what drafts beside it, each a folder or hub name, or loaded already."""

    def __init__(
        self,
        config: EngineConfig,
        spec: SpeculativeConfig | None,
        model: Source,
        draft_model: LoadedModel | None = None,
        head: Head | None = None,
    ) -> None:
        self._config, self._spec, self._given_head = config, spec, head
        self._footprints: dict[tuple[int, str | None], Footprint] = {}
        loaded = [m for m in (model, draft_model) if isinstance(m, LoadedModel)]
        self.device = loaded[0].device if loaded else devices.chosen_device(config.device)
        self._target = model if isinstance(model, LoadedModel) else Outline.of(name_of(model), config.dtype, self.device)
        self._draft = draft_model if draft_model is not None else self._outlined_draft(spec, config)
        given = [*(m.model for m in loaded), *([head] if head is not None else [])]
        self._runtime = process_bytes(self.device, sum(map(weight_bytes, given)))

    @cached_property
    def speeds(self) -> StepSpeeds:
        """What steps of the target have cost on this machine."""
        return StepSpeeds(self.device, self._served(self._target, None), self._drafter_key)

    def _drafter_key(self, spec: SpeculativeConfig) -> dict[str, str] | None:
        """What drafts, as costs are kept by it; None for a head that is not loaded, and where no model is known."""
        if spec.is_head:
            return None if self._given_head is None else key_of_drafter(spec.method, spec.quantization, shapes_of(self._given_head))
        drafts = self._read_again if spec.own_copy is not None else self._draft
        if drafts is None:
            return None
        served = self._served(drafts, spec.own_copy or spec.quantization)
        return key_of_drafter(spec.method, served.quantization, shapes_of(served.module, served.dtype))

    @property
    def context(self) -> int:
        """The target's own, in tokens."""
        return self._footprint(self._target, None).max_len

    @property
    def may_round(self) -> set[str]:
        """Settings whose numbers can be rounded here."""
        if self.device.type != "cpu" or not compiled.is_built():
            return set()
        is_open = isinstance(self._target, Outline) and self._target.scheme is None
        return {"kv_cache_dtype", "quantization"} if is_open else {"kv_cache_dtype"}

    def plan(self, config: EngineConfig, spec: SpeculativeConfig | None) -> MemoryPlan:
        """The plan of an engine with these settings."""
        return plan_memory(config, spec, self.residents(config, spec), config.model_len(self.context))

    def residents(self, config: EngineConfig, spec: SpeculativeConfig | None) -> Residents:
        """What the settings have in memory."""
        target, captures = self._footprint(self._target, config.quantization), are_captured(config, self.device)
        if spec is None:
            return Residents(target, runtime=self._runtime, captures=captures)
        if spec.own_copy is not None:
            copy = self._footprint(self._read_again, spec.own_copy)
            return Residents(target, copy, shared=self._read_again.lookup_bytes, runtime=self._runtime, captures=captures)
        draft = self._footprint(self._draft, spec.quantization) if self._draft is not None else None
        return Residents(target, draft, self._head(spec), runtime=self._runtime, captures=captures)

    def fitted(self, budget: int) -> Fitting:
        """Settings that fit `budget` bytes.

        Raises
        ------
        ConfigError  nothing does
        """
        return fitted(self._config, self._spec, budget, self.plan, self.context, self.may_round, self.speeds.lost)

    @property
    def memory(self) -> int:
        """Bytes that the device has in all, or on a CPU the machine."""
        if self.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        return int(psutil.virtual_memory().total)

    @property
    def within_reach(self) -> int:
        """Bytes that this process has, and those that it could still take."""
        is_device = self.device.type == "cuda"
        held = torch.cuda.memory_allocated(self.device) + DEVICE_RUNTIME if is_device else int(psutil.Process().memory_info().rss)
        return held + available_memory(self.device)

    def _served(self, model: Outline | LoadedModel, quantization: str | None) -> ServedModel:
        """A model as it is served, its weights in integers if they are so already or `quantization` says so."""
        if isinstance(model, LoadedModel):
            return ServedModel(model.model, model.model.dtype, model.quantization)
        return ServedModel(model.model, model.dtype, model.scheme.quantization if model.scheme is not None else quantization)

    @property
    def _dtype(self) -> torch.dtype:
        return self._target.model.dtype if isinstance(self._target, LoadedModel) else self._target.dtype

    @cached_property
    def _read_again(self) -> Outline:
        """The target's checkpoint, which its own copy is read from."""
        return self._target if isinstance(self._target, Outline) else Outline.of(self._target.name, self._config.dtype, self.device)

    def _outlined_draft(self, spec: SpeculativeConfig | None, config: EngineConfig) -> Outline | None:
        if spec is None or METHODS[spec.method].needs != "model" or spec.own_copy is not None:
            return None
        return Outline.of(spec.named_model(), config.dtype, self.device)

    def _footprint(self, model: Outline | LoadedModel, quantization: str | None) -> Footprint:
        key = id(model), quantization
        if key not in self._footprints:
            self._footprints[key] = footprint_of(model) if isinstance(model, LoadedModel) else model.footprint(quantization)
        return self._footprints[key]

    def _head(self, spec: SpeculativeConfig) -> HeadFootprint | None:
        """What a head takes whose longest path is that of `spec`."""
        if not spec.is_head:
            return None
        if self._given_head is not None:
            if not isinstance(self._target, LoadedModel):
                raise ConfigError(
                    "a budget for a head that is loaded needs its target loaded too; give the model that `load_model` returned"
                )
            return footprint_of_head(attach_head(self._given_head, self._target))
        folder = spec.named_model()
        size = self._target.model.config.get_text_config().hidden_size
        return stored_head(folder, spec.method, size, self._dtype, spec.longest_path, spec.quantization, self.device)


def stored_head(
    name: str,
    method: str,
    hidden_size: int,
    dtype: torch.dtype,
    longest: int,
    quantization: str | None = None,
    device: torch.device = HOST,
) -> HeadFootprint:
    """A head in a folder, by the headers of its files: its keys and values are what its key and value projections give. Its matrices stay
    beside their packed copies, where kernels have such.
    """
    folder = Folder.locate(name, "head", needs_owner=True)
    files = [WEIGHTS] if folder.has(WEIGHTS) else sorted(p.name for p in folder.path.glob("*.safetensors"))
    head, weights, of_a_token = head_class(method), 0, 0
    with open_weights(folder, files) if files else weight_headers(folder) as stored:
        for key, tensor in ((bare_name(stored_as), tensor) for stored_as, tensor in stored.tensors.items()):
            place = _PLACE.search(key)
            if key in NOT_OF_THE_HEAD or (head.is_by_place and place is not None and int(place[1]) >= longest):
                continue
            if method == "clover2" and key == OUTPUT:
                continue
            size = dtype.itemsize if tensor.dtype.is_floating_point else tensor.dtype.itemsize  # ids stay what they are
            weights += tensor.numel * size
            if len(tensor.shape) == 2 and key not in LOOKED_UP and is_packed_on(device):
                columns, depth = tensor.shape
                weights += -(-columns // cpu.TILE) * tile_bytes(depth, BITS[quantization], dtype)
            of_a_token += tensor.shape[0] * dtype.itemsize if key.endswith(KEYS_AND_VALUES) else 0
    return HeadFootprint(weights, of_a_token, head.num_features * hidden_size * dtype.itemsize)

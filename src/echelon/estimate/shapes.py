"""Models by name, as their configurations were published: built without weights."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from echelon.errors import ConfigError, EchelonError
from echelon.inputs import dtype_name, shown
from echelon.memory.footprint import Outline, tile_bytes
from echelon.model.attention import IMPLEMENTATION
from echelon.model.load.reading import DTYPES
from echelon.model.patches.packing import BITS
from echelon.ops import cpu

TABLE = Path(__file__).with_name("shapes.json")
DEFAULT_DTYPE = "bfloat16"


@cache
def published_shapes() -> dict[str, dict[str, Any]]:
    """Configurations by name."""
    found: dict[str, dict[str, Any]] = json.loads(TABLE.read_text("utf-8"))
    return found


class PaperModel(NamedTuple):
    """A model without weights, on the meta device in bfloat16, in which all kinds can be recorded; `dtype` is what it is served in, with
    linear layers and experts in integers where `quantization` says so.
    """

    model: PreTrainedModel
    dtype: torch.dtype
    quantization: str | None = None

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def dtype_name(self) -> str:
        """As settings call it."""
        return dtype_name(self.dtype)

    def spared(self, depth: int, count: int, is_output: bool = False) -> float:
        """Bytes that integers save of `count` entries of linear layers of this depth, scales counted, as the kernels lay them out."""
        bits = BITS[self.quantization]
        if not bits:
            return 0.0
        kept = tile_bytes(depth, 8 if is_output else bits, torch.bfloat16)
        return count * (self.dtype.itemsize - kept / (cpu.TILE * depth))


def without_weights(name: str, dtype: str = "auto") -> PaperModel:
    """A published shape, or the model in the folder or of the hub name `name`.

    Raises
    ------
    ConfigError  there is neither, with the shapes that there are
    """
    shapes = published_shapes()
    if name in shapes:
        given = dict(shapes[name])
        config = AutoConfig.for_model(given.pop("model_type"), **{"tie_word_embeddings": "ffn_dim" in given} | given)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        model.set_attn_implementation(IMPLEMENTATION)
        return PaperModel(model.eval().to(torch.bfloat16), DTYPES[DEFAULT_DTYPE if dtype == "auto" else dtype])
    if not Path(name).is_dir() and "/" not in name:
        raise ConfigError(
            f"there is no folder {shown(name)} and no shape of that name; known shapes: {', '.join(shapes)}; for another model give "
            "a folder with its config.json and the headers of its weights"
        )
    try:
        outline = Outline.of(name, dtype)
    except EchelonError as error:
        raise ConfigError(f"{error}; or give one of the shapes {', '.join(shapes)}") from None
    if outline.scheme is not None:
        raise ConfigError(f"{shown(name)} is published in integers; on paper models have 16 or 32 bits: give the checkpoint in bfloat16")
    return PaperModel(outline.model, outline.dtype)

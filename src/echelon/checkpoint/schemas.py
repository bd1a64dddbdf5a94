"""Schemas and limits of the JSON files of a checkpoint, checked before `transformers` builds anything from them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from echelon.errors import ModelLoadError, UnsupportedModelError
from echelon.inputs import shown

MAX_CONTEXT = 2**27  # tokens; the longest published context is below a tenth of it
LAYERS = re.compile(r"layers?$|^depth$")
COUNTS = re.compile(r"^(num|n)_|_num_")
LENGTHS = re.compile(r"position|ctx|context|seq_?len|max_.*length|window")
SERVED_FORMATS = "compressed-tensors (int-quantized of 8 bits, pack-quantized of 4), GPTQ or AWQ of 4 bits"
SPARE_LAYERS, SPARE_COUNT = 256, 4096  # what parts that a causal model leaves out may say
TokenId = Annotated[int, Field(ge=-1, lt=2**31)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]


class JsonFile(BaseModel):
    """A JSON file of a checkpoint: strict in what it names; keys that it does not name are left alone."""

    model_config = ConfigDict(strict=True, extra="allow")


class Index(JsonFile):
    """model.safetensors.index.json: tensor → file."""

    weight_map: dict[Name, Name] = Field(min_length=1)


class ModelConfig(JsonFile):
    """config.json of a model."""

    model_type: Annotated[str, Field(min_length=1, max_length=100)]


class GenerationSettings(JsonFile):
    """generation_config.json, as far as the engine reads it."""

    eos_token_id: TokenId | list[TokenId] | None = None
    bos_token_id: TokenId | list[TokenId] | None = None
    pad_token_id: TokenId | list[TokenId] | None = None


def refuse_own_code(name: str, raw: dict[str, Any]) -> None:
    """Raise UnsupportedModelError for a config.json that wants code of its own, or keeps its settings elsewhere."""
    if "auto_map" in raw:
        raise UnsupportedModelError(
            f"{name} wants to run its own code (auto_map in config.json), which echelon never does; "
            "use a checkpoint whose architecture is part of transformers"
        )
    if raw.get("configuration_files") is not None:
        raise UnsupportedModelError(f"{name} keeps its settings in other files (configuration_files in config.json); merge them into one")


def refuse_quantised(name: str, raw: dict[str, Any], how: str = "") -> None:
    """Raise UnsupportedModelError for a config.json whose weights are quantised; `how` says it better than its `quant_method`."""
    for part in (raw, *(v for v in raw.values() if isinstance(v, dict))):
        for key in ("quantization_config", "compression_config"):
            if (settings := part.get(key)) is not None:
                method = how or str(settings.get("quant_method", "")) if isinstance(settings, dict) else ""
                by = f" by {shown(method, quote=False)}" if method else ""
                raise UnsupportedModelError(
                    f"{name} is quantised{by} ({key} in config.json), which is not served; use {SERVED_FORMATS}, or the checkpoint in "
                    "bfloat16 with quantization='int8' or 'int4'"
                )


def check_counts(name: str, raw: dict[str, Any], num_tensors: int, largest_dimension: int) -> None:
    """Raise ModelLoadError for a number of config.json that would take memory or time, and that no file of this size can mean.

    A model has no more layers than tensors, and no more of anything else than its largest tensor has rows or columns.
    """
    most_layers, most = max(num_tensors, SPARE_LAYERS), max(largest_dimension, SPARE_COUNT)
    for key, value in _numbers(raw):
        limit = MAX_CONTEXT if LENGTHS.search(key) else most_layers if LAYERS.search(key) else most if COUNTS.search(key) else None
        if limit is not None and abs(value) > limit:
            raise ModelLoadError(
                f"config.json of {name} sets {key} = {_digits(value)}, and its {num_tensors:,} tensors, the largest dimension "
                f"{largest_dimension:,}, allow at most {limit:,}; it does not fit its weights"
            )


def _numbers(raw: Any, key: str = "") -> Iterator[tuple[str, int | float]]:
    """Every number with the key it stands under, however deep."""
    stack = [(key, raw)]
    while stack:
        key, value = stack.pop()
        if isinstance(value, dict):
            stack += [(str(k), v) for k, v in value.items()]
        elif isinstance(value, list):
            stack += [(key, v) for v in value]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield key, value


def _digits(value: int | float) -> str:
    return f"{float(value):.6g}" if abs(value) < 2**1000 else "a number of more than 300 digits"

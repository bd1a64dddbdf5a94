"""How checkpoints say that their weights are integers: `quantization_config` of config.json by compressed-tensors, GPTQ and AWQ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import Field, ValidationError

from echelon.checkpoint.schemas import JsonFile, refuse_quantised
from echelon.errors import ModelLoadError
from echelon.inputs import shown

GPTQ_FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True)
class Scheme:
    """Linear layers of a checkpoint in integers. `group_size`: entries of K that share a scale, all of them where it is None; `also_needs`:
    what every layer has besides values and scales, "zeros" or the "order" of its entries.
    """

    layout: str  # one of `model.load.published.LAYOUTS`
    bits: int
    group_size: int | None
    also_needs: tuple[str, ...] = ()

    @property
    def quantization(self) -> str:
        """The setting of `EngineConfig` that it stands for."""
        return f"int{self.bits}"


class _Numbers(JsonFile):
    """Weights or activations of compressed-tensors."""

    num_bits: int
    type: str = "int"
    strategy: str | None = None
    group_size: int | None = None
    symmetric: bool = True
    dynamic: bool | str = False
    actorder: bool | str | None = None


class _Group(JsonFile):
    """Layers of compressed-tensors that are quantised alike."""

    weights: _Numbers
    input_activations: _Numbers | None = None
    output_activations: dict[str, Any] | None = None


class _CompressedTensors(JsonFile):
    """`quantization_config` of compressed-tensors."""

    format: str
    config_groups: dict[str, _Group] = Field(min_length=1)
    kv_cache_scheme: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None

    def scheme(self) -> Scheme:
        first, *others = self.config_groups.values()
        if any(g.weights != first.weights or g.input_activations != first.input_activations for g in others):
            raise ValueError("groups of layers that differ")
        for name, value in (("kv_cache_scheme", self.kv_cache_scheme), ("transform_config", self.transform_config)):
            if value:
                raise ValueError(f"a {name}")
        if first.output_activations:
            raise ValueError("output_activations")
        weights, inputs = first.weights, first.input_activations
        rounded = inputs and (inputs.num_bits, inputs.type, inputs.strategy, inputs.dynamic, inputs.symmetric)
        if rounded not in (None, (8, "int", "token", True, True)):
            raise ValueError("activations other than integers of 8 bits, each token by itself and around 0")
        served = {"int-quantized": (8, ("channel", "tensor")), "pack-quantized": (4, ("channel", "group"))}
        bits, strategies = served.get(self.format, (0, ()))
        if weights.type != "int" or weights.num_bits != bits or weights.strategy not in strategies:
            raise ValueError(f"{self.format} of {weights.num_bits} bits of type {weights.type} by {weights.strategy}")
        if bits == 8 and not weights.symmetric:
            raise ValueError("weights of 8 bits with zeros of their own")
        has_order = self.format == "pack-quantized" and weights.actorder in (True, "group", "dynamic")
        also = [role for role, needs in (("zeros", not weights.symmetric), ("order", has_order)) if needs]
        return Scheme(self.format, bits, weights.group_size if weights.strategy == "group" else None, tuple(also))


class _Groups(JsonFile):
    """What GPTQ and AWQ say alike; a group of −1 is a whole row."""

    bits: int
    group_size: int

    def layout(self) -> str:
        raise NotImplementedError

    @property
    def also_needs(self) -> tuple[str, ...]:
        """As `Scheme` has it."""
        return ("zeros",)

    def scheme(self) -> Scheme:
        if self.bits != 4:
            raise ValueError(f"{self.layout()} of {self.bits} bits")
        return Scheme(self.layout(), self.bits, None if self.group_size == -1 else self.group_size, self.also_needs)


class _Gptq(_Groups):
    """`quantization_config` of GPTQ."""

    checkpoint_format: str = "gptq"
    desc_act: bool = False

    @property
    def also_needs(self) -> tuple[str, ...]:
        return ("zeros", "order") if self.desc_act else ("zeros",)

    def layout(self) -> str:
        if self.checkpoint_format not in GPTQ_FORMATS:
            raise ValueError(f"checkpoint_format {self.checkpoint_format}")
        return self.checkpoint_format


class _Awq(_Groups):
    """`quantization_config` of AWQ."""

    version: str = "gemm"

    def layout(self) -> str:
        if self.version.lower() != "gemm":
            raise ValueError(f"version {self.version}")
        return "awq"


METHODS: dict[str, type[_CompressedTensors | _Gptq | _Awq]] = {"compressed-tensors": _CompressedTensors, "gptq": _Gptq, "awq": _Awq}


def scheme_of(name: str, raw: dict[str, Any]) -> Scheme | None:
    """How the checkpoint of this config.json has its weights in integers; None where it has none.

    Raises
    ------
    ModelLoadError         `quantization_config` is not what its method writes
    UnsupportedModelError  it is quantised otherwise than is served
    """
    settings = raw.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if not isinstance(method, str) or method not in METHODS:
        refuse_quantised(name, raw)
        return None
    refuse_quantised(name, {k: v for k, v in raw.items() if k != "quantization_config"})
    try:
        return METHODS[method].model_validate(settings).scheme()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = shown(".".join(map(str, first["loc"])), quote=False)
        raise ModelLoadError(
            f"config.json of {name} has a wrong quantization_config ({key}: {first['msg']}); copy the checkpoint again"
        ) from error
    except ValueError as error:
        refuse_quantised(name, raw, f"{method}: {shown(str(error), quote=False)}")
        raise AssertionError("refused") from error

"""Norms, rotary embeddings and activations: the right thing is recognised, computed to rounding, alike for every batch, and undone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toys
from decoders import decoders
from torch import Tensor, nn
from transformers.activations import ACT2FN

from echelon.model.patches import PatchedForward
from echelon.model.patches.elementwise import patch_elementwise
from echelon.ops import cpu
from echelon.ops.compiled import is_built
from echelon.ops.contract import Activation, RmsWeight

pytestmark = pytest.mark.skipif(not is_built(), reason="the compiled kernels are not built")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # relative
DECODERS = decoders(window=12, original_context=32)


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 3.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def by_definition(name: str, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """In float64, whatever comes in."""
    x, w, b = x.double(), w.double(), b.double()
    if name == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], w, b, 1e-5)
    if name.startswith("rms"):
        y = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return y * (1 + w) if name == "rms_one_plus" else y * w
    gate = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda v: F.gelu(v, approximate="tanh")}[name.removesuffix("_gated")](x)
    return gate * x.flip(-1) if name.endswith("_gated") else gate


def by_kernel(name: str, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    if name == "layer_norm":
        return cpu.layer_norm(x, w, b, 1e-5)
    if name.startswith("rms"):
        return cpu.rms_norm(x, w, 1e-5, RmsWeight[name.removeprefix("rms_").upper()])
    kind = Activation[name.removesuffix("_gated").upper()]
    return cpu.activate(x, kind, x.flip(-1) if name.endswith("_gated") else None)


OPERATIONS = [
    *("rms_after_rounding", "rms_in_float32", "rms_one_plus", "layer_norm"),
    *(kind + form for kind in ("silu", "gelu_tanh", "gelu") for form in ("", "_gated")),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_within_rounding_of_float64(name: str, dtype: torch.dtype) -> None:
    for size in (1, 7, 16, 33, 64, 1000):
        x, w, b = random(9, size, dtype=dtype), random(size, dtype=dtype, seed=1), random(size, dtype=dtype, seed=2)
        expected, got = by_definition(name, x, w, b), by_kernel(name, x, w, b)
        assert got.dtype == dtype
        # one rounding to the dtype, two where the definition rounds before the weight; and float32 arithmetic at the scale of the row
        roundings = 2.05 if name == "rms_after_rounding" else 1.05
        scale = expected.abs().amax(-1, keepdim=True)
        if name.startswith("gelu"):
            scale = scale + x.double().abs().amax(-1, keepdim=True) ** 2  # what cancels in 1 + erf
        limit = roundings * HALF_ULP[dtype] * expected.abs() + 1e-6 * scale + 1e-7
        assert bool(((got.double() - expected).abs() <= limit).all()), size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_depends_on_itself_alone(name: str, dtype: torch.dtype, threads: int) -> None:
    for size in (5, 48, 771):
        x, w, b = random(70, size, dtype=dtype), random(size, dtype=dtype, seed=1), random(size, dtype=dtype, seed=2)
        whole = by_kernel(name, x, w, b)
        assert threads == torch.get_num_threads()
        for count in (1, 2, 3, 8, 17, 64, 69):
            assert torch.equal(by_kernel(name, x[:count], w, b), whole[:count])
            assert torch.equal(by_kernel(name, x[-count:].clone(), w, b), whole[-count:])
        strided = torch.cat([x, torch.full_like(x, torch.nan)], dim=1)[:, :size]
        assert torch.equal(by_kernel(name, strided, w, b), whole)


def test_extremes_stay_what_they_are() -> None:
    x = torch.tensor([[0.0, -0.0, 1e30, -1e30, torch.inf, 200.0, -200.0, 1e-40]])
    for kind in set(Activation) - {Activation.NONE}:
        got = cpu.activate(x, kind)[0]
        assert got[:2].tolist() == [0.0, 0.0]
        assert got[[2, 4, 5]].tolist() == [x[0, 2].item(), torch.inf, 200.0]
        assert bool((got[[3, 6, 7]].abs() < 1e-8).all())
    poisoned = torch.tensor([[1.0, torch.nan], [2.0, 3.0]])
    for name in OPERATIONS:
        out = by_kernel(name, poisoned, torch.ones(2), torch.zeros(2))
        assert bool(out[0].isnan().any())
        assert bool(out[1].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sixteen_bit_numbers_round_like_the_framework(dtype: torch.dtype) -> None:
    """Every number of the dtype survives, and float32 numbers round to the nearest, ties to even: subnormal, overflow and NaN included."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16 if dtype == torch.float32 else dtype)
    cos, sin = torch.ones(1, 2**16, 2), torch.zeros(1, 2**16, 2)
    x = every.to(dtype)[None, None, :, None].expand(1, 1, -1, 2).contiguous()
    turned = cpu.rotate(x, cos.to(dtype), sin.to(dtype))[0, 0]
    expected = (x[0, 0].float() * 1.0 - x[0, 0].float() * 0.0).to(dtype)
    assert torch.equal(turned[:, 0].nan_to_num(7.0), expected[:, 0].nan_to_num(7.0))
    scale = torch.tensor([2.0**-8, 1.0, 1.0 + 2.0**-7, 3.0]).to(dtype)
    for factor in scale:
        got = cpu.rotate(x, (cos * factor).to(dtype), sin.to(dtype))[0, 0, :, 0]
        wanted = (x[0, 0, :, 0].float() * factor.float() - x[0, 0, :, 0].float() * 0.0).to(dtype)
        assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_embedding_equals_its_definition(dtype: torch.dtype, threads: int) -> None:
    x = random(1, 13, 5, 24, dtype=dtype).transpose(1, 2)  # [1, 5 heads, 13 tokens, 24]
    for rotary in (24, 16, 2):
        angles = random(1, 13, rotary // 2, seed=3).repeat(1, 1, 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        half = torch.cat([-x[..., rotary // 2 : rotary], x[..., : rotary // 2]], -1).double()
        turned = x[..., :rotary].double() * cos.double()[:, None] + half * sin.double()[:, None]
        expected = torch.cat([turned, x[..., rotary:].double()], -1)
        got = cpu.rotate(x, cos, sin)
        assert bool(((got.double() - expected).abs() <= 1.05 * HALF_ULP[dtype] * expected.abs() + 2e-6).all())
        with_float_angles = cpu.rotate(x, cos.float(), sin.float())
        assert torch.equal(with_float_angles, got)
        for token in range(13):
            alone = cpu.rotate(x[:, :, token : token + 1], cos[:, token : token + 1], sin[:, token : token + 1])
            assert torch.equal(alone[0, :, 0], got[0, :, token])


def parts(model: nn.Module) -> dict[str, Callable[..., Any]]:
    return {name: m.forward for name, m in model.named_modules() if "forward" in vars(m)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_a_patched_model_is_the_same_to_rounding_and_can_be_restored(name: str, dtype: torch.dtype) -> None:
    cls, config = DECODERS[name]
    model = toys.randomised(cls, config, seed=2, spread=0.15).to(dtype)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += random(len(parameter), dtype=dtype, scale=0.3)
    before = copy.deepcopy(model.state_dict())
    ids = torch.arange(3, 43)[None]
    with torch.inference_mode():
        expected = model(ids).logits
        replaced = patch_elementwise(model)
        got = model(ids).logits
    assert sum(replaced.values()) == len(parts(model)) > 0
    scale = float(expected.float().abs().max())
    limit = {torch.float32: 2e-5, torch.bfloat16: 0.15, torch.float16: 0.02}[dtype]
    if "moe" not in name and name not in ("mixtral", "gpt-oss"):  # a router may choose another expert after a rounding
        assert float((expected.float() - got.float()).abs().max()) < limit * scale
    toys.unpatch(model, PatchedForward)
    assert parts(model) == {}
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, expected)


EXPECTED = {
    "llama": {"LlamaRMSNorm": 5, "LlamaMLP": 2, "LlamaAttention": 2},
    "gemma2": {"Gemma2RMSNorm": 9, "Gemma2MLP": 2, "Gemma2Attention": 2},
    "phi3": {"Phi3RMSNorm": 5, "Phi3MLP": 2, "Phi3Attention": 2},
    "qwen3": {"Qwen3RMSNorm": 9, "Qwen3MLP": 2, "Qwen3Attention": 2},
    "opt": {"LayerNorm": 5},
    "gpt-neox": {"LayerNorm": 5, "GELUActivation": 2, "GPTNeoXAttention": 2},
    "gpt2": {"LayerNorm": 5, "NewGELUActivation": 2},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_served(name: str) -> None:
    cls, config = DECODERS[name]
    with torch.inference_mode():
        replaced = patch_elementwise(toys.randomised(cls, config, seed=2, spread=0.15))
    assert {k: v for k, v in replaced.items() if k in EXPECTED[name]} == EXPECTED[name]


class OddNorm(nn.Module):
    """Looks like a norm and is none of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(32) + 0.5), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


def test_what_computes_something_else_stays_with_the_framework() -> None:
    with torch.inference_mode():
        assert patch_elementwise(nn.Sequential(OddNorm(), nn.Tanh(), nn.Softmax(-1))) == {}
        assert patch_elementwise(nn.Sequential(nn.LayerNorm(8), ACT2FN["quick_gelu"])) == {"LayerNorm": 1}

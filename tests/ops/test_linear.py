"""Linear layers over packed weights: a row's result is its own, bit for bit, and as accurate as its dtype allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import toys
import transformers as tr
from torch import Tensor

from echelon import LLM, SamplingParams, ops
from echelon.model.load.loading import adopt_model, load_model, load_plain, served_copy
from echelon.model.patches.linear import framework_layers
from echelon.ops import compiled, cpu
from echelon.ops.contract import Activation

needs_kernels = pytest.mark.skipif(not compiled.is_built(), reason="the compiled kernels are not built")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS = (*range(1, 71), 128, 200, 512)
SHAPES = ((67, 131), (32, 64), (100, 515), (1, 1), (33, 1025))  # [N, K]
ROUNDING = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}  # a unit in the last place, relative


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """float64 [T, N]."""
    out = x.double() @ weight.double().t()
    return out if bias is None else out + bias.double()


def tolerance(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """[T, N]: one rounding of the result and float32 accumulation of K terms."""
    size = x.double().abs() @ weight.double().abs().t()
    return size * (2.0**-23 * max(4.0, x.shape[1] ** 0.5)) + reference(x, weight).abs() * ROUNDING[out_dtype]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_its_own_whatever_the_call(family: str, dtype: torch.dtype, shape: tuple[int, int], threads: int) -> None:
    """Seen in float32, before a last rounding that would hide most differences."""
    columns, depth = shape
    x, bias = drawn(512, depth, dtype=dtype), drawn(columns, seed=1)
    packed = cpu.pack(drawn(columns, depth, dtype=dtype, seed=2))
    torch.set_num_threads(1)
    expected = torch.cat([cpu.packed_linear(row[None], packed, bias, float32=True) for row in x])
    torch.set_num_threads(threads)
    for rows in ROWS:
        for start in {0, (512 - rows) // 3, 512 - rows}:
            assert torch.equal(cpu.packed_linear(x[start : start + rows], packed, bias, float32=True), expected[start : start + rows]), (
                rows,
                start,
            )


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_calls_agree_with_small_ones(family: str, dtype: torch.dtype, threads: int) -> None:
    """Wide enough that threads share the columns and tiles are grouped; more rows than one pass takes."""
    x = drawn(600, 420, dtype=dtype)
    packed = cpu.pack(drawn(700, 420, dtype=dtype, seed=2))
    whole = cpu.packed_linear(x, packed, float32=True)
    for rows in (1, 13, 16, 31, 40, 300, 512):
        parts = torch.cat([cpu.packed_linear(part, packed, float32=True) for part in torch.split(x, rows)])
        assert torch.equal(whole, parts), rows


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("float32", [False, True])
def test_accuracy(family: str, dtype: torch.dtype, float32: bool) -> None:
    for columns, depth in (*SHAPES, (200, 3000)):
        x, weight, bias = drawn(19, depth, dtype=dtype), drawn(columns, depth, dtype=dtype, seed=1), drawn(columns, seed=2)
        got = cpu.packed_linear(x, cpu.pack(weight), bias, float32=float32)
        assert got.dtype == (torch.float32 if float32 else dtype)
        error = (got.double() - reference(x, weight, bias)).abs()
        allowed = tolerance(x, weight, got.dtype) + bias.double().abs() * ROUNDING[got.dtype]
        assert bool((error <= allowed).all()), (columns, depth, float((error / allowed).max()))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_ragged_shapes(family: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(DTYPES.index(dtype))
    for case in range(2000 // len(compiled.offered_isas())):
        rows, columns, depth = (int(n) for n in rng.integers(1, (40, 80, 90)))
        x, weight = drawn(rows, depth, dtype=dtype, seed=case), drawn(columns, depth, dtype=dtype, seed=case + 1)
        got = cpu.packed_linear(x, cpu.pack(weight))
        assert got.shape == (rows, columns)
        assert bool(((got.double() - reference(x, weight)).abs() <= tolerance(x, weight, dtype)).all()), (rows, columns, depth)


ACTIVATIONS = {
    Activation.NONE: lambda v: v,
    Activation.RELU: F.relu,
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda v: F.gelu(v, approximate="tanh"),
}


@needs_kernels
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_and_activation_are_rounded_once(family: str, dtype: torch.dtype, activation: Activation) -> None:
    x, weight, bias = drawn(21, 70, dtype=dtype), drawn(45, 70, dtype=dtype, seed=1) / 4, drawn(45, seed=2)
    expected = ACTIVATIONS[activation](reference(x, weight, bias))
    got = cpu.packed_linear(x, cpu.pack(weight), bias, activation)
    assert got.dtype == dtype
    assert torch.allclose(got.double(), expected, rtol=ROUNDING[dtype], atol=2e-5)


@needs_kernels
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.name)
def test_activations_far_from_zero(family: str, activation: Activation) -> None:
    x = torch.tensor([[v] for v in (-1e30, -200.0, -90.0, -20.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 20.0, 90.0, 1e30, torch.inf, torch.nan)])
    got = cpu.packed_linear(x, cpu.pack(torch.ones(1, 1)), activation=activation)[:, 0]
    expected = ACTIVATIONS[activation](x[:, 0].double())
    assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stale_memory_does_not_leak(family: str, dtype: torch.dtype) -> None:
    """x is a slice of a sea of NaN, and an earlier call left NaN in every buffer."""
    sea = torch.full((40, 200), torch.nan, dtype=dtype)
    x, weight = drawn(17, 101, dtype=dtype), drawn(35, 101, dtype=dtype, seed=1)
    packed = cpu.pack(weight)
    expected = cpu.packed_linear(x, packed)
    cpu.packed_linear(torch.full((40, 101), torch.nan, dtype=dtype), packed)
    sea[3:20, 5:106] = x
    assert torch.equal(cpu.packed_linear(sea[3:20, 5:106], packed), expected)
    sea[3] = torch.nan
    assert torch.equal(cpu.packed_linear(sea[3:20, 5:106], packed)[1:], expected[1:])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_rows_are_the_rows_of_the_weight(dtype: torch.dtype) -> None:
    for columns, depth in ((50, 33), (32, 64), (97, 1)):
        weight = drawn(columns, depth, dtype=dtype)
        ids = torch.randint(columns, (3, 7), generator=torch.Generator().manual_seed(0))
        packed = cpu.pack(weight)
        assert torch.equal(cpu.packed_rows(packed, ids), weight[ids])
        assert torch.equal(cpu.packed_rows(packed, torch.arange(columns)), weight)
        assert torch.equal(cpu.pack(weight.t().contiguous().t()).data, packed.data)
    with pytest.raises(RuntimeError, match="outside"):
        cpu.packed_rows(packed, torch.tensor([columns]))


@needs_kernels
def test_tile_registers_are_driven_right() -> None:
    """The control flow of AMX on emulated tiles: what it computes does not depend on the number of rows either."""
    for columns, depth in ((67, 131), (1, 1), (100, 2100)):
        x, weight = drawn(200, depth, dtype=torch.bfloat16), drawn(columns, depth, dtype=torch.bfloat16, seed=1)
        packed = cpu.pack(weight)
        whole = compiled.kernels.emulated_amx_linear(x, packed.data, columns)
        assert bool(((whole.double() - reference(x, weight)).abs() <= tolerance(x, weight, torch.float32)).all())
        for rows in (1, 15, 16, 17, 32, 33, 48, 70):
            parts = torch.cat([compiled.kernels.emulated_amx_linear(part, packed.data, columns) for part in torch.split(x, rows)])
            assert torch.equal(whole, parts), rows


@needs_kernels
def test_calls_that_do_not_fit_are_refused() -> None:
    packed = cpu.pack(torch.ones(5, 3))
    assert cpu.packed_linear(torch.ones(0, 3), packed).shape == (0, 5)
    for call in (
        lambda: cpu.packed_linear(torch.ones(2, 40), packed),
        lambda: cpu.packed_linear(torch.ones(2, 3).bfloat16(), packed),
        lambda: cpu.packed_linear(torch.ones(2, 3), packed, torch.ones(4)),
        lambda: cpu.packed_linear(torch.ones(2, 3), packed, activation=5),
        lambda: compiled.kernels.emulated_amx_linear(torch.ones(2, 3), packed.data, 5),
        lambda: cpu.pack(torch.ones(5, 3, dtype=torch.float64)),
        lambda: compiled.set_isa("mmx"),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            call()


def test_the_fallback_is_invariant_too(threads: int) -> None:
    weight = drawn(48, 64)
    counts = ops.RowCounts()
    x = drawn(130, 64, seed=1)
    whole = ops.fixed_rows_linear(x, weight, None, counts)
    for rows in (1, 16, 17, 70):
        parts = torch.cat([ops.fixed_rows_linear(part, weight, None, counts) for part in torch.split(x, rows)])
        assert torch.equal(whole, parts)


@needs_kernels
def test_what_serves_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "compiled" in ops.which()["linear"]
    monkeypatch.setattr(compiled, "kernels", compiled.MISSING)
    assert "PyTorch" in ops.which()["linear"]


# ---- in loaded models

HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "vocab_size": 80}
TIED = HEADS | {"intermediate_size": 72, "num_key_value_heads": 2, "pad_token_id": None, "tie_word_embeddings": True}


def saved(folder: Path, cls: Any, config: Any) -> str:
    toys.randomised(cls, config, seed=2, spread=0.15).save_pretrained(folder)
    return str(folder)


def storages(module: torch.nn.Module) -> int:
    """Bytes of memory behind the matrices among a model's parameters."""
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters() if p.ndim >= 2}
    return sum(held.values())


@needs_kernels
@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (tr.LlamaForCausalLM, tr.LlamaConfig(**TIED)),
        (tr.Gemma3ForCausalLM, tr.Gemma3TextConfig(**TIED, head_dim=16, query_pre_attn_scalar=16)),
        (tr.MixtralForCausalLM, tr.MixtralConfig(**TIED, num_local_experts=4, num_experts_per_tok=2)),
        (tr.GPT2LMHeadModel, tr.GPT2Config(vocab_size=80, n_embd=48, n_layer=2, n_head=6)),
    ],
)
def test_a_loaded_model_holds_no_weight_twice(tmp_path: Path, cls: Any, config: Any) -> None:
    loaded = load_model(saved(tmp_path, cls, config))
    adopted = adopt_model(load_plain(str(tmp_path))[0], None, "copy")
    assert storages(loaded.model) <= 48 * 80 * 4 + 1024 * 48 * 4  # position tables and routers, never layers
    assert storages(adopted.model) > 2 * storages(loaded.model) or cls is tr.GPT2LMHeadModel
    embedding = loaded.model.get_input_embeddings()
    ids = torch.arange(80)[None]
    assert torch.equal(embedding(ids), adopted.model.get_input_embeddings()(ids))
    assert loaded.vocab_size == 80
    assert framework_layers(loaded.model) == []
    prompts = [[1, 2, 3], [7] * 20]
    params = SamplingParams(temperature=0, max_tokens=8)
    texts = [[r.outputs[0].token_ids for r in LLM(m).generate(prompts, params)] for m in (loaded, adopted)]
    assert texts[0] == texts[1]


@needs_kernels
def test_the_output_layer_gives_float32() -> None:
    model = toys.adopted(toys.llama().bfloat16()).model
    hidden = torch.ones(3, 64, dtype=torch.bfloat16)
    assert model.get_output_embeddings()(hidden).dtype == torch.float32
    assert model.model.layers[0].mlp.gate_proj(hidden).dtype == torch.bfloat16


@needs_kernels
def test_a_served_copy_shares_the_weights_and_leaves_the_model_as_it_is() -> None:
    config = tr.MixtralConfig(**TIED, num_local_experts=4, num_experts_per_tok=2)
    model = toys.randomised(tr.MixtralForCausalLM, config, seed=2, spread=0.15)
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    loaded = served_copy(model)
    assert {"Linear": 9, "MixtralTopKRouter": 2, "MixtralExperts": 2}.items() <= loaded.replaced.items()
    assert all(id(p) == before[name][0] for name, p in loaded.model.named_parameters() if "gate.weight" not in name)
    assert not any("forward" in vars(m) for m in model.modules())
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_without_kernels_the_framework_serves_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "kernels", compiled.MISSING)
    mixture = tr.MixtralConfig(**TIED, num_local_experts=4, num_experts_per_tok=2)
    loaded = toys.adopted(toys.randomised(tr.MixtralForCausalLM, mixture, seed=2, spread=0.15))
    assert loaded.replaced == {"Linear": 9}
    assert framework_layers(loaded.model) == ["MixtralExperts", "MixtralTopKRouter"]
    llm = LLM(toys.adopted(toys.llama()))
    params = SamplingParams(temperature=0, max_tokens=6)
    together = [r.outputs[0].token_ids for r in llm.generate([[1, 2, 3], [7] * 20, [4]], params)]
    assert together == [llm.generate([p], params)[0].outputs[0].token_ids for p in ([1, 2, 3], [7] * 20, [4])]

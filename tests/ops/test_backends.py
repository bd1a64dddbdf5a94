"""Every operation by every backend, against its definition in `ops.reference`; and which backend serves what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from echelon import ConfigError, SamplingParams
from echelon.batch import Span
from echelon.kv.blocks import BlockTables
from echelon.model import pack as unpadded
from echelon.ops import compiled, cpu, devices, reference
from echelon.ops.contract import Activation, Backend, RmsWeight
from echelon.sampling import Sampler

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}  # of the largest value: both round, once or twice
OPERATIONS = [name for name, value in vars(Backend).items() if callable(value) and not name.startswith("_")]


@pytest.fixture(params=["cpu", "triton"])
def backend(request: pytest.FixtureRequest) -> Any:
    """Each backend besides the reference; Triton's interpreter where there is no device (conftest)."""
    if request.param == "cpu":
        if not compiled.is_built():
            pytest.skip("the compiled kernels are not built")
        return cpu
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tensors of these tests lie on the host")
    from echelon.ops import triton

    return triton


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_alike(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    difference = (got.double() - expected.double()).abs().max()
    assert float(difference) <= LIMITS[expected.dtype] * float(expected.double().abs().max())


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_a_backend_has_every_operation(name: str) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    module = __import__(f"echelon.ops.{name}", fromlist=["*"])
    assert len(OPERATIONS) >= 12
    assert all(callable(getattr(module, operation)) for operation in OPERATIONS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 9, "softcap": 3.0, "sinks": torch.linspace(-1, 1, 4)}], ids=["plain", "all"])
def test_attention(backend: Backend, dtype: torch.dtype, options: dict[str, Any]) -> None:
    tables = BlockTables(40, 16, 20)
    spans = []
    for row, (start, count, tree) in enumerate([(0, 5, None), (70, 1, None), (30, 4, [-1, 0, 0])]):
        assert tables.reserve(row, start + count)
        num_drafted = len(tree) if tree else 0
        spans.append(Span(row, start, [0] * count, 1, start + count - num_drafted, num_drafted, tree))
    batch = unpadded.pack(spans, tables)
    keys, values, query = (
        drawn(40, 2, 16, 32, dtype=dtype),
        drawn(40, 2, 16, 48, dtype=dtype, seed=1),
        drawn(10, 4, 32, dtype=dtype, seed=2),
    )
    expected = reference.ragged_attention(query, keys, values, batch, 0.2, **options)
    batch.plans.clear()
    assert_alike(backend.ragged_attention(query, keys, values, batch, 0.2, **options), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", Activation, ids=lambda a: a.name)
def test_linear_layers(backend: Backend, dtype: torch.dtype, activation: Activation) -> None:
    x, weight, bias = drawn(2, 3, 70, dtype=dtype), drawn(45, 70, dtype=dtype, seed=1) / 4, drawn(45, seed=2)
    packed, plain = backend.pack(weight), reference.pack(weight)
    assert (packed.columns, packed.depth) == (plain.columns, plain.depth) == (45, 70)
    for float32 in (False, True):
        expected = reference.packed_linear(x, plain, bias, activation, float32)
        assert expected.dtype == (torch.float32 if float32 else dtype)
        assert_alike(backend.packed_linear(x, packed, bias, activation, float32), expected)
    ids = torch.tensor([[44, 0], [7, 7]])
    assert torch.equal(backend.packed_rows(packed, ids), reference.packed_rows(plain, ids))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_activations_and_rotary_embedding(backend: Backend, dtype: torch.dtype) -> None:
    x, other = drawn(2, 5, 64, dtype=dtype), drawn(2, 5, 64, dtype=dtype, seed=1)
    w, b = drawn(64, dtype=dtype, seed=2), drawn(64, dtype=dtype, seed=3)
    for how in RmsWeight:
        assert_alike(backend.rms_norm(x, w, 1e-5, how), reference.rms_norm(x, w, 1e-5, how))
    for weight, bias in ((None, None), (w, None), (None, b), (w, b)):
        assert_alike(backend.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5))
    for kind in Activation:
        for factor in (None, other):
            assert_alike(backend.activate(x, kind, factor), reference.activate(x, kind, factor))
    heads, angles = drawn(1, 6, 3, 40, dtype=dtype).transpose(1, 2), drawn(1, 6, 16).repeat(1, 1, 2)
    for cos, sin in ((angles.cos(), angles.sin()), (angles.cos().to(dtype), angles.sin().to(dtype))):
        assert_alike(backend.rotate(heads, cos, sin), reference.rotate(heads, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writing_to_slots(backend: Backend, dtype: torch.dtype) -> None:
    keys, values, slots = drawn(3, 2, 24, dtype=dtype), drawn(3, 2, 8, dtype=dtype, seed=1), torch.tensor([95, 0, 17])
    caches = [[torch.zeros(6, 2, 16, size, dtype=dtype) for size in (24, 8)] for _ in range(2)]
    backend.write_slots(keys, values, *caches[0], slots)
    reference.write_slots(keys, values, *caches[1], slots)
    assert all(torch.equal(a, b) for a, b in zip(*caches, strict=True))
    assert sum(int(c.count_nonzero()) for c in caches[0]) == keys.numel() + values.numel()


KINDS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}]


@pytest.mark.parametrize("samplers", [[Sampler(SamplingParams(**k), i) for i, k in enumerate(KINDS)]], ids=["mixed"])
def test_drawing_and_ranking_tokens(backend: Backend, samplers: list[Sampler]) -> None:
    logits, positions = drawn(len(KINDS), 300) * 3, list(range(3, 3 + len(KINDS)))
    assert backend.sample_rows(list(logits), samplers, positions) == reference.sample_rows(list(logits), samplers, positions)
    broken = [torch.full((300,), value) for value in (torch.nan, torch.inf, -torch.inf)]
    for module in (backend, reference):
        assert module.sample_rows(broken, samplers[:3], positions[:3]) == [-1] * 3
    tokens, scores = backend.likeliest_rows(logits, samplers, positions, 7, 128, False, 1.5)
    expected, expected_scores = reference.likeliest_rows(logits, samplers, positions, 7, 128, False, 1.5)
    possible = np.isfinite(expected_scores)
    assert np.array_equal(tokens[possible], expected[possible])
    np.testing.assert_allclose(scores[possible], expected_scores[possible], rtol=1e-6, atol=4e-6)
    backend.read_memory(logits)


def test_a_row_is_the_same_bits_whatever_the_call() -> None:
    """Of the reference; the others have tests of their own, harder ones."""
    x, packed = drawn(40, 70), reference.pack(drawn(45, 70, seed=1))
    whole = reference.packed_linear(x, packed)
    for rows in (1, 7, 16, 39):
        assert torch.equal(torch.cat([reference.packed_linear(part, packed) for part in torch.split(x, rows)]), whole)


def test_one_backend_serves_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1, 4)
    assert devices.backend_of(x) is (cpu if compiled.is_built() else reference)
    monkeypatch.setattr(compiled, "kernels", compiled.MISSING)
    monkeypatch.setattr(compiled, "REASON", "no such file: Python.h")
    compiled.isa.cache_clear()
    assert devices.backend_of(x) is reference and not devices.has_kernels(x)
    for call in (compiled.isa, lambda: compiled.set_isa("generic"), lambda: cpu.rms_norm(x, x[0], 1e-5, RmsWeight.IN_FLOAT32)):
        with pytest.raises(ConfigError, match=r"no compiled kernels \(no such file: Python.h\)"):
            call()

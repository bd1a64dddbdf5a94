"""Which processors give the same bits, and that the environment chooses among them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from echelon.batch import Span
from echelon.kv.blocks import BlockTables
from echelon.model import pack as unpadded
from echelon.ops import compiled, cpu
from echelon.ops.contract import Activation, RmsWeight
from echelon.sampling import Sampler, SamplingParams

pytestmark = pytest.mark.skipif(not compiled.is_built(), reason="the compiled kernels are not built")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCK = 16


def results(isa: str, call: Callable[[], Tensor]) -> Tensor:
    best = compiled.isa()
    compiled.set_isa(isa)
    try:
        return call()
    finally:
        compiled.set_isa(best)


def assert_same_bits(call: Callable[[], Tensor], families: tuple[str, ...]) -> None:
    """`call` gives the same bits by every family named that this machine has."""
    offered = [isa for isa in families if isa in compiled.offered_isas()]
    if len(offered) < 2:
        pytest.skip(f"this machine has only {', '.join(offered)}")
    first, *others = (results(isa, call) for isa in offered)
    for other in others:
        assert torch.equal(first.nan_to_num(7.0), other.nan_to_num(7.0))


def test_asking_for_the_family_keeps_no_memory() -> None:
    """Every row that enters asks; PyTorch keeps some 32 bytes of each string that a kernel returns."""
    compiled.isa()
    before = psutil.heap_info().heap_used
    names = {compiled.isa() for _ in range(20_000)}
    assert len(names) == 1 and psutil.heap_info().heap_used - before < 100_000


FUSED = ("avx2", "avx512")  # both fuse multiply-adds, in float32, in the same order
EVERY = ("generic", "avx2", "avx512", "avx512_bf16", "amx")


def attention(seed: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """A random ragged batch with trees: sizes of heads, groups, windows, softcap and sinks at random."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    num_rows, kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.choice([1, 2, 4, 9]))
    key_size, value_size = (int(n) for n in rng.choice([8, 24, 64, 65, 128], 2))
    tables, spans = BlockTables(600, BLOCK, 200), []
    for row in range(num_rows):
        before, known, drafted = int(rng.integers(0, 1100)), int(rng.integers(1, 40)), int(rng.integers(0, 9))
        parents = [int(rng.integers(-1, node)) for node in range(drafted)] if rng.integers(2) else None
        tables.reserve(row, before + known + drafted)
        spans.append(Span(row, before, [1] * (known + drafted), 1, before + known, drafted, parents))
    batch = unpadded.pack(spans, tables)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    keys, values = drawn(600, kv_heads, BLOCK, key_size), drawn(600, kv_heads, BLOCK, value_size)
    query, heads = drawn(batch.num_tokens, group * kv_heads, key_size), group * kv_heads
    window = int(rng.integers(1, 90)) if rng.integers(2) else None
    softcap = 4.0 if rng.integers(2) else None
    sinks = torch.linspace(-1, 1, heads) if rng.integers(2) else None
    return lambda: cpu.ragged_attention(query, keys, values, batch, key_size**-0.5, window, softcap, sinks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_by_avx2_and_avx512_is_the_same(dtype: torch.dtype) -> None:
    for seed in range(40):
        assert_same_bits(attention(seed, dtype), FUSED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_layers_by_avx2_and_avx512_are_the_same(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    for seed in range(40):
        rows, columns, depth = (int(rng.integers(1, high)) for high in (40, 130, 600))
        generator = torch.Generator().manual_seed(seed)
        x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, depth), (columns, depth)))
        packed = cpu.pack(weight)
        activation = list(Activation)[seed % len(Activation)]
        assert_same_bits(lambda x=x, packed=packed, a=activation: cpu.packed_linear(x, packed, None, a), FUSED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_activations_and_rotary_embeddings_are_the_same_by_every_family(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 7, 16, 64, 129, 1000):
        x, weight = torch.randn(5, size, generator=generator).to(dtype), torch.randn(size, generator=generator).to(dtype)
        for how in RmsWeight:
            assert_same_bits(lambda x=x, w=weight, how=how: cpu.rms_norm(x, w, 1e-5, how), EVERY)
        assert_same_bits(lambda x=x, w=weight: cpu.layer_norm(x, w, None, 1e-5), EVERY)
        for activation in Activation:
            assert_same_bits(lambda x=x, a=activation: cpu.activate(x, a), EVERY)
    heads, angles = torch.randn(1, 3, 5, 40, generator=generator).to(dtype), torch.randn(1, 5, 20, generator=generator)
    assert_same_bits(lambda: cpu.rotate(heads, angles.cos().to(dtype), angles.sin().to(dtype)), EVERY)


def test_chosen_tokens_are_the_same_by_every_family() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (5, 300, 5001):
        logits = 3 * torch.randn(8, size, generator=generator)
        samplers = [Sampler(SamplingParams(temperature=0.8, top_p=0.9, top_k=-1 + 21 * (i % 2)), seed=i) for i in range(8)]
        assert_same_bits(lambda logits=logits, s=samplers: torch.tensor(cpu.sample_rows(list(logits), s, range(8))), EVERY)


def run(isa: str, code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ECHELON_ISA": isa}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_the_environment_names_the_family() -> None:
    code = "from echelon.ops import compiled; print(compiled.isa())"
    for isa in compiled.offered_isas():
        assert run(isa, code).stdout.strip() == isa
    assert run("", code).stdout.strip() == compiled.offered_isas()[-1]


def test_a_family_that_the_machine_lacks_is_refused() -> None:
    done = run("mmx", "import sys; from echelon.cli import main; sys.argv = ['echelon', 'doctor']; main()")
    assert done.returncode == 2
    assert "no instruction family mmx on this machine; it offers generic" in done.stderr
    assert "Traceback" not in done.stderr

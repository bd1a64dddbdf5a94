"""Linear layers over weights of 8 and 4 bits: by definition, bit for bit, on every family of instructions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from echelon.ops import compiled, cpu, reference
from echelon.ops.contract import Activation, PackedWeight, QuantisedWeight

pytestmark = pytest.mark.skipif(not compiled.is_built(), reason="the compiled kernels are not built")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GROUPS = (32, 64, 128)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounded(weight: Tensor, bits: int, group_size: int = 32) -> QuantisedWeight:
    values, scales = cpu.round_weight(weight, bits, group_size)
    return QuantisedWeight(values, scales, None, bits)


def random_weight(rng: np.random.Generator, columns: int, bits: int, depth: int, group_size: int) -> QuantisedWeight:
    """Every integer, scales over six powers of two, and of 4 bits sometimes zeros of their own."""
    groups = 1 if bits == 8 else depth // group_size
    values = torch.from_numpy(rng.integers(0, 2**bits, (columns, depth), dtype=np.uint8))
    scales = torch.from_numpy(np.exp2(rng.uniform(-12, -6, (columns, groups))).astype(np.float32))
    has_zeros = bits == 4 and bool(rng.integers(2))
    return QuantisedWeight(
        values, scales, torch.from_numpy(rng.integers(0, 16, (columns, groups), dtype=np.uint8)) if has_zeros else None, bits
    )


def variants() -> Iterator[str]:
    """Every set of instructions here, without products of bytes and with them."""
    best = compiled.isa()
    try:
        for isa in compiled.offered_isas():
            for byte_products in (False, True):
                compiled.set_isa(isa, byte_products)
                yield f"{isa}, {cpu.linear_family(torch.float32, 8)}"
    finally:
        compiled.set_isa(best)


@pytest.mark.parametrize("bits", [8, 4])
def test_every_family_gives_the_bits_of_the_definition(bits: int) -> None:
    rng = np.random.default_rng(bits)
    cases = []
    for case in range(1000):
        group_size = int(rng.choice(GROUPS))
        rows, columns = (int(rng.integers(1, high)) for high in (40, 100))
        depth = int(rng.integers(1, 300)) if bits == 8 else group_size * int(rng.integers(1, 8))
        weight = random_weight(rng, columns, bits, depth, group_size)
        x = drawn(rows, depth, dtype=DTYPES[case % 3], seed=case)
        bias = drawn(columns, seed=case) if case % 2 else None
        cases.append((x, cpu.pack_integers(weight, x.dtype), bias, reference.integer_linear(x, weight, bias, float32=True)))
    for variant in variants():
        for case, (x, packed, bias, expected) in enumerate(cases):
            assert torch.equal(cpu.packed_linear(x, packed, bias, float32=True), expected), (variant, case, x.shape, packed.columns)


@pytest.mark.parametrize("bits", [8, 4])
def test_many_rows_and_a_deep_weight(bits: int) -> None:
    """More rows than a pass takes and more entries of K than a block of depth."""
    rng = np.random.default_rng(bits)
    for rows, columns, depth in ((530, 70, 2560), (600, 40, 4224), (33, 200, 8192)):
        weight = random_weight(rng, columns, bits, depth, 128)
        x = drawn(rows, depth)
        expected, packed = reference.integer_linear(x, weight), cpu.pack_integers(weight, x.dtype)
        for variant in variants():
            assert torch.equal(cpu.packed_linear(x, packed), expected), (variant, rows)


@pytest.mark.parametrize(
    ("bits", "depth", "group_size"),
    [*((8, depth, 0) for depth in (1, 63, 64, 500, 2500)), *((4, size * count, size) for size in GROUPS for count in (1, 2, 7, 19))],
)
def test_emulated_tile_registers_give_the_same_bits(bits: int, depth: int, group_size: int) -> None:
    rng = np.random.default_rng(depth)
    weight = random_weight(rng, 70, bits, depth, group_size)
    packed = cpu.pack_integers(weight, torch.float32)
    for rows in (1, 16, 17, 33, 70):
        x = drawn(rows, depth)
        got = compiled.kernels.emulated_amx_linear(x, packed.data, packed.columns, *packed.integers)
        assert torch.equal(got, reference.integer_linear(x, weight))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_its_own_whatever_the_call(family: str, bits: int, dtype: torch.dtype, threads: int) -> None:
    x, packed = drawn(520, 416, dtype=dtype), cpu.pack_integers(rounded(drawn(700, 416, seed=1), bits), dtype)
    torch.set_num_threads(1)
    expected = torch.cat([cpu.packed_linear(row[None], packed, activation=Activation.SILU) for row in x])
    torch.set_num_threads(threads)
    for rows in (*range(1, 40), 64, 130, 512, 520):
        start = (520 - rows) // 3
        assert torch.equal(
            cpu.packed_linear(x[start : start + rows], packed, activation=Activation.SILU), expected[start : start + rows]
        ), rows


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_that_is_not_finite_is_nan_and_harms_no_other(family: str, bits: int, dtype: torch.dtype) -> None:
    packed = cpu.pack_integers(rounded(drawn(40, 96, seed=1), bits), dtype)
    x = drawn(6, 96, dtype=dtype)
    expected = cpu.packed_linear(x, packed)
    x[1, 5], x[3, 95], x[4] = torch.nan, -torch.inf, 0.0
    got = cpu.packed_linear(x, packed)
    assert torch.equal(got[[0, 2, 5]], expected[[0, 2, 5]])
    assert bool(got[[1, 3]].isnan().all())
    assert bool((got[4] == 0).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_8_bits_round_a_row_by_its_largest_entry(dtype: torch.dtype) -> None:
    weight = drawn(50, 131, dtype=dtype)
    weight[7] = 0
    values, scales = cpu.round_weight(weight, 8, 0)
    expected = weight.float().abs().amax(1, keepdim=True) / 127
    expected[7] = 1
    assert torch.equal(scales, expected)
    error = scales * (values.float() - 128) - weight.float()
    assert bool((error.abs() <= 0.501 * scales).all())
    assert int(values.min()) >= 1


@pytest.mark.parametrize("group_size", GROUPS)
def test_4_bits_are_nearer_than_the_largest_entry_alone_would_bring_them(group_size: int) -> None:
    weight = drawn(60, 512)
    weight[3, :group_size] = 0
    rounded_to = rounded(weight, 4, group_size)
    groups = weight.view(60, -1, group_size)
    naive = groups.abs().amax(2, keepdim=True).clamp_min(1e-30) / 7
    naive_error = ((groups / naive).round().clamp(-8, 7) * naive - groups).square().sum()
    found = (rounded_to.values.float().view_as(groups) - 8) * rounded_to.scales[..., None]
    assert (found - groups).square().sum() < 0.85 * naive_error
    assert bool((found[3, 0] == 0).all())


@pytest.mark.parametrize(("bits", "most"), [(8, 0.51), (4, 0.30)])
def test_bytes_of_a_weight_beside_16_bits(bits: int, most: float) -> None:
    for columns, depth in ((1024, 1024), (4096, 2752)):
        packed = cpu.pack_integers(rounded(drawn(columns, depth), bits), torch.bfloat16)
        assert packed.data.nbytes <= most * columns * depth * 2


def test_what_does_not_fit_is_refused() -> None:
    values, scales = torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 3)
    cases = {
        "8 or 4 bits": QuantisedWeight(values, scales, None, 2),
        "a divisor of K": QuantisedWeight(values, torch.ones(4, 5), None, 4),
        "groups of 32, 64 or 128, not of 48": QuantisedWeight(values, torch.ones(4, 2), None, 4),
        "not of 32": QuantisedWeight(values, scales, None, 8),
        r"zeros must be uint8": QuantisedWeight(values, scales, torch.zeros(4, 2, dtype=torch.uint8), 4),
    }
    for message, weight in cases.items():
        with pytest.raises(RuntimeError, match=message):
            cpu.pack_integers(weight, torch.float32)
    with pytest.raises(RuntimeError, match="no weight of depth 40"):
        cpu.round_weight(torch.ones(4, 40), 4, 32)
    packed = cpu.pack_integers(QuantisedWeight(values, scales, None, 4), torch.float32)
    with pytest.raises(RuntimeError, match="does not hold"):
        cpu.packed_linear(torch.ones(1, 64), packed)
    with pytest.raises(RuntimeError, match="does not hold"):
        cpu.packed_linear(torch.ones(1, 96), PackedWeight(packed.data, 40, 96, integers=packed.integers))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_no_number_is_not_rounded_away(bits: int, value: float) -> None:
    """Its column gives NaN, as in numbers; the others stay."""
    weight, x = drawn(64, 128), drawn(5, 128, seed=1)

    def product(weight: Tensor) -> Tensor:
        return cpu.packed_linear(x, cpu.pack_integers(rounded(weight, bits), x.dtype))

    before = product(weight)
    weight[7, 40] = value
    after = product(weight)
    assert after[:, 7].isnan().all() and torch.equal(after[:, :7], before[:, :7]) and torch.equal(after[:, 8:], before[:, 8:])

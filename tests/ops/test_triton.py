"""The kernels for CUDA devices: interpreted on CPU tensors where there is no device (conftest), compiled where there is one."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from test_elementwise import HALF_ULP, OPERATIONS, by_definition, random

from echelon.batch import RaggedBatch, Span
from echelon.kv.blocks import BlockTables
from echelon.model import pack as unpadded
from echelon.ops import reference
from echelon.ops.contract import Activation, RmsWeight
from echelon.ops.slots import gather_slots, scatter_slots
from echelon.ops.triton import attention, elementwise, linear, plan
from echelon.ops.triton.linear import linear_invariant
from echelon.ops.triton.sample import sample_rows
from echelon.sampling import Sampler, SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # of attention, relative to the largest value
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "few": {},
    "window": {"window": 37},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": [-1.0, 1.0]},
    "all": {"window": 70, "softcap": 3.0, "sinks": [-2.0, 2.0]},
}
BLOCK = 16


def options_of(case: str, heads: int) -> dict[str, Any]:
    return {k: torch.linspace(*v, heads) if k == "sinks" else v for k, v in CASES[case].items()}


class World:
    """Rows of keys and values in blocks; every slot that no row has filled, the rest of its last block too, holds NaN."""

    def __init__(self, lengths: list[int], kv_heads: int, sizes: tuple[int, int], dtype: torch.dtype) -> None:
        num_blocks = 2 * sum(-(-n // BLOCK) for n in lengths) + 60
        a_row = max(60, *(-(-n // BLOCK) for n in lengths))
        self.tables, generator = BlockTables(num_blocks, BLOCK, a_row), torch.Generator().manual_seed(len(lengths))
        self.stored = [torch.full((num_blocks, kv_heads, BLOCK, size), torch.nan, dtype=dtype) for size in sizes]
        for row, length in enumerate(lengths):
            slots = self.reserve(row, length)
            for storage in self.stored:
                scatter_slots(storage, slots, torch.randn(length, kv_heads, storage.shape[3], generator=generator).to(dtype))

    def reserve(self, row: int, length: int) -> Tensor:
        """int64 [length]: the slots of the row's places."""
        assert self.tables.reserve(row, length)
        blocks = torch.tensor(self.tables.blocks(row))
        return (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:length]

    def attend(self, query: Tensor, spans: list[Span], **options: Any) -> Tensor:
        """By the kernel, on the device."""
        on_device = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in options.items()}
        keys, values = (storage.to(DEVICE) for storage in self.stored)
        return attention.ragged_attention(query.to(DEVICE), keys, values, self.pack(spans), 0.3, **on_device).cpu()

    def pack(self, spans: list[Span]) -> RaggedBatch:
        batch = unpadded.pack(spans, self.tables)
        batch.check()
        return batch


def chain(row: int, start: int, end: int) -> Span:
    return Span(row, start, [0] * (end - start), 1, end)


def tree(row: int, text: int, parents: list[int], first: int = -1) -> Span:
    """Nodes `first` and later of a tree, −1 being the last known token."""
    count = len(parents) - first
    return Span(row, text + first, [0] * count, 1, text, len(parents) - max(first, 0), parents)


def random_tree(rng: np.random.Generator, count: int) -> list[int]:
    deep = rng.random()
    return [node - 1 if rng.random() < deep else int(rng.integers(-1, node)) for node in range(count)]


def random_query(count: int, heads: int, size: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(count, heads, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ragged_world(kv_heads: int, sizes: tuple[int, int], dtype: torch.dtype) -> tuple[World, list[Span]]:
    """One key; a prompt; a token after two splits; tokens over the edge of a split; trees after little text, and around edges of tiles."""
    rng = np.random.default_rng(3)
    trees = {4: (130, random_tree(rng, 7)), 5: (256, random_tree(rng, 3)), 6: (3, random_tree(rng, 5)), 7: (61, random_tree(rng, 6))}
    spans = [chain(0, 0, 1), chain(1, 0, 21), chain(2, 299, 300), chain(3, 252, 259), *(tree(r, *t) for r, t in trees.items())]
    return World([s.start + len(s.tokens) for s in spans], kv_heads, sizes, dtype), spans


@pytest.mark.parametrize(
    ("case", "heads", "kv_heads", "sizes", "dtype"),
    [
        *(("plain", 8, 2, (24, 40), dtype) for dtype in DTYPES),
        ("window", 3, 3, (16, 16), torch.float32),
        ("softcap", 4, 1, (16, 16), torch.bfloat16),
        ("sinks", 6, 2, (16, 16), torch.float16),
        *(("all", 8, 1, (32, 16), dtype) for dtype in DTYPES),
        ("few", 70, 1, (8, 8), torch.float16),  # a group beyond the lanes of a program
    ],
)
def test_attention_agrees_with_the_reference(case: str, heads: int, kv_heads: int, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    world, spans = ragged_world(kv_heads, sizes, dtype)
    spans = spans[2:4] if case == "few" else spans
    query, options = random_query(sum(len(s.tokens) for s in spans), heads, sizes[0], dtype), options_of(case, heads)
    expected = reference.ragged_attention(query, *world.stored, world.pack(spans), 0.3, **options)
    got = world.attend(query, spans, **options)
    assert got.dtype == dtype
    assert float((got.double() - expected.double()).abs().max()) < LIMITS[dtype] * float(expected.double().abs().max())


@pytest.mark.parametrize(("case", "dtype"), [("plain", torch.float32), ("all", torch.bfloat16)])
def test_a_query_depends_on_what_it_sees_alone(case: str, dtype: torch.dtype) -> None:
    """Tokens at once, in pieces, one by one; alone and beside neighbours; rows with and without trees: the same bits."""
    world, spans = ragged_world(2, (16, 16), dtype)
    counts = [len(s.tokens) for s in spans]
    options, query = options_of(case, 4), random_query(sum(counts), 4, 16, dtype)
    queries = dict(enumerate(query.split(counts)))
    whole = dict(enumerate(world.attend(query, spans, **options).split(counts)))
    assert all(bool(out.isfinite().all()) for out in whole.values())
    for row in (2, 5):
        assert torch.equal(world.attend(queries[row], [spans[row]], **options), whole[row])
    order = [6, 3, 1]
    together = world.attend(torch.cat([queries[r] for r in order]), [spans[r] for r in order], **options)
    assert torch.equal(together, torch.cat([whole[r] for r in order]))
    for row, cuts in ((1, [0, 9, 20, 21]), (3, [0, 1, 4, 7])):
        for start, end in pairwise(cuts):
            piece = chain(row, spans[row].start + start, spans[row].start + end)
            assert torch.equal(world.attend(queries[row][start:end], [piece], **options), whole[row][start:end])
    for row in (4, 6):
        parents, text = list(spans[row].parents or ()), spans[row].text_len
        rest = world.attend(queries[row][3:], [tree(row, text, parents, 2)], **options)
        assert torch.equal(rest, whole[row][3:])


@pytest.mark.parametrize(("case", "dtype"), [("all", torch.float32), ("plain", torch.float16)])
def test_a_node_of_a_tree_sees_what_its_path_as_a_chain_would_see(case: str, dtype: torch.dtype) -> None:
    rng, options = np.random.default_rng(5), options_of(case, 4)
    for text, count in ((250, 12), (62, 7), (128, 4)):
        parents = random_tree(rng, count)
        world = World([text + count], 2, (16, 16), dtype)
        query = random_query(1 + count, 4, 16, dtype)
        got = world.attend(query, [tree(0, text, parents)], **options)
        own = world.reserve(0, text + count)
        for node in (-1, 0, count // 2, count - 1):
            path = [node] if node >= 0 else []
            while path and parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            length = text + len(path)
            slots = world.reserve(9, length)
            for storage in world.stored:
                scatter_slots(storage, slots, gather_slots(storage, own[[*range(text), *(text + n for n in path)]]))
            alone = world.attend(query[node + 1 : node + 2], [chain(9, length - 1, length)], **options)
            assert torch.equal(alone[0], got[node + 1])
            for storage in world.stored:
                scatter_slots(storage, slots, torch.full((length, 2, 16), torch.nan, dtype=dtype))
            world.tables.release(9)


@pytest.mark.parametrize("window", [None, 100])
def test_who_walks_the_splits_does_not_matter(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([600, 290], 1, (16, 16), torch.float32)
    spans, query = [chain(0, 580, 600), chain(1, 250, 290)], random_query(60, 2, 16, torch.float32)
    outs = []
    for walkers in (0, 1000):
        monkeypatch.setattr(plan, "WALKERS", walkers)
        outs.append(world.attend(query, spans, window=window))
    assert torch.equal(*outs)


def test_keys_are_read_once_for_all_new_tokens_of_a_row() -> None:
    """No two programs of a row with few tokens share a tile, but beyond the text of a tree."""
    world = World([700, 520], 1, (16, 16), torch.float32)
    spans = [chain(0, 690, 700), tree(1, 500, random_tree(np.random.default_rng(0), 20))]
    work = plan.plan_attention(world.pack(spans), plan.PlanKey(32, None), torch.device("cpu"))
    for row, end in ((0, 700), (1, 448)):
        tiles = [start for item in work.items.tolist() if item[0] == row for start in range(item[3], item[4], plan.KEY_TILE)]
        assert tiles == list(range(0, end, plan.KEY_TILE))
    assert all(item[0] == 1 and item[3] >= 448 for item in work.late.tolist())


def test_stale_slots_do_not_matter() -> None:
    """NaN and large numbers where nothing was written: the same bits."""
    world, spans = ragged_world(2, (16, 16), torch.bfloat16)
    spans = [spans[i] for i in (0, 3, 5)]
    query = random_query(sum(len(s.tokens) for s in spans), 4, 16, torch.bfloat16)
    whole = world.attend(query, spans)
    for storage in world.stored:
        storage.nan_to_num_(1e4)
    assert torch.equal(world.attend(query, spans), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_and_values_reach_their_slots(dtype: torch.dtype) -> None:
    keys, values = random(5, 3, 24, dtype=dtype), random(5, 40, 3, dtype=dtype, seed=1).transpose(1, 2)
    caches = [torch.full((6, 3, 16, size), torch.nan, dtype=dtype, device=DEVICE) for size in (24, 40)]
    slots = torch.tensor([95, 0, 17, 16, 40])
    elementwise.write_slots(keys.to(DEVICE), values.to(DEVICE), *caches, slots.to(DEVICE))
    for cache, rows in zip(caches, (keys, values), strict=True):
        assert torch.equal(gather_slots(cache.cpu(), slots), rows)
        assert int(cache.isnan().sum()) == cache.numel() - rows.numel()


def by_kernel(name: str, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x, w, b = x.to(DEVICE), w.to(DEVICE), b.to(DEVICE)
    if name == "layer_norm":
        return elementwise.layer_norm(x, w, b, 1e-5).cpu()
    if name.startswith("rms"):
        return elementwise.rms_norm(x, w, 1e-5, RmsWeight[name.removeprefix("rms_").upper()]).cpu()
    kind = Activation[name.removesuffix("_gated").upper()]
    return elementwise.activate(x, kind, x.flip(-1) if name.endswith("_gated") else None).cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_are_within_rounding_of_float64_and_depend_on_themselves(name: str, dtype: torch.dtype) -> None:
    for size in (1, 33, 1100):
        x, w, b = random(5, size, dtype=dtype), random(size, dtype=dtype, seed=1), random(size, dtype=dtype, seed=2)
        expected, got = by_definition(name, x, w, b), by_kernel(name, x, w, b)
        assert got.dtype == dtype
        roundings = 2.05 if name == "rms_after_rounding" else 1.05
        scale = expected.abs().amax(-1, keepdim=True)
        if name.startswith("gelu"):
            scale = scale + x.double().abs().amax(-1, keepdim=True) ** 2  # what cancels in 1 + erf
        limit = roundings * HALF_ULP[dtype] * expected.abs() + 1e-6 * scale + 1e-7
        assert bool(((got.double() - expected).abs() <= limit).all()), size
        assert torch.equal(by_kernel(name, x[3:4].clone(), w, b), got[3:4])
        strided = torch.cat([x, torch.full_like(x, torch.nan)], dim=1)[:, :size]
        assert torch.equal(by_kernel(name, strided, w, b), got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_norm_is_rounded_before_its_weight_or_after(dtype: torch.dtype) -> None:
    x, w = random(8, 600, dtype=dtype), random(600, dtype=dtype, seed=1)
    y = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    before, after = (w.double() * y.to(dtype).double()).to(dtype), (w.double() * y).to(dtype)
    assert float((before != after).float().mean()) > 0.1
    assert float((before != by_kernel("rms_after_rounding", x, w, w)).float().mean()) < 0.01
    assert float((after != by_kernel("rms_in_float32", x, w, w)).float().mean()) < 0.01


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_extremes_stay_what_they_are() -> None:
    x = torch.tensor([[0.0, -0.0, 1e30, -1e30, torch.inf, 200.0, -200.0, 1e-40]])
    for kind in set(Activation) - {Activation.NONE}:
        got = elementwise.activate(x.to(DEVICE), kind)[0].cpu()
        assert got[:2].tolist() == [0.0, 0.0]
        assert got[[2, 4, 5]].tolist() == [x[0, 2].item(), torch.inf, 200.0]
        assert bool((got[[3, 6, 7]].abs() < 1e-8).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_embedding_equals_its_definition(dtype: torch.dtype) -> None:
    x = random(1, 4, 5, 24, dtype=dtype).transpose(1, 2)  # [1, 5 heads, 4 tokens, 24]
    for rotary in (24, 16, 2):
        angles = random(1, 4, rotary // 2, seed=3).repeat(1, 1, 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        half = torch.cat([-x[..., rotary // 2 : rotary], x[..., : rotary // 2]], -1).float()
        turned = x[..., :rotary].float() * cos.float()[:, None] + half * sin.float()[:, None]
        expected = torch.cat([turned.to(dtype), x[..., rotary:]], -1)
        for factors in ((cos, sin), (cos.float(), sin.float())):
            assert torch.equal(elementwise.rotate(x.to(DEVICE), *(f.to(DEVICE) for f in factors)).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "depth", "num_splits"), [(70, 130, 1), (64, 64, 1), (3, 200, 1), (70, 600, 2), (20, 900, 3)])
def test_a_linear_layer_is_right_and_its_rows_do_not_know_how_many_they_are(
    columns: int, depth: int, num_splits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 131 rows, programs walk the splits of K; of a few, each split has a program."""
    for name, size in (("ROWS", 64), ("COLUMNS", 32), ("PROGRAMS", 7)):
        monkeypatch.setattr(linear, name, size)
    assert linear.splits_of(columns, depth) == num_splits
    x, weight, bias = random(131, depth, dtype=dtype), random(columns, depth, dtype=dtype, seed=1), random(columns, dtype=dtype, seed=2)
    x, weight, bias = x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE)
    expected = x.double() @ weight.double().T + bias.double()
    whole = linear_invariant(x, weight, bias)
    assert whole.dtype == dtype
    scale = float((x.double().abs() @ weight.double().abs().T).max())
    assert bool(((whole.double() - expected).abs() <= 1.01 * HALF_ULP[dtype] * expected.abs() + 1e-6 * scale).all())
    in_float32 = linear_invariant(x, weight, float32=True)
    assert bool(((in_float32.double() + bias.double() - expected).abs() <= 1e-6 * scale).all())
    for start, end in ((0, 1), (63, 65), (130, 131), (5, 70)):
        assert torch.equal(linear_invariant(x[start:end], weight, bias), whole[start:end])
    poisoned = x.clone()
    poisoned[1:] = torch.nan
    assert torch.equal(linear_invariant(poisoned, weight, bias)[0], whole[0])
    assert linear_invariant(x[:0], weight, bias).shape == (0, columns)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_their_own_size_are_right(dtype: torch.dtype) -> None:
    x, weight = random(130, 520, dtype=dtype), random(140, 520, dtype=dtype, seed=1)
    assert linear.splits_of(140, 520) == 2
    whole = linear_invariant(x.to(DEVICE), weight.to(DEVICE), float32=True)
    scale = float((x.double().abs() @ weight.double().abs().T).max())
    assert float((whole.cpu().double() - x.double() @ weight.double().T).abs().max()) < 1e-6 * scale
    assert torch.equal(linear_invariant(x[3:4].to(DEVICE), weight.to(DEVICE), float32=True), whole[3:4])
    assert not linear._counters(whole.device).any(), "as the next launch must find it"


def test_a_graphs_launches_count_apart_from_those_of_the_thread() -> None:
    x, weight = random(3, 520, dtype=torch.float32).to(DEVICE), random(140, 520, dtype=torch.float32, seed=1).to(DEVICE)
    expected, of_thread, own = linear_invariant(x, weight), linear._counters(x.device), linear.new_counters(x.device)
    of_thread.fill_(1)  # as in the middle of another launch
    try:
        with linear.counting_in(own):
            assert torch.equal(linear_invariant(x, weight), expected)
        assert bool((of_thread == 1).all()) and not own.any()
    finally:
        of_thread.zero_()


def test_every_processor_reads_a_weight() -> None:
    for columns, depth, num_splits in (
        (50_272, 4096, 1),
        (16_384, 4096, 1),
        (12_288, 4096, 1),
        (4096, 16_384, 4),
        (2560, 2560, 6),
        (768, 768, 3),
    ):
        assert linear.splits_of(columns, depth) == num_splits
        programs = -(-columns // linear.COLUMNS) * num_splits
        assert programs >= 96 or depth // num_splits < 2 * linear.SHORTEST


def sampler(i: int, **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), seed=i * 7919 + 2**63, index=i % 3)


def draw(samplers: list[Sampler], logits: np.ndarray, positions: list[int]) -> list[int]:
    return sample_rows(list(torch.from_numpy(logits).to(DEVICE)), samplers, positions)


ASKED: list[dict[str, float]] = [
    {"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}, {"top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.1}, {"temperature": 2.5, "top_k": 17, "top_p": 0.9, "min_p": 0.02}, {"top_k": 1},
    {"top_p": 0.01}, {"top_k": 400, "top_p": 0.9999}, {"min_p": 1.0},
]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "shape"),
    [(1, "smooth"), (7, "ties"), (512, "flat"), (600, "ruled out"), (600, "peaked"), (600, "smooth"), (1100, "large"), (1100, "ties")],
)
def test_the_kernel_draws_what_the_definition_draws(size: int, shape: str) -> None:
    rng = np.random.default_rng(size)
    logits = rng.normal(0, 0.01 if shape == "flat" else 3, (len(ASKED), size)).astype(np.float32)
    if shape == "ties":
        logits = np.round(logits)
    if shape == "ruled out":
        logits[:, 1::2] = -np.inf
    if shape == "peaked":
        logits[:, size // 2] += 25
    if shape == "large":
        logits += 1e4 * (-1) ** np.arange(len(ASKED))[:, None].astype(np.float32)
    samplers = [sampler(i, **asked) for i, asked in enumerate(ASKED)]
    positions = [int(p) for p in rng.integers(0, 5000, len(ASKED))]
    defined = [s.choose_processed(row, p) for s, row, p in zip(samplers, logits, positions, strict=True)]
    assert draw(samplers, logits, positions) == defined


def test_logits_are_divided_by_the_temperature_and_not_multiplied() -> None:
    """Neighbours that the division makes equal: top_k keeps both, and noise decides."""
    temperature = np.float32(0.7)
    low = np.random.default_rng(0).normal(0, 3, 4000).astype(np.float32)
    high = np.nextafter(low, np.float32(np.inf))
    inverse = np.float32(1.0) / temperature
    are_equal = (low / temperature == high / temperature) & (low * inverse != high * inverse)
    logits = np.stack([low, high], 1)[are_equal][:12]
    samplers = [sampler(i, temperature=0.7, top_k=1) for i in range(len(logits))]
    defined = [s.choose_processed(row, 3) for s, row in zip(samplers, logits, strict=True)]
    assert len(logits) == 12 and 0 < sum(defined) < 12
    assert draw(samplers, logits, [3] * 12) == defined


def test_a_draw_depends_on_its_place_alone_and_the_first_of_equals_wins() -> None:
    logits = np.random.default_rng(0).normal(0, 2, (4, 300)).astype(np.float32)
    samplers = [sampler(i, **asked) for i, asked in enumerate(ASKED[:8:2])]
    positions = list(range(4))
    assert draw(samplers, logits, positions) == draw(samplers[::-1], logits[::-1].copy(), positions[::-1])[::-1]
    greedy = [sampler(0, temperature=0.0)]
    equal = np.zeros((1, 1200), np.float32)
    equal[0, [600, 1100]] = 3.0
    assert draw(greedy, equal, [0]) == [600]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_give_no_token(bad: float) -> None:
    logits = np.full((3, 600), -np.inf, np.float32)
    logits[:2, 550], logits[2, 550] = bad, 0.0
    samplers = [sampler(i, temperature=t) for i, t in enumerate((0.0, 1.0, 1.0))]
    assert draw(samplers, logits, [4, 4, 4]) == [-1, -1, 550]


def test_every_kernel_compiles_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    """Through the compiler and assembler for compute capability 9.0: matrix instructions are used, and nothing is contracted."""
    script = Path(__file__).parents[1] / "support" / "compile_triton.py"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    found = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    kernels: dict[str, set[str]] = {}
    for name, *instructions in map(str.split, found.stdout.splitlines()):
        kernels.setdefault(name, set()).update(instructions)
    names = ("attend", "merge_splits", "linear", "rms_norm", "layer_norm", "activate", "rotate", "write_slots", "sample_rows")
    assert set(kernels) == {f"_{name}" for name in names}
    assert {name for name, instructions in kernels.items() if "wgmma" in instructions} == {"_attend", "_linear"}
    assert {name for name, instructions in kernels.items() if "fma.rn.f32" in instructions} == {"_attend", "_linear"}, "float32 alone"


def test_without_triton_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "echelon.ops.triton")
    with pytest.raises(ImportError, match=r"pip install 'echelon\[gpu\]'"):
        importlib.import_module("echelon.ops.triton")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_the_contract_holds_at_the_size_of_models(size: int, dtype: torch.dtype) -> None:
    """32 heads in groups of 4 over 2,000 keys beside 20 rows; a prompt, a tree and single tokens."""
    rng = np.random.default_rng(size)
    nodes = random_tree(rng, 60)
    spans = [
        chain(0, 0, 2000),
        tree(1, 1900, nodes),
        *(chain(r, n, n + 1 + r % 7) for r, n in enumerate(rng.integers(1, 1500, 22)) if r > 1),
    ]
    world = World([s.start + len(s.tokens) for s in spans], 8, (size, size), dtype)
    counts = [len(s.tokens) for s in spans]
    query = random_query(sum(counts), 32, size, dtype)
    whole = world.attend(query, spans)
    expected = reference.ragged_attention(query, *world.stored, world.pack(spans), 0.3)
    assert float((whole.double() - expected.double()).abs().max()) < 2 * LIMITS[dtype] * float(expected.double().abs().max())
    queries, outs = query.split(counts), whole.split(counts)
    for row, span in enumerate(spans):
        assert torch.equal(world.attend(queries[row], [span]), outs[row])
    for start, end in ((0, 1), (255, 258), (1000, 1600), (1999, 2000)):
        assert torch.equal(world.attend(queries[0][start:end], [chain(0, start, end)]), outs[0][start:end])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1536, 4096, 8192])
def test_a_linear_layer_of_a_model_keeps_the_contract(columns: int, dtype: torch.dtype) -> None:
    x, weight = random(513, 4096, dtype=dtype).to(DEVICE), random(columns, 4096, dtype=dtype, seed=1).to(DEVICE)
    whole = linear_invariant(x, weight)
    for start, end in ((0, 1), (0, 8), (7, 40), (64, 128), (100, 513)):
        assert torch.equal(linear_invariant(x[start:end], weight), whole[start:end])

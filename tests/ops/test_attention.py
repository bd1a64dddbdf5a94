"""The definition of ragged attention against a few lines of float64, with NaN in every slot it must not touch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import toys
from peak_memory import CLEAR_REFS, growth_during
from torch import Tensor

from echelon.batch import RaggedBatch, Span
from echelon.errors import UnsupportedModelError
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import LARGEST_HEAD, LayerShape
from echelon.model import pack as unpadded
from echelon.ops import cpu, reference
from echelon.ops.compiled import is_built

CASES = {
    "plain": {},
    "window": {"window": 37},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.linspace(-1, 1, 6)},
    "window, softcap and sinks": {"window": 5, "softcap": 3.0, "sinks": torch.linspace(-2, 2, 6)},
}


def blocked(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`attend` over keys and values that these tests keep as [slots, Hkv, D]."""

    def attend_blocked(query: Tensor, keys: Tensor, values: Tensor, batch: RaggedBatch, *arguments: object, **options: object) -> Tensor:
        stored = (x.view(-1, batch.block_size, *x.shape[1:]).transpose(1, 2).contiguous() for x in (keys, values))
        return attend(query, *stored, batch, *arguments, **options)

    return attend_blocked


SIZES = {"plain": 64, "window": 128, "sinks": 64}  # of a head; heads of 64 and 128 have code of their own

needs_kernels = pytest.mark.skipif(not is_built(), reason="the compiled kernels are not built")
IMPLEMENTATIONS = [
    pytest.param(blocked(reference.ragged_attention), id="reference"),
    pytest.param(blocked(cpu.ragged_attention), id="compiled", marks=needs_kernels),
]


def naive(query: Tensor, key: Tensor, value: Tensor, position: int, scale: float, **options: object) -> Tensor:
    """One query [H, D] over keys and values [L, Hkv, D] in float64."""
    window, softcap, sinks = options.get("window"), options.get("softcap"), options.get("sinks")
    first = max(0, position - int(window) + 1) if isinstance(window, int) else 0
    group = query.shape[0] // key.shape[1]
    k = key[first : position + 1].double().repeat_interleave(group, 1)
    v = value[first : position + 1].double().repeat_interleave(group, 1)
    scores = torch.einsum("hd,lhd->hl", query.double(), k) * scale
    if isinstance(softcap, float):
        scores = torch.tanh(scores / softcap) * softcap
    if isinstance(sinks, Tensor):
        weights = torch.cat([scores, sinks.double()[:, None]], 1).softmax(1)[:, :-1]
    else:
        weights = scores.softmax(1)
    return torch.einsum("hl,lhd->hd", weights, v)


def random_batch(rng: np.random.Generator, num_rows: int, block_size: int) -> tuple[RaggedBatch, BlockTables]:
    tables = BlockTables(1400, block_size, 300)
    spans = []
    for row in range(num_rows):
        start, count = int(rng.integers(0, 200)), int(rng.integers(1, 20))
        assert tables.reserve(row, start + count)
        spans.append(Span(row, start, [0] * count, 1, start + count))
    return unpadded.pack(spans, tables), tables


@pytest.mark.parametrize("attend", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_matches_the_naive_form(case: str, seed: int, attend: Callable[..., Tensor]) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    options = CASES[case]
    heads, kv_heads, size, block = 6, (1, 2, 3, 6)[seed], 16, (1, 4, 8, 16)[seed]
    batch, tables = random_batch(rng, 6, block)
    keys = torch.full((1400 * block, kv_heads, size), torch.nan)
    values = keys.clone()
    query = torch.randn(batch.num_tokens, heads, size)
    for row in range(6):
        blocks = torch.tensor(tables.blocks(row))
        slots = (blocks[:, None] * block + torch.arange(block)).flatten()[: int(batch.kv_lens[row])]
        keys[slots], values[slots] = torch.randn(len(slots), kv_heads, size), torch.randn(len(slots), kv_heads, size)
    got = attend(query, keys, values, batch, 0.25, **options)
    for row in range(6):
        blocks = torch.tensor(tables.blocks(row))
        slots = (blocks[:, None] * block + torch.arange(block)).flatten()[: int(batch.kv_lens[row])]
        alone_keys, alone_values = torch.full_like(keys, torch.nan), torch.full_like(values, torch.nan)
        alone_keys[slots], alone_values[slots] = keys[slots], values[slots]
        neighbours_gone = attend(query, alone_keys, alone_values, batch, 0.25, **options)
        for token in range(int(batch.indptr[row]), int(batch.indptr[row + 1])):
            expected = naive(query[token], keys[slots], values[slots], int(batch.positions[token]), 0.25, **options)
            assert torch.allclose(expected.float(), got[token], rtol=1e-5, atol=1e-5)
            assert torch.equal(neighbours_gone[token], got[token])


def random_tree(rng: np.random.Generator, count: int) -> list[int]:
    """Parents of a random forest: nodes without children, long paths and wide levels all come up."""
    deep = rng.random()
    return [node - 1 if rng.random() < deep else int(rng.integers(-1, node)) for node in range(count)]


@pytest.mark.parametrize("attend", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_node_of_a_tree_sees_what_its_path_as_a_chain_would_see(
    case: str, dtype: torch.dtype, attend: Callable[..., Tensor], threads: int
) -> None:
    """Every node of random trees, over the edges of tiles, beside chains and other trees: the same bits as its path in a row of its own."""
    assert threads == torch.get_num_threads()
    rng = np.random.default_rng(3)
    heads, kv_heads, size, options = 6, 2, SIZES.get(case, 24), CASES[case]
    for texts, nodes in (([120, 3, 60, 127], [30, 5, 0, 90]), ([1, 500, 64], [70, 40, 12])):
        tables = BlockTables(1400, 16, 300)
        trees = [random_tree(rng, count) for count in nodes]
        known = [int(rng.integers(1, min(text, 4) + 1)) for text in texts]
        spans = []
        for row, (text, new, tree) in enumerate(zip(texts, known, trees, strict=True)):
            assert tables.reserve(row, text + len(tree))
            spans.append(Span(row, text - new, [0] * (new + len(tree)), 1, text, len(tree), tree))
        keys, values = filled(tables, len(texts), kv_heads, (size, size), dtype)
        query = torch.randn(sum(known) + sum(nodes), heads, size, generator=torch.Generator().manual_seed(1)).to(dtype)
        batch = unpadded.pack(spans, tables)
        batch.check()
        got = attend(query, keys, values, batch, 0.3, **options)
        for row, tree in enumerate(trees):
            own = torch.tensor([b * 16 + i for b in tables.blocks(row) for i in range(16)])
            for node in range(-1, len(tree), 1 if toys.PROVE else 3):
                path = [node] if node >= 0 else []
                while path and tree[path[0]] >= 0:
                    path.insert(0, tree[path[0]])
                length = texts[row] + len(path)
                assert tables.reserve(9, length)
                slots = torch.tensor([b * 16 + i for b in tables.blocks(9) for i in range(16)])[:length]
                places = own[torch.tensor([*range(texts[row]), *(texts[row] + n for n in path)])]
                keys[slots], values[slots] = keys[places], values[places]
                token = int(batch.indptr[row]) + known[row] + node
                alone = unpadded.pack([Span(9, length - 1, [0], 1, length)], tables)
                assert torch.equal(attend(query[token : token + 1], keys, values, alone, 0.3, **options)[0], got[token])
                tables.release(9)


@pytest.mark.parametrize("attend", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_tree_fed_in_pieces_is_the_tree_fed_at_once(case: str, dtype: torch.dtype, attend: Callable[..., Tensor]) -> None:
    """Nodes whose ancestors are cached, not in the batch; beside chains fed in pieces and rows without a draft: the same bits."""
    rng = np.random.default_rng(4)
    heads, kv_heads, size, options = 6, 2, SIZES.get(case, 24), CASES[case]
    texts, nodes = [120, 3, 60, 500, 64], [30, 5, 90, 70, 12]
    for _ in range(3):
        tables = BlockTables(1400, 16, 300)
        trees = [random_tree(rng, count) for count in nodes]
        trees[1] = list(range(-1, nodes[1] - 1))
        for row, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            assert tables.reserve(row, text + len(tree))
        keys, values = filled(tables, len(texts), kv_heads, (size, size), dtype)
        queries = [torch.randn(1 + n, heads, size, generator=torch.Generator().manual_seed(n)).to(dtype) for n in nodes]

        def run(pieces: dict[int, tuple[int, int]], trees: list[list[int]] = trees, queries: list[Tensor] = queries) -> dict[int, Tensor]:
            """Nodes first to end − 1 of rows; −1 is the last known token."""
            spans = []
            for row, (first, end) in pieces.items():
                parents = trees[row][:end] if row != 1 else None
                drafted = end - max(first, 0)
                spans.append(Span(row, texts[row] + first, [0] * (end - first), 1, texts[row], drafted, parents))
            batch = unpadded.pack(spans, tables)  # noqa: B023
            batch.check()
            query = torch.cat([queries[row][first + 1 : end + 1] for row, (first, end) in pieces.items()])
            out = attend(query, keys, values, batch, 0.3, **options)  # noqa: B023
            return dict(zip(pieces, out.split([end - first for first, end in pieces.values()]), strict=True))

        whole = run({row: (-1, n) for row, n in enumerate(nodes)})
        at = [-1] * len(nodes)
        while any(a < n for a, n in zip(at, nodes, strict=True)):
            pieces = {row: (a, min(nodes[row], a + int(rng.integers(1, 40)))) for row, a in enumerate(at) if a < nodes[row]}
            for row, got in run(pieces).items():
                first, end = pieces[row]
                assert torch.equal(got, whole[row][first + 1 : end + 1])
                at[row] = end


def filled(tables: BlockTables, rows: int, kv_heads: int, sizes: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Keys and values in the slots that rows hold, NaN everywhere else."""
    generator = torch.Generator().manual_seed(rows)
    storages = []
    for size in sizes:
        storage = torch.full((1400 * tables.block_size, kv_heads, size), torch.nan, dtype=dtype)
        for row in range(rows):
            blocks = torch.tensor(tables.blocks(row))
            slots = (blocks[:, None] * tables.block_size + torch.arange(tables.block_size)).flatten()
            storage[slots] = torch.randn(len(slots), kv_heads, size, generator=generator).to(dtype)
        storages.append(storage)
    return storages


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_family_keeps_the_contract(dtype: torch.dtype, family: str) -> None:
    """Rows with trees whole and token by token, with few and many queries a key: the same bits, near the reference."""
    rng = np.random.default_rng(5)
    limit = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    for heads, kv_heads, size in ((4, 4, 64), (12, 2, 128), (6, 3, 40), (9, 1, 64)):
        texts, trees = [600, 70, 5], [random_tree(rng, 20), random_tree(rng, 3), list(range(-1, 8))]
        tables = BlockTables(1400, 16, 300)
        for row, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            assert tables.reserve(row, text + len(tree))
        keys, values = filled(tables, len(texts), kv_heads, (size, size), dtype)
        query = torch.randn(sum(1 + len(t) for t in trees), heads, size, generator=torch.Generator().manual_seed(1)).to(dtype)
        spans = [Span(row, texts[row] - 1, [0] * (1 + len(t)), 1, texts[row], len(t), t) for row, t in enumerate(trees)]
        batch = unpadded.pack(spans, tables)
        whole = blocked(cpu.ragged_attention)(query, keys, values, batch, 0.2)
        expected = blocked(reference.ragged_attention)(query, keys, values, batch, 0.2).double()
        assert float((whole.double() - expected).abs().max()) < limit * float(expected.abs().max())
        for row, tree in enumerate(trees):
            for node in range(-1, len(tree)):
                token = int(batch.indptr[row]) + 1 + node
                span = Span(row, texts[row] + node, [0], 1, texts[row], 1 if node >= 0 else 0, tree[: node + 1] if node >= 0 else None)
                alone = unpadded.pack([span], tables)
                assert torch.equal(blocked(cpu.ragged_attention)(query[token : token + 1], keys, values, alone, 0.2)[0], whole[token])


HEAD_SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 255, 256, 257, 288, 511, 512, 513, 1023, 1024)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_heads_of_every_size_up_to_the_largest(dtype: torch.dtype, family: str) -> None:
    """Odd sizes and sizes over 256 too, of keys and of values: near the reference. (`make sanitize` draws all of them.)"""
    assert HEAD_SIZES[-1] == LARGEST_HEAD
    limit = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    sizes = range(1, LARGEST_HEAD + 1) if toys.PROVE else HEAD_SIZES
    for key_size, value_size in zip(sizes, reversed(sizes), strict=True):
        batch, tables = random_batch(np.random.default_rng(key_size), 3, 16)
        keys, values = filled(tables, 3, 2, (key_size, value_size), dtype)
        query = torch.randn(batch.num_tokens, 4, key_size, generator=torch.Generator().manual_seed(1)).to(dtype)
        scale = key_size**-0.5
        expected = blocked(reference.ragged_attention)(query, keys, values, batch, scale).double()
        got = blocked(cpu.ragged_attention)(query, keys, values, batch, scale).double()
        assert float((got - expected).abs().max()) < limit * float(expected.abs().max()), (key_size, value_size)


@needs_kernels
@pytest.mark.parametrize(("key_size", "value_size"), [(0, 8), (8, 0), (LARGEST_HEAD + 1, 8), (8, LARGEST_HEAD + 1)])
def test_heads_of_any_other_size_are_refused(key_size: int, value_size: int) -> None:
    """When a cache is planned, and by the kernel itself."""
    with pytest.raises(UnsupportedModelError, match="served are 1 to 1024"):
        LayerShape(2, key_size, value_size)
    batch, _ = random_batch(np.random.default_rng(0), 1, 16)
    query, keys, values = (
        torch.zeros(batch.num_tokens, 2, key_size),
        torch.zeros(1400, 2, 16, key_size),
        torch.zeros(1400, 2, 16, value_size),
    )
    with pytest.raises(RuntimeError, match="attention serves 1 to 1024"):
        cpu.ragged_attention(query, keys, values, batch, 1.0)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "sizes"), [(6, 2, (24, 40)), (8, 1, (64, 64)), (4, 4, (128, 128)), (80, 1, (8, 8))])
def test_the_kernel_agrees_with_the_reference(heads: int, kv_heads: int, sizes: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    """500 ragged rows a shape: alone and together, whatever the window and cap."""
    assert threads == torch.get_num_threads()
    rng = np.random.default_rng(heads)
    for case in CASES.values():
        options = {k: torch.linspace(-1, 1, heads) if k == "sinks" else v for k, v in case.items()}
        batch, tables = random_batch(rng, 20, 16)
        keys, values = filled(tables, 20, kv_heads, sizes, dtype)
        query = torch.randn(batch.num_tokens, heads, sizes[0], generator=torch.Generator().manual_seed(1)).to(dtype)
        expected = blocked(reference.ragged_attention)(query, keys, values, batch, 0.2, **options)
        got = blocked(cpu.ragged_attention)(query, keys, values, batch, 0.2, **options)
        limit = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
        assert got.dtype == dtype
        assert float((got.double() - expected.double()).abs().max()) < limit * float(expected.double().abs().max())


@pytest.mark.parametrize("attend", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_query_depends_on_what_it_sees_alone(case: str, dtype: torch.dtype, attend: Callable[..., Tensor], threads: int) -> None:
    """A row of 1,100 tokens whole, in pieces, token by token; alone and beside 1 to 63 others: the same bits."""
    assert threads == torch.get_num_threads()
    heads, kv_heads, size, length = 6, 2, SIZES.get(case, 24), 1100  # more than two sections of keys
    tables = BlockTables(1400, 16, 300)
    rng = np.random.default_rng(0)
    lengths = [length, *rng.integers(1, 150, 63).tolist()]
    for row, count in enumerate(lengths):
        assert tables.reserve(row, count)
    keys, values = filled(tables, 64, kv_heads, (size, size), dtype)
    queries = [torch.randn(n, heads, size, generator=torch.Generator().manual_seed(r)).to(dtype) for r, n in enumerate(lengths)]

    def run(pieces: dict[int, tuple[int, int]]) -> dict[int, Tensor]:
        spans = [Span(row, start, [0] * (end - start), 1, end) for row, (start, end) in pieces.items()]
        query = torch.cat([queries[row][start:end] for row, (start, end) in pieces.items()])
        out = attend(query, keys, values, unpadded.pack(spans, tables), 0.3, **CASES[case])
        return dict(zip(pieces, out.split([e - s for s, e in pieces.values()]), strict=True))

    whole = run({0: (0, length)})[0]
    assert bool(whole.isfinite().all())
    for cuts in ([0, 1, 8, 9, 70, 135, 511, 512, 700, 1024, 1099, 1100], list(range(1015, 1030))):
        for start, end in pairwise(cuts):
            assert torch.equal(run({0: (start, end)})[0], whole[start:end])
    for count in (1, 7, 63):
        others = {row: (lengths[row] // 2, lengths[row]) for row in range(1, count + 1) if lengths[row] > 1}
        order = [*list(others)[: count // 2], 0, *list(others)[count // 2 :]]
        for start, end in ((0, 1100), (1090, 1100), (512, 513)):
            pieces = others | {0: (start, end)}
            assert torch.equal(run({row: pieces[row] for row in order})[0], whole[start:end])


@pytest.mark.parametrize("attend", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["plain", "window"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_no_numbers_hurt_those_who_see_them(
    value: float, case: str, dtype: torch.dtype, attend: Callable[..., Tensor]
) -> None:
    """A rejected draft may leave them behind: those before it have their bits, and so have those whose window has left it behind."""
    heads, kv_heads, size, length, place = 6, 2, 24, 300, 130
    tables = BlockTables(1400, 16, 300)
    assert tables.reserve(0, length)
    keys, values = filled(tables, 1, kv_heads, (size, size), dtype)
    query = torch.randn(length, heads, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    batch = unpadded.pack([Span(0, 0, [0] * length, 1, length)], tables)
    whole = attend(query, keys, values, batch, 0.3, **CASES[case])
    values[tables.blocks(0)[place // 16] * 16 + place % 16, 1, 3] = value
    found = attend(query, keys, values, batch, 0.3, **CASES[case])
    window = CASES[case].get("window")
    end = place + int(window) if isinstance(window, int) else length
    assert torch.equal(found[:place], whole[:place]) and torch.equal(found[end:], whole[end:])
    assert not found[place:end, heads // 2 :].isfinite().all(-1).any() and torch.equal(found[:, : heads // 2], whole[:, : heads // 2])


@needs_kernels
def test_what_does_not_fit_together_is_refused() -> None:
    """Before anything is read or written."""
    batch, tables = random_batch(np.random.default_rng(0), 3, 16)
    keys, values = (x.view(-1, 16, 2, 24).transpose(1, 2).contiguous() for x in filled(tables, 3, 2, (24, 24), torch.float32))
    query = torch.zeros(batch.num_tokens, 4, 24)
    for given, sinks, changes, message in (
        (query[:1], None, {}, "each query has a position"),
        (query, torch.zeros(3), {}, "each head has a sink"),
        (query, None, {"indptr": batch.indptr[:-1].contiguous()}, "indptr must end with the number of positions"),
        (query, None, {"block_table": batch.block_table[:1].contiguous()}, "a line of block_table"),
    ):
        with pytest.raises(RuntimeError, match=message):
            cpu.ragged_attention(given, keys, values, replace(batch, **changes), 0.3, sinks=sinks)


@needs_kernels
def test_2000_random_ragged_shapes_agree_with_the_reference() -> None:
    """Rows, blocks, heads, windows, caps, sinks, trees and dtypes drawn at random; NaN in every slot that no row holds."""
    rng = np.random.default_rng(7)
    limits = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
    for shape in range(2000):
        block, kv_heads, group = int(rng.integers(1, 20)), int(rng.integers(1, 4)), int(rng.integers(1, 5))
        dtype = list(limits)[shape % 3]
        tables = BlockTables(1400, block, 300)
        spans = []
        for row in range(int(rng.integers(1, 5))):
            known, text = int(rng.integers(1, 6)), int(rng.integers(6, 90))
            tree = random_tree(rng, int(rng.integers(0, 9))) if shape % 2 else None
            count = len(tree) if tree is not None else int(rng.integers(0, 9))
            assert tables.reserve(row, text + count)
            spans.append(Span(row, text - known, [0] * (known + count), 1, text, count, tree))
        sizes = (8 * int(rng.integers(1, 6)), 8 * int(rng.integers(1, 6))) if shape % 4 else (64, 64 * int(rng.integers(1, 3)))
        keys, values = filled(tables, len(spans), kv_heads, sizes, dtype)
        batch = unpadded.pack(spans, tables)
        query = torch.randn(batch.num_tokens, group * kv_heads, sizes[0], generator=torch.Generator().manual_seed(shape)).to(dtype)
        window = int(rng.integers(1, 60)) if rng.random() < 0.4 else None
        softcap = 3.0 if rng.random() < 0.3 else None
        sinks = torch.linspace(-1, 1, group * kv_heads) if rng.random() < 0.3 else None
        expected = blocked(reference.ragged_attention)(query, keys, values, batch, 0.3, window, softcap, sinks)
        got = blocked(cpu.ragged_attention)(query, keys, values, batch, 0.3, window, softcap, sinks)
        error = float((got.double() - expected.double()).abs().max())
        assert error < limits[dtype] * float(expected.double().abs().max()), f"shape {shape}: {error}"


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("is_capped", [False, True], ids=["window", "window, softcap and sinks"])
def test_a_window_over_a_long_row_has_the_same_bits_however_its_keys_are_shared_out(
    is_capped: bool, is_tree: bool, dtype: torch.dtype, family: str
) -> None:
    """By one thread and by three, in pieces and token by token, and beside rows enough that no keys are split; near the reference."""
    heads, kv_heads, size, text, nodes = 6, 2, 24, 3060, 40  # the new tokens lie over the end of a section
    limit = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}[dtype]
    softcap, sinks = (3.0, torch.linspace(-2, 2, heads)) if is_capped else (None, None)
    parents = random_tree(np.random.default_rng(6), nodes) if is_tree else None
    tables = BlockTables(1400, 16, 300)
    assert tables.reserve(0, text + nodes) and all(tables.reserve(row, 5) for row in range(1, 17))
    keys, values = (x.view(-1, 16, kv_heads, size).transpose(1, 2).contiguous() for x in filled(tables, 17, kv_heads, (size, size), dtype))
    query = torch.randn(1 + nodes + 16, heads, size, generator=torch.Generator().manual_seed(1)).to(dtype)

    def batch_of(first: int, end: int, *others: Span) -> RaggedBatch:
        """Nodes first to end − 1 of the long row, −1 being its last known token; then others."""
        own = Span(0, text + first, [0] * (end - first), 1, text, end - max(first, 0), None if parents is None else parents[:end])
        return unpadded.pack([own, *others], tables)

    beside = [Span(row, 4, [0], 1, 5) for row in range(1, 17)]
    threads = torch.get_num_threads()
    for window in (1, 511, 512, 513, 1024, 5000):
        how = 0.3, window, softcap, sinks
        whole = cpu.ragged_attention(query[: 1 + nodes], keys, values, batch_of(-1, nodes), *how)
        expected = reference.ragged_attention(query[: 1 + nodes], keys, values, batch_of(-1, nodes), *how).double()
        assert float((whole.double() - expected).abs().max()) < limit * float(expected.abs().max()), window
        for first, end in pairwise((-1, 0, 1, 8, 11, 12, 13, nodes)):
            piece = cpu.ragged_attention(query[first + 1 : end + 1], keys, values, batch_of(first, end), *how)
            assert torch.equal(piece, whole[first + 1 : end + 1]), (window, first)
        try:
            for count in (1, 3):
                torch.set_num_threads(count)
                alone = cpu.ragged_attention(query[: 1 + nodes], keys, values, batch_of(-1, nodes), *how)
                among = cpu.ragged_attention(query, keys, values, batch_of(-1, nodes, *beside), *how)
                assert torch.equal(alone, whole) and torch.equal(among[: 1 + nodes], whole), (window, count)
        finally:
            torch.set_num_threads(threads)


@needs_kernels
@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="the peak of memory cannot be asked for")
def test_what_a_window_has_left_behind_takes_neither_memory_nor_part_in_the_result() -> None:
    """Of a row of four million tokens: the bits of one that is shorter by whole sections."""
    tables = BlockTables(2**12 + 1, 1024, 2**12 + 1)
    assert tables.reserve(0, 2**22 + 544)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 1, 1024, 16, generator=generator) for _ in range(2))  # of each block the same
    query = torch.randn(64, 1, 16, generator=generator)

    def attended(length: int) -> Tensor:
        batch = unpadded.pack([Span(0, length - 64, [0] * 64, 1, length)], tables)
        batch = replace(batch, block_table=torch.zeros_like(batch.block_table))
        return cpu.ragged_attention(query, keys, values, batch, 0.3, 16)

    near = attended(544)  # over the end of the first section
    far, growth = growth_during(lambda: attended(2**22 + 544))
    assert torch.equal(far, near)
    assert growth < 2**24, f"{growth:,} bytes"

"""The self-test of a patched model: whether a twin computes the same with our operations, and a row the same in any batch.

The shrunken random twin as it will be served, everything replaced, must show that

* its logits are those of `transformers`, also where matrices around activations are wide enough to reach every clamp, and in 16-bit dtypes
  as near to the float32 twin as `transformers` itself is;
* a text that grows has the logits that it has under `generate`;
* a row's logits are the same bits beside any number of others and in pieces;
* no matrix is multiplied by the framework, whose rounding follows the number of rows, and no pass changes a buffer of a module.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from echelon.batch import Span
from echelon.errors import Refusal, UnsupportedModelError
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.model import pack as unpadded
from echelon.model.attention import CONTEXT_KEYWORD, IMPLEMENTATION, CachedAttention, record_layers
from echelon.model.patches.apply import patch_model
from echelon.model.patches.packing import Packing
from echelon.model.patches.rope import coded_positions, patch_rope
from echelon.model.patches.vectors import in_whole_vectors, is_whole
from echelon.ops import devices

TOLERANCE = 5e-5  # float32, relative to the largest logit
SPREAD = 16.0  # times wider: what enters activations then reaches some hundreds
NOT_WIDENED = ("attn", "attention", "embed", "head", "router", "gate.")  # sharp scores would be ties, and rounding would decide them
MOST_ROUNDING = 3.0  # times the error of transformers, which rounds more often
BESIDE = (1, 2, 3, 4, 6, 11, 16, 23, 40)  # neighbours of a row
NUM_GIVEN = 3  # tokens of a short prompt
NUM_GROWN = 14  # tokens that `generate` adds to it, past the twin's original context
BLOCK, LONGEST = 8, 64
PRODUCTS = ("mm", "bmm", "matmul", "addmm", "baddbmm")  # the last tensor is [..., K, N]
MATMULS = {
    *PRODUCTS,
    *("mv", "addmv", "dot", "vdot", "inner", "tensordot", "einsum", "bilinear", "linear", "_addmm_activation", "_scaled_mm", "addbmm"),
    *("convolution", "conv1d", "conv2d", "scaled_dot_product_attention", "_grouped_mm"),
}


class ServedTwin:
    """A twin with our operations in it, or with `is_bare` our attention alone, a cache, and rows in it."""

    def __init__(self, twin: PreTrainedModel, is_bare: bool = False) -> None:
        twin.set_attn_implementation(IMPLEMENTATION)
        shapes = record_layers(twin)
        self.original = patch_rope(twin) if is_bare else patch_model(twin, False, Packing())[1]
        self.twin, self.num_fed = twin, 0
        self.cache = KVCache(shapes, BlockTables(LONGEST * 8, BLOCK, LONGEST // BLOCK), twin.dtype, torch.device("cpu"))
        for storage in (*self.cache.keys, *self.cache.values):
            storage.fill_(torch.nan)

    def feed(self, pieces: dict[int, list[int]], text_lens: dict[int, int], prompt_lens: dict[int, int]) -> dict[int, Tensor]:
        """The next tokens of some rows in one batch: float32 logits [n, V] of each."""
        tables = self.cache.tables
        spans = []
        for row, tokens in pieces.items():
            start = tables.num_cached(row)
            tables.reserve(row, start + len(tokens))
            spans.append(Span(row, start, tokens, len(tokens), text_lens[row], prompt_len=prompt_lens[row]))
        batch = unpadded.pack(spans, tables)
        positions = coded_positions(batch, self.original)[None].long()
        context = {CONTEXT_KEYWORD: CachedAttention(batch, self.cache)}
        logits = self.twin(input_ids=batch.tokens[None].long(), position_ids=positions, use_cache=False, **context).logits[0].float()
        for span in spans:
            tables.commit(span.row, span.start + len(span.tokens))
        return dict(zip(pieces, logits.split([len(t) for t in pieces.values()]), strict=True))

    def alone(self, tokens: list[int], sizes: list[int] | None = None) -> Tensor:
        """Logits [T, V] of one text, fed in pieces of `sizes` tokens."""
        row = self._next_row()
        length = {row: len(tokens)}
        pieces = torch.split(torch.tensor(tokens), sizes or [len(tokens)])
        logits = [self.feed({row: piece.tolist()}, length, length)[row] for piece in pieces]
        self.cache.tables.release(row)
        return torch.cat(logits)

    def beside(self, tokens: list[int], count: int) -> Tensor:
        """Logits [T, V] of a text in the middle of `count` others of other lengths."""
        rows = [self._next_row() for _ in range(count + 1)]
        middle = count // 2
        pieces = {r: tokens if i == middle else [3 + (i + j) % 50 for j in range(1 + i % 5)] for i, r in enumerate(rows)}
        lengths = {row: len(piece) for row, piece in pieces.items()}
        logits = self.feed(pieces, lengths, lengths)[rows[middle]]
        for row in rows:
            self.cache.tables.release(row)
        return logits

    def grown(self, tokens: list[int], num_given: int) -> Tensor:
        """Logits [n, V] after a prompt and after each further token but the last, as a row meets them when it generates."""
        row = self._next_row()
        logits = []
        for known in range(num_given, len(tokens)):
            is_new = self.original is not None and self.original.is_read_anew and known == self.original.length + 1
            if is_new:
                self.cache.tables.commit(row, 0)
            start = self.cache.tables.num_cached(row) if known > num_given else 0
            logits.append(self.feed({row: tokens[start:known]}, {row: known}, {row: num_given})[row][-1])
        self.cache.tables.release(row)
        return torch.stack(logits)

    def _next_row(self) -> int:
        self.num_fed += 1
        return self.num_fed


@torch.inference_mode()
def check_served(make_twin: Callable[[], PreTrainedModel], tokens: list[int]) -> None:
    """Raise `UnsupportedModelError`, with what differed, unless a twin passes all of the above. `make_twin`: equal float32 twins with
    eager attention; `tokens`: a text.
    """
    twin, served = make_twin(), ServedTwin(make_twin())
    name = type(twin).__name__
    _check_near(name, "once our operations have taken their places", eager(twin, tokens), served.alone(tokens))
    wide = eager(_widened(make_twin()), tokens), ServedTwin(_widened(make_twin())).alone(tokens)
    _check_near(name, "where large values meet its activations", *wide)
    text, logits = _generated(twin, tokens[:NUM_GIVEN])
    is_anew = served.original is None or served.original.is_read_anew
    where = "of a text that grows under generate" if served.original is None else "of a text that outgrows its original context"
    _check_near(name, where, logits, served.grown(text, NUM_GIVEN), Refusal.CACHE if is_anew else Refusal.OPERATIONS)
    if devices.has_kernels(torch.empty(0)):  # else `framework_layers` says what stays with the framework
        _check_operations(name, served, tokens)
        _check_bits(name, served, tokens)


@torch.inference_mode()
def check_rounding(make_twin: Callable[[], PreTrainedModel], tokens: list[int], dtype: torch.dtype) -> None:
    """Raise `UnsupportedModelError` unless a served twin of a 16-bit dtype is as near to float32 as `transformers` is."""
    exact, theirs, ours = make_twin().to(dtype).float(), make_twin().to(dtype), ServedTwin(make_twin().to(dtype))
    texts = [tokens, tokens[::-1], tokens[7:] + tokens[:7]]  # of a deep mixture most tokens of one text may go to other experts
    expected = [eager(exact, text) for text in texts]
    limits = [_distance(x, eager(theirs, text)) for x, text in zip(expected, texts, strict=True)]
    errors = [_distance(x, ours.alone(text)) for x, text in zip(expected, texts, strict=True)]
    ratio = sorted(a / max(b, 1e-30) for a, b in zip(errors, limits, strict=True))[1]
    if not ratio <= MOST_ROUNDING:
        detail = f"in {dtype} with {ratio:.1f} times the rounding error that transformers has there"
        raise UnsupportedModelError.because(type(exact).__name__, Refusal.OPERATIONS, detail)


def _distance(expected: Tensor, got: Tensor) -> float:
    """Median error over tokens: in a mixture some tokens go to another expert after a rounding."""
    return float((expected - got.float()).square().mean(-1).sqrt().median())


def eager(twin: PreTrainedModel, tokens: list[int] | Tensor, positions: Tensor | None = None) -> Tensor:
    """float32 logits [T, V] of a text alone, at `positions` int64[T], by default from 0 on."""
    taken = inspect.signature(twin.forward).parameters
    keywords = {"position_ids": (torch.arange(len(tokens)) if positions is None else positions)[None]}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    used = keywords if takes_any or "position_ids" in taken else {}
    logits: Tensor = twin(input_ids=torch.as_tensor(tokens)[None], use_cache=False, **used).logits[0]
    return logits.float()


def difference(expected: Tensor, got: Tensor) -> float:
    """Largest difference of two tensors of any one shape, relative to the largest expected."""
    return float((expected - got).abs().max() / expected.abs().max())


def _generated(twin: PreTrainedModel, prompt: list[int]) -> tuple[list[int], Tensor]:
    """Tokens of `generate` after a prompt, and their logits [n, V]."""
    ids = torch.tensor([prompt])
    settings: dict[str, Any] = {"max_new_tokens": NUM_GROWN, "min_new_tokens": NUM_GROWN, "do_sample": False, "pad_token_id": 0}
    out = twin.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_logits=True, **settings)
    return out.sequences[0].tolist(), torch.cat(out.logits).float()


def _widened(twin: PreTrainedModel) -> PreTrainedModel:
    """Make matrices outside of attention SPREAD times as large, in place."""
    for name, parameter in twin.named_parameters():
        if parameter.ndim >= 2 and not any(part in name for part in NOT_WIDENED):
            parameter.mul_(SPREAD)
    return twin


def _check_near(name: str, where: str, expected: Tensor, got: Tensor, refusal: Refusal = Refusal.OPERATIONS) -> None:
    if not (found := difference(expected, got)) < TOLERANCE:
        raise UnsupportedModelError.because(name, refusal, f"other logits {where} than in transformers, relative difference {found:.1e}")


def _check_bits(name: str, served: ServedTwin, tokens: list[int]) -> None:
    alone = served.alone(tokens)
    ways = {f"beside {count} others": served.beside(tokens, count) for count in BESIDE}
    ways |= {"in pieces": served.alone(tokens, [len(tokens) - 8, 1, 4, 2, 1])}
    for way, logits in ways.items():
        if not torch.equal(alone, logits):
            detail = f"other bits {way} than alone, largest difference {float((alone - logits).abs().max()):.1e}"
            raise UnsupportedModelError.because(name, Refusal.ROUNDING, detail)


def _check_operations(name: str, served: ServedTwin, tokens: list[int]) -> None:
    before = {key: (id(buffer), buffer.clone()) for key, buffer in served.twin.named_buffers()}
    with _Watch() as watch:
        served.alone(tokens)
    if watch.problems:
        raise UnsupportedModelError.because(name, Refusal.ROUNDING, f"it {' and '.join(sorted(watch.problems))}")
    after = dict(served.twin.named_buffers())
    if changed := [k for k, (at, values) in before.items() if id(after.get(k)) != at or not torch.equal(after[k], values)]:
        raise UnsupportedModelError.because(name, Refusal.STATE, f"it changes {changed[0]} in a pass")


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects what the framework does meanwhile that depends on the number of rows, with the class of the module."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problems: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in MATMULS and not _is_outer(func.overloadpacket.__name__, args):
            self.problems.add(f"multiplies matrices by the framework in {_caller()}")
        out = func(*args, **(kwargs or {}))
        keywords = kwargs or {}
        is_of_places = any(isinstance(value, Tensor | torch.memory_format) for value in keywords.values())
        if torch.Tag.pointwise in func.tags and not is_of_places and _rounds_by_place(functools.partial(func, **keywords), out, args):
            self.problems.add(f"calls {func.overloadpacket.__name__} in {_caller()}, which rounds by an element's place")
        return out


def _rounds_by_place(func: Any, out: Any, args: Any) -> bool:
    """An element-wise function of one tensor gives other bits to what is left over behind whole vectors, and there is such a rest."""
    x, *others = args
    is_one = isinstance(x, Tensor) and isinstance(out, Tensor) and out.shape == x.shape and x.is_floating_point()
    if not is_one or any(isinstance(a, Tensor) for a in others) or is_whole(x) or out is x:
        return False
    pieces = [func(piece, *others) for piece in x.reshape(-1).split(7)]
    return not torch.equal(torch.cat(pieces), in_whole_vectors(func, x, *others).reshape(-1))


def _is_outer(name: str, args: Any) -> bool:
    """Whether every entry is one product and nothing is summed. Rotary embeddings multiply frequencies and positions so."""
    last = [a for a in args if isinstance(a, Tensor)][-1]
    return name in PRODUCTS and last.ndim >= 2 and last.shape[-2] == 1


def _caller() -> str:
    """The class of the innermost module on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(module := frame.f_locals.get("self"), nn.Module):
            return type(module).__name__
        frame = frame.f_back
    return "a function"

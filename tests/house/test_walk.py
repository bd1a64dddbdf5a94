"""The way of a prompt from `LLM.generate` to the attention kernel: how many functions it passes, and in how many forms."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import toys
from torch._ops import OpOverload

from echelon import LLM, SamplingParams
from echelon.ops import compiled

MOST_FUNCTIONS = 11
KERNELS = (compiled.kernels.ragged_attention, compiled.kernels.run_layers) if compiled.is_built() else ()  # alone or within its layer
# what a row of a batch is in turn: the request, its part of a step, its draft, its rows of the batch, what attention reads, what survives
FORMS = {"Sequence", "PlannedRow", "Draft", "RaggedBatch", "CachedAttention", "RowVerdict"}
# what holds these for a moment: all rows of a step, a row's tokens on their way into the batch, one layer's tensors, one row of logits
CARRIERS = {"Plan", "HostStep", "StepRecord", "Occupancy", "Span", "LayerCall", "DraftedRow", "SampleRow"}


@contextmanager
def profiled(watch: Any) -> Iterator[None]:
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


def is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").startswith("echelon.") and not frame.f_code.co_name.startswith("<")


def functions_of(frame: FrameType | None) -> list[str]:
    """Our functions on the stack, from `generate` on; not the framework's."""
    found = []
    while frame is not None and frame.f_code.co_name != "generate":
        if is_ours(frame):
            found.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return ["LLM.generate", *reversed(found)]


@pytest.mark.skipif(not compiled.is_built(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("method", [None, {"method": "ngram", "num_speculative_tokens": 3}], ids=["plain", "ngram"])
def test_the_way_to_the_attention_kernel_is_short(method: dict[str, Any] | None) -> None:
    llm = LLM(toys.adopted(toys.llama()), method, kv_cache_memory_bytes=2**20)
    longest: list[str] = []

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal longest
        operation = frame.f_locals.get("self") if event == "call" and frame.f_code.co_name == "__call__" else None
        if isinstance(operation, OpOverload) and operation in KERNELS:
            longest = max(longest, functions_of(frame), key=len)

    with profiled(watch):
        llm.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=8))
    assert longest, "no attention was seen"
    assert len(longest) <= MOST_FUNCTIONS, " → ".join(longest)


def test_a_row_has_few_forms() -> None:
    """Of all our types that are made anew in every step, a row is in turn six; the others carry these."""
    llm = LLM(toys.adopted(toys.llama()), {"method": "ngram", "num_speculative_tokens": 3}, kv_cache_memory_bytes=2**20)
    made: set[str] = set()

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        new = frame.f_locals.get("self") if event == "call" and frame.f_code.co_name == "__init__" else None
        if type(new).__module__.startswith("echelon."):
            made.add(type(new).__name__)

    requests = [llm.inputs.samples([1, 2, 3], SamplingParams(max_tokens=8), watch_text=False)]
    running = llm.run(requests)
    next(running)  # what a row keeps from step to step, such as its block table, is made in its first
    with profiled(watch):
        for _ in running:
            pass
    assert made <= FORMS | CARRIERS, made - FORMS - CARRIERS

"""CUDA graphs: what the host would launch one by one is recorded once and replayed by one call.

A replay runs the recorded kernels on the recorded addresses with the recorded numbers, so everything that differs from step to step must
lie in memory that is filled before (`model.graphs.buffers`). All graphs share one pool of memory, which only one of them uses at a time:
what a graph returns is to be read, on the device, before any of them is replayed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from echelon.ops.triton.linear import counting_in, new_counters

logger = logging.getLogger("echelon")
MOST_GRAPHS = 48  # kept at once; each holds its own logits
EAGER_USES = 1  # of a key before it is captured: most buckets of prompts come only once
Outputs = tuple[Tensor, ...]


class Program(Protocol):
    """A function over fixed memory that a CUDA graph can capture."""

    def forward(self) -> Outputs:
        """Launch everything, from tensors that stay where they are, without waiting for the device."""


P = TypeVar("P", bound=Program)


class Graphs:
    """Graphs of programs by key, the least recently used first; a key is that of one kind of program."""

    def __init__(self, device: torch.device) -> None:
        self._most = MOST_GRAPHS
        self._pool, self._side = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._counters = new_counters(device)
        self._kept: dict[Hashable, tuple[Any, torch.cuda.CUDAGraph, Outputs]] = {}
        self._uses: Counter[Hashable] = Counter()  # of what is not captured
        self.is_refused = False
        self.num_captures = 0

    def run(self, key: Hashable, make: Callable[[], P], fill: Callable[[P], None]) -> Outputs | None:
        """Fill the program of this key and replay it. None for the first EAGER_USES, and where the device refuses to capture: then the
        caller launches by itself.
        """
        if key in self._kept:
            program, graph, outputs = self._kept.pop(key)
            fill(program)
        else:
            self._uses[key] += 1
            if self.is_refused or self._uses[key] <= EAGER_USES:
                return None
            program = make()
            fill(program)
            try:
                graph, outputs = self._captured(program)
            except RuntimeError as error:
                self.is_refused = True
                logger.warning("steps run without CUDA graphs, since one could not be captured: %s", error.__context__ or error)
                return None
        self._kept[key] = (program, graph, outputs)
        if len(self._kept) > self._most:  # only after a capture, which has waited for all replays
            del self._kept[next(iter(self._kept))]
        graph.replay()
        return outputs

    def _captured(self, program: Program) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        """Run once on a stream of its own, which compiles kernels and sets libraries up, then once more to record.

        Other threads may use the device meanwhile.
        """
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        try:
            with torch.cuda.stream(self._side), counting_in(self._counters):
                program.forward()
                graph = self._begun = torch.cuda.CUDAGraph()  # kept where it fails: the allocator may still speak to it
                with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
                    outputs = program.forward()
        finally:
            current.wait_stream(self._side)
        self.num_captures += 1
        return graph, outputs

"""CUDA graphs that are not there: on the card of card.py, what is launched while a graph records is noted, operation by operation
as PyTorch dispatches them and kernel by kernel, with the very tensors; a replay carries it out again in the same memory.

So a value that a replay should have taken from elsewhere (a number, a tensor of the host) is that of the recording. Before a replay all
that any graph computes is made NaN, since they share their memory. Refused while recording is what CUDA refuses: waiting for the device,
copies between it and the host, and shapes that depend on values; and always a copy from memory of the host that is not pinned, for which
the host would wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from card import MOVERS, Card, tensors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {Tensor.cpu, Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__}
BY_VALUE = {"nonzero", "masked_select", "_local_scalar_dense", "unique_dim", "_unique2", "bincount"}


class Call:
    """What was called, and what it returned; `own` are results in memory that it was not given."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], out: Any) -> None:
        self.function, self.args, self.kwargs, self.outputs = function, args, kwargs, list(tensors(out))
        given = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        fresh = (t for t in self.outputs if t.numel() and t.dtype != torch.bool)
        self.own = [t for t in fresh if t.untyped_storage().data_ptr() not in given]


class Recording(TorchDispatchMode):
    """Notes every operation; `is_paused` within kernels, which are noted as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.is_paused:
            if func.overloadpacket.__name__ in BY_VALUE:
                raise RuntimeError(f"{func} waits for the device; operation not permitted when stream is capturing")
            self.calls.append(Call(func, args, kwargs or {}, out))
        return out


class Recorder(Card):
    """A card whose operations can be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.recording: Recording | None = None
        self._pinned: set[int] = set()
        self._on_their_way: list[tuple[Tensor, Tensor]] = []  # to the host
        self.num_replays = 0
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_pinned = kwargs.pop("pin_memory", False)
        if self.recording is not None and func in WAITS and self.holds(args[0]):
            raise RuntimeError(f"{func.__name__} waits for the device; operation not permitted when stream is capturing")
        if func is Tensor.copy_ and self.holds(args[0]) and not self.holds(args[1]):
            assert args[1].untyped_storage().data_ptr() in self._pinned, "a copy from memory that is not pinned waits for the device"
            assert self.recording is None, "a graph reads memory of the host"
        if func is Tensor.copy_ and self.holds(args[1]) and not self.holds(args[0]) and kwargs.get("non_blocking"):
            assert args[0].untyped_storage().data_ptr() in self._pinned, "a copy to memory that is not pinned waits for the device"
            assert self.recording is None, "a graph writes memory of the host"
            with torch._C.DisableTorchFunction():
                self._on_their_way.append((args[0], args[1].clone()))
                return args[0].fill_(-(1 << 40))
        out = super().__torch_function__(func, types, args, kwargs)
        if is_pinned:
            self._pinned.add(out.untyped_storage().data_ptr())
        if self.recording is not None and func in MOVERS and self.holds(out) and not self.holds(args[0]):
            raise RuntimeError("a tensor of the host is moved to the card; operation not permitted when stream is capturing")
        if self.recording is not None and func is torch.tensor and self.holds(out):
            raise RuntimeError("a tensor is made from values of the host; operation not permitted when stream is capturing")
        return out

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        run = super().kernel(function)

        def launch(*args: Any, **kwargs: Any) -> Any:
            if self.recording is None:
                return run(*args, **kwargs)
            self.recording.is_paused = True
            out = run(*args, **kwargs)
            self.recording.is_paused = False
            self.recording.calls.append(Call(run, args, kwargs, out))
            return out

        return launch

    def jit(self, function: Any) -> Any:
        """A Triton kernel, interpreted: `function[grid](...)`."""
        return _Launcher(lambda grid: self.kernel(function[grid]))

    def cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`torch.cuda` as `model.graphs.graphs` uses it."""
        stream = SimpleNamespace(wait_stream=lambda _: None)
        stand_ins: dict[str, Any] = {
            "is_available": lambda: True,
            "current_stream": lambda *_: stream,
            "Stream": lambda _: stream,
            "stream": lambda _: nullcontext(),
            "graph_pool_handle": lambda: (0, 1),
            "CUDAGraph": lambda: Graph(self),
            "Event": lambda: Event(self._on_their_way),
            "graph": self._record,
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    @contextmanager
    def _record(self, graph: Graph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert pool == (0, 1) and stream is not None and capture_error_mode == "thread_local" and self.recording is None
        self.recording = Recording()
        try:
            with self.recording:
                yield
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904 (as PyTorch ends a capture)
        finally:
            graph.calls, self.recording = self.recording.calls, None


class _Launcher:
    def __init__(self, launch: Callable[[Any], Callable[..., Any]]) -> None:
        self._launch = launch

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self._launch(grid)


class Event:
    """Copies to the host, asked for before it is recorded, arrive when it is waited for and no sooner."""

    def __init__(self, on_their_way: list[tuple[Tensor, Tensor]]) -> None:
        self._on_their_way = on_their_way

    def record(self) -> None:
        self._copies = list(self._on_their_way)
        self._on_their_way.clear()

    def synchronize(self) -> None:
        with torch._C.DisableTorchFunction():
            for host, values in self._copies:
                host.numpy()[...] = values.numpy()


class Graph:
    def __init__(self, card: Recorder) -> None:
        self._card = card
        card.graphs.add(self)
        self.calls: list[Call] = []

    def replay(self) -> None:
        self._card.num_replays += 1
        with torch._C.DisableTorchFunction():
            for call in (call for graph in self._card.graphs for call in graph.calls):
                for tensor in call.own:
                    tensor.fill_(torch.nan if tensor.is_floating_point() else -(1 << 20))
            for call in self.calls:
                for mine, new in zip(call.outputs, tensors(call.function(*call.args, **call.kwargs)), strict=True):
                    if mine.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        mine.copy_(new)

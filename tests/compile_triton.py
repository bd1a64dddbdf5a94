"""Compile every Triton kernel as its wrapper would launch it, without a device; a line each: its name, and instructions looked for."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from echelon.batch import Span
from echelon.kv.blocks import BlockTables
from echelon.layouts import unpadded
from echelon.ops.elementwise import Activation, RmsWeight
from echelon.ops.triton import attention, elementwise
from echelon.ops.triton.linear import linear_invariant
from echelon.ops.triton.sample import sample_rows

LOOKED_FOR = ("wgmma", "fma.rn.f32")
launch = JITFunction.run


class Absent:
    """What Triton asks the driver of a device before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    compiled = launch(kernel, *arguments, grid=grid, warmup=True, **options)
    assert len(compiled.asm["cubin"]) > 0
    print(kernel.fn.__name__, *(name for name in LOOKED_FOR if name in compiled.asm["ptx"]))


driver.set_active(Absent())
JITFunction.run = compile_only

tables = BlockTables(50, 16, 50)
assert tables.reserve(0, 600)
batch = unpadded.pack([Span(0, 599, [0], 1, 600)], tables)
x = torch.zeros(4, 64, dtype=torch.bfloat16)
cache = torch.zeros(50, 2, 16, 64, dtype=torch.bfloat16)
attention.ragged_attention(torch.zeros(1, 8, 64, dtype=torch.bfloat16), cache, cache, batch, 0.1, 100, 3.0, torch.zeros(8))
linear_invariant(x, x, x[0])
elementwise.rms_norm(x, x[0], 1e-5, RmsWeight.AFTER_ROUNDING)
elementwise.layer_norm(x, x[0], x[0], 1e-5)
elementwise.activate(x, Activation.GELU_TANH, x)
elementwise.rotate(x[None, None], x[None, :, :32], x[None, :, :32])
elementwise.write_slots(x.view(4, 2, 32), x.view(4, 2, 32), cache[..., :32], cache[..., :32], torch.arange(4))
sample_rows(torch.zeros(1, 600), [1.0], [3], [0.5], [0.1], [1], [0], [2])

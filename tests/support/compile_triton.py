"""Compile every Triton kernel as its wrapper would launch it, without a device; a line each: its name, and instructions looked for."""

from __future__ import annotations

import re
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from echelon.batch import Span
from echelon.kv.blocks import BlockTables
from echelon.model import pack as unpadded
from echelon.ops.contract import Activation, RmsWeight
from echelon.ops.triton import attention, elementwise
from echelon.ops.triton.linear import linear_invariant
from echelon.ops.triton.sample import sample_rows
from echelon.sampling import Sampler, SamplingParams

SHARED_MEMORY = 232_448  # bytes that a program may take on a device of compute capability 9.0
LOOKED_FOR = ("wgmma", "mma.sync", "fma.rn.f32")
launch, orders = JITFunction.run, list[tuple[str, set[str]]]()


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
    assert compiled.metadata.shared <= SHARED_MEMORY, f"{kernel.fn.__name__} wants {compiled.metadata.shared:,} bytes of shared memory"
    orders.append((kernel.fn.__name__, order_of_additions(compiled.asm["ttgir"])))
    print(kernel.fn.__name__, *(name for name in LOOKED_FOR if name in compiled.asm["ptx"]))


def order_of_additions(code: str) -> set[str]:
    """How products and sums over a dimension lie in the threads."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    products = re.findall(r"(?:tt\.dot|warp_group_dot) .* -> (tensor<.*), (#\w+)>", code)
    sums = re.findall(r"(tensor<\d+x\d+xf32), (#\w+)>\) -> tensor<\d+xf32, #ttg.slice", code)
    return {f"{kind} {shape} {layouts[name]}" for kind, found in (("dot", products), ("sum", sums)) for shape, name in found}


driver.set_active(Absent())
JITFunction.run = compile_only

tables = BlockTables(50, 16, 50)
assert tables.reserve(0, 600)
batch = unpadded.pack([Span(0, 580, [0] * 3, 1, 581, 2, [-1, -1])], tables)
half = torch.bfloat16
x, slots = torch.zeros(4, 64, dtype=half), torch.zeros(50, 2, 16, 32, dtype=half)
for num_heads, size, dtype in ((1, 128, half), (4, 64, half), (8, 128, half), (8, 256, half), (8, 512, half), (4, 64, torch.float32)):
    cache, query = torch.zeros(50, 1, 16, size, dtype=dtype), torch.zeros(3, num_heads, size, dtype=dtype)
    orders.clear()
    attention.ragged_attention(query, cache, cache, batch, 0.1, 100, 3.0, torch.zeros(num_heads))
    shared, of_tails = (order for name, order in orders if name == "_attend")
    assert shared == of_tails and len(shared) > 1, "what several programs compute of one row adds up in one order"
orders.clear()
for num_rows in (1, 16_384):
    for dtype in (half, torch.float32):
        linear_invariant(torch.zeros(num_rows, 512, dtype=dtype), torch.zeros(8, 512, dtype=dtype), torch.zeros(8))
shared, shared_in_float32, walked, walked_in_float32 = (order for _, order in orders)
assert shared == walked and shared_in_float32 == walked_in_float32
elementwise.rms_norm(x, x[0], 1e-5, RmsWeight.AFTER_ROUNDING)
elementwise.layer_norm(x, x[0], x[0], 1e-5)
elementwise.activate(x, Activation.GELU_TANH, x)
elementwise.rotate(x[None, None], x[None, :, :32], x[None, :, :32])
elementwise.write_slots(x.view(4, 2, 32), x.view(4, 2, 32), slots, slots, torch.arange(4))
sample_rows([torch.zeros(600)], [Sampler(SamplingParams(top_k=3, top_p=0.5, min_p=0.1), 1)], [2])

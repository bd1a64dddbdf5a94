"""The operations on CUDA devices, by Triton kernels (`contract.Backend`); importing this room imports Triton.

Every kernel keeps the contract by the same means: block sizes are constants of a model, never of a batch; sums run over
tiles at fixed places in a fixed order; and no multiplication and addition are contracted (`EXACT`), so that two kernels, or two versions of
one, that are written alike compute alike. Under Triton's interpreter (TRITON_INTERPRET=1 before Triton is first imported) all of them
run on CPU tensors, which is how they are tested where there is no device.
"""

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError("tensors on a CUDA device need Triton, which is not installed: pip install 'echelon[gpu]'") from error

from echelon.ops.reference import likeliest_rows, pack, packed_rows, read_memory
from echelon.ops.triton.attention import ragged_attention
from echelon.ops.triton.elementwise import activate, layer_norm, rms_norm, rotate, write_slots
from echelon.ops.triton.linear import packed_linear
from echelon.ops.triton.sample import sample_rows

__all__ = [
    "activate",
    "layer_norm",
    "likeliest_rows",
    "pack",
    "packed_linear",
    "packed_rows",
    "ragged_attention",
    "read_memory",
    "rms_norm",
    "rotate",
    "sample_rows",
    "write_slots",
]

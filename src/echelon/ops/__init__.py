"""The operations that the engine owns: typed in `contract`, defined in `reference`, compiled in `cpu` and `triton`."""

import torch

from echelon.inputs import dtype_name
from echelon.ops import compiled, cpu, devices
from echelon.ops.reference import LARGEST_CALL, ROWS_PER_CALL, RowCounts, fixed_rows_linear

FEW, MANY = 1, 512  # tokens of a pass

__all__ = ["ROWS_PER_CALL", "RowCounts", "fixed_rows_linear", "which"]

ON_CUDA = {
    "ragged_attention": "Triton: keys and values read once a step for all new tokens of a row; tiles at fixed positions, float32",
    "linear": "Triton: blocks of one shape and one order over K for any number of rows",
    "norms, rotary, activations": "Triton: rounded once, where seen to compute what the model's own do",
    "drawing tokens": "Triton: float64 noise from the request's own keys; what changes logits first, on the host",
    "ranking drafts": "PyTorch",
}


def which(on: torch.device | None = None) -> dict[str, str]:
    """Operation → the implementation that serves it on a device, by default the one that engines choose, with the reason."""
    if devices.by_triton(torch.empty(0, device=on or devices.chosen_device("auto"))):
        return ON_CUDA
    return {
        "ragged_attention": _compiled(
            "keys and values read once a step for all new tokens and heads of a group; tiles at fixed positions, float32",
            "PyTorch (tiles of fixed shape, float32 accumulation)",
        ),
        "linear": _linear(),
        "norms, rotary, activations": _compiled("rounded once, where seen to compute what the model's own do", "the model's own"),
        "drawing tokens": _compiled("no sort, noise only for tokens that can win", "NumPy, row by row"),
        "ranking drafts": _compiled("no sort, two passes over a row", "PyTorch"),
    }


def _compiled(how: str, otherwise: str) -> str:
    return f"compiled: {how}" if compiled.is_built() else f"{otherwise}: no compiled kernels ({compiled.REASON})"


def _linear() -> str:
    if compiled.is_built():
        served = ", ".join(f"{dtype_name(t)} by {cpu.linear_family(t)}" for t in (torch.bfloat16, torch.float16, torch.float32))
        integers = dict.fromkeys(cpu.linear_family(torch.bfloat16, 8, rows) for rows in (FEW, MANY))
        return (
            f"compiled: weights packed once, one order over K for any number of rows; {served}; "
            f"weights of 8 and 4 bits by {' for few rows, else '.join(integers)}"
        )
    return (
        f"PyTorch, calls of {ROWS_PER_CALL} rows, or of up to {LARGEST_CALL} where they were seen to round alike, so that a row's result "
        f"does not depend on the batch: no compiled kernels ({compiled.REASON})"
    )

"""The operations on CUDA devices, by Triton kernels; importing this room imports Triton.

Every kernel keeps the contract of `echelon.ops` by the same means: block sizes are constants of a model, never of a batch; sums run over
tiles at fixed places in a fixed order; and no multiplication and addition are contracted (`EXACT`), so that two kernels, or two versions of
one, that are written alike compute alike. Under Triton's interpreter (TRITON_INTERPRET=1 before Triton is first imported) all of them
run on CPU tensors, which is how they are tested where there is no device.
"""

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError("tensors on a CUDA device need Triton, which is not installed: pip install 'echelon[gpu]'") from error

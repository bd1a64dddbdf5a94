"""Builds the compiled kernels where PyTorch and a compiler are at hand; without them the package installs and runs on PyTorch alone.

Everything else about the package stands in pyproject.toml. The kernels share PyTorch's thread pool, so they must be built against the
PyTorch that runs them: `pip install --no-build-isolation .`
"""

import platform
from pathlib import Path

from setuptools import setup

CSRC = Path("src/echelon/csrc")
FLAGS = ["-O3", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wno-unknown-pragmas", "-Wno-psabi"]
FLAGS += ["-mprefer-vector-width=512"] * (platform.machine() in ("x86_64", "AMD64"))  # where there are such vectors


def kernels() -> dict[str, object]:
    """Arguments of `setup` that build the extension; none where PyTorch is not installed."""
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        print("PyTorch is not installed in the build environment: no compiled kernels (use --no-build-isolation)")
        return {}
    sources = sorted(str(p) for p in CSRC.glob("*.cpp"))
    extension = CppExtension("echelon._kernels", sources, extra_compile_args=FLAGS, extra_link_args=["-fopenmp"], optional=True)
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildExtension}}


setup(**kernels())

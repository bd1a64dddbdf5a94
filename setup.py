"""Builds the compiled kernels where PyTorch and a compiler are at hand; without them the package installs and runs on PyTorch alone.

Everything else about the package stands in pyproject.toml. The kernels share PyTorch's thread pool, so they must be built against the
PyTorch that runs them: `pip install --no-build-isolation .` Where they cannot be built, the reason is installed in their place
(`echelon/_kernels.txt`), so that the package can say what would mend it.
"""

import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from setuptools import setup
from setuptools.command.build_py import build_py

CSRC = Path("src/echelon/csrc")
NOTE = "_kernels.txt"
FLAGS = ["-O3", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas", "-Wno-psabi"]
# so that loops over exponentials become vectors: what errno, traps or one side of a bound would do is not worked out apart
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fno-thread-jumps"]
FLAGS += ["-mprefer-vector-width=512"] * (platform.machine() in ("x86_64", "AMD64"))  # where there are such vectors


def note(folder: Path, reason: str) -> None:
    """Leave the reason why there are no kernels beside where they would be; none where there are."""
    path = folder / "echelon" / NOTE
    if reason:
        print(f"no compiled kernels: {reason}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(reason + "\n", encoding="utf-8")
    else:
        path.unlink(missing_ok=True)


@contextmanager
def words_of_compiler_in(file: IO[str]) -> Iterator[None]:
    """Send what this process and its children print to a file for a while."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        for descriptor, before in zip((1, 2), kept, strict=True):
            os.dup2(before, descriptor)
            os.close(before)


def commands() -> dict[str, object]:
    """Arguments of `setup` that build the extension, or that install the reason why it is not built."""
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:

        class WithoutKernels(build_py):
            """Install the package and why it has no kernels."""

            def run(self) -> None:
                super().run()
                folder = Path("src") if getattr(self, "editable_mode", False) else Path(self.build_lib)
                note(folder, "PyTorch was not there when the package was built (pip builds in isolation)")

        return {"cmdclass": {"build_py": WithoutKernels}}

    class Kernels(BuildExtension):
        """Compile; where that fails, install why."""

        def run(self) -> None:
            reason = ""
            with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
                try:
                    with words_of_compiler_in(output):
                        super().run()
                except Exception as error:
                    output.seek(0)
                    words = [line.strip() for line in (*output, *str(error).splitlines())]
                    reason = "compilation failed: " + next((w for w in words if "error" in w.lower()), f"{type(error).__name__}: {error}")
                output.seek(0)
                print(output.read())
            note(Path("src") if self.inplace else Path(self.build_lib), reason)

    sources = sorted(str(p) for p in CSRC.rglob("*.cpp") if p.parent.name != "harness")
    extension = CppExtension("echelon._kernels", sources, extra_compile_args=FLAGS, extra_link_args=["-fopenmp"])
    return {"ext_modules": [extension], "cmdclass": {"build_ext": Kernels}}


setup(**commands())

"""Builds the compiled kernels where PyTorch's headers and a compiler are at hand; without them the package runs on PyTorch alone.

Everything else about the package stands in pyproject.toml. The kernels are built with the headers of PyTorch's stable interface, so any
Python and any PyTorch from OLDEST on load them. The headers are those of the environment that is installed into, though pip hides its
packages from this process. Where the kernels cannot be built, the reason is installed in their place (`echelon/_kernels.txt`), so that the
package can say what would mend it.
"""

import os
import platform
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

CSRC = Path("src/echelon/csrc")
NOTE = "_kernels.txt"
OLDEST = (2, 11)  # PyTorch that takes them
FLAGS = ["-O3", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas", "-Wno-psabi", "-g0"]
# so that loops over exponentials become vectors: what errno, traps or one side of a bound would do is not worked out apart
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fno-thread-jumps"]
FLAGS += [f"-DTORCH_TARGET_VERSION={OLDEST[0] << 56 | OLDEST[1] << 48:#x}"]
FLAGS += ["-mprefer-vector-width=512"] * (platform.machine() in ("x86_64", "AMD64"))  # where there are such vectors


def torch_folder() -> Path | None:
    """PyTorch of the environment, with headers of its stable interface."""
    places = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    folders = (Path(place) / "torch" for place in places)
    return next((folder for folder in folders if (folder / "include/torch/csrc/stable/library.h").is_file()), None)


def note(folder: Path, reason: str) -> None:
    """Leave the reason why there are no kernels beside where they would be; none where there are."""
    path = folder / "echelon" / NOTE
    if reason:
        print(f"no compiled kernels: {reason}")
        path.parent.mkdir(parents=True, exist_ok=True)
        newest = max(source.stat().st_mtime for source in CSRC.rglob("*.[ch]*"))
        for older in path.parent.glob("_kernels*.so"):  # of other sources than those that are installed
            if not is_newer(older, newest):
                older.unlink()
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


class WithoutKernels(build_py):
    """Install the package and why it has no kernels."""

    def run(self) -> None:
        super().run()
        folder = Path("src") if getattr(self, "editable_mode", False) else Path(self.build_lib)
        note(folder, "PyTorch was not there when the package was built: install it first")


class Kernels(build_ext):
    """Compile, several files at once and none that is up to date; where that fails, install why."""

    def run(self) -> None:
        reason = ""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            self.terminal = os.fdopen(os.dup(2), "w")
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

    def build_extensions(self) -> None:
        one = self.compiler.compile
        self.compiler.compile = lambda sources, **how: self.compile(one, sources, how)
        super().build_extensions()

    def compile(self, one: Callable[..., list[str]], sources: list[str], how: dict[str, Any]) -> list[str]:
        """The objects of `sources`, each made by a call of `one`, with a line of progress."""
        objects = self.compiler.object_filenames(sources, output_dir=how["output_dir"])
        newest = max(path.stat().st_mtime for path in (Path(__file__), *CSRC.rglob("*.h")))
        pairs = zip(sources, objects, strict=True)
        stale = [source for source, made in pairs if not is_newer(Path(made), max(newest, Path(source).stat().st_mtime))]
        start = time.monotonic()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            jobs = [pool.submit(one, [source], **how) for source in stale]
            for done, job in enumerate(as_completed(jobs), start=1):
                if job.exception() is not None:
                    pool.shutdown(cancel_futures=True)
                job.result()
                spent = time.monotonic() - start
                left = spent / done * (len(stale) - done)
                print(f"kernels: {done} of {len(stale)} files after {spent:.0f} s, about {left:.0f} s left", file=self.terminal, flush=True)
        return objects


def is_newer(path: Path, moment: float) -> bool:
    """Whether there is such a file, written after `moment`."""
    return path.is_file() and path.stat().st_mtime > moment


def commands() -> dict[str, Any]:
    """Arguments of `setup` that build the kernels, or that install the reason why they are not built."""
    torch = torch_folder()
    if torch is None:
        return {"cmdclass": {"build_py": WithoutKernels}}
    extension = Extension(
        "echelon._kernels",
        sorted(str(p) for p in CSRC.rglob("*.cpp") if p.parent.name != "harness"),
        include_dirs=[str(torch / "include")],
        library_dirs=[str(torch / "lib")],
        libraries=["torch_cpu"],
        depends=sorted(str(p) for p in CSRC.rglob("*.h")),
        extra_compile_args=FLAGS,
        extra_link_args=["-fopenmp"],
        py_limited_api=True,
    )
    tag = {"bdist_wheel": {"py_limited_api": "cp311"}}  # any Python from there on, though the kernels know of none
    return {"ext_modules": [extension], "cmdclass": {"build_ext": Kernels}, "options": tag}


setup(**commands())

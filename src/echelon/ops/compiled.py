"""The compiled kernels, where they were built, and what would mend it where they were not."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import shlex
import shutil
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import torch

from echelon.errors import ConfigError

logger = logging.getLogger("echelon")
LIBRARY = Path(__file__).parents[1] / "_kernels.abi3.so"
NOTE = LIBRARY.with_name("_kernels.txt")  # what the installation wrote where it built none

REASON = ""  # why there are no kernels


class MissingKernels:
    """Stands for the kernels where there are none.

    Raises
    ------
    ConfigError  a kernel is called: why there are none, and what mends it
    """

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(with_remedy(f"no compiled kernels ({REASON}), so there is no {name}"))


class Kernels:
    """The library of operations that csrc/bindings defines, `torch.ops.echelon`, each looked up once."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch.ops.echelon, name).default
        setattr(self, name, found)
        return found


MISSING = MissingKernels()
kernels: Any = MISSING
try:
    torch.ops.load_library(LIBRARY)  # type: ignore[no-untyped-call]
    kernels = Kernels()
except OSError as error:
    if LIBRARY.is_file():
        REASON = f"PyTorch {torch.__version__} does not take them: {str(error).splitlines()[0]}"
    else:
        REASON = NOTE.read_text("utf-8").strip() if NOTE.is_file() else f"there is no {LIBRARY.name}"


def is_built() -> bool:
    """The extension is there and fits the PyTorch that is running."""
    return kernels is not MISSING


def remedy() -> str:
    """The commands that build the kernels here; "" where they are built or the processor is none that they are written for."""
    if is_built() or platform.machine() not in ("x86_64", "AMD64"):
        return ""
    compiler = "" if shutil.which("c++") else "install a C++20 compiler (c++), then: "
    return f"{compiler}pip install --no-deps --force-reinstall {_origin()}"


def with_remedy(problem: str) -> str:
    """A problem for lack of the kernels, and what mends it, if anything does."""
    advice = remedy()
    return f"{problem}; {advice}" if advice else problem


def check_built(what: str) -> None:
    """Raise ConfigError where `what` needs the kernels and there are none."""
    if not is_built():
        raise ConfigError(with_remedy(f"{what} needs the compiled kernels ({REASON})"))


@cache
def warn_once_if_missing() -> None:
    """Log, once a process, that models run many times slower than they could, and what mends it."""
    if advice := remedy():
        logger.warning("no compiled kernels (%s): models run many times slower than they could; %s", REASON, advice)


def _origin() -> str:
    """What pip is to install: the folder or address that this package came from, editable if it was; else its name."""
    try:
        source = json.loads(distribution("echelon").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        source = {}
    url = str(source.get("url", "echelon"))
    editable = "--editable " if source.get("dir_info", {}).get("editable") else ""
    return editable + shlex.quote(unquote(urlparse(url).path) if url.startswith("file:") else url)


@cache
def fingerprint() -> str:
    """A short hash of the compiled kernels, "none" where there are none: what was measured with others does not hold."""
    return hashlib.sha256(LIBRARY.read_bytes()).hexdigest()[:16] if is_built() else "none"


@cache  # PyTorch never frees a string that a kernel returns, and every row asks
def isa() -> str:
    """Name the instructions that kernels use: generic, avx2, avx512, avx512_bf16 or amx. It is the largest set that the machine offers, or
    the one that the environment's ECHELON_ISA names; ConfigError where the machine does not offer that.
    """
    try:
        return str(kernels.isa())
    except ValueError as error:
        raise ConfigError(f"ECHELON_ISA: {error}") from None


def offered_isas() -> list[str]:
    """Name the sets of instructions that this machine offers, the smallest first."""
    return list(kernels.offered_isas())


def set_isa(name: str, byte_products: bool = True) -> None:
    """Use a lesser set of instructions than the machine offers, with what the processor has for products of bytes within it (VNNI, AMX) or
    without; ConfigError for one that it lacks.
    """
    try:
        kernels.set_isa(name, byte_products)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    isa.cache_clear()

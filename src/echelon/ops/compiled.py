"""The compiled kernels, where they were built, and what would mend it where they were not."""

from __future__ import annotations

import importlib
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

from echelon.errors import ConfigError

logger = logging.getLogger("echelon")
NOTE = Path(__file__).parents[1] / "_kernels.txt"  # what the installation wrote where it built none

REASON = ""  # why there are no kernels


class MissingKernels:
    """Stands for the kernels where there are none.

    Raises
    ------
    ConfigError  a kernel is called: why there are none, and what mends it
    """

    def __getattr__(self, name: str) -> Any:
        advice = remedy()
        raise ConfigError(f"no compiled kernels ({REASON}), so there is no {name}{advice and '; '}{advice}")


MISSING = MissingKernels()
kernels: Any = MISSING  # the module `echelon._kernels` (csrc/bindings)
try:
    kernels = importlib.import_module("echelon._kernels")
except ModuleNotFoundError as error:
    REASON = NOTE.read_text("utf-8").strip() if NOTE.is_file() else str(error)
except ImportError as error:
    REASON = f"they were built against another PyTorch: {str(error).splitlines()[0]}"


def is_built() -> bool:
    """The extension is there and fits the PyTorch that is running."""
    return kernels is not MISSING


def remedy() -> str:
    """The commands that build the kernels here; "" where they are built or the processor is none that they are written for."""
    if is_built() or platform.machine() not in ("x86_64", "AMD64"):
        return ""
    compiler = "" if shutil.which("c++") else "install a C++20 compiler (c++), then: "
    build = "pip install --no-build-isolation --no-deps --force-reinstall"
    return f"{compiler}pip install 'setuptools>=77' ninja && {build} {_origin()}"


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

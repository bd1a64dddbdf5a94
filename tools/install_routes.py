"""Every documented way to install, each into an environment of its own: `python -m tools.install_routes [ROUTE ...]`, some minutes each.

wheel      `make wheel`, with the kernels in it
sdist      compiled while it is installed; PyTorch is there, though pip hides it from the build
compiler-free   the same where no compiler is: without kernels, and the doctor says what cures it
editable   from a folder of the sources

In each: does `echelon doctor` say that the kernels are compiled, or the cure, and does a first text come?
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from echelon.demo import TARGET

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
FIRST_TEXT = ["generate", str(TARGET), "def main(argv):", "--max-tokens", "16", "--temperature", "0"]
NO_COMPILER = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
Install = Callable[["Environment", Path], None]


def apart() -> dict[str, str]:
    """The environment without modules from elsewhere, which pip would take for installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


class Environment:
    """A virtual environment with PyTorch in it, as the README says first."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        self.pip(TORCH)

    def pip(self, *what: str, **environ: str) -> None:
        """Install, by plain pip."""
        command = [str(self.bin / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
        subprocess.run(command, check=True, env=apart() | environ)

    def echelon(self, *arguments: str) -> str:
        """What the command prints, away from the sources."""
        command = [str(self.bin / "echelon"), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=self.bin, env=apart()).stdout


def wheel(environment: Environment, scratch: Path) -> None:
    """The wheel of `make wheel`."""
    del scratch
    subprocess.run(["make", "wheel"], cwd=ROOT, check=True, stdout=sys.stderr)
    (built,) = (ROOT / "build/wheel").glob("echelon-*.whl")
    environment.pip("-c", str(ROOT / "constraints.txt"), str(built))


def sdist(environment: Environment, scratch: Path, **environ: str) -> None:
    """The sources as one file."""
    clone(scratch / "sources")
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(scratch)]
    subprocess.run(command, cwd=scratch / "sources", check=True, stdout=sys.stderr)
    (packed,) = scratch.glob("echelon-*.tar.gz")
    environment.pip("-c", str(ROOT / "constraints.txt"), str(packed), **environ)


def compiler_free(environment: Environment, scratch: Path) -> None:
    """The same, where nothing compiles."""
    sdist(environment, scratch, **NO_COMPILER)


def editable(environment: Environment, scratch: Path) -> None:
    """A folder that one works in."""
    clone(scratch / "sources")
    environment.pip("-c", str(ROOT / "constraints.txt"), "--editable", str(scratch / "sources"))


def clone(folder: Path) -> None:
    """The sources as they are committed."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)


ROUTES: dict[str, Install] = {"wheel": wheel, "sdist": sdist, "compiler-free": compiler_free, "editable": editable}


def verdict(name: str, kernels: str, text: str) -> str:
    """What is wrong; "" where nothing is."""
    if name == "compiler-free":
        cured = kernels.startswith("MISSING") and "pip install" in kernels
        return "" if cured and text else f"no cure is said: {kernels}"
    return "" if not kernels.startswith("MISSING") and text else f"no kernels: {kernels}"


def tried(name: str) -> str:
    """Install by one route, and try it: what is wrong with it."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        environment = Environment(Path(folder) / "venv")
        ready = time.monotonic()
        ROUTES[name](environment, Path(folder))
        installed = time.monotonic()
        report = json.loads(environment.echelon("doctor", "--json"))
        kernels = report.get("compiled kernels", report["linear"])  # the former is there where they are missing
        text = environment.echelon(*FIRST_TEXT)
        done = time.monotonic()
        print(f"{name}: PyTorch {ready - start:.0f} s, echelon {installed - ready:.0f} s, doctor and first text {done - installed:.0f} s")
        print(f"  kernels: {kernels}\n  {shlex.join(['echelon', *FIRST_TEXT])}: {' '.join(text.split())}", flush=True)
        return verdict(name, kernels, text)


def main() -> int:
    """1 if a route does not lead to a first text, or to kernels or their cure."""
    chosen = sys.argv[1:] or list(ROUTES)
    if unknown := [name for name in chosen if name not in ROUTES]:
        print(f"there is no route {unknown[0]!r}; known: {', '.join(ROUTES)}", file=sys.stderr)
        return 2
    wrong = {name: said for name in chosen if (said := tried(name))}
    for name, said in wrong.items():
        print(f"{name}: {said}", file=sys.stderr)
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} routes lead to a text")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

"""Files that a command of this repository depends on, found by following imports through the syntax trees.

A proof is stale when one of its files has changed, and only then (`prove`). Followed are imports of the package, of tests, benchmarks and
tools, wherever they stand in a file; `python -m package` in a list of words; tests and scripts that a string names. Whoever imports
the compiled operations depends on all of `csrc`, whoever imports the embedded pair on its files. Of the package's own `__init__`, which
names what is public, each name that is imported counts alone.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from tools import ROOT

PACKAGE = ROOT / "src" / "echelon"
ROOMS = {"echelon": PACKAGE, "benchmarks": ROOT / "benchmarks", "tools": ROOT / "tools"}  # what is imported by its full name
FOLDERS = (*sorted(p for p in (ROOT / "tests").iterdir() if p.is_dir()), ROOT / "scripts")  # whose modules import each other by bare name
EXTRA = {  # module → what it needs besides its imports
    "ops/compiled.py": [*sorted(p for p in PACKAGE.glob("csrc/**/*.*") if p.parent.name != "harness"), ROOT / "setup.py"],
    "bench/peers.py": sorted(p for p in ROOT.glob("benchmarks/workers/*") if p.is_file()),
    "cli/__init__.py": sorted(PACKAGE.glob("cli/*.py")),  # verbs are loaded by name
    "demo/__init__.py": sorted(p for p in PACKAGE.glob("demo/pair/**/*") if p.is_file()),
}
ALWAYS = (ROOT / "constraints.txt", ROOT / "pyproject.toml")


def of_command(words: list[str]) -> frozenset[Path]:
    """Files behind a command: its scripts and test files, the modules it runs with -m, and all that these import."""
    files = {path for word in words if (path := ROOT / word.split("::")[0]).is_file()}
    files |= {path for flag, module in pairwise(words) if flag == "-m" for path in module_files(f"{module}.__main__")}
    if "pytest" in words:
        files.add(ROOT / "tests" / "conftest.py")
    if {"sanitize", "tools.kernel_mutants", "tools.install_routes"} & set(words):
        files |= {ROOT / "Makefile", ROOT / "setup.py", *PACKAGE.glob("csrc/**/*.*")}
    return closure(files)


def digest(files: frozenset[Path], *more: str) -> str:
    """A short hash over names and contents of files, and over other words that matter."""
    sha = hashlib.sha256("\0".join(more).encode())
    for path in sorted({*files, *ALWAYS}):
        sha.update(str(path.relative_to(ROOT)).encode() + _content(path))
    return sha.hexdigest()[:16]


def closure(files: set[Path]) -> frozenset[Path]:
    """Files and everything that they import, directly or not."""
    found, new = set[Path](), set(files)
    while new:
        found |= new
        new = {needed for path in new for needed in _needed_by(path)} - found
    return frozenset(found)


@cache
def _content(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


@cache
def _needed_by(path: Path) -> frozenset[Path]:
    """What one file needs: modules it imports or names, and files of this repository that its strings name."""
    files = set(EXTRA.get(str(path.relative_to(PACKAGE)), [])) if path.is_relative_to(PACKAGE) else set()
    if path.suffix != ".py" or path == PACKAGE / "__init__.py":
        return frozenset(files)
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        for module in _modules(node):
            files |= module_files(module, path.parent)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and Path(node.value).suffix in (".py", ".sh", ".txt"):
            files |= {file for folder in FOLDERS if (file := folder / Path(node.value).name).is_file()}
    return frozenset(files - {path})


def _modules(node: ast.AST) -> Iterator[str]:
    """Modules that a statement imports or a list of words runs; of `from a import b` both a and a.b."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    elif isinstance(node, ast.List | ast.Tuple):
        words = [item.value if isinstance(item, ast.Constant) else None for item in node.elts]
        yield from (f"{name}.__main__" for flag, name in pairwise(words) if flag == "-m" and isinstance(name, str))
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
        yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def module_files(module: str, folder: Path = ROOT) -> set[Path]:
    """The file of a module of this repository with the packages it lies in; nothing for other modules."""
    first, *rest = module.split(".")
    if first not in ROOMS:
        return {path for beside in (folder, *FOLDERS) if (path := beside / f"{first}.py").is_file()}
    files = {ROOMS[first] / "__init__.py"}
    if first == "echelon" and len(rest) == 1 and rest[0] in public_names():
        return files | module_files(public_names()[rest[0]])
    for depth in range(1, len(rest) + 1):
        at = ROOMS[first].joinpath(*rest[:depth])
        files |= {path for path in (at.with_suffix(".py"), at / "__init__.py") if path.is_file()}
    return files


@cache
def public_names() -> dict[str, str]:
    """Public name of the package → the module that it comes from."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text("utf-8"))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module)
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}

"""Names, sizes and docstrings of the sources: one class name, one meaning; functions that fit on a screen; explained public names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "echelon"
CORE = ("kv", "model", "baselines", "drafters", "ops", "heads")  # and the modules beside these rooms
MOST_LINES, MOST_BRANCHES, MOST_EXCEPTIONS = 45, 15, 5
EXCEPTIONS = {
    "ops/triton/attention.py _attend": "a kernel: Triton compiles one function",
}
FRAMEWORK = {"forward", "backward"}  # methods that PyTorch documents
OF_ANY_TENSOR = "ops/devices.py"  # asks only where a tensor lies

# What is left of the rebuilding, to be emptied. A name that is no longer found here may go at once.
KNOWN_TWICE: set[str] = set()
KNOWN_LONG: set[str] = set()
KNOWN_WITHOUT_SHAPES = {"ops/reference.py: RowCounts.agreeing", "model/patches/experts.py: patch_experts"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
TREES = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text("utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
CORE_TREES = {path: tree for path, tree in TREES.items() if "/" not in path or path.split("/")[0] in CORE}


def complexity(function: Function) -> int:
    """Cyclomatic: one more than the number of branches, conditions of comprehensions and assertions included."""
    branches = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension, ast.Assert)
    nodes = list(ast.walk(function))
    return 1 + sum(isinstance(x, branches) for x in nodes) + sum(len(x.values) - 1 for x in nodes if isinstance(x, ast.BoolOp))


def documented_by_a_base() -> set[str]:
    """Names of methods that a protocol, or a class with subclasses, explains: implementations need not."""
    classes = [c for tree in TREES.values() for c in ast.walk(tree) if isinstance(c, ast.ClassDef)]
    bases = {ast.unparse(b).split("[")[0].split(".")[-1] for c in classes for b in c.bases}
    shared = [c for c in classes if c.name in bases or any("Protocol" in ast.unparse(b) for b in c.bases)]
    return {f.name for c in shared for f in c.body if isinstance(f, Function) and ast.get_docstring(f)}


def public(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for x in node.body:
        if isinstance(x, Function | ast.ClassDef) and not x.name.startswith("_"):
            yield f"{prefix}{x.name}", x
            if isinstance(x, ast.ClassDef):
                yield from public(x, f"{prefix}{x.name}.")


def takes_tensors(function: Function) -> bool:
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    annotations = [a.annotation for a in arguments if a.annotation] + [r for r in [function.returns] if r]
    return any(isinstance(x, ast.Name) and x.id == "Tensor" for a in annotations for x in ast.walk(a))


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in TREES.items():
        for x in ast.walk(tree):
            if isinstance(x, ast.ClassDef):
                places[x.name].append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1 and name not in KNOWN_TWICE} == {}


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in Path(__file__).parents[1].rglob("*.py")]  # two of one name cannot be collected in one run
    assert {name for name in names if names.count(name) > 1} <= {"__init__.py"}


def test_functions_of_the_core_are_short_and_simple() -> None:
    found = {
        f"{path} {x.name}": (x.end_lineno - x.lineno + 1, complexity(x))
        for path, tree in CORE_TREES.items()
        for x in ast.walk(tree)
        if isinstance(x, Function) and x.end_lineno is not None
    }
    large = {name: size for name, size in found.items() if size[0] > MOST_LINES or size[1] > MOST_BRANCHES}
    assert {name: size for name, size in large.items() if name not in EXCEPTIONS.keys() | KNOWN_LONG} == {}
    assert len(EXCEPTIONS) <= MOST_EXCEPTIONS


def test_public_names_of_the_core_are_explained() -> None:
    explained = documented_by_a_base() | FRAMEWORK
    names = [(f"{path}: {name}", x) for path, tree in CORE_TREES.items() for name, x in public(tree, "")]
    bare = [name for name, x in names if not ast.get_docstring(x) and (isinstance(x, ast.ClassDef) or x.name not in explained)]
    assert bare == []


def test_functions_over_tensors_say_their_shapes() -> None:
    """In brackets, or by the word: `of any shape`."""
    inherited = documented_by_a_base() | FRAMEWORK
    names = [(f"{path}: {name}", x) for path, tree in CORE_TREES.items() if path != OF_ANY_TENSOR for name, x in public(tree, "")]
    functions = [(n, x) for n, x in names if isinstance(x, Function) and x.name not in inherited and takes_tensors(x)]
    silent = [name for name, x in functions if not {"[", "shape"} & set(re.findall(r"\[|shape", ast.get_docstring(x) or ""))]
    assert [name for name in silent if name not in KNOWN_WITHOUT_SHAPES] == []

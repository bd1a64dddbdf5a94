"""Who may import whom (docs/architecture.md)."""

from __future__ import annotations

import ast
from pathlib import Path

from echelon import HOMES

SOURCE = Path(__file__).parents[2] / "src" / "echelon"
LEVELS = [
    {"errors", "release"},
    {"inputs"},
    {"sizes", "pyplot"},
    {"settings", "token_counts"},
    {"sampling"},
    {"draft"},
    {"trees"},
    {"methods"},
    {"config", "speculative_config", "checkpoint"},
    {"text", "chat", "text_process", "text_worker", "memory.pool", "kv.blocks", "kv.tables"},
    {"sequence"},
    {"outputs", "stats", "metrics"},
    {"batch"},
    {"ops"},
    {"heads"},
    {"kv.cache"},
    {"model"},
    {"acceptance"},
    {"drafters"},
    {"step_costs", "prefix_cache"},
    {"row_blocks"},
    {"scheduler"},
    {"adaptive"},
    {"memory"},
    {"estimate"},
    {"engine", "storage"},
    {"baselines", "parallel"},
    {"engine_costs"},
    {"build", "input_processor"},
    {"llm"},
    {"requests"},
    {"aio"},
    {"server"},
    {"ray"},
    {"bench"},
    {"demo"},
    {"cli", "hf"},
    {"__main__"},
]
RANK = {room: rank for rank, rooms in enumerate(LEVELS) for room in rooms}
APART = {"drafters", "heads"}  # siblings in these rooms do not import each other
ALLOWED_SIBLINGS = {"base", "frontier", "parts"}
GATHERS = {"heads.layouts", "heads.checkpoints"}  # they know all of their siblings
TRAINING_READS = {"errors", "inputs", "pyplot", "settings", "config", "checkpoint", "methods", "heads", "model", "ops"}
BEHIND_TRITON = ("ops.triton", "model.graphs")  # loaded where a CUDA device serves


def room(module: str) -> str:
    parts = module.removeprefix("echelon").lstrip(".").split(".")
    two = ".".join(parts[:2])
    return two if two in RANK else parts[0]


def imports(path: Path) -> set[str]:
    """Names with their modules; those of the package itself with the modules that they come from."""
    tree = ast.parse(path.read_text("utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "echelon":
            homes = {name: f"echelon.{module}" for name, module in HOMES.items()} if node.module == "echelon" else {}
            found |= {f"{homes.get(alias.name, node.module)}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "echelon"}
    return found


def imported_names(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return found | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def modules() -> dict[str, Path]:
    paths = {p: p.relative_to(SOURCE).with_suffix("").parts for p in SOURCE.rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): p for p, parts in paths.items() if parts != ("__init__",)}


def test_data_flows_one_way() -> None:
    for module, path in modules().items():
        if module in ("kv", "baselines") or module.startswith("train"):
            continue
        mine = RANK[room(module)]
        for imported in imports(path):
            other = room(imported)
            assert other in RANK or (other == "train" and mine == RANK["cli"]), f"{module} imports {imported}, which has no place"
            if other in RANK and other != room(module):
                assert RANK[other] <= mine, f"{module} imports {imported}"


def test_siblings_stay_apart() -> None:
    for module, path in modules().items():
        folder, _, name = module.partition(".")
        if folder in APART and module not in GATHERS:
            for imported in imports(path):
                parts = imported.split(".")
                if parts[1] == folder:
                    assert parts[2] in ALLOWED_SIBLINGS | {name}, f"{module} imports {imported}"


def test_training_never_imports_the_engine() -> None:
    for module, path in modules().items():
        if module.startswith("train"):
            assert {i.split(".")[1] for i in imports(path)} <= {"train", *TRAINING_READS}, module


def test_only_the_builder_knows_the_baselines() -> None:
    for module, path in modules().items():
        if not module.startswith("baselines"):
            known = {i for i in imports(path) if i.startswith("echelon.baselines")}
            assert known <= ({"echelon.baselines.strategies.STRATEGIES"} if module == "build" else set()), module


def test_the_scheduler_sees_no_tensors() -> None:
    books = ("kv.blocks", "kv.tables", "baselines.lines", "row_blocks")
    for module in ("scheduler", "step_costs", "baselines.selection", "sequence", "sampling", *books):
        assert "torch" not in modules()[module].read_text("utf-8").replace("tokenizers", ""), module


def test_triton_is_imported_in_its_room_alone() -> None:
    for module, path in modules().items():
        roots = {name.split(".")[0] for name in imported_names(path)}
        assert "triton" not in roots or module.startswith("ops.triton"), module


def test_what_needs_triton_is_imported_at_the_top_of_nothing_else() -> None:
    for module, path in modules().items():
        if not module.startswith(BEHIND_TRITON):
            top = [n for n in ast.parse(path.read_text("utf-8")).body if isinstance(n, ast.Import | ast.ImportFrom)]
            assert not any(name in ast.unparse(node) for node in top for name in BEHIND_TRITON), module


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Circles of modules, imports for type checking alone and inside functions included, also within a room."""
    known = modules()
    edges = {m: {next((n for n in (i.removeprefix("echelon."), i.removeprefix("echelon.").rpartition(".")[0]) if n in known), m)
                 for i in imports(path)} - {m} for m, path in known.items()}  # fmt: skip
    reached = {m: set(targets) for m, targets in edges.items()}
    while grown := {m: more for m, targets in reached.items() if (more := set().union(*(reached[t] for t in targets)) - targets)}:
        for m, more in grown.items():
            reached[m] |= more
    circles = {frozenset(n for n in targets if m in reached[n]) for m, targets in reached.items() if m in targets}
    assert [sorted(c) for c in circles] == []

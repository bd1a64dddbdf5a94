"""Draw docs/rooms.png, the picture of the package's rooms: `python -m tools.rooms [FILE]`.

A room is a folder or a module of `src/echelon`; an arrow leads from it to a room that it imports. A room stands above all that it imports,
and an arrow that follows from others is left out.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from echelon.pyplot import pyplot_or_refusal
from tools import ROOT
from tools.dependencies import PACKAGE, public_names

Graph = dict[str, set[str]]  # room → rooms that it imports


def rooms() -> Graph:
    """Every room of the package, and the rooms that it imports."""
    graph, public = dict[str, set[str]](), public_names()
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        found = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "echelon":
                found |= {public.get(alias.name, f"echelon.{alias.name}") for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("echelon."):
                found.add(str(node.module))
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names if alias.name.startswith("echelon.")}
        graph.setdefault(room, set()).update({module.split(".")[1] for module in found} - {room})
    return {name: imported for name, imported in graph.items() if name not in ("__init__", "__main__")}


def reduced(graph: Graph) -> Graph:
    """Without the arrows that follow from others."""
    reached = {name: set(imported) for name, imported in graph.items()}
    for between in graph:
        for name in graph:
            if between in reached[name]:
                reached[name] |= reached[between]
    return {name: {other for other in imported if not any(other in reached[by] for by in imported)} for name, imported in graph.items()}


def levels_of(graph: Graph) -> list[list[str]]:
    """Rooms from bottom to top, each above all that it imports and, within its level, near to them.

    Raises
    ------
    ValueError  rooms import each other in a circle
    """
    level: dict[str, int] = {}
    while len(level) < len(graph):
        ready = [name for name, imported in graph.items() if name not in level and imported <= level.keys()]
        if not ready:
            raise ValueError(f"rooms import each other in a circle: {', '.join(sorted(graph.keys() - level.keys()))}")
        level |= {name: max((level[other] + 1 for other in graph[name]), default=0) for name in ready}
    place: dict[str, float] = {}
    levels = []
    for number in range(max(level.values()) + 1):
        row = [name for name in sorted(graph) if level[name] == number]
        row.sort(key=lambda name: (sum(place[other] for other in graph[name]) / max(1, len(graph[name])), name))
        place |= {name: (at + 0.5) / len(row) for at, name in enumerate(row)}
        levels.append(row)
    return levels


def draw(path: Path, graph: Graph) -> None:
    pyplot, arrows = pyplot_or_refusal(), reduced(graph)
    levels = levels_of(graph)
    figure, axis = pyplot.subplots(figsize=(1.9 * max(map(len, levels)), 0.7 * len(levels)), constrained_layout=True)
    at = {name: ((i + 0.5) / len(row), float(height)) for height, row in enumerate(levels) for i, name in enumerate(row)}
    for name in sorted(arrows):
        for other in sorted(arrows[name]):
            (x, y), (other_x, other_y) = at[name], at[other]
            bend = 0.3 if x == other_x and y - other_y > 1 else 0.0  # round the rooms between
            arrow = {"arrowstyle": "->", "connectionstyle": f"arc3,rad={bend}", "shrinkA": 0, "shrinkB": 0}
            axis.annotate("", (other_x, other_y + 0.2), (x, y - 0.2), arrowprops=arrow | {"color": "#8aa0b8", "linewidth": 0.8})
    box = {"boxstyle": "round,pad=0.4", "facecolor": "#eef3f8", "edgecolor": "#4575b4"}
    for name, (x, y) in at.items():
        axis.text(x, y, name, ha="center", va="center", fontsize=9, bbox=box)
    axis.set(xlim=(0, 1), ylim=(-0.5, len(levels) - 0.5))
    axis.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main(arguments: list[str]) -> None:
    path = Path(arguments[0]) if arguments else ROOT / "docs" / "rooms.png"
    draw(path, rooms())
    print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])

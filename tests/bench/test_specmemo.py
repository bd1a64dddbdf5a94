"""SpecMemo's experiment, small."""

from __future__ import annotations

from pathlib import Path

import pytest
import toys

from benchmarks import specmemo
from benchmarks.cells import Records
from benchmarks.workloads import SMALL
from echelon import ConfigError
from echelon.trees import StaticTree


@pytest.mark.parametrize(("heads", "nodes"), specmemo.shapes_of_the_grid("medusa"))
def test_trees_keep_their_first_level_and_are_connected(heads: int, nodes: int) -> None:
    paths = specmemo.paths_of(heads, nodes)
    assert len(paths) == len(set(paths)) == nodes - 1 and max(map(len, paths)) <= heads
    assert sum(len(path) == 1 for path in paths) == specmemo.WIDTH
    StaticTree(paths)


@pytest.mark.parametrize("method", list(specmemo.STOCK) if toys.PROVE else ["eagle"])
def test_a_shape_is_chosen_from_the_grid_and_measured_beside_stock(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specmemo, "shapes_of_the_grid", lambda _: [(2, 16), (4, 64)])
    study, records = specmemo.Study(SMALL, method, prompt=24, new=10, rounds=1), Records(tmp_path)
    with pytest.raises(ConfigError, match="grid"):
        specmemo.planned(study, records)
    records.write(f"grid_{method}", specmemo.grid(study))
    found = specmemo.planned(study, records)
    assert found["shape"] == (2, 16) and found["tree"][1] <= specmemo.MOST_TREE * found["tree"][0]
    said = specmemo.as_markdown(records.read() | {"planned": found})
    specmemo.draw(records.read() | {"planned": found}, tmp_path / "plots" / "shapes.png")
    assert (tmp_path / "plots" / "shapes.png").stat().st_size > 5000
    assert "throughput kept" in said and "| 4 | 64 |" in said

"""The ablation on a toy: every variant is trained and measured, a cut-off run goes on, and the tables say what the cells hold."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import toys
from test_train_heads import counting, tiny_target

from benchmarks import ablation
from benchmarks.cells import Records
from echelon.bench.throughput import environment


def study(folder: Path, **changes: Any) -> Any:
    asked = argparse.Namespace(**({"steps": 3, "minutes": 0.001, "max_tokens": 9, "runs": folder} | changes))
    target = tiny_target()
    return ablation.Study(asked, target, toys.adopted(target), counting(), toys.prompts((7, 12)))


def test_every_variant_is_trained_and_measured(tmp_path: Path) -> None:
    asked, settings = study(tmp_path), {"steps": 3}
    for name in ablation.VARIANTS:
        for seed in range(2 if name.startswith("clover") else 1):
            cell = asked.run(name, seed)
            again = asked.run(name, seed)  # trained already: measured again
            assert (again["loss"], again["top5"]) == (cell["loss"], cell["top5"])
            assert len(cell["losses"]) == cell["plan"]["steps"] == 3
            assert all(t["tokens_per_step"] >= 1 and t["drafted_a_step"] > 0 for t in cell["trees"].values())
            file = tmp_path / "cells" / f"{name}-{seed}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps({"environment": environment(), "settings": settings} | cell))
    sizes = {n: json.loads((tmp_path / "cells" / f"{n}-0.json").read_text())["parameters"] for n in ablation.VARIANTS}
    ladder = [sizes[f"clover-{n}"] for n in ("medusa", "augmenting", "regressive", "full")]
    assert ladder[0] < ladder[1] < ladder[2] and ladder[3] > ladder[1]
    other = {"environment": environment(), "settings": {"steps": 4}, "variant": "eagle", "seed": 7}
    (tmp_path / "cells" / "eagle-7.json").write_text(json.dumps(other))
    (tmp_path / "cells" / "eagle-8.json").write_text(json.dumps({name: other[name] for name in ("environment", "variant", "seed")}))
    ablation.write_document(Records(tmp_path / "cells"), tmp_path, settings)
    text = (tmp_path / "ablation.md").read_text()
    for words in (
        f"{', '.join(sorted(ablation.VARIANTS))}: ",
        "+ Attention Decoder (Clover)",
        "| + Regressive Connection | ",
        "4.8, 9.0, 11.5",
        "| EAGLE | ",
        "training-time test (7 steps, 2 in the first half)",
    ):
        assert words in text, words
    for kept in (set(ablation.VARIANTS), {"eagle"}, set[str]()):  # another machine has cells of some, or of none
        for path in (tmp_path / "cells").glob("*.json"):
            if path.stem.rpartition("-")[0] not in kept:
                path.unlink()
        ablation.write_document(Records(tmp_path / "cells"), tmp_path, settings)
        assert (tmp_path / "ablation.md").read_text() == text
    fewer = json.loads((tmp_path / "ablation.json").read_text())["cells"]["clover-full"][1]
    (tmp_path / "cells" / "clover-full-1.json").write_text(json.dumps(fewer))
    ablation.write_document(Records(tmp_path / "cells"), tmp_path, settings)
    assert (tmp_path / "ablation.md").read_text() == text, "one seed does not take the place of two"
    cells = json.loads((tmp_path / "ablation.json").read_text())["cells"]
    assert {n: len(c) for n, c in cells.items()} == {n: 2 if n.startswith("clover") else 1 for n in ablation.VARIANTS}


def test_a_family_gets_equally_many_batches(tmp_path: Path) -> None:
    asked = study(tmp_path, steps=0, minutes=0.05)
    steps = asked.steps_of("eagle")
    assert steps >= 1
    assert steps == study(tmp_path, steps=0, minutes=0.05).steps_of("eagle"), "counted once for a folder"
    assert {v.plan(5, 0).depth for n, v in ablation.VARIANTS.items() if n == "eagle3-one-step"} == {1}
    assert ablation.VARIANTS["eagle3-one-step"].plan(5, 0).recipe.depth == 1
    assert ablation.VARIANTS["eagle3-training-time-test"].plan(5, 0).recipe.depth == 7


def test_acceptance_by_depth_is_of_those_that_got_there() -> None:
    assert ablation._conditional([10, 10, 8], [5, 4, 1]) == [0.5, 0.8, 0.25]
    assert ablation._conditional([], []) == []

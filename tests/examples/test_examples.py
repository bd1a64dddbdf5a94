"""Every example runs, as its reader would run it, and says what it promises."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCS = EXAMPLES.parent / "docs"
LONGEST = 60  # lines
SHORT = ["--max-tokens", "8"]
CASES: dict[str, tuple[list[str], str]] = {  # by file: its arguments, and what it must print
    "offline_batch.py": (SHORT, "% of the drafted ones accepted"),
    "transformers_drop_in.py": (SHORT, "the same as without the draft model: True"),
    "openai_client.py": (SHORT, "'num_accepted_draft_tokens'"),
    "asyncio_service.py": (SHORT, "--- broken off after "),
    "train_a_head.py": (
        ["--text", str(DOCS), "--output", "{folder}/head", "--steps", "2", "--continuations", "4"],
        "the same text",
    ),
    "ray_replicas.py": (SHORT, "--- row 3, seed "),
    "notebook.ipynb": ([], "EAGLE head   tokens a step: "),
}


def code_of(notebook: Path) -> str:
    """The code of a notebook's cells, in order."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def command_of(path: Path, arguments: list[str]) -> list[str]:
    run = ["-c", code_of(path)] if path.suffix == ".ipynb" else [str(path)]
    return [sys.executable, *run, *arguments]


def test_every_example_is_run_and_short() -> None:
    files = {path.name: path for path in EXAMPLES.iterdir() if path.is_file()}
    assert files.keys() == CASES.keys()
    assert {name for name, path in files.items() if path.suffix == ".py" and len(path.read_text("utf-8").splitlines()) > LONGEST} == set()


@pytest.mark.parametrize("name", CASES)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    if name.startswith("ray") and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed; run: make replicas")
    arguments, said = CASES[name]
    command = command_of(EXAMPLES / name, [word.format(folder=tmp_path) for word in arguments])
    done = subprocess.run(command, cwd=EXAMPLES.parent, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout, done.stdout


def test_a_notebook_is_kept_without_what_it_printed() -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text("utf-8"))["cells"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")

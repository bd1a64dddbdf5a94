"""Every full-size proof and benchmark, cell by cell: `python scripts/prove.py [--status] [PREFIX ...]`, all or those whose names begin so.

A cell is a command that must succeed. What came out, with commit and machine, goes to docs/evidence/prove.json as soon as a cell is done;
a cell that has passed with the files it depends on as they are (`dependencies.py`) is not run again, so that a run which was cut off
goes on where it was. `--status` runs nothing and says which cells are proven, stale, failed or missing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import astuple, dataclass, field
from pathlib import Path

import dependencies
from mutants import MUTANTS, Mutant

from echelon.bench.throughput import environment

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs" / "evidence" / "prove.json"


@dataclass(frozen=True)
class Cell:
    """A proof: its name, its command, whether it asks for the full size, and the mutant that it kills, if any."""

    name: str
    command: list[str] = field(hash=False)
    full_size: bool = True
    mutant: Mutant | None = None


def pytest(name: str, *arguments: str) -> Cell:
    return Cell(name, ["python", "-m", "pytest", *arguments])


def bench(name: str, *arguments: str, of: str = "") -> Cell:
    """A benchmark, of one model among several perhaps, whose figures go to a file of their own beside the other evidence."""
    file = f"{name}-{of}" if of else name
    command = ["python", "-m", "echelon", "bench", name, *arguments, "--output", f"docs/evidence/{file}.json"]
    return Cell(f"bench {file}", command, full_size=False)


FUZZED = {
    "completions": "v1/completions",
    "chat": "v1/chat",
    "tokenize": "/tokenize",
    "detokenize": "detokenize",
    "what is read": "readable or tried",
}

CELLS = [
    pytest("lossless", "tests/promises/test_lossless.py"),
    pytest(
        "heads and trees",
        "tests/promises/test_heads_lossless.py",
        "tests/drafters/test_trees.py",
        "tests/promises/test_draft_trees.py",
        "tests/model/test_hidden_states.py",
    ),
    pytest("decoders", "tests/promises/test_decoders.py"),
    pytest("invariance", "tests/promises/test_invariance.py"),
    pytest("parameters", "tests/promises/test_parameters.py"),
    pytest("transformers", *(f"tests/hf/test_hf{part}.py" for part in ("", "_arguments", "_model", "_outputs"))),
    *(pytest(f"census: {dtype}", "tests/promises/test_census.py", "-k", dtype) for dtype in ("float32", "bfloat16")),
    pytest("recognised modules and rotary embeddings", *(f"tests/model/test_{part}.py" for part in ("recognised", "rope", "vectors"))),
    pytest("checkpoints", "tests/model/test_loading.py", "tests/checkpoint/test_checkpoints.py"),
    pytest("texts", "tests/core/test_text.py", "tests/promises/test_one_text.py", "tests/core/test_chat.py"),
    pytest("inputs", "tests/core/test_inputs.py", "tests/cli/test_mistakes.py", "tests/cli/test_generate_files.py"),
    pytest("training runs", "tests/train/test_train_files.py", "tests/train/test_train_heads.py"),
    pytest("strategies", "tests/baselines/test_strategies.py"),
    pytest("echelon verify", "tests/cli/test_verify_command.py"),
    pytest("end to end", "tests/promises/test_end_to_end.py"),
    pytest("server", *(f"tests/server/test_server{part}.py" for part in ("", "_walls", "_secrets", "_bodies", "_endings", "_readers"))),
    pytest("server exceptions", "tests/server/test_server_faults.py", "-k", "exception or dies"),
    pytest("server disconnects", "tests/server/test_server_faults.py", "-k", "leave"),
    pytest("server overload", "tests/server/test_server_faults.py", "-k", "overload"),
    pytest("drafter faults", "tests/promises/test_drafter_faults.py", "tests/promises/test_drafter_wall.py"),
    pytest("server drains", "tests/server/test_server_faults.py", "-k", "shutdown or signal"),
    *(pytest(f"server fuzz: {name}", "tests/server/test_server_fuzz.py", "-k", chosen) for name, chosen in FUZZED.items()),
    Cell("soak", ["python", "scripts/soak.py"], full_size=False),
    *(Cell(name, ["python", "scripts/third_party.py", name], full_size=False) for name in ("lm-eval", "guidellm")),
    Cell("heads learn in 20 minutes", ["python", "scripts/plateau.py"], full_size=False),
    Cell("vLLM drafts the same", ["python", "scripts/eagle3_in_vllm.py"], full_size=False),
    pytest("linear layers", "tests/ops/test_linear.py"),
    pytest("norms, rotary embeddings, activations", "tests/model/test_elementwise.py"),
    pytest("drawing", "tests/core/test_sampling.py"),
    pytest("attention", "tests/ops/test_attention.py"),
    pytest("kill and resume", "tests/promises/test_resume.py"),
    pytest("goodness of fit", "tests/promises/test_fit.py"),
    pytest("state machine", "tests/core/test_scheduler.py"),
    pytest("steps ahead", "tests/model/test_ahead.py", "tests/model/test_ahead_books.py"),
    Cell("sanitisers", ["make", "sanitize", "CASES=100000"], full_size=False),
    *(Cell(f"mutant: {m.name}", ["python", "scripts/mutants.py", m.name], full_size=False, mutant=m) for m in MUTANTS),
    bench("pair"),
    bench("overhead"),
    bench("serving"),
    bench("kernels"),
    bench("step", "llama-1.1b"),
    bench("step", "opt-1.3b", of="opt"),
    bench("throughput", "--parameters", "500000000", "--strategies", "unpadded", "--no-transformers"),
]


def sources_of(cell: Cell) -> str:
    """The hash of everything that this proof depends on."""
    if cell.mutant is None:
        return dependencies.digest(dependencies.of_command(cell.command), *cell.command)
    files = dependencies.of_command(["pytest", cell.mutant.killer]) | {ROOT / "src/echelon" / cell.mutant.file}
    return dependencies.digest(frozenset(files), *astuple(cell.mutant))


def state_of(cell: Cell, records: dict[str, dict[str, object]]) -> str:
    """ "proven" by the sources as they are; else "stale", "failed" or "missing". On which machine is recorded and makes no difference."""
    if cell.name not in records:
        return "missing"
    record = records[cell.name]
    return "failed" if not record["passed"] else "proven" if record["sources"] == sources_of(cell) else "stale"


def run(cell: Cell) -> dict[str, object]:
    """The cell's record; its output passes on to the terminal."""
    start = time.perf_counter()
    environ = os.environ | ({"PROVE": "1"} if cell.full_size else {})
    command = [sys.executable if word == "python" else word for word in cell.command]
    lines = []
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    return {
        "command": ("PROVE=1 " if cell.full_size else "") + " ".join(cell.command),
        "passed": process.returncode == 0,
        "seconds": round(time.perf_counter() - start, 1),
        "result": next((line for line in reversed(lines) if line), ""),
        "sources": sources_of(cell),
        **environment(),
    }


def main(arguments: list[str]) -> int:
    records = recorded()
    prefixes = tuple(a for a in arguments if a != "--status")
    chosen = [cell for cell in CELLS if not prefixes or cell.name.startswith(prefixes)]
    if not chosen:
        print("no proof of such a name; there are:", *(cell.name for cell in CELLS), sep="\n  ")
        return 2
    if "--status" not in arguments:
        prove(chosen, records)
    return report(chosen, records)


def recorded() -> dict[str, dict[str, object]]:
    """Name of a cell → its record, in the order of the cells."""
    records: dict[str, dict[str, object]] = json.loads(EVIDENCE.read_text("utf-8")) if EVIDENCE.exists() else {}
    return {cell.name: records[cell.name] for cell in CELLS if cell.name in records}


def keep(records: dict[str, dict[str, object]]) -> None:
    """Write all records, whole or not at all."""
    order = [cell.name for cell in CELLS]
    text = json.dumps({name: records[name] for name in sorted(records, key=order.index)}, indent=1, ensure_ascii=False)
    partial = EVIDENCE.with_suffix(".tmp")
    partial.write_text(text + "\n", "utf-8")
    partial.replace(EVIDENCE)


def prove(cells: list[Cell], records: dict[str, dict[str, object]]) -> None:
    """Run what is not proven yet by the sources as they are; each record is kept as soon as it is there."""
    for number, cell in enumerate(cells, 1):
        is_proven = state_of(cell, records) == "proven"
        print(f"[{number}/{len(cells)}] {cell.name}{': proven already' if is_proven else ''}", flush=True)
        if not is_proven:
            records[cell.name] = run(cell)
            keep({**recorded(), cell.name: records[cell.name]})  # another run may have proven other cells meanwhile


def report(cells: list[Cell], records: dict[str, dict[str, object]]) -> int:
    """Print what is proven, and name what is not; 0 where all is."""
    states = {cell.name: state_of(cell, records) for cell in cells}
    print(f"{sum(state == 'proven' for state in states.values())} of {len(cells)} proven by the sources as they are")
    for name, state in states.items():
        if state != "proven":
            record = records.get(name, {})
            print(f"  {state:8}{name}" + (f"  (commit {record['commit']}, {record['cpu']})" if record else ""))
    return 0 if set(states.values()) == {"proven"} else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--status | head` ends without a traceback
    sys.exit(main(sys.argv[1:]))

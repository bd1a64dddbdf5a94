"""Every full-size proof and benchmark, cell by cell: `python scripts/prove.py [PREFIX ...]`, all or those whose names begin so.

A cell is a command that must succeed. What came out, with commit and machine, goes to docs/evidence/prove.json as soon as a cell is done;
a cell that has passed with the same sources on the same machine is not run again, so that a run which was cut off goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from mutants import MUTANTS

from echelon.bench.throughput import environment

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs" / "evidence" / "prove.json"
SOURCES = ("src/echelon", "tests", "scripts")
SUFFIXES = {".py", ".cpp", ".h", ".safetensors"}


@dataclass(frozen=True)
class Cell:
    """A proof: its name, its command, and whether it asks for the full size."""

    name: str
    command: list[str] = field(hash=False)
    full_size: bool = True


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
    pytest("lossless", "tests/test_lossless.py"),
    pytest("heads and trees", "tests/test_heads_lossless.py", "tests/test_trees.py", "tests/test_draft_trees.py", "tests/test_taps.py"),
    pytest("decoders", "tests/test_decoders.py"),
    pytest("invariance", "tests/test_invariance.py"),
    pytest("parameters", "tests/test_parameters.py"),
    pytest("transformers", "tests/test_hf.py"),
    *(pytest(f"census: {dtype}", "tests/test_census.py", "-k", dtype) for dtype in ("float32", "bfloat16")),
    pytest("strategies", "tests/test_strategies.py"),
    pytest("echelon verify", "tests/test_verify_command.py"),
    pytest("end to end", "tests/test_end_to_end.py"),
    pytest("server", "tests/test_server.py", "tests/test_server_walls.py"),
    pytest("server exceptions", "tests/test_server_faults.py", "-k", "exception or dies"),
    pytest("server disconnects", "tests/test_server_faults.py", "-k", "leave"),
    pytest("server overload", "tests/test_server_faults.py", "-k", "overload"),
    pytest("drafter faults", "tests/test_drafter_faults.py"),
    pytest("server drains", "tests/test_server_faults.py", "-k", "shutdown or signal"),
    *(pytest(f"server fuzz: {name}", "tests/test_server_fuzz.py", "-k", chosen) for name, chosen in FUZZED.items()),
    Cell("soak", ["python", "scripts/soak.py"], full_size=False),
    *(Cell(name, ["python", "scripts/third_party.py", name], full_size=False) for name in ("lm-eval", "guidellm")),
    Cell("heads learn in 20 minutes", ["python", "scripts/plateau.py"], full_size=False),
    Cell("vLLM drafts the same", ["python", "scripts/eagle3_in_vllm.py"], full_size=False),
    pytest("linear layers", "tests/test_linear.py"),
    pytest("norms, rotary embeddings, activations", "tests/test_fused.py"),
    pytest("drawing", "tests/test_sampling.py"),
    pytest("attention", "tests/test_attention.py"),
    pytest("kill and resume", "tests/test_resume.py"),
    pytest("goodness of fit", "tests/test_fit.py"),
    pytest("state machine", "tests/test_scheduler.py"),
    pytest("steps ahead", "tests/test_ahead.py", "tests/test_ahead_books.py"),
    Cell("sanitisers", ["make", "sanitize", "CASES=100000"], full_size=False),
    *(Cell(f"mutant: {m.name}", ["python", "scripts/mutants.py", m.name], full_size=False) for m in MUTANTS),
    bench("pair"),
    bench("overhead"),
    bench("serving"),
    bench("kernels"),
    bench("step", "llama-1.1b"),
    bench("step", "opt-1.3b", of="opt"),
    bench("throughput", "--parameters", "500000000", "--strategies", "unpadded", "--no-transformers"),
]


def sources_hash() -> str:
    """Of everything that a proof may depend on."""
    files = sorted(p for folder in SOURCES for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES)
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


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
        "sources": sources_hash(),
        **environment(),
    }


def main(prefixes: list[str]) -> int:
    records: dict[str, dict[str, object]] = json.loads(EVIDENCE.read_text("utf-8")) if EVIDENCE.exists() else {}
    records = {cell.name: records[cell.name] for cell in CELLS if cell.name in records}
    known = {"sources": sources_hash(), "cpu": environment()["cpu"], "passed": True}
    chosen = [cell for cell in CELLS if not prefixes or cell.name.startswith(tuple(prefixes))]
    for place, cell in enumerate(chosen, 1):
        if known.items() <= records.get(cell.name, {}).items():
            print(f"[{place}/{len(chosen)}] {cell.name}: proven already", flush=True)
            continue
        print(f"[{place}/{len(chosen)}] {cell.name}", flush=True)
        records[cell.name] = run(cell)
        EVIDENCE.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n", "utf-8")
    failed = [cell.name for cell in chosen if not records[cell.name]["passed"]]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} proven", *(f"  FAILED {name}" for name in failed), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

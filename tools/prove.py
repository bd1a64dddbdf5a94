"""Every full-size proof and benchmark, cell by cell: `python -m tools.prove [--status] [PREFIX ...]`, all or those whose names begin so.

A proof is a command that must succeed. What came out, with commit and machine, goes to docs/evidence/prove.json as soon as it is done. What
has passed with the files that it depends on as they are (`dependencies`) is not run again. `--status` runs nothing and says which proofs
are proven, stale, failed or missing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import astuple, dataclass, field
from functools import partial

from benchmarks.cells import Cell, Record, Records, run_cells
from echelon.bench.throughput import environment
from tools import ROOT, dependencies
from tools.mutants import MUTANTS, Mutant

EVIDENCE = ROOT / "docs" / "evidence" / "prove.json"


@dataclass(frozen=True)
class Proof:
    """A command that must succeed: its name, whether it asks for the full size, and the mutant that it kills, if any."""

    name: str
    command: list[str] = field(hash=False)
    full_size: bool = True
    mutant: Mutant | None = None


def pytest(name: str, *arguments: str) -> Proof:
    return Proof(name, ["python", "-m", "pytest", *arguments])


def bench(file: str, *words: str) -> Proof:
    """A benchmark, run by these words after `-m`, whose figures go to a file of their own beside the other evidence."""
    return Proof(f"bench {file}", ["python", "-m", *words, "--output", f"docs/evidence/{file}.json"], full_size=False)


FUZZED = {
    "completions": "v1/completions",
    "chat": "v1/chat",
    "tokenize": "/tokenize",
    "detokenize": "detokenize",
    "what is read": "readable or tried",
}

SPLIT_MODELS = ("llama", "qwen3", "opt", "mixtral")
RANK_FAULTS = {
    **{f"{split} {fault}": f"that_fails and {split} and {fault}" for split in ("tensor", "pipeline") for fault in ("ends", "hangs")},
    "at the start": "at_the_start or no_memory",
    "late, and told something else": "late",
    "the rest": "not that_fails and not at_the_start and not no_memory and not late",
}

PROOFS = [
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
    pytest(
        "integers", "tests/promises/test_quantised.py", *(f"tests/model/test_{part}.py" for part in ("published", "publishing", "rounding"))
    ),
    pytest("texts", "tests/core/test_text.py", "tests/promises/test_one_text.py", "tests/core/test_chat.py"),
    pytest("inputs", "tests/core/test_inputs.py", "tests/cli/test_mistakes.py", "tests/cli/test_generate_files.py"),
    pytest("training runs", "tests/train/test_train_files.py", "tests/train/test_train_heads.py"),
    *(pytest(f"several ranks: {name}", "tests/parallel/test_ranks.py", "-k", name) for name in ("tensor_parallel", "pipeline_parallel")),
    pytest("several ranks: stages", *(f"tests/parallel/test_{part}.py" for part in ("stages", "eight_stages", "handover"))),
    pytest("several ranks that others have started", *(f"tests/parallel/test_{part}.py" for part in ("meeting", "joined_ranks"))),
    *(pytest(f"a thousand rows in ranks: {name}", "tests/parallel/test_rank_rows.py", "-k", name) for name in SPLIT_MODELS),
    *(pytest(f"fifty ranks: {name}", "tests/parallel/test_rank_faults.py", "-k", chosen) for name, chosen in RANK_FAULTS.items()),
    pytest("a server's ranks that fail", "tests/server/test_server_ranks.py"),
    pytest("replicas on Ray", *(f"tests/replicas/test_{part}.py" for part in ("answers", "parts", "on_ray"))),
    pytest("strategies", "tests/baselines/test_strategies.py", "tests/baselines/test_padded_blocks.py"),
    pytest("echelon verify", "tests/cli/test_verify_command.py"),
    pytest("end to end", "tests/promises/test_end_to_end.py"),
    pytest("server", *(f"tests/server/test_server{part}.py" for part in ("", "_walls", "_secrets", "_bodies", "_endings", "_readers"))),
    pytest("server exceptions", "tests/server/test_server_faults.py", "-k", "exception or dies"),
    pytest("server disconnects", "tests/server/test_server_faults.py", "-k", "leave"),
    pytest("server overload", "tests/server/test_server_faults.py", "-k", "overload"),
    pytest("drafter faults", "tests/promises/test_drafter_faults.py", "tests/promises/test_drafter_wall.py"),
    pytest("server drains", "tests/server/test_server_faults.py", "-k", "shutdown or signal"),
    *(pytest(f"server fuzz: {name}", "tests/server/test_server_fuzz.py", "-k", chosen) for name, chosen in FUZZED.items()),
    Proof("install", ["python", "-m", "tools.install_routes"], full_size=False),
    Proof("soak", ["python", "-m", "tools.soak"], full_size=False),
    *(Proof(name, ["python", "-m", "tools.third_party", name], full_size=False) for name in ("lm-eval", "guidellm")),
    Proof("heads learn in 20 minutes", ["python", "-m", "benchmarks.plateau", "medusa", "clover", "clover2", "eagle3"], full_size=False),
    Proof("drafters are ranked alike", ["python", "-m", "benchmarks.ranking"], full_size=False),
    Proof("vLLM drafts the same", ["python", "-m", "benchmarks.eagle3_in_vllm"], full_size=False),
    pytest("linear layers", "tests/ops/test_linear.py"),
    pytest("linear layers of integers", "tests/ops/test_integers.py", "tests/ops/test_rounded_keys.py"),
    pytest("norms, rotary embeddings, activations", "tests/model/test_elementwise.py"),
    pytest("drawing", "tests/core/test_sampling.py"),
    pytest("attention", "tests/ops/test_attention.py"),
    pytest("kill and resume", "tests/promises/test_resume.py"),
    pytest("goodness of fit", "tests/promises/test_fit.py"),
    pytest("state machine", "tests/core/test_scheduler.py"),
    pytest("prefix cache", "tests/core/test_prefix_cache.py", "tests/promises/test_prefix_hits.py"),
    pytest(
        "memory", *(f"tests/memory/test_{part}.py" for part in ("footprint", "ladder", "peak", "device_plan", "hard_limits", "step_speeds"))
    ),
    pytest("plans on paper", *(f"tests/estimate/test_{part}.py" for part in ("layout", "estimate")), "tests/cli/test_plan_on_paper.py"),
    Proof("several devices on paper", ["python", "-m", "benchmarks.on_paper"], full_size=False),
    Proof("peaks of memory", ["python", "-m", "benchmarks.memory"], full_size=False),
    Proof("SpecMemo's experiments", ["python", "-m", "benchmarks.specmemo"], full_size=False),
    pytest("steps ahead", "tests/model/test_ahead.py", "tests/model/test_ahead_books.py"),
    Proof("sanitisers", ["make", "-j2", "sanitize", "CASES=12500"], full_size=False),
    Proof("mutants of the kernels", ["python", "-m", "tools.kernel_mutants"], full_size=False),
    *(Proof(f"mutant: {m.name}", ["python", "-m", "tools.mutants", m.name], full_size=False, mutant=m) for m in MUTANTS),
    bench("pair", "benchmarks.pair"),
    bench("overhead", "echelon", "bench", "overhead"),
    bench("serving", "benchmarks.serving"),
    bench("kernels", "echelon", "bench", "kernels"),
    bench("step", "echelon", "bench", "step", "llama-1.1b"),
    bench("step-opt", "echelon", "bench", "step", "opt-1.3b"),
    bench("throughput", "echelon", "bench", "throughput", "--parameters", "500000000", "--strategies", "unpadded", "--no-transformers"),
]


def sources_of(proof: Proof) -> str:
    """The hash of everything that this proof depends on."""
    if proof.mutant is None:
        return dependencies.digest(dependencies.of_command(proof.command), *proof.command)
    files = dependencies.of_command(["pytest", proof.mutant.killer]) | {ROOT / "src/echelon" / proof.mutant.file}
    return dependencies.digest(frozenset(files), *astuple(proof.mutant))


def state_of(proof: Proof, records: dict[str, Record]) -> str:
    """ "proven" by the sources as they are; else "stale", "failed" or "missing". On which machine is recorded and makes no difference."""
    if proof.name not in records:
        return "missing"
    record = records[proof.name]
    return "failed" if not record.get("passed") else "proven" if record["sources"] == sources_of(proof) else "stale"


def run(proof: Proof) -> Record:
    """The proof's record; its output passes on to the terminal."""
    environ = os.environ | ({"PROVE": "1"} if proof.full_size else {})
    command = [sys.executable if word == "python" else word for word in proof.command]
    lines = []
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    return {
        "command": ("PROVE=1 " if proof.full_size else "") + " ".join(proof.command),
        "passed": process.returncode == 0,
        "result": next((line for line in reversed(lines) if line), ""),
        "sources": sources_of(proof),
        **environment(),
    }


def main(arguments: list[str]) -> int:
    prefixes = tuple(a for a in arguments if a != "--status")
    proofs = {proof.name: proof for proof in PROOFS if not prefixes or proof.name.startswith(prefixes)}
    if not proofs:
        print("no proof of such a name; there are:", *(proof.name for proof in PROOFS), sep="\n  ")
        return 2
    records = Records(EVIDENCE)
    if "--status" not in arguments:
        cells = [Cell(name, partial(run, proof)) for name, proof in proofs.items()]
        run_cells(cells, records, {}, lambda name, record: state_of(proofs[name], {name: record}) == "proven")
    return report(list(proofs.values()), records.read())


def report(proofs: list[Proof], records: dict[str, Record]) -> int:
    """Print what is proven, and name what is not; 0 where all is."""
    states = {proof.name: state_of(proof, records) for proof in proofs}
    print(f"{sum(state == 'proven' for state in states.values())} of {len(proofs)} proven by the sources as they are")
    for name, state in states.items():
        if state != "proven":
            record = records.get(name, {})
            print(f"  {state:8}{name}" + (f"  (commit {record['commit']}, {record['cpu']})" if "commit" in record else ""))
    return 0 if set(states.values()) == {"proven"} else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--status | head` ends without a traceback
    sys.exit(main(sys.argv[1:]))

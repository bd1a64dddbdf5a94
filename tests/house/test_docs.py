"""What the documents say is what the evidence files hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.adaptive import over_plain
from benchmarks.cells import Records
from benchmarks.claims_of_echelon import PEERS, PROCESSORS
from benchmarks.claims_of_padding import LLMA
from benchmarks.document import ratios_beside_kernels, slower_than_others
from benchmarks.verdicts import Evidence, over
from echelon.bench.throughput import from_json
from echelon.cli import VERBS

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "docs" / "evidence"


def evidence(name: str) -> dict[str, object]:
    value: dict[str, object] = json.loads((EVIDENCE / name).read_text("utf-8"))
    return value


@pytest.mark.parametrize("batch", [1, 4, 8, 16])
def test_the_table_of_the_readme_is_the_measured_one(batch: int) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    cells: list[str] = []
    for drafter in ("draft_model", "ngram"):
        value = evidence(f"adaptive/avx512_bf16_{drafter}_t0_b{batch}.json")
        speeds: dict[str, list[float]] = value["speeds"]  # type: ignore[assignment]
        gains = over_plain(speeds)
        fixed = [name for name, own in speeds.items() if name not in ("plain", "auto") and len(own) == len(speeds["auto"])]
        best = max(fixed, key=gains.__getitem__)
        cells += [] if cells else [f"{median(speeds['plain']):.1f}"]
        cells += [f"{gains['auto']:.2f}", f"{gains[best]:.2f} ({best})"]
        assert str(value["environment"]["cpu"]).split(" family")[0] in readme  # type: ignore[index]
    assert f"| {batch} | {' | '.join(cells)} |" in readme


def test_what_the_readme_says_of_strategies_is_measured() -> None:
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    cells = Records(EVIDENCE / "benchmarks").read()
    (fastest,) = slower_than_others(cells)
    (beside_kernels,) = ratios_beside_kernels(cells)
    won, compared = re.findall(r"in (\d+) of (\d+) comparisons", fastest)[0]
    low, high = (float(x) for x in re.findall(r"is (\d+\.\d+) to (\d+\.\d+) at batch 8 and 16", beside_kernels)[0])
    assert won == compared and f"in all of {compared} comparisons" in readme
    assert f"{low:.1f} to {high:.1f} times as fast as `padded`" in readme
    speeds = [Evidence(EVIDENCE).speeds(f"alike/opt_b{batch:02d}") for batch in (8, 16)]
    alone = [median(over(found, (LLMA, "unpadded"), (LLMA, "padded"))) for found in speeds]
    assert f"it is {alone[0]:.2f} and {alone[1]:.2f} times as fast" in readme


def test_what_the_readme_says_of_adapting_is_measured() -> None:
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    costs = [100 * float(evidence(f"adapting/wrong_b{batch}.json")["cost"]) for batch in (1, 8)]  # type: ignore[arg-type]
    assert f"a drafter never right costs {min(costs):.0f} to {max(costs):.0f} %" in readme
    loads: dict[str, dict[str, list[list[float]]]] = evidence("adapting/arriving.json")["latencies"]  # type: ignore[assignment]
    waits = [median(a[0] / p[0] for a, p in zip(own["auto"], own["plain"], strict=True)) for own in loads.values()]
    assert f"are done in {min(waits):.2f} to {max(waits):.2f} of the time (median" in readme


def test_measured_texts_were_those_of_plain_decoding() -> None:
    assert all(r.num_identical == r.num_rows > 0 for r in from_json(evidence("throughput.json")))


def test_overhead_of_a_step_is_within_its_bounds() -> None:
    """1.5 ms at batch 8 and 6 ms at 64, greedy, vocabulary 32,000, with and without drafts, as measured on the named machine."""
    rows = evidence("overhead.json")["results"]
    greedy = [r for r in rows if r["temperature"] == 0.0]  # type: ignore[attr-defined]
    assert {r["batch_size"] for r in greedy} == {8, 64}
    assert all(r["median_ms"] <= {8: 1.5, 64: 6.0}[r["batch_size"]] for r in greedy)


def test_figures_of_the_pair_are_quoted_as_measured() -> None:
    results = evidence("pair.json")["results"]
    quoted = (ROOT / "src/echelon/demo/pair/README.md").read_text("utf-8")
    for key, value in results.items():  # type: ignore[attr-defined]
        assert f"| {key} | {value:.3f} |" in quoted, key


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), target


def test_every_verb_of_the_readme_exists() -> None:
    named = set(re.findall(r"(?<!from )\bechelon ([a-z]+)\b(?= [A-Z]{2}|`)", (ROOT / "README.md").read_text("utf-8")))
    assert {"generate", "doctor", "inflate"} <= named <= set(VERBS)


def test_readme_fits_one_screen() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 80


def test_the_glossary_names_what_there_is() -> None:
    """Paths and classes of its last column stand in the sources."""
    sources = ROOT / "src" / "echelon"
    text = "\n".join(path.read_text("utf-8") for path in sources.rglob("*.py"))
    for line in (ROOT / "docs" / "glossary.md").read_text("utf-8").splitlines()[4:]:
        for name in re.findall(r"`([^`]+)`", line.split("|")[3]):
            is_path = "/" in name or name.endswith(".py")
            assert (sources / name).exists() if is_path else re.search(rf"class {name}\b", text), name


ENGINES = {  # rows of the tables beside other engines, as records name them
    "echelon, plain": "plain",
    "echelon, draft model, 4 tokens": "draft model",
    "echelon, draft model, auto": "draft model auto",
    "echelon, n-grams, auto": "LLMA auto",
    "OpenVINO GenAI, plain": "openvino, plain",
    "OpenVINO GenAI, draft model": "openvino, draft model",
    "OpenVINO GenAI, n-grams": "openvino, LLMA",
    "llama.cpp, plain": "llama_cpp, plain",
    "llama.cpp, draft model": "llama_cpp, draft model",
    "llama.cpp, n-grams": "llama_cpp, LLMA",
    "vLLM, plain": "vllm, plain",
    "vLLM, draft model": "vllm, draft model",
    "vLLM, n-grams": "vllm, LLMA",
}


def decoding_speed(record: str, batch: int, row: str) -> str:
    """Of a run of `echelon bench peers`; empty where an engine was not in it."""
    run: Any = evidence(f"peers/{record}.json")
    results = [r for r in (*run["ours"], *(p["result"] for p in run["peers"])) if (r["method"], r["batch_size"]) == (ENGINES[row], batch)]
    return f"{median(results[0]['decode_tokens_per_second']):.1f}" if results else ""


def test_speeds_in_integers_are_quoted_as_measured() -> None:
    quoted = (ROOT / "docs" / "quantisation.md").read_text("utf-8").splitlines()
    for row in ENGINES:
        for processor in PROCESSORS:
            cells = [decoding_speed(record, batch, row) for (where, _, batch), record in PEERS.items() if where == processor]
            assert f"| {row} | {' | '.join(cells)} |" in quoted, (row, cells)
        on_avx2 = [decoding_speed("int4_avx2", batch, row) for batch in (1, 8)]
        assert on_avx2 == ["", ""] or f"| {row} | {' | '.join(on_avx2)} |" in quoted, row
    theirs, ours = (
        " and ".join(decoding_speed("int4_avx2_llama", batch, row) for batch in (1, 8)) for row in ("llama.cpp, plain", "echelon, plain")
    )
    assert any(f"has {theirs} beside our plain {ours}" in line for line in quoted)
    for family in ("avx2", "avx512", "avx512_bf16", "amx"):
        steps: Any = evidence(f"quantised/speed_{family}.json")["results"]
        pairs = [(a, b) for kind in ("int8", "int4") for a, b in zip(steps["None"], steps[kind], strict=True)]
        ratios = [f"{a['milliseconds'] / b['milliseconds']:.2f}" for a, b in pairs]
        assert f"| {family} | {' | '.join(ratios)} |" in quoted


def test_losses_in_integers_are_quoted_as_measured() -> None:
    quoted = (ROOT / "docs" / "quantisation.md").read_text("utf-8")
    for size in ("embedded", "grown"):
        losses = evidence(f"quantised/quality_{size}.json")["loss"]
        assert all(f"{loss:.4f}" in quoted for loss in losses.values())  # type: ignore[attr-defined]

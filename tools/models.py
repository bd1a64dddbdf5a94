"""Examine every causal model of `transformers`: `python -m tools.models [NAME ...]`, those without a record or those that are named.

Findings go to docs/evidence/census.json one by one, so that a run which was cut off goes on; then docs/models.md is written from them.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings

import census
import transformers

from echelon.errors import Refusal
from tools import ROOT

EVIDENCE = ROOT / "docs" / "evidence" / "census.json"
DOCUMENT = ROOT / "docs" / "models.md"
HEAD = """# Models

What becomes of every class that `transformers` {version} maps causal language models to. A small random model of each is loaded; what is
served has, in a ragged batch beside random neighbours and with drafts, the same tokens and log-probabilities, bit for bit, as alone, and in
float32 the greedy text of `transformers`' own `generate`. The rest is refused at load, by name and with one of these reasons:

| reason | a model of this class | what to do |
|---|---|---|
{reasons}

{counts} A class's configuration is its default made small, with `is_decoder` where there is one, since by default such models are not
causal; completed after published models, where defaults are incomplete or of another kind, for {changed}. The table is written by
`python -m tools.models`; `PROVE=1 pytest tests/promises/test_census.py` examines every row anew.

| model type | class | float32 | bfloat16 |
|---|---|---|---|
{rows}
"""


def recorded() -> dict[str, dict[str, str]]:
    """Model type → class and verdict in each dtype."""
    found: dict[str, dict[str, str]] = json.loads(EVIDENCE.read_text("utf-8"))["models"] if EVIDENCE.exists() else {}
    return {name: found[name] for name in census.NAMES if name in found}


def words(verdict: str) -> str:
    """As it is read in the table."""
    return verdict.lower().replace("_", " ")


def document(models: dict[str, dict[str, str]], version: str) -> str:
    """docs/models.md."""
    verdicts = [m["float32"] for m in models.values()]
    known = [r for r in Refusal if r.name in {v for m in models.values() for v in m.values()}]
    counts = ", ".join(f"{verdicts.count(r.name)} {words(r.name)}" for r in known)
    return HEAD.format(
        version=version,
        reasons="\n".join(f"| {words(r.name)} | {r} | {r.remedy} |" for r in known),
        counts=f"Of {len(models)} model types {verdicts.count('served')} are served in float32; refused are {counts}.",
        changed=", ".join(sorted(census.CHANGES)),
        rows="\n".join(f"| {n} | {m['class']} | {words(m['float32'])} | {words(m['bfloat16'])} |" for n, m in models.items()),
    )


def main(names: list[str]) -> int:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    models = recorded()
    for name in names or [n for n in census.NAMES if n not in models]:
        findings = {dtype: census.examine(name, dtype) for dtype in census.DTYPES}
        models[name] = {"class": census.class_of(name).__name__, **{dtype: f.verdict for dtype, f in findings.items()}}
        EVIDENCE.write_text(json.dumps({"transformers": transformers.__version__, "models": models}, indent=1) + "\n", "utf-8")
        print(name, *(f"{dtype}: {f.verdict} ({f.detail})" for dtype, f in findings.items()), sep="\n  ", flush=True)
    DOCUMENT.write_text(document({n: models[n] for n in census.NAMES}, transformers.__version__), "utf-8")
    wrong = [name for name, model in models.items() if "wrong" in model.values()]
    print(f"{len(models)} examined; wrong: {', '.join(wrong) or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

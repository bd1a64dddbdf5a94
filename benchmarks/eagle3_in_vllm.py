"""Does vLLM draft what we draft? `python -m benchmarks.eagle3_in_vllm [--head FOLDER] [--vllm-python PYTHON]`

An EAGLE-3 head of `echelon train`, on the embedded target, is given to vLLM's CPU build as the folder lies there, and both draft for the
same prompts of held-out code: float32, greedy, chains. vLLM runs rows in batches, we alone. Wherever both drafted after the same text the
ids must be equal up to the first tie: a token that our head prefers to its second by less than MARGIN. Figures and ties go to
docs/evidence/eagle3_in_vllm.json. The exit code is 1 where a draft differs otherwise, or too few follow the same text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.options import parser_of
from benchmarks.workloads import EVIDENCE, ROOT, greedy
from echelon import LLM, ConfigError, EchelonError
from echelon.bench.peers import Peer, run_worker
from echelon.bench.report import table, write_json
from echelon.bench.throughput import environment
from echelon.bench.workloads import code_prompts
from echelon.demo import TARGET, held_out_files
from echelon.draft import Draft
from echelon.drafters.heads import HeadDrafter
from echelon.sequence import PlannedRow

NUM_PROMPTS, PROMPT_TOKENS, MAX_TOKENS, NUM_DRAFT_TOKENS, BATCH_SIZE = 16, 96, 64, 4, 4
MARGIN = 1e-4  # between two logits: float32 sums in another order move it by about 1e-5 where logits are about 9
LEAST_SHARED = 0.9  # of vLLM's drafts: those after a text that we drafted after too
TIMEOUT = 480.0


@dataclass(frozen=True)
class Note:
    """What was drafted after a text, and by how much each token's logit exceeds the second (by nothing known for vLLM)."""

    text: tuple[int, ...]
    tokens: list[int]
    margins: list[float]


@dataclass(frozen=True)
class Difference:
    """The first token of a draft that is not the same."""

    text: tuple[int, ...]
    place: int
    ours: int
    vllm: int
    margin: float

    @property
    def is_tie(self) -> bool:
        return self.margin < MARGIN


def parser() -> argparse.ArgumentParser:
    return parser_of(
        __doc__,
        {
            "--head": {"type": Path, "default": ROOT / "build" / "heads" / "eagle3", "help": "of `echelon train TARGET --method eagle3`"},
            "--vllm-python": {"type": Path, "default": ROOT / "build" / "peers" / "vllm" / "bin" / "python"},
            "--output": {"type": Path, "default": EVIDENCE / "eagle3_in_vllm.json"},
        },
    )


def watch(drafter: HeadDrafter) -> list[Note]:
    """Grows as `drafter`, with one row a step, proposes chains."""
    notes: list[Note] = []
    margins: list[float] = []
    propose, logits = drafter.propose, drafter.head.logits

    def logits_and_margin(states: Tensor, depth: int) -> Tensor:
        found = logits(states, depth)
        first, second = found[0].float().topk(2).values.tolist()
        margins.append(first - second)
        return found

    def propose_and_note(rows: SequenceOf[PlannedRow]) -> Draft:
        margins.clear()
        draft = propose(rows)
        if tokens := draft.row(0):
            notes.append(Note(tuple(rows[0].sequence.tokens), tokens, list(margins)))
        return draft

    drafter.head.logits, drafter.propose = logits_and_margin, propose_and_note  # type: ignore[method-assign]
    return notes


def by_us(task: Mapping[str, Any]) -> dict[str, Any]:
    """What the worker writes of vLLM."""
    drafting = {"method": "eagle3", "model": task["head"], "num_speculative_tokens": task["num_draft_tokens"], "tree": "chain"}
    llm = LLM(task["model"], drafting, dtype=task["dtype"], max_num_seqs=1)
    notes = watch(llm.engine.drafter.unguarded)  # type: ignore[arg-type]
    outputs = llm.generate(task["prompts"], greedy(task["max_tokens"]))
    rates = {"tokens_per_step": llm.stats.tokens_per_step, "acceptance_rate": llm.stats.acceptance_rate}
    return {"outputs": [list(o.outputs[0].token_ids) for o in outputs], "drafts": notes, **rates}


def difference(ours: Note, vllm: Note) -> Difference | None:
    pairs = enumerate(zip(ours.tokens, vllm.tokens, ours.margins, strict=False))  # our last ones of a row are short
    return next((Difference(ours.text, i, own, other, margin) for i, (own, other, margin) in pairs if own != other), None)


def compare(ours: SequenceOf[Note], vllm: SequenceOf[Note]) -> tuple[int, list[Difference]]:
    """How many drafts follow a text that both have seen, and where they differ."""
    own = {note.text: note for note in ours}
    pairs = [(own[note.text], note) for note in vllm if note.text in own]
    return len(pairs), [d for d in (difference(*pair) for pair in pairs) if d is not None]


def job(asked: argparse.Namespace) -> dict[str, Any]:
    """What both do."""
    if not (asked.head / "config.json").is_file():
        made_by = f"echelon train {TARGET} --method eagle3 --draft-vocab-size 3072 --output {asked.head}"
        raise ConfigError(f"there is no head in {asked.head}; train one by `{made_by}`, or give --head")
    if not asked.vllm_python.is_file():
        raise ConfigError(
            f"there is no vLLM at {asked.vllm_python}; see benchmarks/workers/__init__.py on installing it, or give --vllm-python"
        )
    return {
        "model": str(TARGET),
        "head": str(asked.head),
        "prompts": code_prompts(AutoTokenizer.from_pretrained(TARGET), held_out_files(), NUM_PROMPTS, PROMPT_TOKENS),
        "dtype": "float32",
        "batch_size": BATCH_SIZE,
        "max_tokens": MAX_TOKENS,
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "num_threads": torch.get_num_threads(),
    }


def report(ours: Mapping[str, Any], vllm: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison of what `by_us` and the worker have written."""
    drafted = [Note(tuple(text), tokens, []) for text, tokens in vllm["drafts"]]
    num_shared, differing = compare(ours["drafts"], drafted)
    names = ("tokens_per_step", "acceptance_rate")  # each counts its own: vLLM also what it drafts past the end of a text
    return {
        "num_drafts": {"ours": len(ours["drafts"]), "vllm": len(drafted), "after the same text": num_shared},
        "num_equal": num_shared - len(differing),
        "ties": [asdict(d) for d in differing if d.is_tie],
        "differences": [asdict(d) for d in differing if not d.is_tie],
        "smallest_margin": min(m for note in ours["drafts"] for m in note.margins),
        "num_equal_texts": sum(a == b for a, b in zip(ours["outputs"], vllm["outputs"], strict=True)),
        "ours": {name: ours[name] for name in names},
        "vllm": {name: vllm.get(name, 0.0) for name in names} | {"versions": vllm["versions"]},
    }


def as_markdown(found: Mapping[str, Any]) -> str:
    num, both = found["num_drafts"], (found["ours"], found["vllm"])
    rows = [
        ("drafts", num["ours"], num["vllm"]),
        ("tokens_per_step", *(f"{one['tokens_per_step']:.3f}" for one in both)),
        ("acceptance_rate", *(f"{one['acceptance_rate']:.1%}" for one in both)),
    ]
    said = [
        f"{found['num_equal']} of {num['after the same text']} drafts after the same text are equal",
        f"{len(found['ties'])} differ in a tie and {len(found['differences'])} otherwise",
        f"{found['num_equal_texts']} of {NUM_PROMPTS} texts are equal",
    ]
    return f"{table(['', 'ours', 'vLLM'], rows)}\n\n{'; '.join(said)}"


def main(asked: argparse.Namespace) -> int:
    task = job(asked)
    vllm = run_worker(Peer("vllm_drafts", str(asked.vllm_python)), task, TIMEOUT, ("versions", "outputs", "drafts"))
    found = report(by_us(task), vllm)
    said = {k: v for k, v in task.items() if k not in ("model", "head", "prompts")} | {"num_prompts": NUM_PROMPTS, "margin": MARGIN}
    write_json(asked.output, {"environment": environment(), "job": said, **found})
    print(as_markdown(found))
    is_seen = found["num_drafts"]["after the same text"] >= LEAST_SHARED * len(vllm["drafts"]) > 0
    return 0 if is_seen and not found["differences"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main(parser().parse_args()))
    except EchelonError as error:
        sys.exit(f"error: {error}")

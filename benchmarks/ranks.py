"""What splitting costs: one engine on all cores against ranks that share them out, and how long a plan takes to reach all.

    python -m benchmarks.ranks [--shape llama-1.1b] [--size 2] [--output FILE]

Random weights are written to a temporary folder, since every rank reads its own share. Both engines stand side by side and run by turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from echelon import LLM, SamplingParams
from echelon.bench.shapes import SHAPES, plain_with_random_weights
from echelon.bench.throughput import environment
from echelon.parallel.children import ChildRanks
from echelon.parallel.runner import SplitRunner
from echelon.stats import StepRecord

BATCH, PROMPT, NEW, ROUNDS = 8, 32, 32, 6


def round_of(llm: LLM, prompts: list[list[int]]) -> tuple[list[float], list[float], list[list[int]]]:
    """Milliseconds of each step that decodes, and until the last rank had its plan; and the texts."""
    steps: list[float] = []
    plans: list[float] = []
    last = time.perf_counter()

    def note(record: StepRecord) -> None:
        nonlocal last
        now = time.perf_counter()
        if all(row.num_new == 1 for row in record.rows):
            steps.append((now - last) * 1e3)
            if isinstance(llm.engine.target, SplitRunner) and isinstance(llm.engine.target.group, ChildRanks):
                plans.append(llm.engine.target.group.seconds_to_plan * 1e3)
        last = now

    with llm.engine.observed(note):
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True), use_tqdm=False)
    return steps, plans, [o.outputs[0].token_ids for o in outputs]


def compared(folder: str, size: int) -> dict[str, Any]:
    """Medians of each round, and of all rounds how fast the ranks are beside one engine."""
    settings: dict[str, Any] = {"max_num_seqs": BATCH, "max_model_len": 256, "skip_tokenizer_init": True, "enable_prefix_caching": False}
    threads = torch.get_num_threads()
    with LLM(folder, **settings) as one, LLM(folder, tensor_parallel_size=size, **settings) as several:
        shares, rounds = torch.get_num_threads(), []
        prompts = torch.randint(0, one.target.vocab_size, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
        for _ in range(1 + ROUNDS):
            torch.set_num_threads(threads)
            alone, _, texts = round_of(one, prompts)
            torch.set_num_threads(shares)
            split, plans, others = round_of(several, prompts)
            assert others == texts, "several ranks say something else"
            rounds.append([statistics.median(values) for values in (alone, split, plans)])
            print(json.dumps(dict(zip(("one_ms", "ranks_ms", "plan_ms"), rounds[-1], strict=True))), flush=True)
    del rounds[0]
    return {
        "one_ms": statistics.median(one for one, *_ in rounds),
        "ranks_ms": statistics.median(split for _, split, _ in rounds),
        "speed": statistics.median(one / split for one, split, _ in rounds),
        "plan_ms": statistics.median(plan for *_, plan in rounds),
        "rounds": rounds,
    }


def main() -> None:
    """Print what was found, and write it where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="llama-1.1b", choices=SHAPES)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain_with_random_weights(SHAPES[asked.shape](), torch.bfloat16, "cpu").save_pretrained(folder)
        found = {"shape": asked.shape, "size": asked.size, "batch": BATCH} | compared(folder, asked.size) | {"environment": environment()}
    print(json.dumps(found))
    if asked.output is not None:
        asked.output.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

"""What splitting costs: one engine on all cores against ranks that share them out, and how long a plan takes to reach all.

    python -m benchmarks.ranks [--split tensor_parallel_size] [--shape llama-1.1b] [--size 2] [--batch 8] [--output FILE]

Random weights are written to a temporary folder, since every rank reads its own share. Both engines stand side by side and run by turns. In
pipeline stages rows take turns (docs/parallel.md); a step is counted there as the time in which every row has had one.
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
from echelon.bench.report import write_json
from echelon.bench.shapes import SHAPES, plain_with_random_weights
from echelon.bench.throughput import environment
from echelon.config import RANKS
from echelon.parallel.children import ChildRanks
from echelon.parallel.runner import SplitRunner
from echelon.stats import StepRecord

PROMPT, NEW, ROUNDS = 32, 32, 6
NAMES = ("one_ms", "ranks_ms", "plan_ms")  # the last of tensor parallelism alone: in stages plans wait until workers are free


def round_of(llm: LLM, prompts: list[list[int]]) -> tuple[list[float], list[float], list[list[int]]]:
    """Milliseconds of each step of all rows that decodes, and until the last rank had its plan; and the texts."""
    steps: list[float] = []
    plans: list[float] = []
    last = time.perf_counter()

    def note(record: StepRecord) -> None:
        nonlocal last
        now = time.perf_counter()
        if all(row.num_new == 1 for row in record.rows):
            steps.append((now - last) * 1e3 * len(prompts) / len(record.rows))
            if isinstance(llm.engine.target, SplitRunner) and isinstance(llm.engine.target.group, ChildRanks):
                plans.append(llm.engine.target.group.seconds_to_plan * 1e3)
        last = now

    with llm.engine.observed(note):
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True), use_tqdm=False)
    return steps, plans, [o.outputs[0].token_ids for o in outputs]


def compared(folder: str, split: str, size: int, batch: int) -> dict[str, Any]:
    """Medians of each round, and of all rounds how fast the ranks are beside one engine."""
    settings: dict[str, Any] = {"max_num_seqs": batch, "max_model_len": 256, "skip_tokenizer_init": True, "enable_prefix_caching": False}
    threads = torch.get_num_threads()
    with LLM(folder, **settings) as one, LLM(folder, **(settings | {split: size})) as several:
        shares, rounds = torch.get_num_threads(), []
        prompts = torch.randint(0, one.target.vocab_size, (batch, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
        for _ in range(1 + ROUNDS):
            torch.set_num_threads(threads)
            alone, _, texts = round_of(one, prompts)
            torch.set_num_threads(shares)
            apart, plans, others = round_of(several, prompts)
            assert others == texts, "several ranks say something else"
            rounds.append([statistics.fmean(alone), statistics.fmean(apart), *([statistics.median(plans)] if plans else [])])
            print(json.dumps(dict(zip(NAMES, rounds[-1], strict=False))), flush=True)
    del rounds[0]
    speed = statistics.median(one / ranks for one, ranks, *_ in rounds)
    return dict(zip(NAMES, map(statistics.median, zip(*rounds, strict=True)), strict=False)) | {"speed": speed, "rounds": rounds}


def main() -> None:
    """Print what was found, and write it where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="llama-1.1b", choices=SHAPES)
    parser.add_argument("--split", default=RANKS[0], choices=RANKS)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain_with_random_weights(SHAPES[asked.shape](), torch.bfloat16, "cpu").save_pretrained(folder)
        found: dict[str, Any] = {"shape": asked.shape, "split": asked.split, "size": asked.size, "batch": asked.batch}
        found |= compared(folder, asked.split, asked.size, asked.batch) | {"environment": environment()}
    print(json.dumps(found))
    if asked.output is not None:
        write_json(asked.output, found)


if __name__ == "__main__":
    main()

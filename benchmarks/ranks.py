"""What splitting costs: one engine on all cores against as many ranks with one core each, and how long a plan takes to reach them.

    python -m benchmarks.ranks [--shape llama-1.1b] [--size 2]

Random weights are written to a temporary folder, since every rank reads its own share. Both kinds run by turns, each in a process of its
own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from echelon import LLM, SamplingParams
from echelon.bench.shapes import SHAPES, plain_with_random_weights
from echelon.bench.throughput import environment
from echelon.stats import StepRecord

BATCH, PROMPT, NEW, TURNS = 8, 32, 48, 2


def measured(folder: str, size: int) -> dict[str, Any]:
    """Milliseconds of the prompts' steps and of a decoding step, the median, and tokens: the texts are compared."""
    settings: dict[str, Any] = {"max_num_seqs": BATCH, "max_model_len": 512, "skip_tokenizer_init": True, "enable_prefix_caching": False}
    llm = LLM(folder, tensor_parallel_size=size, **settings)
    prompts = torch.randint(0, llm.target.vocab_size, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    steps: list[tuple[bool, float, float]] = []  # of prompts, ms, ms until the last rank had the plan
    last = time.perf_counter()

    def note(record: StepRecord) -> None:
        nonlocal last
        now = time.perf_counter()
        group = getattr(llm.engine.target, "group", None)
        planned = group.seconds_to_plan * 1e3 if group is not None else 0.0
        steps.append((any(row.num_new > 1 for row in record.rows), (now - last) * 1e3, planned))
        last = now

    with llm.engine.observed(note):
        outputs = llm.generate(prompts, params, use_tqdm=False)
    decoding = [step for step in steps if not step[0]]
    result = {
        "ranks": size,
        "prefill_ms": sum(ms for is_prompt, ms, _ in steps if is_prompt),
        "decode_ms": statistics.median(ms for _, ms, _ in decoding),
        "plan_ms": statistics.median(ms for *_, ms in decoding),
        "plan_ms_most": max(ms for *_, ms in steps),
        "tokens": [o.outputs[0].token_ids for o in outputs],
    }
    llm.close()
    return result


def main() -> None:
    """Print a line for each run, and what the ranks make of the speed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="llama-1.1b", choices=SHAPES)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    context, results = multiprocessing.get_context("spawn"), []
    with tempfile.TemporaryDirectory() as folder:
        plain_with_random_weights(SHAPES[asked.shape](), torch.bfloat16, "cpu").save_pretrained(folder)
        for size in (1, asked.size) * TURNS:
            with context.Pool(1) as pool:
                results.append(pool.apply(measured, (folder, size)))
            print(json.dumps({k: v for k, v in results[-1].items() if k != "tokens"}), flush=True)
    alike = all(r["tokens"] == results[0]["tokens"] for r in results)
    best = {size: min(r["decode_ms"] for r in results if r["ranks"] == size) for size in (1, asked.size)}
    summary = {"same_texts": alike, "speed_of_one": best[1] / best[asked.size], "environment": environment()}
    print(json.dumps(summary))
    if asked.output is not None:
        runs = [{k: v for k, v in r.items() if k != "tokens"} for r in results]
        asked.output.write_text(json.dumps({"shape": asked.shape, "runs": runs} | summary, indent=1) + "\n")


if __name__ == "__main__":
    main()

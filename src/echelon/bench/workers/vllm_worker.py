"""Runs one job on vLLM; started by `echelon bench peers` with a Python that has vLLM's CPU build. `vllm_worker.py JOB RESULT`"""

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


def speculation(job: dict[str, Any]) -> dict[str, Any] | None:
    """vLLM's own configuration of the same drafter."""
    if job["mode"] == "ngram":
        lengths = {"prompt_lookup_max": job["match_length"], "prompt_lookup_min": job["match_length"]}
        return {"method": "ngram", "num_speculative_tokens": job["num_ngram_tokens"], **lengths}
    if job["mode"] == "draft_model":
        return {"method": "draft_model", "model": job["draft_model"], "num_speculative_tokens": job["num_draft_tokens"]}
    return None


def main(given: str, taken: str) -> None:
    job = json.loads(Path(given).read_text("utf-8"))
    os.environ["OMP_NUM_THREADS"] = str(job["num_threads"])
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    longest = max(map(len, job["prompts"]))
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_num_seqs=job["batch_size"],
        max_model_len=longest + job["max_tokens"] + 8,
        enable_prefix_caching=False,  # every round reads its prompts
        speculative_config=speculation(job),
        disable_log_stats=True,
        seed=0,
    )
    prompts = [{"prompt_token_ids": p} for p in job["prompts"]]

    def run(max_tokens: int) -> tuple[float, list[list[int]]]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start, [list(o.outputs[0].token_ids) for o in outputs]

    run(job["head_tokens"])  # warm-up
    seconds: list[float] = []
    head_seconds: list[float] = []
    outputs: list[list[int]] = []
    for _ in range(job["rounds"]):
        head_seconds.append(run(job["head_tokens"])[0])
        elapsed, outputs = run(job["max_tokens"])
        seconds.append(elapsed)
    versions = {name: version(name) for name in ("vllm", "torch")}
    Path(taken).write_text(
        json.dumps({"versions": versions, "outputs": outputs, "seconds": seconds, "head_seconds": head_seconds}), "utf-8"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

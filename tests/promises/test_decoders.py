"""Every architecture: speculation in a batch gives, in float32, the ids that `transformers` gives each row alone."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import toys
from decoders import decoders

from echelon import LLM, SamplingParams

DECODERS = decoders(window=12, original_context=32)
NUM_TOKENS = 24
PROMPTS = toys.prompts((1, 5, 12, 13, 20, 31, 32, 33, 50), vocabulary=77)
PROMPTS = [[t + 3 for t in prompt] for prompt in PROMPTS]  # no special tokens
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@cache
def model(name: str) -> torch.nn.Module:
    cls, config = DECODERS[name]
    return toys.randomised(cls, config, seed=2, spread=0.25)


@cache
def by_transformers(name: str) -> list[list[int]]:
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model(name).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        rows.append(out[0, len(prompt) :].tolist())
    return rows


def speculative_llm(name: str, drafter: str, **settings: int) -> LLM:
    draft = toys.adopted(toys.noisy_copy(model(name), 0.03)) if drafter == "draft_model" else None
    config = {"method": drafter, "num_speculative_tokens": 4}
    return toys.watch(LLM(toys.adopted(model(name)), config, draft_model=draft, kv_cache_memory_bytes=1 << 22, **settings))


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_speculation_equals_transformers(name: str, drafter: str) -> None:
    llm = speculative_llm(name, drafter, max_num_seqs=4)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == by_transformers(name)
    toys.assert_all_blocks_free(llm)
    if drafter == "draft_model":
        assert 0.1 < llm.stats.acceptance_rate < 1.0


@pytest.mark.parametrize("name", DECODERS)
def test_sampled_speculation_equals_plain_decoding(name: str) -> None:
    plain = LLM(toys.adopted(model(name)), max_num_seqs=1, kv_cache_memory_bytes=1 << 22)
    expected = [plain.generate([p], SAMPLED)[0].outputs[0].token_ids for p in PROMPTS]
    llm = speculative_llm(name, "draft_model", max_num_seqs=8, max_num_batched_tokens=19)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, SAMPLED)] == expected


def test_a_text_that_outgrows_the_original_context_is_computed_anew() -> None:
    """LongRoPE: within the original context and beyond it the same text has other keys, so a wrong set would show."""
    name = "phi3-longrope"
    cls, config = copy.deepcopy(DECODERS[name])
    assert len(PROMPTS[0]) + NUM_TOKENS < 32 < len(PROMPTS[2]) + NUM_TOKENS
    unaware = toys.randomised(cls, config, seed=2, spread=0.25)
    unaware.config.rope_parameters["long_factor"] = unaware.config.rope_parameters["short_factor"]
    plain = LLM(toys.adopted(unaware), max_num_seqs=1, kv_cache_memory_bytes=1 << 22)
    others = [plain.generate([p], GREEDY)[0].outputs[0].token_ids for p in PROMPTS]
    assert [a == b for a, b in zip(others, by_transformers(name), strict=True)] == [len(p) + NUM_TOKENS <= 32 for p in PROMPTS]


@pytest.mark.parametrize("samples", [3])
def test_samples_of_one_prompt_share_it_on_both_sides_of_the_limit(samples: int) -> None:
    params = SAMPLED.model_copy(update={"n": samples})
    one = LLM(toys.adopted(model("phi3-longrope")), max_num_seqs=1, kv_cache_memory_bytes=1 << 22)
    many = speculative_llm("phi3-longrope", "draft_model", max_num_seqs=6, max_num_batched_tokens=24)
    expected, got = ([[s.token_ids for s in o.outputs] for o in llm.generate(PROMPTS[2:7], params)] for llm in (one, many))
    assert got == expected


@pytest.mark.parametrize("method", ["exact", "rejection"])
@pytest.mark.parametrize("width", [77, 96])
def test_vocabularies_padded_to_other_widths(width: int, method: str) -> None:
    """The draft model has fewer ids than the target (which emits some of those that are lacking), or more."""
    target = toys.llama(vocab_size=80)
    draft = toys.noisy_copy(target, 0.03)
    draft.resize_token_embeddings(width, mean_resizing=False)
    with torch.no_grad():
        draft.lm_head.weight[80:] = 10.0  # ids that the target lacks, and that would be drafted if they could
    loaded = toys.adopted(target), toys.adopted(draft)
    for one in loaded:
        object.__setattr__(one, "tokenizer", SameVocabulary())
    llm = toys.watch(
        LLM(loaded[0], {"method": "draft_model", "num_speculative_tokens": 5, "acceptance": method}, draft_model=loaded[1], max_num_seqs=4)
    )
    got = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
    expected = [LLM(toys.adopted(target)).generate([p], GREEDY)[0].outputs[0].token_ids for p in PROMPTS]
    assert got == expected
    assert llm.stats.acceptance_rate > 0.1
    assert any(t >= 77 for row in expected for t in row)


class SameVocabulary:
    """A tokenizer that has pieces, and never any text."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return ""

    def get_vocab(self) -> dict[str, int]:
        return {f"piece{i}": i for i in range(70)}


@pytest.mark.parametrize("context", [8, 16, 37, 128])
def test_a_row_goes_on_without_a_draft_past_the_draft_models_context(context: int) -> None:
    target = toys.llama()
    draft = toys.noisy_copy(target, 0.0)
    draft.config.max_position_embeddings = context
    llm = toys.watch(
        LLM(toys.adopted(target), {"method": "draft_model", "num_speculative_tokens": 5}, draft_model=toys.adopted(draft), block_size=8)
    )
    prompts = [[t % toys.VOCABULARY for t in p] for p in PROMPTS]
    for prompt in prompts:
        alone = LLM(toys.adopted(target)).generate([prompt], GREEDY)[0].outputs[0].token_ids
        before = llm.stats.num_draft_tokens
        assert llm.generate([prompt], GREEDY)[0].outputs[0].token_ids == alone
        drafted = llm.stats.num_draft_tokens - before
        assert (drafted > 0) == (len(prompt) <= context), "drafts end where the draft model's context does"
    assert llm.stats.acceptance_rate == 1.0

"""Every causal model of `transformers`, small and random: served exactly, or refused for one of the reasons of `Refusal`.

`examine` takes one name of `MODEL_FOR_CAUSAL_LM_MAPPING`. What is served has the same bits in a ragged batch with drafts as alone, and in
float32 the text of `generate`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
import toys
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from echelon import LLM, SamplingParams, UnsupportedModelError
from echelon.bench.verify import logits_after
from echelon.model.load.loading import adopt_model
from echelon.model.load.selftest import self_test
from echelon.model.load.shrink import Sizes, part_for, shrunken

NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = Sizes(vocabulary=96, context=160, original_context=48, window=12)
SPREAD = 0.25
LENGTHS = (1, 5, 17, 40, 90)
NUM_TOKENS = 24
POOL = 1 << 21  # bytes of keys and values
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# where a configuration without arguments is incomplete, or lacks what published checkpoints of the class have
CHANGES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 30}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "xmod": {"default_language": "en_XX"},
}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [3.0] * 48}
CHANGES["phi4_multimodal"] = {"rope_parameters": LONG | {"original_max_position_embeddings": 4096}}
INDEXED = {"indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 64, "indexer_compress_ratio": 4}
CHANGES |= {"qwen4_exp": {"text_config": INDEXED}, "qwen4_exp_text": INDEXED}


@dataclass(frozen=True)
class Finding:
    """What became of a class in one dtype: "served", the name of a `Refusal`, or "wrong"; and what was seen."""

    verdict: str
    detail: str = ""


def class_of(name: str) -> type[PreTrainedModel]:
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(configuration(name))]
    return found[0] if isinstance(found, tuple) else found


def configuration(name: str) -> Any:
    """As published models have it, as far as what they compute is concerned."""
    kind, changes = CONFIG_MAPPING[name], CHANGES.get(name, {})
    config = kind(**changes)
    return kind(**changes, is_decoder=True) if getattr(config, "is_decoder", None) is False else config


def small_model(name: str) -> PreTrainedModel:
    """Random float32 weights; several layers of every kind. The error of the framework where it cannot run it."""
    cls = class_of(name)
    errors: list[Exception] = []
    for is_narrow in (True, False):
        try:
            config = shrunken(part_for(cls, configuration(name)), is_narrow, SIZES)
            model = toys.randomised(cls, config, 0, SPREAD).requires_grad_(False)
            _logits(model, list(range(10)))
            return model
        except Exception as error:
            errors.append(error)
    raise errors[-1]


def examine(name: str, dtype: str) -> Finding:
    """Serve it, or be refused; a refusal without a reason, and anything unlike itself alone or `generate`, is wrong."""
    try:
        model = small_model(name)
    except Exception as error:  # whatever the framework raises: then it must be refused too
        return _refused(name, error)
    try:
        loaded = adopt_model(copy.deepcopy(model).to(DTYPES[dtype]), None, name)
    except UnsupportedModelError as error:
        return _finding(error)
    rows = toys.prompts(LENGTHS, SIZES.vocabulary)
    alone = _outputs(LLM(loaded, max_num_seqs=1, block_size=8, kv_cache_memory_bytes=POOL), rows, one_by_one=True)
    texts = [text for text, *_ in alone]
    if (found := _beside_others(loaded, rows, alone)) is not None:
        return found
    if dtype == "float32" and (found := _unlike_generate(model, loaded, rows, texts)) is not None:
        return found
    return Finding("served", f"{len({tuple(t) for t in texts})} different texts")


def _refused(name: str, error: Exception) -> Finding:
    """A model that cannot be built small: what loading says of its configuration."""
    try:
        self_test(class_of(name), configuration(name))
    except UnsupportedModelError as refused:
        return _finding(refused)
    return Finding("wrong", f"passes its test, and cannot be built: {error}")


def _finding(error: UnsupportedModelError) -> Finding:
    return Finding(error.refusal.name, str(error)) if error.refusal else Finding("wrong", f"refused without a reason: {error}")


Output = tuple[list[int], list[dict[int, float]], list[dict[int, float]]]


def _outputs(llm: LLM, rows: SequenceOf[SequenceOf[int]], one_by_one: bool = False) -> list[Output]:
    """Of each row its tokens, their log-probabilities and those of the prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    batches = [[row] for row in rows] if one_by_one else [rows]
    found = [output for batch in batches for output in llm.generate([list(r) for r in batch], params)]
    return [(o.outputs[0].token_ids, _values(o.outputs[0].logprobs), _values(o.prompt_logprobs)) for o in found]


def _values(places: Any) -> list[dict[int, float]]:
    return [{token: entry.logprob for token, entry in (place or {}).items()} for place in places or []]


def _beside_others(loaded: Any, rows: list[list[int]], alone: list[Output]) -> Finding | None:
    """In a ragged batch among random neighbours, with drafts copied from the text, and with some that are right beside noise."""
    neighbours = toys.prompts((33, 2, 71, 9), SIZES.vocabulary, seed=11)
    truth = {tuple(row): text for row, (text, *_) in zip(rows, alone, strict=True)}
    for kind in ("copied", "mixed") if loaded.model.dtype == torch.float32 else ("mixed",):
        settings = {"max_num_seqs": 4, "block_size": 8, "kv_cache_memory_bytes": POOL, "max_num_batched_tokens": 64}
        llm = LLM(loaded, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}, **settings)
        if kind == "mixed":
            llm.engine.drafter = Mixed(truth, None)
        got = _outputs(toys.watch(llm), [x for pair in zip(rows, [*neighbours, [7]], strict=True) for x in pair])[::2]
        for row, (ours, own) in enumerate(zip(got, alone, strict=True)):
            for what, a, b in zip(("tokens", "log-probabilities", "log-probabilities of the prompt"), ours, own, strict=True):
                if a != b:
                    return Finding(
                        "wrong", f"{what} change beside others, in the row with {LENGTHS[row]} tokens of prompt (drafts: {kind})"
                    )
    return None


class Mixed(toys.ScriptedDrafter):
    """Knows how the rows of `truth` go on, and drafts noise for the others."""

    def _row(self, row: Any) -> list[int]:
        sequence = row.sequence
        known = self._truth.get(tuple(sequence.tokens[: sequence.num_prompt_tokens]))
        return super()._row(row) if known is None else known[sequence.num_output_tokens :][: row.max_draft_tokens]


def _unlike_generate(model: PreTrainedModel, loaded: Any, rows: list[list[int]], texts: list[list[int]]) -> Finding | None:
    """A different text is wrong unless the first different tokens are a tie by the rule of `echelon verify`."""
    for row, text in zip(rows, texts, strict=True):
        ids = torch.tensor([row])
        options = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        model.generation_config.eos_token_id = None
        want = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(row) :].tolist()
        place = next((i for i, (a, b) in enumerate(zip(text, want, strict=False)) if a != b), None)
        if len(text) != len(want):
            return Finding("wrong", f"{len(text)} tokens where generate gives {len(want)}")
        if place is not None and not _is_tie(model, loaded, [*row, *want[:place]], text[place], want[place]):
            return Finding("wrong", f"after a prompt of {len(row)} tokens, token {place} is {text[place]}, by generate {want[place]}")
    return None


def _is_tie(model: PreTrainedModel, loaded: Any, prefix: list[int], token: int, expected: int) -> bool:
    """Both are the top two of the model in float64, and no further apart than twice the error of float32 there."""
    exact, rounded = (_logits(m, prefix).double() for m in (copy.deepcopy(model).double(), model))
    ours = logits_after(LLM(loaded, max_num_seqs=1, kv_cache_memory_bytes=POOL), prefix).double()
    error = max(float((exact - x).abs().max()) for x in (rounded, ours))
    gap = float((exact[token] - exact[expected]).abs())
    return {token, expected} == set(exact.topk(2).indices.tolist()) and gap <= 2 * min(error, MOST_ERROR * float(exact.abs().max()))


MOST_ERROR = 1e-4  # of float32, relative to the largest logit: more is no rounding


def _logits(model: PreTrainedModel, prefix: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([prefix]), use_cache=False).logits[0, -1]
    return logits

"""The promise in integers: weights of 8 and 4 bits, keys and values of 8. What is drafted, in whatever numbers, changes no text."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import toys

import heads
from echelon import LLM, ConfigError, SamplingParams
from echelon.heads.checkpoints import build_head, save_head
from echelon.model.load.loading import LoadedModel, adopt_model
from echelon.model.patches.linear import packed_weights
from echelon.ops import compiled

pytestmark = pytest.mark.skipif(not compiled.is_built(), reason="the compiled kernels are not built")

NUM_TOKENS = 40 if toys.PROVE else 24
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "min_p": 0.01},
}
NUMBERS = [("int8", "auto"), ("int4", "auto"), (None, "int8"), ("int8", "int8"), ("int4", "int8")]
TREE = {"tree": "dynamic", "num_speculative_tokens": 10, "tree_top_k": 3, "tree_depth": 4}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "model": {"method": "draft_model", "num_speculative_tokens": 4},
    "model, tree": {"method": "draft_model", **TREE},
    "model in 4 bits": {"method": "draft_model", "num_speculative_tokens": 4, "quantization": "int4"},
    "auto": {"method": "draft_model"},
    "autoregressive": {"method": "eagle", "num_speculative_tokens": 4},
    "autoregressive, tree": {"method": "eagle", **TREE},
    "independent": {"method": "medusa", "num_speculative_tokens": 4},
    "recurrent": {"method": "clover", "num_speculative_tokens": 4},
}


@cache
def model() -> Any:
    return toys.llama(intermediate_size=128)


@cache
def loaded(quantization: str | None) -> LoadedModel:
    return adopt_model(copy.deepcopy(model()), None, "toy", quantization=quantization)


@cache
def draft(quantization: str | None) -> LoadedModel:
    return adopt_model(toys.noisy_copy(model(), 0.05), None, "draft", quantization=quantization)


def params(mode: str) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=NUM_TOKENS, seed=100 + i, **MODES[mode]) for i in range(len(toys.PROMPT_LENGTHS))]


def told(llm: LLM, mode: str, rows: slice = slice(None)) -> list[list[int]]:
    outputs = llm.generate(toys.prompts()[rows], params(mode)[rows])
    toys.assert_all_blocks_free(llm)
    return [o.outputs[0].token_ids for o in outputs]


@cache
def truth(quantization: str | None, kv: str, mode: str) -> list[list[int]]:
    """Plain decoding, each row alone."""
    llm = toys.watch(LLM(loaded(quantization), max_num_seqs=1, kv_cache_dtype=kv, kv_cache_memory_bytes=1 << 21))
    return [llm.generate([p], [q])[0].outputs[0].token_ids for p, q in zip(toys.prompts(), params(mode), strict=True)]


def speculative(drafter: str, quantization: str | None, kv: str, mode: str, **settings: Any) -> LLM:
    config, own, given = DRAFTERS[drafter], None, None
    if config["method"] == "draft_model":
        given = draft(config.get("quantization"))
    elif config["method"] != "ngram":
        kind = drafter.partition(",")[0]
        own = heads.Knowing(heads.KINDS[kind](model()), truth(quantization, kv, mode), toys.VOCABULARY).eval()
        config = config | {"method": own.method}
    settings = {"block_size": 8, "kv_cache_memory_bytes": 1 << 22, "kv_cache_dtype": kv} | settings
    return toys.watch(LLM(loaded(quantization), config, given, own, **settings))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_size", [1, 8, 32])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("quantization", "kv"), NUMBERS)
def test_no_draft_changes_a_token(quantization: str | None, kv: str, drafter: str, batch_size: int, mode: str) -> None:
    rows = toys.few(batch_size != 8 or mode == "sampled")
    llm = speculative(drafter, quantization, kv, mode, max_num_seqs=batch_size)
    assert told(llm, mode, rows) == truth(quantization, kv, mode)[rows]
    if drafter not in ("auto", "ngram"):
        assert llm.stats.tokens_per_step > 1.1


@pytest.mark.parametrize(("quantization", "kv"), NUMBERS)
def test_prompts_in_pieces_and_rows_thrown_out(quantization: str | None, kv: str) -> None:
    probe = speculative("model", quantization, kv, "greedy").memory_plan
    for settings in (
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"kv_cache_memory_bytes": 20 * probe.block_bytes, "max_num_seqs": 8},
    ):
        llm = speculative("model", quantization, kv, "sampled", **settings)
        assert told(llm, "sampled") == truth(quantization, kv, "sampled")
        assert "kv_cache_memory_bytes" not in settings or llm.stats.num_preemptions > 0


def test_integers_are_told_from_numbers() -> None:
    """Or the tests above would compare a model with itself."""
    texts = [truth(*numbers, "greedy") for numbers in [(None, "auto"), *NUMBERS]]
    assert len({str(t) for t in texts}) == len(texts)


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_families_say_the_same_in_integers(kv: str) -> None:
    """Integer sums are exact, and what is left of attention has one order of sums by AVX2 and AVX-512."""
    best, found = compiled.isa(), {}
    families = [isa for isa in compiled.offered_isas() if isa.startswith("avx") and (kv == "int8" or "bf16" not in isa)]
    if len(families) < 2:
        pytest.skip("this processor has one family alone")
    try:
        for isa in families:
            compiled.set_isa(isa)
            found[isa] = told(LLM(loaded("int8"), kv_cache_dtype=kv, kv_cache_memory_bytes=1 << 22), "greedy")
    finally:
        compiled.set_isa(best)
    assert all(text == found["avx2"] for text in found.values()), "a family has another text"


def test_keys_in_8_bits_take_half_the_memory() -> None:
    sizes = {
        kv: LLM(adopt_model(copy.deepcopy(model()).bfloat16(), None, "toy"), kv_cache_dtype=kv).memory_plan.block_bytes
        for kv in ("auto", "int8")
    }
    assert sizes["int8"] / sizes["auto"] == (16 + 4) / 32


@pytest.mark.parametrize("strategy", ["padded", "realign"])
def test_keys_in_8_bits_belong_to_the_engines_own_strategy(strategy: str) -> None:
    with pytest.raises(ConfigError, match=rf"kv_cache_dtype = 'int8' belongs to strategy = 'unpadded', not to '{strategy}'"):
        LLM(loaded(None), kv_cache_dtype="int8", strategy=strategy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model().bfloat16().save_pretrained(path)
    model().float()
    return path


@pytest.mark.parametrize(("own", "quantization"), [("int4", None), ("int8", None), ("int4", "int8")])
def test_a_models_own_copy_drafts_for_it(own: str, quantization: str | None, folder: Path) -> None:
    prompts, asked = toys.prompts()[:9], params("greedy")[:9]
    plain = LLM(str(folder), quantization=quantization, kv_cache_memory_bytes=1 << 22).generate(prompts, asked)
    config = {"method": "draft_model", "model": f"self:{own}", "num_speculative_tokens": 4}
    llm = toys.watch(LLM(str(folder), config, quantization=quantization, kv_cache_memory_bytes=1 << 22, max_num_seqs=4))
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, asked)] == [o.outputs[0].token_ids for o in plain]
    assert llm.stats.tokens_per_step > 1.3
    draft = llm.storage.runners[1].loaded
    assert draft.quantization == own
    shared = {id(p) for p in llm.target.model.parameters()} & {id(p) for p in draft.model.parameters()}
    assert id(llm.target.model.get_input_embeddings().weight) in shared, "the embedding is kept once"
    if quantization == "int8":
        weights = [{w.data.data_ptr() for w in packed_weights(m)} for m in (llm.target.model, draft.model)]
        assert len(weights[0] & weights[1]) == 1, "the output layer, of 8 bits in both, is kept once"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "draft_model", "model": "self:int2"}, "is the target's own copy in integers: write self:int8 or self:int4"),
        ({"method": "ngram", "model": "self:int4"}, "use method 'draft_model'"),
        ({"method": "draft_model", "model": "self:int4", "quantization": "int8"}, "differs from model = 'self:int4'"),
    ],
)
def test_a_copy_that_can_be_none(config: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(loaded(None), config)


def test_a_copy_of_a_model_that_has_no_files() -> None:
    with pytest.raises(ConfigError, match=r"reads the target's checkpoint again, and that fails .*; give another draft model"):
        LLM(loaded(None), {"method": "draft_model", "model": "self:int4"})
    with pytest.raises(ConfigError, match=r"'self:int8' is what 'toy' is itself, and would draft no faster"):
        LLM(loaded("int8"), {"method": "draft_model", "model": "self:int8"})


def test_a_head_in_integers(tmp_path: Path) -> None:
    """Rounded as it is loaded; one that is given stays as it is, and nobody may think otherwise."""
    own = build_head("medusa", model(), num_heads=3)
    save_head(own, tmp_path, model())
    config = {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": 3, "quantization": "int8"}
    assert told(toys.watch(LLM(loaded("int8"), config, kv_cache_memory_bytes=1 << 22)), "greedy") == truth("int8", "auto", "greedy")
    with pytest.raises(ConfigError, match="draft_head is given as it is; leave it out"):
        LLM(loaded("int8"), config, draft_head=own)

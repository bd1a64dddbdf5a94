"""The promise with heads: whatever they draft, as chains or trees, token ids are those of plain decoding; and what they keep of a row is
what they would compute from its whole text (asked at every third length, with PROVE=1 at every one).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from test_decoders import GREEDY as DECODED
from test_decoders import PROMPTS, by_transformers, model

import heads
from echelon import LLM, ConfigError, SamplingParams
from echelon.batch import Span
from echelon.drafters.heads import HeadDrafter, _HeadFrontier
from echelon.heads.checkpoints import build_head, save_head
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache, LayerShape
from echelon.model import pack as unpadded
from echelon.model.attention import CONTEXT_KEYWORD, CachedAttention
from echelon.model.patches.rope import coded_positions
from echelon.ops.compiled import is_built
from echelon.stats import StepRecord

NUM_TOKENS, ASKED_AT = 28, 1 if toys.PROVE else 7
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "min_p": 0.01},
}
TREES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain", "num_speculative_tokens": 4},
    "static": {"tree": "static", "num_speculative_tokens": 12},
    "dynamic": {"tree": "dynamic", "num_speculative_tokens": 10, "tree_top_k": 3, "tree_depth": 4},
}
CELLS = [(kind, tree, mode) for kind in heads.KINDS for tree in TREES for mode in MODES]


@cache
def target() -> Any:
    return toys.llama()


def params(mode: str, **changes: Any) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=NUM_TOKENS, seed=100 + i, **(MODES[mode] | changes)) for i in range(len(toys.PROMPT_LENGTHS))]


@cache
def truth(mode: str) -> list[list[int]]:
    """Plain decoding, each row alone."""
    llm = LLM(toys.adopted(target()), max_num_seqs=1, kv_cache_memory_bytes=1 << 21)
    return [llm.generate([p], [q])[0].outputs[0].token_ids for p, q in zip(toys.prompts(), params(mode), strict=True)]


@cache
def head(kind: str, mode: str) -> heads.Knowing:
    return heads.Knowing(heads.KINDS[kind](target()), truth(mode), toys.VOCABULARY).eval()


def head_llm(kind: str, tree: str, mode: str, **settings: Any) -> LLM:
    own = head(kind, mode)
    config = {"method": own.method, **TREES[tree]}
    settings = {"block_size": 8, "kv_cache_memory_bytes": 1 << 22} | settings
    llm = toys.watch(LLM(toys.adopted(target()), config, draft_head=own, **settings))
    return checked(llm) if settings.get("max_num_seqs", 3) == 3 else llm


def drafter_of(llm: LLM) -> HeadDrafter:
    drafter = llm.engine.drafter.unguarded  # type: ignore[attr-defined]
    assert isinstance(drafter, HeadDrafter)
    return drafter


def checked(llm: LLM) -> LLM:
    """Whenever the head has read what waited of a row, its state is that of the whole text, read at once; `num_compared` on the drafter
    counts them. A wall stands around a drafter, so what is wrong is said outside of it, after the step.
    """
    drafter: Any = drafter_of(llm)
    read_waiting, stale = drafter._read, list[int]()
    drafter.num_compared = 0

    def compared(numbers: SequenceOf[int]) -> None:
        read_waiting(numbers)
        for sequence in [s for s in llm.engine.scheduler.running if s.id in numbers and (len(s) + s.id) % ASKED_AT == 0]:
            known, state = drafter._states.get(sequence.id, (-1, None))
            if state is not None and known == len(sequence) == llm.engine.target.num_cached(sequence.id) + 1:
                expected = from_scratch(llm, sequence.tokens)
                drafter.num_compared += 1
                stale.extend([] if torch.allclose(state.float(), expected.float(), rtol=1e-3, atol=1e-3) else [len(sequence)])

    def said(_: StepRecord) -> None:
        assert not stale, "a stale state"

    drafter._read = compared
    llm.engine.observers.append(said)
    return llm


def from_scratch(llm: LLM, tokens: list[int], path: SequenceOf[int] = ()) -> torch.Tensor:
    """The head's last state when target and head read `tokens` at once and then `path` as a chain, with caches of their own."""
    target, drafter = llm.engine.target, drafter_of(llm)
    reader, head = target.hidden_state_reader, drafter.head
    assert reader is not None
    length = len(tokens) - 1
    with torch.inference_mode(), reader.reading() as found:
        batch, step = read(target.cache, tokens[:-1], len(tokens))
        positions = coded_positions(batch, target.loaded.original_context)
        inputs = {"input_ids": batch.tokens[None], "position_ids": positions[None]}
        target.loaded.model(**inputs, use_cache=False, **{CONTEXT_KEYWORD: step})
    features = reader.joined(found, length)
    with torch.inference_mode():
        step = None if drafter.cache is None else read(drafter.cache, tokens[1:])[1]
        state = head.encode(features, torch.tensor(tokens[1:]), torch.arange(length), **({CONTEXT_KEYWORD: step} if step else {}))[-1:]
        for place, token in enumerate(path, length):
            assert step is not None
            batch = unpadded.pack([Span(0, place, [token], 0, length, 1)], step.cache.tables)
            keywords = {CONTEXT_KEYWORD: CachedAttention(batch, step.cache)}
            state = head.extend(state, torch.tensor([token]), torch.tensor([place]), 1 + place - length, **keywords)
        return state[0]


def read(cache: Any, tokens: list[int], text_len: int = 0) -> tuple[Any, CachedAttention]:
    """A batch of these tokens, of a text of `text_len` (by default all of it), and a step that answers with a cache laid out like `cache`,
    with some room left.
    """
    shapes = [LayerShape(k.shape[1], k.shape[3], v.shape[3]) for k, v in zip(cache.keys, cache.values, strict=True)]
    count = (len(tokens) + 8) // 8 + 1
    tables = BlockTables(count, 8, count)
    own = KVCache(shapes, tables, cache.keys[0].dtype, torch.device("cpu"))
    assert tables.reserve(0, len(tokens) + 8)
    batch = unpadded.pack([Span(0, 0, tokens, 1, text_len or len(tokens))], tables)
    return batch, CachedAttention(batch, own)


def generated(llm: LLM, given: list[list[int]], asked: list[SamplingParams]) -> list[list[int]]:
    outputs = [o.token_ids for r in llm.generate(given, asked) for o in r.outputs]
    toys.assert_all_blocks_free(llm)
    assert not drafter_of(llm)._states
    return outputs


@pytest.mark.parametrize("batch_size", [1, 3, 8, 17])
@pytest.mark.parametrize(("kind", "tree", "mode"), CELLS)
def test_heads_change_no_token(kind: str, tree: str, mode: str, batch_size: int) -> None:
    llm = head_llm(kind, tree, mode, max_num_seqs=batch_size)
    rows = toys.few(batch_size == 1)
    assert generated(llm, toys.prompts()[rows], params(mode)[rows]) == truth(mode)[rows]
    assert llm.stats.tokens_per_step > 1.1, "the head should be right sometimes"
    assert llm.stats.acceptance_rate < 1.0
    assert batch_size != 3 or drafter_of(llm).num_compared > 10  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "tree", "mode"), CELLS)
def test_preemption_at_every_step_changes_no_token(kind: str, tree: str, mode: str) -> None:
    llm = head_llm(kind, tree, mode, max_num_seqs=3)
    scheduler = llm.engine.scheduler

    num_thrown_out = 0

    def preempt(_: StepRecord) -> None:
        nonlocal num_thrown_out
        if len(scheduler.running) > 1:
            num_thrown_out += 1
            llm.engine.drafter.forget(scheduler._preempt().id)

    llm.engine.observers.append(preempt)
    asked = [p.model_copy(update={"max_tokens": 10}) for p in params(mode)][:12]
    assert generated(llm, toys.prompts()[:12], asked) == [t[:10] for t in truth(mode)[:12]]
    assert num_thrown_out > 10


@pytest.mark.parametrize("kind", ["autoregressive", "independent"])
def test_moves_that_wait_while_blocks_change_hands_change_no_token(kind: str) -> None:
    """What was accepted of a tree moves into line with the next pass, before which rows may be thrown out and their blocks given away."""
    own = head(kind, "sampled")
    config = {"method": own.method, **TREES["dynamic"]}
    block_bytes = head_llm(kind, "dynamic", "sampled").memory_plan.block_bytes
    settings = {"block_size": 4, "max_num_seqs": 8, "kv_cache_memory_bytes": block_bytes * 20}
    llm = toys.watch(LLM(toys.adopted(target()), config, draft_head=own, **settings), are_settled=False)
    assert generated(llm, toys.prompts(), params("sampled")) == truth("sampled")
    assert llm.stats.num_preemptions > 0


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", heads.KINDS)
def test_a_full_pool_changes_no_token(kind: str, tree: str) -> None:
    block_bytes = head_llm(kind, tree, "sampled").memory_plan.block_bytes
    llm = head_llm(kind, tree, "sampled", max_num_seqs=8, kv_cache_memory_bytes=block_bytes * 20)
    assert generated(llm, toys.prompts(), params("sampled")) == truth("sampled")
    assert llm.stats.num_preemptions > 0


@pytest.mark.parametrize(("chunk", "rows"), [(1, 1), (7, 4), (64, 8)])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", heads.KINDS)
def test_prompts_in_pieces_change_no_token(kind: str, tree: str, chunk: int, rows: int) -> None:
    llm = head_llm(kind, tree, "sampled", max_num_seqs=rows, max_num_batched_tokens=chunk)
    fed = toys.few(chunk == 1)
    assert generated(llm, toys.prompts()[fed], params("sampled")[fed]) == truth("sampled")[fed]
    assert llm.stats.num_draft_tokens > 0


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", heads.KINDS)
def test_stop_tokens_inside_an_accepted_path(kind: str, tree: str) -> None:
    for place in (1, 3):
        stops = [(t[min(place, len(t) - 1)],) for t in truth("greedy")]
        expected = [t[: t.index(s[0]) + 1] for t, s in zip(truth("greedy"), stops, strict=True)]
        asked = [p.model_copy(update={"stop_token_ids": s}) for p, s in zip(params("greedy"), stops, strict=True)]
        assert generated(head_llm(kind, tree, "greedy", max_num_seqs=8), toys.prompts(), asked) == expected


@pytest.mark.parametrize(("lengths", "count", "chunk"), [((33, 17), 4, 2048), ((5, 5, 9), 3, 8)], ids=["whole", "in pieces"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", heads.KINDS)
def test_samples_of_one_prompt_share_what_the_head_read(kind: str, tree: str, lengths: tuple[int, ...], count: int, chunk: int) -> None:
    """In pieces of one token, too, the last of which comes just before the samples part."""
    params = SamplingParams(max_tokens=20, n=count, **MODES["sampled"])
    given, asked = toys.prompts(lengths), [params.model_copy(update={"seed": seed}) for seed in range(len(lengths))]
    expected = [o.token_ids for r in LLM(toys.adopted(target())).generate(given, asked) for o in r.outputs]
    llm = head_llm(kind, tree, "sampled", max_num_seqs=8, max_num_batched_tokens=chunk)
    drafted: dict[int, int] = {}

    def noted(step: StepRecord) -> None:
        for row, kept in zip(step.rows, step.verdict, strict=True):
            drafted[row.sequence.id] = drafted.get(row.sequence.id, 0) + kept.num_draft_tokens

    llm.engine.observers.append(noted)
    assert generated(llm, given, asked) == expected
    assert len(drafted) == count * len(lengths)
    assert min(drafted.values()) > 0, "a sample was never drafted for"


CHANGES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {5: 3.0}, "min_tokens": 4},
    "few": {"allowed_token_ids": tuple(range(3, 9))},
    "no draft": {"num_speculative_tokens": 0},
    "small draft": {"num_speculative_tokens": 2},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("change", CHANGES)
def test_requests_of_their_own_kind(change: str, tree: str, mode: str) -> None:
    """Parameters that change logits along a path, and budgets of single rows, beside others."""
    asked = [p.model_copy(update=CHANGES[change]) if i % 2 else p for i, p in enumerate(params(mode))]
    asked = [p.model_copy(update={"max_tokens": 12}) for p in asked]
    expected = [
        LLM(toys.adopted(target())).generate([p], [q])[0].outputs[0].token_ids for p, q in zip(toys.prompts()[:8], asked[:8], strict=True)
    ]
    assert generated(head_llm("autoregressive", tree, mode, max_num_seqs=5), toys.prompts()[:8], asked[:8]) == expected


@pytest.mark.parametrize("kind", heads.KINDS)
def test_after_a_fault_rows_go_on_and_are_drafted_for_once_read_anew(kind: str) -> None:
    """What the rows of that step had read is lost; those that are read from their start again, and new ones, are drafted for."""
    own = head(kind, "greedy")
    llm = checked(
        toys.watch(LLM(toys.adopted(target()), {"method": own.method, **TREES["chain"]}, draft_head=own, max_num_seqs=4), is_faulty=True)
    )
    drafter, calls = drafter_of(llm), 0
    observe: Callable[..., None] = drafter.observe

    def faulty(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise RuntimeError("out of luck")
        observe(*arguments)

    drafter.observe = faulty  # type: ignore[method-assign]
    assert generated(llm, toys.prompts(), params("greedy")) == truth("greedy")
    assert llm.stats.drafter_faults == {"raised": 1}
    assert llm.stats.num_draft_tokens > 100


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
def test_a_drafted_nodes_state_is_that_of_its_path_alone(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head with attention sees the text and the node's own ancestors, whichever pass they were fed in."""
    llm = head_llm("autoregressive", tree, "greedy", max_num_seqs=3)
    extend, num_compared = _HeadFrontier.extend, 0

    def compared(frontier: _HeadFrontier, nodes: Any, depth: int) -> None:
        nonlocal num_compared
        extend(frontier, nodes, depth)
        for i, node in enumerate(nodes.tolist()):
            if (node + len(nodes)) % 5 == 0:
                tokens = frontier.rows[int(frontier.forest.rows[node])].sequence.tokens
                expected = from_scratch(llm, tokens, frontier.forest.path(node))
                assert torch.allclose(frontier._states[frontier.at[i]], expected, rtol=1e-3, atol=1e-3)
                num_compared += 1

    monkeypatch.setattr(_HeadFrontier, "extend", compared)
    asked = [p.model_copy(update={"max_tokens": 12}) for p in params("greedy")]
    assert generated(llm, toys.prompts()[:6], asked[:6]) == [t[:12] for t in truth("greedy")[:6]]
    assert num_compared > 10


@pytest.mark.skipif(not is_built(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("batch_size", [3, 17])
@pytest.mark.parametrize(("kind", "tree", "mode"), CELLS)
def test_bfloat16_on_the_kernels(kind: str, tree: str, mode: str, batch_size: int) -> None:
    served = toys.adopted(_bfloat16())
    expected = _plain(mode)
    own = heads.Knowing(heads.KINDS[kind](_bfloat16()), expected, toys.VOCABULARY).eval()
    llm = LLM(
        served, {"method": own.method, **TREES[tree]}, draft_head=own, max_num_seqs=batch_size, block_size=8, kv_cache_memory_bytes=1 << 22
    )
    assert generated(toys.watch(llm), toys.prompts(), params(mode)) == expected
    assert llm.stats.tokens_per_step > 1.1


@cache
def _bfloat16() -> Any:
    return toys.llama().bfloat16()


@cache
def _plain(mode: str) -> list[list[int]]:
    llm = LLM(toys.adopted(_bfloat16()), max_num_seqs=4)
    return [r.outputs[0].token_ids for r in llm.generate(toys.prompts(), params(mode))]


def test_without_a_drafter_that_asks_nothing_is_tapped() -> None:
    llm = LLM(toys.adopted(target()), {"method": "ngram", "num_speculative_tokens": 5})
    llm.generate(toys.prompts((5,)), SamplingParams(max_tokens=4, temperature=0.0))
    assert llm.engine.target.hidden_state_reader is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in llm.target.model.modules())


def test_the_pool_counts_the_heads_keys_and_values() -> None:
    plain = LLM(toys.adopted(target())).memory_plan.block_bytes
    assert head_llm("independent", "chain", "greedy", block_size=16).memory_plan.block_bytes == plain
    assert head_llm("autoregressive", "chain", "greedy", block_size=16).memory_plan.block_bytes == plain + 16 * 2 * 2 * 16 * 4 + 64 * 4


PUBLISHED: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 3},
    "clover": {"num_heads": 3},
    "clover2": {},
    "eagle": {"bias": True},
    "eagle3": {"draft_vocab_size": 40, "depths": (0, 1, 1)},
    "scylla": {"num_layers": 2},
}


@cache
def published(method: str) -> Any:
    """A head of random weights on a served target, which it shares the output layer with."""
    served = toys.adopted(target())
    torch.manual_seed(1)
    own: Any = build_head(method, served.model, **PUBLISHED[method])
    if method == "eagle3":
        own.choose_vocabulary(torch.arange(toys.VOCABULARY) * 7 % toys.VOCABULARY)
    return served, own.eval().requires_grad_(False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("method", PUBLISHED)
def test_published_architectures_change_no_token(method: str, tree: str, mode: str) -> None:
    served, own = published(method)
    llm = checked(toys.watch(LLM(served, {"method": method, **TREES[tree]}, draft_head=own, max_num_seqs=5, kv_cache_memory_bytes=1 << 22)))
    asked = [p.model_copy(update={"max_tokens": 16}) for p in params(mode)]
    assert generated(llm, toys.prompts()[:8], asked[:8]) == [t[:16] for t in truth(mode)[:8]]
    assert llm.stats.num_draft_tokens > 50


def test_a_head_is_loaded_by_its_folder(tmp_path: Path) -> None:
    served, own = published("eagle")
    save_head(own, tmp_path, served.model)
    llm = checked(LLM(served, {"method": "eagle", "model": str(tmp_path), **TREES["dynamic"]}, kv_cache_memory_bytes=1 << 22))
    asked = [p.model_copy(update={"max_tokens": 16}) for p in params("greedy")]
    assert generated(llm, toys.prompts()[:4], asked[:4]) == [t[:16] for t in truth("greedy")[:4]]
    assert llm.stats.num_draft_tokens > 50


def on_architecture(name: str, tree: str, **settings: Any) -> LLM:
    """A head of chance on one of the decoders, every step checked."""
    served = toys.adopted(model(name))
    torch.manual_seed(1)
    own = build_head("eagle", served.model).eval() if name != "opt-350m" else heads.Knowing(Last(served.model), [], 80)
    config = {"method": own.method, **TREES[tree]}
    return checked(toys.watch(LLM(served, config, draft_head=own, max_num_seqs=4, kv_cache_memory_bytes=1 << 22, **settings)))


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
@pytest.mark.parametrize("name", ["gemma3", "gpt2", "phi3-longrope", "opt-350m"])
def test_heads_on_other_architectures(name: str, tree: str) -> None:
    """Windows, tied layers, and texts whose keys change past a length; ids are those of transformers."""
    llm = on_architecture(name, tree)
    assert generated(llm, PROMPTS, [DECODED] * len(PROMPTS)) == by_transformers(name)
    assert llm.stats.num_draft_tokens > 50


@pytest.mark.parametrize("piece", [4, 5, 6, 7, 8, 9, 11, 13, 16])
def test_a_text_is_read_anew_in_pieces_of_any_size(piece: int) -> None:
    llm = on_architecture("phi3-longrope", "chain", max_num_batched_tokens=piece)
    assert generated(llm, PROMPTS, [DECODED] * len(PROMPTS)) == by_transformers("phi3-longrope")


class Last(heads.Independent):
    """Any target's last hidden state, whatever its width."""


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no folder": ({"method": "eagle"}, {}, "needs the key 'model'"),
    "rejection": ({"method": "eagle", "model": "x", "acceptance": "rejection"}, {}, "defined on chains"),
    "tree without a head": ({"method": "ngram", "tree": "dynamic"}, {}, "drafts chains"),
    "paths without a tree": ({"method": "medusa", "model": "x", "speculative_token_tree": [[0]]}, {}, "needs tree = 'static'"),
    "words": ({"method": "medusa", "model": "x", "tree": "static", "speculative_token_tree": "[(0,), oak]"}, {}, "is no list of paths"),
    "no paths": ({"method": "medusa", "model": "x", "tree": "static", "speculative_token_tree": "[]"}, {}, "has no paths"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_makes_no_sense_is_refused(case: str) -> None:
    config, settings, reason = BAD[case]
    with pytest.raises(ConfigError, match=reason):
        LLM(toys.adopted(target()), config, **settings)


def test_heads_that_do_not_fit_are_refused() -> None:
    own = head("independent", "greedy")
    with pytest.raises(ConfigError, match="not 'eagle'"):
        LLM(toys.adopted(target()), {"method": "eagle"}, draft_head=own)
    with pytest.raises(ConfigError, match="does not fit"):
        LLM(toys.adopted(toys.llama(hidden_size=32)), {"method": "medusa"}, draft_head=own)
    with pytest.raises(ConfigError, match="logits"):
        LLM(toys.adopted(toys.llama(vocab_size=97)), {"method": "medusa"}, draft_head=own)
    tree = {"tree": "static", "speculative_token_tree": "[(0, 0), (0,)]"}
    with pytest.raises(ConfigError, match="does not come after"):
        LLM(toys.adopted(target()), {"method": "medusa", **tree}, draft_head=own)


def test_a_tree_in_vllms_words() -> None:
    paths = "[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]"
    own = head("autoregressive", "greedy")
    config = {"method": "eagle", "num_speculative_tokens": 5, "tree": "static", "speculative_token_tree": paths}
    llm = LLM(toys.adopted(target()), config, draft_head=own)
    assert generated(llm, toys.prompts((9,)), [SamplingParams(max_tokens=8, temperature=0.0)])
    assert {drafted for drafted, _ in llm.stats.acceptance} <= {0, 1, 2, 3, 4, 5}
    assert max(drafted for drafted, _ in llm.stats.acceptance) == 5


@pytest.mark.parametrize("kind", ["independent", "autoregressive"])
def test_typical_acceptance_says_that_it_is_lossy(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Greedy rows are as ever; others keep more than the exact rule does, and are another text."""
    own = head(kind, "sampled")
    config = {"method": own.method, **TREES["dynamic"], "acceptance": "typical"}
    llm = toys.watch(LLM(toys.adopted(target()), config, draft_head=own, max_num_seqs=8, kv_cache_memory_bytes=1 << 22))
    assert "LOSSY" in caplog.text
    assert "LOSSY" in llm.get_counters()["acceptance"]
    assert "LOSSY" in llm.generate(toys.prompts((3,)), SamplingParams(max_tokens=2))[0].metrics.acceptance
    assert generated(llm, toys.prompts(), params("greedy")) == truth("greedy")
    outputs = generated(llm, toys.prompts(), params("sampled"))
    assert outputs != truth("sampled")
    assert [len(o) for o in outputs] == [len(t) for t in truth("sampled")]
    assert outputs == generated(llm, toys.prompts(), params("sampled")), "the seed decides"


@pytest.mark.parametrize("kind", heads.KINDS)
def test_passes_of_heads_are_counted_as_those_of_draft_models(kind: str) -> None:
    """In a step of a chain of 4: a pass for each of its last three tokens, and one that reads what was kept, from which the next begins."""
    llm = head_llm(kind, "chain", "greedy", max_num_seqs=1)
    counts: list[tuple[int, int]] = []
    llm.generate(
        toys.prompts((9,)),
        SamplingParams(max_tokens=20, temperature=0.0),
        on_step=lambda: counts.append((llm.stats.draft.num_passes, llm.stats.draft.num_tokens)),
    )
    passes, tokens = (after - before for before, after in zip(counts[1], counts[2], strict=True))
    assert passes == 4
    assert tokens == 4 if kind == "independent" else 4 <= tokens <= 8
    assert llm.stats.draft.num_inputs == llm.stats.draft.num_tokens
    assert (llm.stats.draft.kv_bytes_touched > 0) == (kind != "independent")
    assert all(seconds > 0 for seconds in llm.stats.seconds.values())

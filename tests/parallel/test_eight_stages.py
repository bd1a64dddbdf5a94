"""SpecMemo's way to run (arXiv 2506.01986), for real: stages, a Medusa head and its trees, against plain decoding in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import toys

import heads
from echelon import LLM, SamplingParams
from echelon.heads.checkpoints import build_head
from echelon.ops import compiled
from echelon.parallel import stages

pytestmark = pytest.mark.skipif(not compiled.is_built(), reason="stages need the compiled kernels")
BATCHES = (1, 2, 4, 8, 10)
PROMPTS = toys.prompts((3, 11, 1, 20, 5, 7, 13, 2, 9, 6))
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True, logprobs=1) for i in range(len(PROMPTS))]
TREE: dict[str, Any] = {"method": "medusa", "tree": "static", "num_speculative_tokens": 12}
SETTINGS: dict[str, Any] = {"max_num_seqs": 10, "kv_cache_memory_bytes": 1 << 22, "enable_prefix_caching": False}


def said(llm: LLM, batch: int) -> list[Any]:
    outputs = llm.generate(PROMPTS[:batch], PARAMS[:batch], use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.mark.parametrize("size", [8, 4] if toys.PROVE else [2])
def test_medusas_trees_in_stages_say_what_plain_decoding_says(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every batch of its table, in fewer steps; rows take turns, and prompts are read in micro-batches."""
    monkeypatch.setattr(stages, "FEWEST_TOKENS", 16)
    model = toys.llama(num_hidden_layers=8)
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        plain = {batch: said(llm, batch) for batch in BATCHES}
    texts = [prompt + ids for prompt, (ids, _) in zip(PROMPTS, plain[10], strict=True)]
    head = heads.Knowing(build_head("medusa", model, num_heads=3), texts, toys.VOCABULARY)
    cuts: list[int] = []
    row_ends = stages.row_ends

    def noted(*arguments: Any) -> list[int]:
        cuts.append(len(ends := row_ends(*arguments)))
        return ends

    monkeypatch.setattr(stages, "row_ends", noted)
    under_way: list[int] = []
    with LLM(str(tmp_path), TREE, draft_head=head, pipeline_parallel_size=size, **SETTINGS) as llm:
        llm.engine.observers.append(lambda _: under_way.append(1 + len(llm.engine.in_flight)))
        for batch in BATCHES:
            steps, accepted = llm.stats.num_row_steps, llm.stats.num_accepted_tokens
            assert said(llm, batch) == plain[batch], batch
            assert llm.stats.num_accepted_tokens - accepted > batch
            assert llm.stats.num_row_steps - steps < 24 * batch
        assert max(under_way) == llm.engine.target.group.most_at_work  # type: ignore[attr-defined]
    assert max(cuts) > 1 and min(cuts) == 1

"""Rotary embeddings by table: the bits of the module's own forward, and only where they depend on the position alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys
import transformers as tr
from torch import Tensor

from echelon.model.patches import PatchedForward, rotary_tables
from echelon.model.patches.rotary_tables import num_positions, table_bytes, tables_of, tabulate_rotary
from echelon.ops import compiled

pytestmark = pytest.mark.skipif(not compiled.is_built(), reason="where no kernel serves, nothing is patched")
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 40},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 40},
    "dynamic": {"factor": 4.0},
}
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}


def model(kind: str, most: int = 160) -> Any:
    rope = {"rope_type": kind, "rope_theta": 1e4, **KINDS[kind]}
    return toys.randomised(tr.LlamaForCausalLM, tr.LlamaConfig(**SIZES, max_position_embeddings=most, rope_parameters=rope), 0, 0.25)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lookups_have_the_bits_of_the_forward(kind: str, dtype: torch.dtype) -> None:
    served = model(kind).to(dtype)
    rotary, predicted = served.model.rotary_emb, table_bytes(served, dtype)
    own = rotary.forward
    tabulate_rotary(served)
    assert isinstance(vars(rotary).get("forward"), PatchedForward)
    assert sum(t.nbytes for t in tables_of(served)) == predicted > 0
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 7, 33, 160):
        positions = torch.randint(0, num_positions(rotary), (1, count), generator=generator, dtype=torch.int32)
        x = torch.empty(1, count, 64, dtype=dtype)
        for a, b in zip(own(x, positions), rotary(x, position_ids=positions), strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype and a.shape == b.shape


def test_a_pass_beyond_the_table_computes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary_tables, "TABULATED", 8)
    served = model("default")
    rotary = served.model.rotary_emb
    own = rotary.forward
    tabulate_rotary(served)
    assert [len(table) for table in tables_of(served)] == [8, 8]
    x = torch.empty(1, 3, 64)
    for positions in ([[0, 7, 3]], [[0, 8, 3]], [[150, 8, 159]]):
        for a, b in zip(own(x, torch.tensor(positions)), rotary(x, torch.tensor(positions)), strict=True):
            assert torch.equal(a, b)


def test_what_depends_on_more_than_the_position_has_no_table() -> None:
    assert not tables_of(tabulated(model("dynamic")))
    lengthwise = model("default")
    own = lengthwise.model.rotary_emb.forward

    class Lengthwise(type(lengthwise.model.rotary_emb)):  # type: ignore[misc]
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = own(x, position_ids)
            return cos * (1.0 if int(position_ids.max()) == 159 else 0.5), sin

    lengthwise.model.rotary_emb.__class__ = Lengthwise
    assert not tables_of(tabulated(lengthwise)), "the trial sees what a pass with other neighbours gets"


def tabulated(served: Any) -> Any:
    tabulate_rotary(served)
    return served

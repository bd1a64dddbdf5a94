"""What integers cost and bring, in small: every cell's record and its table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import quantised
from benchmarks.cells import Records
from echelon.bench import shapes, step
from echelon.ops import compiled

pytestmark = pytest.mark.skipif(not compiled.is_built(), reason="the compiled kernels are not built")


def test_quality_is_measured_beside_bfloat16() -> None:
    record = quantised.quality("embedded", 2, 48)
    assert set(record["loss"]) == {f"{kind}, {kv}" for kind in quantised.KINDS for kv in ("auto", "int8")}
    assert record["agreement"]["None, auto"] == 1.0 and record["tokens"] == 2 * 47
    assert all(0.7 < share <= 1.0 for share in record["agreement"].values())
    base = record["loss"]["None, auto"]
    assert all(abs(loss / base - 1) < 0.2 for loss in record["loss"].values()) and len(set(record["loss"].values())) == 6
    lines = quantised.quality_lines(record)
    assert lines[0][:2] == ("bfloat16", "bfloat16") and lines[-1][:2] == ("int4", "int8")


def test_speed_and_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(shapes.SHAPES, quantised.SHAPE, lambda: shapes.llama(512, 1024, 2, 8, 4))
    monkeypatch.setattr(quantised, "CONTEXT", 8)
    monkeypatch.setattr(quantised, "ROUNDS", 1)
    record = quantised.speed()
    assert record["layers"]["None"] == 1.0
    for kind, most in quantised.MOST_BYTES.items():
        assert record["layers"][kind] < most + 0.2, "of layers as narrow as these the output layer is most"
        assert record["model"][kind] < 1.0
    lines = quantised.speed_lines("avx2", record)
    assert [line[0] for line in lines] == [f"{kind}, {n}" for kind in ("int8", "int4") for n in quantised.WIDTHS]
    assert [line[4] for line in lines[:3]] == ["≥ 1.7", "≥ 1.2", "≥ 1.2"]
    Records(tmp_path).write("speed_avx2", record | {"environment": environment()})
    text = "\n".join(quantised.quantised_part(tmp_path))
    assert "times as fast" in text and "Bytes over those of bfloat16" in text


def environment() -> dict[str, str]:
    return dict.fromkeys(("cpu", "isa", "threads", "torch", "transformers", "python", "commit"), "x")


def test_limits_name_what_is_met() -> None:
    result = {"tokens": 8, "milliseconds": 12.0, "reading": 10.0, "arithmetic": 1.0}
    lines = quantised.limit_lines({"results": {"int8": [result, result | {"tokens": 512, "arithmetic": 9.0}]}})
    assert [line[4:] for line in lines] == [("1.20", "≤ 1.25", "yes"), ("1.20", "≤ 1.15", "**no**")]


def test_rounding_of_activations_is_told_apart_from_that_of_weights(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    record = quantised.rounding(2, 48)
    assert len(set(record["loss"].values())) == 3 and 0.8 < record["agreement"] <= 1.0
    Records(tmp_path).write("rounding_embedded", record | {"environment": environment()})
    assert f"{record['agreement']:.1%} are the same" in "\n".join(quantised.quantised_part(tmp_path))


def test_texts_of_every_family_are_beside_those_of_one(tmp_path: Path) -> None:
    record = quantised.texts(3, 8)
    families = compiled.offered_isas()
    assert set(record["results"]) == {f"{kind}, {family}" for kind in ("int8", "int4") for family in families}
    assert all(r["faults"] == 0 for r in record["results"].values())
    assert compiled.isa() == families[-1], "the family is put back"
    for kind in ("int8", "int4"):
        assert record["results"][f"{kind}, {quantised.REFERENCE}"]["equal"] == 3
    Records(tmp_path).write("texts_embedded", record | {"environment": environment()})
    assert f"rows with the text of {quantised.REFERENCE}" in "\n".join(quantised.quantised_part(tmp_path))


def test_a_product_that_saturates_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On AVX2 the framework adds two products in 16 bits, and most of its sums are wrong: that rate is no aim for sums that are right."""

    def saturating(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        unsigned = x.int() + 128
        pairs = (unsigned.unflatten(1, (-1, 2)).unsqueeze(1) * y.int().t().unflatten(1, (-1, 2))).sum(-1)
        return pairs.clamp(-(2**15), 2**15 - 1).sum(-1, dtype=torch.int32) - 128 * y.sum(0, dtype=torch.int32)

    ones = torch.ones(32, 64, dtype=torch.int8)
    assert torch.equal(saturating(ones, ones.t()), torch.full((32, 32), 64, dtype=torch.int32))  # small ones are right
    for product, is_right in ((saturating, False), (lambda x, y: x.int() @ y.int(), True)):
        monkeypatch.setattr(torch, "_int_mm", product)
        assert step._is_exact(ones, ones.t()) is is_right

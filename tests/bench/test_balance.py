"""Scylla's law: k_opt is where operations a byte meet the machine's balance, and the published curve is the published curve."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import toys
from test_bench import run

from echelon.bench.balance import H800_BALANCE, QWEN_72B, Balance, BalancePoint, ModelShape, numbers_of, published_k_opt, shape_of
from echelon.bench.kernels import Machine

SHAPE = ModelShape(weights=1000, activations=60, query_size=16, cache_size=8, bytes_each=2)


def test_the_published_curve() -> None:
    assert [round(published_k_opt(b)) for b in (1, 2, 4, 8, 16, 32, 64)] == [477, 243, 125, 66, 37, 22, 14]


def test_the_large_shape_has_72_billion_parameters() -> None:
    assert 70e9 < QWEN_72B.weights < 73e9
    assert 250 < QWEN_72B.k_opt(1, 0, H800_BALANCE) < 400


def test_k_opt_is_where_intensity_meets_balance_and_falls_with_the_batch() -> None:
    found = [SHAPE.k_opt(b, 10, 4.0) for b in (1, 2, 4)]
    assert found == sorted(found, reverse=True)
    for b, k in zip((1, 2, 4), found, strict=True):
        assert SHAPE.intensity(b, k, 10) == pytest.approx(4.0, rel=1e-3)
    assert SHAPE.k_opt(1, 10, 0.1) == 1.0
    assert math.isinf(SHAPE.k_opt(1, 10, 1e6))


def test_operations_and_bytes_are_those_of_a_step() -> None:
    assert SHAPE.flops(2, 3, 10) == 2 * 6 * 1000 + 2 * 6 * 12 * 16
    assert SHAPE.bytes(2, 3, 10) == 2 * (1000 + 2 * 13 * 8 + 6 * 60)


def test_the_shape_of_a_model() -> None:
    loaded = toys.adopted(toys.llama())
    config, found = loaded.model.config, shape_of(loaded)
    linear = sum(m.in_features * m.out_features for m in toys.llama().modules() if hasattr(m, "in_features"))
    assert found.weights == linear
    size = config.hidden_size // config.num_attention_heads
    assert found.query_size == config.num_hidden_layers * config.num_attention_heads * 2 * size
    assert found.cache_size == config.num_hidden_layers * config.num_key_value_heads * 2 * size


def test_the_measured_one_is_where_flat_meets_rising() -> None:
    points = [BalancePoint(1, k, max(10.0, 2.0 * k), 1.0) for k in (1, 2, 4, 8, 16)]
    found = Balance(Machine(10.0, 10.0, 100.0), SHAPE, 10, points)
    assert found.balance == 10.0
    assert found.measured(1) == pytest.approx(5.0)
    flat = replace(found, points=[replace(p, milliseconds=1.0) for p in points])
    assert math.isinf(flat.measured(1))
    assert math.isnan(replace(found, points=points[:2]).measured(1))
    assert numbers_of(1)[-1] == 256
    assert numbers_of(128) == [1, 2, 4]


def test_the_verb_writes_tables_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    toys.llama().save_pretrained(tmp_path / "toy")
    monkeypatch.setattr("echelon.bench.kernels.COLD_BYTES", 1 << 20)
    out = tmp_path / "out"
    code, said, _ = run(
        capsys, monkeypatch, "balance", tmp_path / "toy", "--batch-sizes", "1,64", "--context", 8, "--rounds", 1, "--output", out
    )
    assert code == 0
    assert "k_opt, measured" in said
    assert "477" in said
    assert {p.name for p in out.iterdir()} == {"balance.json", "balance.md", "balance.png", "intensity.png"}
    assert [b["batch_size"] for b in json.loads((out / "balance.json").read_text())["k_opt"]] == [1, 64]


def test_a_cost_table_is_written_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    toys.llama().save_pretrained(tmp_path / "toy")
    file = tmp_path / "costs.json"
    code, said, _ = run(capsys, monkeypatch, "step", tmp_path / "toy", "--cost-table", file, "--max-num-seqs", 4)
    assert code == 0
    assert "a step, ms by its tokens: 1:" in said
    assert json.loads(file.read_text())["table"]["step"]["tokens"][0] == 1

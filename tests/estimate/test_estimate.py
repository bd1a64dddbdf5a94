"""Rooflines, stages and drafts on paper, against values worked out by hand; more of anything is never slower."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import toys

from benchmarks.stages import WaitingCluster
from echelon import ConfigError, EngineConfig
from echelon.estimate.devices import Device, Work, device_named, read_devices
from echelon.estimate.drafting import Acceptance, DraftingCost, acceptance_of, counted_head, drafting_of
from echelon.estimate.layout import Gather, Held, Pass, StagePart, model_parts, split_among
from echelon.estimate.paper_plan import PaperPlan
from echelon.estimate.pipeline import Visit, run_on, run_once
from echelon.estimate.shapes import PaperModel, published_shapes, without_weights
from echelon.estimate.speed import Cluster
from echelon.memory.footprint import Outline
from echelon.methods import method_names
from echelon.speculative_config import SpeculativeConfig

SLOW = Device(memory_gb=1e-6, read_gb=1e-9, tflops={"float32": 1e-12}, link_gb=1e-9, link_us=1e6, source="1 byte, 1 operation a second")
BILLIONS = {"llama-7b": 6.74, "llama-13b": 13.02, "llama-70b": 68.98, "qwen2.5-72b": 72.71, "mixtral-8x7b": 46.70, "opt-6.7b": 6.66}
SPEC = SpeculativeConfig(method="eagle", tree="dynamic", num_speculative_tokens=8)


@cache
def small() -> PaperModel:
    return without_weights("opt-125m")


def whole(planned: PaperModel) -> int:
    return sum(p.numel() for p in planned.model.parameters())


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_shapes_have_the_published_numbers_of_parameters(name: str, billions: float) -> None:
    planned = without_weights(name)
    assert whole(planned) / 1e9 == pytest.approx(billions, abs=0.01)
    assert sum(part.numbers for (part,) in split_among(planned, 1, 4)) == whole(planned)


def test_keys_and_values_of_70_billion_parameters_take_320_kibibytes_a_token() -> None:
    (parts,) = model_parts(without_weights("llama-70b"))
    assert sum(layer.kv_bytes for layer in parts.layers) == 80 * 2 * 8 * 128 * 2 == 320 * 1024


def test_a_layer_by_hand() -> None:
    """100 entries of a linear layer, 20 numbers in and out, heads of 4, 2 of keys and values; 3 rows of 2 tokens after 10, in 4 bytes."""
    held = Held(matrices=100, features=20, query_size=8, kv_bytes=4 * 4, layers=1, gathers=(Gather(30, 10, 4),))
    found = held.seconds(SLOW, "float32", 4, Pass(3, 2, 10))
    linear = max(2 * 6 * 100, 4 * (100 + 6 * 20))
    attention = max(2 * 6 * (10 + 1.5) * 8, 4 * 3 * 12 * 4)
    assert found == pytest.approx({"linear layers": linear, "attention": attention, "gathers": 1 + 6 * 20 * 4})
    for kv_bytes in (16, 6):
        few = replace(held, query_size=1, kv_bytes=kv_bytes)
        assert few.seconds(SLOW, "float32", 4, Pass(3, 1, 1000))["attention"] == 3 * 1001 * kv_bytes, (
            "keys and values in 8 bits are read so"
        )
    assert held.seconds(SLOW.model_copy(update={"layer_us": 5e6}), "float32", 4, Pass(3, 2, 10))["between kernels"] == pytest.approx(5.0)
    assert Gather(30, 10, 4, for_first=True).received(1) == 0


def test_micro_batches_overlap_by_hand() -> None:
    """Two stages of 3 and 2 seconds: one micro-batch takes 5, and of two the second ends 3 later; with travel each way is longer."""
    way = [Visit(0, 3.0), Visit(1, 2.0)]
    assert run_once([way]).seconds == 5.0
    assert run_once([way, way]).seconds == 8.0
    assert run_once([[Visit(0, 3.0, 1.0), Visit(1, 2.0, 1.0)]]).seconds == 7.0
    going = run_on([way, way])
    assert going.seconds == pytest.approx(6.0), "the first stage is always at work"
    assert going.busy[0] == pytest.approx(1.0, abs=0.05) and going.busy[1] == pytest.approx(2 / 3, abs=0.05)


def cluster(stages: int, kind: type[Cluster] = Cluster, device: Device = SLOW) -> Cluster:
    """Every stage takes 120 operations or 60 bytes a step of one token, the output layer 20 or 40."""
    held, output = Held(matrices=60, layers=1), Held(matrices=10)
    parts = [[StagePart(s, 0, held, output if s == 0 else Held())] for s in range(stages)]
    return kind(parts, device, "float32", 3, 1)


def test_a_step_of_stages_by_hand() -> None:
    one = cluster(1)
    assert one.speed(1, 0).seconds == 140.0
    assert one.speed(4, 0).tokens_per_second == pytest.approx(4 / (4 * 140))
    two = cluster(2)
    travel = 1 + 3
    assert two.speed(1, 0).seconds == pytest.approx(2 * 120 + 2 * travel + 20)
    both = two.speed(2, 0, lanes=2)
    assert both.seconds == pytest.approx(2 * (120 + 20), rel=0.01), "the first stage has most to do, and never waits"
    assert both.seconds < two.speed(2, 0, lanes=1).seconds
    assert two.speed(2, 0).lanes == 2
    waiting = cluster(2, WaitingCluster).speed(2, 0, lanes=2)
    assert waiting.seconds == pytest.approx(120 + 120 + travel + 120 + travel + 40), "the second follows one stage behind"


def test_drafts_pay_where_bytes_bind() -> None:
    quick = SLOW.model_copy(update={"tflops": {"float32": 1.0}})
    drafting = DraftingCost((), 0, 3, 2.5)
    plain, speculative = (cluster(1, device=quick).speed(1, 0, d) for d in (None, drafting))
    assert speculative.tokens_per_second == pytest.approx(2.5 * plain.tokens_per_second)
    bound = cluster(1).speed(1, 0, drafting)
    assert bound.tokens_per_second == pytest.approx(2.5 / (4 * 140)), "every drafted token costs what it weighs"


@pytest.mark.parametrize("field", ["read_gb", "link_gb", "tflops"])
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (4, 1), (1, 4)])
def test_more_of_a_device_is_never_slower(field: str, ranks: int, stages: int) -> None:
    device, config = read_devices()["rtx-4090"], EngineConfig(max_num_seqs=8, max_model_len=256)
    value: Any = getattr(device, field)
    more = {name: 1.7 * v for name, v in value.items()} if field == "tflops" else 1.7 * value
    slow, fast = (
        [line.speculative_speed for line in PaperPlan(small(), d, ranks, stages, config, SPEC).speeds()]
        for d in (device, device.model_copy(update={field: more}))
    )
    assert all(b >= a * (1 - 1e-12) for a, b in zip(slow, fast, strict=True))


def test_more_rows_never_come_to_fewer_tokens() -> None:
    for ranks, stages in ((1, 1), (2, 1), (1, 3)):
        plan = PaperPlan(small(), read_devices()["h100"], ranks, stages, EngineConfig(max_num_seqs=64, max_model_len=512), SPEC)
        lines = list(plan.speeds())
        for speeds in ([x.plain.tokens_per_second for x in lines], [x.speculative_speed for x in lines]):
            assert speeds == sorted(speeds)


def test_heads_multiply_by_what_they_hold() -> None:
    """Of 768 numbers: Medusa a block and the output layer a token; EAGLE what joins token and feature, and a decoder layer."""
    size, vocabulary = 768, 50272
    read, extended, output, numbers, kv_bytes = counted_head("medusa", small(), num_heads=3)
    assert (read.matrices, extended.matrices, output.matrices) == (0, 0, size * size + size * vocabulary)
    assert numbers == 3 * (size * size + size) and kv_bytes == 0
    read, extended, output, *_ = counted_head("eagle", small())
    assert read.matrices == extended.matrices == 2 * size * size + 4 * size * size + 3 * size * 3072
    assert output.matrices == size * vocabulary
    acceptance = Acceptance(2.0, 8, True)
    levels = drafting_of(SPEC, small(), acceptance, 8, "auto").levels
    assert sum(level.held.matrices > size * vocabulary for level in levels) == 0
    assert len(levels) == 2 * SPEC.longest_path, "each level goes on, and has logits"


@pytest.mark.parametrize("method", method_names(needs="head"))
def test_every_head_is_counted_by_its_longest_path(method: str) -> None:
    """Heads with a network for each place have one for each of the path, the others none more."""
    deep, shallow = (SpeculativeConfig(method=method, model="head", tree="dynamic", tree_depth=depth) for depth in (5, 2))
    found = [drafting_of(spec, small(), Acceptance(2.0, 8, True), 8, "auto") for spec in (deep, shallow)]
    assert all(drafting.numbers > 0 and drafting.levels for drafting in found)
    assert (found[0].numbers > found[1].numbers) == (method in ("medusa", "clover"))


def test_tokens_a_step_by_drafted_tokens() -> None:
    chain = Acceptance(1 + 0.5 + 0.25 + 0.125, 3, False)
    assert [round(chain.at(n), 6) for n in (1, 2, 3)] == [1.5, 1.75, 1.875]
    tree = Acceptance(4.0, 7, True)
    assert [tree.at(n) for n in (1, 3, 7)] == [2.0, 3.0, 4.0]
    assert acceptance_of(SPEC, None).drafted == 48, "as published"
    with pytest.raises(
        ConfigError, match=rf"--tokens-per-step 7 is not between 1 and {1 + SPEC.longest_path}: {SPEC.longest_path} tokens are drafted one"
    ):
        acceptance_of(SPEC, 7.0)
    with pytest.raises(ConfigError, match="chains of 'medusa' are in no table; measure them, and give --tokens-per-step"):
        acceptance_of(SpeculativeConfig(method="medusa", num_speculative_tokens=3), None)


def test_what_does_not_fit_says_how_many_devices_would() -> None:
    config = EngineConfig(max_num_seqs=1, max_model_len=128, max_num_batched_tokens=64)
    device = read_devices()["rtx-4090"]
    plan = PaperPlan(without_weights("llama-13b"), device, 1, 1, config)
    assert not plan.fits and plan.least_devices() == (2, 1)
    again = PaperPlan(without_weights("llama-13b"), device, 2, 1, config)
    assert again.fits
    tiny = device.model_copy(update={"memory_gb": 0.5})
    assert PaperPlan(small(), tiny, 1, 1, config).least_devices() is None, "what a process takes is more than there is"


def test_bytes_of_a_device_by_hand() -> None:
    config = EngineConfig(max_num_seqs=3, max_model_len=100, max_num_batched_tokens=64)
    (found,) = PaperPlan(small(), read_devices()["h100"], 1, 1, config).device_bytes
    assert found.weights == 2 * whole(small())
    assert found.keys_and_values == 3 * 100 * 12 * 2 * 768 * 2
    assert found.total == found.weights + found.keys_and_values + found.activations + found.runtime
    drafting = PaperPlan(small(), read_devices()["h100"], 1, 2, config, SPEC).device_bytes
    assert drafting[0].draft_weights > 0 == drafting[1].draft_weights
    of_head = 2 * 768 * 2  # one layer's, on the first device
    assert drafting[0].keys_and_values + drafting[1].keys_and_values == 3 * 108 * (12 * 2 * 768 * 2 + of_head)


def test_a_draft_models_keys_and_values_are_on_the_first_device() -> None:
    config = EngineConfig(max_num_seqs=3, max_model_len=100, max_num_batched_tokens=64)
    spec = SpeculativeConfig(method="draft_model", model="opt-125m", num_speculative_tokens=4)
    alone, drafting = (PaperPlan(small(), read_devices()["h100"], 1, 2, config, s, 2.0).device_bytes for s in (None, spec))
    assert drafting[1].keys_and_values == 3 * 104 * 6 * 2 * 768 * 2
    assert drafting[0].keys_and_values == 3 * 104 * (6 + 12) * 2 * 768 * 2
    assert alone[0].draft_weights == 0 < drafting[0].draft_weights
    rounded = config.model_copy(update={"kv_cache_dtype": "int8"})
    both = PaperPlan(small(), read_devices()["h100"], 1, 1, rounded, spec, 2.0).device_bytes[0].keys_and_values
    assert both == 2 * PaperPlan(small(), read_devices()["h100"], 1, 1, rounded).device_bytes[0].keys_and_values * 104 // 100


def test_no_tree_emits_more_than_its_longest_path() -> None:
    shallow = SpeculativeConfig(method="eagle", model="head", tree="dynamic", tree_depth=2)
    assert drafting_of(shallow, small(), acceptance_of(shallow, None), 64, "auto").emitted == 3.0


def test_traffic_by_hand() -> None:
    """12 layers of 768 numbers, 3072 between: what two ranks get from each other, in 2 bytes, and logits; two hops of two stages."""
    config, device = EngineConfig(max_num_seqs=4, max_model_len=100), read_devices()["h100"]
    found = PaperPlan(small(), device, 2, 1, config).traffic(Pass(4, 1, 0))
    first = 32 * (50272 // 32 // 2)  # rank 0's tiles
    assert found.logits == 4 * (50272 - first) * 4
    assert found.gathered - found.logits == 4 * 12 * (768 + 768 + 3072 + 768) * 2
    assert PaperPlan(small(), device, 1, 2, config).traffic(Pass(4, 1, 0)).hidden_states == 4 * 2 * 768 * 2


def test_devices_of_ones_own(tmp_path: Path) -> None:
    entry = {"memory_gb": 1, "read_gb": 2, "tflops": {"float32": 3}, "link_gb": 4, "source": "mine"}
    (tmp_path / "mine.json").write_text(json.dumps({"mine": entry}), "utf-8")
    devices = read_devices(tmp_path / "mine.json")
    assert device_named("mine", devices).seconds(Work(6e12, 2e9), "float32") == 2.0
    assert device_named("mine", devices).memory_bytes == 10**9 and "h100" in devices
    with pytest.raises(ConfigError, match=r"no device 'other'; known: a100-40gb.*mine; add one with --devices FILE"):
        device_named("other", devices)
    with pytest.raises(ConfigError, match=r"no speed in float16; choose another --dtype .float32., or add it"):
        devices["mine"].flops("float16")
    for text, match in (
        ("[]", "holds no devices by name"),
        ("{", "devices cannot be read"),
        (json.dumps({"mine": entry | {"read_gb": 0}}), "device 'mine' of .*read_gb = 0"),
        (json.dumps({"mine": entry | {"speed": 1}}), "has no key 'speed'"),
        (json.dumps({"mine": {}}), "memory_gb"),
    ):
        (tmp_path / "bad.json").write_text(text, "utf-8")
        with pytest.raises(ConfigError, match=match):
            read_devices(tmp_path / "bad.json")


def test_published_devices_name_their_sources() -> None:
    assert all({"bfloat16", "float16"} & device.tflops.keys() for device in read_devices().values())
    here = json.loads((Path(__file__).parents[2] / "docs" / "evidence" / "kernels.json").read_text("utf-8"))["machine"]
    assert read_devices()["epyc-2-cores"].read_gb == pytest.approx(here["read_gb"], rel=0.01)
    assert read_devices()["epyc-2-cores"].flops("bfloat16") == pytest.approx(here["matmul_gflop"] * 1e9, rel=0.01)
    assert all({"model_type", "hidden_size"} <= shape.keys() for shape in published_shapes().values())


def test_what_cannot_be_planned_on_paper() -> None:
    device, config = read_devices()["h100"], EngineConfig(max_num_seqs=2)
    with pytest.raises(ConfigError, match="memory belongs to a plan for this machine"):
        PaperPlan(small(), device, 1, 1, config.model_copy(update={"memory": "8GiB"}))
    rounded = SpeculativeConfig(method="draft_model", model="opt-125m", num_speculative_tokens=2, quantization="int8")
    with pytest.raises(ConfigError, match="on paper what drafts has 16 or 32 bits"):
        drafting_of(rounded, small(), Acceptance(1.5, 2, False), 2, "auto")
    with pytest.raises(ConfigError, match="no speed in float16"):
        PaperPlan(without_weights("opt-125m", "float16"), replace_tflops(device, {"bfloat16": 1.0}), 1, 1, config)
    own = SpeculativeConfig(method="draft_model", model="self:int4", num_speculative_tokens=2)
    with pytest.raises(ConfigError, match="on paper the draft model is a shape or a folder, not 'self:int4'"):
        drafting_of(own, small(), Acceptance(1.5, 2, False), 2, "auto")
    beside = SpeculativeConfig(method="draft_model", model="opt-125m", num_speculative_tokens=2)
    found = drafting_of(beside, small(), Acceptance(1.5, 2, False), 2, "auto")
    assert found.numbers == whole(small()) and len(found.levels) == 2


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_in_integers(quantization: str, tmp_path: Path) -> None:
    """They take the bytes that a plan for this machine counts, and are read as much faster; integers are multiplied at their own speed."""
    toys.llama(vocab_size=128, hidden_size=128, intermediate_size=128).to(torch.bfloat16).save_pretrained(tmp_path)
    config = EngineConfig(max_num_seqs=2, max_model_len=64)
    plain, rounded = (
        PaperPlan(without_weights(str(tmp_path)), read_devices()["h100"], 1, 1, config.model_copy(update={"quantization": q}))
        for q in (None, quantization)
    )
    here = Outline.of(str(tmp_path), "auto")
    spared = here.footprint().weights - here.footprint(quantization).weights
    assert plain.device_bytes[0].weights - rounded.device_bytes[0].weights == pytest.approx(spared, rel=0.01)
    large, before = (
        PaperPlan(without_weights("llama-70b"), read_devices()["h100"], 1, 1, config.model_copy(update={"quantization": q}))
        for q in (quantization, None)
    )
    gain = next(large.speeds()).plain.tokens_per_second / next(before.speeds()).plain.tokens_per_second
    assert gain == pytest.approx({"int8": 2.0, "int4": 3.85}[quantization], rel=0.02)
    assert large.fits and not before.fits
    held = Held(matrices=10**9, spared=10**9)
    one, many = (held.seconds(large.device, "bfloat16", 2, Pass(rows, 1, 0))["linear layers"] for rows in (1, 10**5))
    assert one == pytest.approx(1e9 / 3350e9, rel=0.01)
    assert many == pytest.approx(2e14 / 1979e12, rel=0.01)


def replace_tflops(device: Device, tflops: dict[str, float]) -> Device:
    return device.model_copy(update={"tflops": tflops})


def test_without_drafting_time_only_the_pass_counts() -> None:
    drafting = drafting_of(SPEC, small(), Acceptance(2.0, 8, True), 8, "auto")
    used = Cluster(split_among(small(), 1, 1), read_devices()["h100"], "bfloat16", 768, 2)
    assert used.speed(1, 64, replace(drafting, levels=())).seconds < used.speed(1, 64, drafting).seconds

"""Training of heads: it learns, by the published losses, and a killed run ends where an unbroken one does."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import toys
import transformers
from decoders import decoders
from safetensors import safe_open
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast

from echelon import ConfigError, UnsupportedModelError
from echelon.cli import main
from echelon.demo import TARGET as EMBEDDED
from echelon.heads.base import Recipe
from echelon.heads.checkpoints import build_head, load_head
from echelon.heads.eagle3 import Eagle3Head
from echelon.methods import head_class, method_names
from echelon.model.load.loading import load_plain
from echelon.train import heads as training
from echelon.train import precision
from echelon.train import text as texts
from echelon.train.draft_model import DraftTraining, train_draft_model
from echelon.train.draft_model import evaluate as losses_of
from echelon.train.examples import Examples, Teacher, soft_targets, unroll
from echelon.train.files import load_checkpoint
from echelon.train.heads import TrainingConfig, evaluate, learn, train_head
from echelon.train.losses import depth_loss, noised, soft
from echelon.train.precision import mixed_precision, teaching
from echelon.train.sources import HELD_OUT, Document
from echelon.train.text import Data, batch, fingerprint, prepare
from echelon.train.trainer import rate_factor

WINDOW = 24
OPTIONS: dict[str, tuple[tuple[str, Any], ...]] = {"eagle3": (("draft_vocab_size", 60),), "medusa": (("num_heads", 3),)}


def tiny_target() -> PreTrainedModel:
    model = toys.llama(num_hidden_layers=3, tie_word_embeddings=True, spread=0.1)
    model.set_attn_implementation("sdpa")
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target()


@pytest.fixture(scope="module")
def data() -> Data:
    return counting()


def counting() -> Data:
    """Texts that count upwards: anything that reads a token can say what comes next."""
    rng = np.random.default_rng(0)
    said = ((rng.integers(0, 90, (64, 1)) + np.arange(WINDOW)) % 90).astype(np.uint16)
    text = (np.arange(2000) % 90).astype(np.uint16)
    return Data({"text": text, HELD_OUT: text}, said, said[:16])


def test_a_run_keeps_the_recipe_it_began_with(target: PreTrainedModel, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The method's own, but for the rate that is given; neither other code nor another rate may go on with it."""
    known = head_class("eagle3").recipe
    for given, used in ((None, known.rate), (0.02, 0.02)):
        folder = tmp_path / str(given)
        train_head(target, data, folder, TrainingConfig("eagle3", steps=1, rate=given, options=OPTIONS["eagle3"]))
        kept = json.loads((folder / "training.json").read_text())
        assert {k: kept[k] for k in asdict(known)} == {**asdict(known), "rate": used}
    with pytest.raises(ConfigError, match=r"rate = 0\.02 there, 0\.006 here"):
        train_head(target, data, folder, TrainingConfig("eagle3", steps=1, options=OPTIONS["eagle3"]))
    monkeypatch.setattr(Eagle3Head, "recipe", replace(known, first_part=0.25))
    with pytest.raises(ConfigError, match=r"first_part = 0\.5 there, 0\.25 here"):
        train_head(target, data, folder, TrainingConfig("eagle3", steps=1, rate=0.02, options=OPTIONS["eagle3"]))


def test_training_time_test_begins_with_two_steps() -> None:
    plan = TrainingConfig("eagle3", steps=20)
    assert [plan.depth_at(step) for step in range(20)] == [2] * 10 + [7] * 10
    assert {replace(plan, depth=1).depth_at(step) for step in range(20)} == {1}
    assert {TrainingConfig("clover", steps=20).depth_at(step) for step in range(20)} == {head_class("clover").recipe.depth}


def test_scylla_learns_from_raw_text_first_and_then_from_what_the_target_says(data: Data) -> None:
    """At a constant rate, which falls over the second stage."""
    plan = TrainingConfig("scylla", steps=12)
    assert (plan.num_steps, plan.falling) == (15, 3)
    assert replace(plan, fine_tuning=0).num_steps == 12 and replace(plan, steps=0, fine_tuning=5).falling == 5
    said = Data({"text": data.text["text"]}, np.full_like(data.continuations, 95), data.held_out_continuations)
    is_own = [bool((plan.ids(said, step) == 95).all()) for step in range(15)]
    assert is_own == [False] * 12 + [True] * 3
    with pytest.raises(ConfigError, match="no steps"):
        TrainingConfig("scylla", steps=0, fine_tuning=0)
    with pytest.raises(ConfigError, match="does not pretrain"):
        TrainingConfig("eagle", steps=4, fine_tuning=1)


def test_the_rate_rises_stays_and_falls() -> None:
    factors = [rate_factor(step, 12, decay=4, warm_up=5) for step in range(12)]
    assert factors == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("method", method_names(needs="head"))
def test_every_head_learns(method: str, target: PreTrainedModel, data: Data, tmp_path: Path) -> None:
    seen: list[float] = []
    is_soft = False if method == "eagle3" else None  # an untrained target's distribution is nothing to learn
    plan = TrainingConfig(method, steps=60, rate=0.02, every=30, is_soft=is_soft, options=OPTIONS.get(method, ()))
    head = train_head(target, data, tmp_path, plan, lambda _, __, loss: seen.append(loss))
    assert np.mean(seen[-5:]) < 0.92 * np.mean(seen[:5])
    lines = [json.loads(x) for x in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if "loss" in x] == list(range(1, plan.num_steps + 1))
    accuracies = [x for x in lines if "top1" in x]
    assert [x["step"] for x in accuracies] == [*range(30, plan.num_steps, 30), plan.num_steps]
    depth = head.max_depth or training.DEPTHS_EVALUATED
    assert all(len(x["top1"]) == len(x["top5"]) == depth and 1 <= x["tokens_per_step"] <= 1 + depth for x in accuracies)
    assert all(a <= b for a, b in zip(accuracies[-1]["top1"], accuracies[-1]["top5"], strict=True))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    again = load_head(str(tmp_path), target)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), head.state_dict().values(), strict=True))


def test_accuracy_counts_what_it_says(target: PreTrainedModel, data: Data) -> None:
    """Heads that know the text: Medusa's shared output layer cannot, so the logits are replaced."""
    head: Any = build_head("medusa", target, num_heads=2)
    ids = torch.from_numpy(data.held_out_continuations[:8].astype(np.int64))
    truth = [ids[:, 2 + k : 2 + k + WINDOW - 3].flatten() for k in range(2)]
    right = torch.arange(len(truth[0])) % 2 == 0  # every second place is right at depth 1

    def logits(_: torch.Tensor, depth: int) -> torch.Tensor:
        tokens = truth[depth] if depth == 0 else torch.where(right, truth[1], (truth[1] + 1) % 90)
        return F.one_hot(tokens, toys.VOCABULARY).float() + 0.5 * F.one_hot(truth[depth], toys.VOCABULARY)

    head.logits = logits
    found = evaluate(Teacher(target, head), data.held_out_continuations[:8])
    assert found.top1 == [1.0, pytest.approx(float(right.float().mean()))]
    assert found.top5 == [1.0, 1.0]
    assert found.tokens_per_step == pytest.approx(2 + float(right.float().mean()))


def examples_of(num_positions: int, vocabulary: int, draft_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, Examples]:
    """Random logits of a target, and examples of them."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, vocabulary, (1, num_positions + 3), generator=generator)
    shape = (1, num_positions + 3)
    logits, last = (torch.randn(*shape, n, generator=generator) for n in (vocabulary, 64))
    return logits, Examples(ids, torch.zeros(num_positions, 64), last, num_positions, *soft_targets(logits, draft_ids))


def test_losses_are_the_published_ones(target: PreTrainedModel) -> None:
    target_logits, given = examples_of(5, toys.VOCABULARY)
    states = torch.randn(5, 128)
    medusa, clover2, eagle = (build_head(m, target) for m in ("medusa", "clover2", "eagle"))
    expected = 0.8 * F.cross_entropy(medusa.logits(states[:, :64], 1), given.ids[0, 3:8])
    torch.testing.assert_close(depth_loss(medusa, states[:, :64], given, 1, head_class("medusa").recipe), expected)
    wanted, feature = target_logits[0, 2:7].softmax(-1), given.last[0, 2:7]
    cross = -(wanted * clover2.logits(states, 1).log_softmax(-1)).sum(-1).mean()
    expected = 0.7 * (10 * F.smooth_l1_loss(states[:, 64:], feature) + cross)
    torch.testing.assert_close(depth_loss(clover2, states, given, 1, head_class("clover2").recipe), expected)
    wanted, feature = target_logits[0, 1:6].softmax(-1), given.last[0, 1:6]
    cross = -(wanted * eagle.logits(states[:, :64], 0).log_softmax(-1)).sum(-1).mean()
    expected = F.smooth_l1_loss(states[:, :64], feature) + 0.1 * cross
    torch.testing.assert_close(depth_loss(eagle, states[:, :64], given, 0, head_class("eagle").recipe), expected)


@pytest.mark.parametrize("is_soft", [True, False])
def test_eagle3_learns_within_its_vocabulary(is_soft: bool, target: PreTrainedModel) -> None:
    """Places whose token cannot be drafted count as zero, and the target's distribution is renormalised."""
    head: Any = build_head("eagle3", target, draft_vocab_size=30)
    head.choose_vocabulary(torch.arange(toys.VOCABULARY) * 5 % toys.VOCABULARY)
    all_logits, given = examples_of(40, toys.VOCABULARY, head.draft_ids)
    states = torch.randn(40, 64)
    logits, target_logits = head.logits(states, 0), all_logits[0, 1:41]
    token = target_logits.argmax(-1) if is_soft else given.token(2)
    known = head.t2d[token]
    assert 0 < int(known.sum()) < 40
    wanted = target_logits.masked_fill(~head.t2d, -torch.inf).softmax(-1) if is_soft else F.one_hot(token, toys.VOCABULARY).float()
    per_place = -(wanted * logits.log_softmax(-1).masked_fill(~head.t2d, 0)).sum(-1)
    recipe = Recipe(depth=7, decay=0.8, tokens=1.0, is_soft=is_soft)
    torch.testing.assert_close(depth_loss(head, states, given, 0, recipe), per_place[known].sum() / 40)


DECODERS = decoders(16, 32)


@pytest.mark.parametrize("name", [n for n in DECODERS if n != "opt-350m"])
@pytest.mark.parametrize("method", ["clover2", "eagle3"])
def test_heads_train_on_every_decoder(method: str, name: str) -> None:
    model = toys.randomised(*DECODERS[name], seed=0, spread=0.2).requires_grad_(False)
    head: Any = build_head(method, model)
    head.start_from(model)
    loss = learn(Teacher(model, head), torch.arange(40).view(2, 20), 2, TrainingConfig(method, 5), 0)
    assert np.isfinite(loss)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in head.parameters() if p.requires_grad)


def test_a_target_of_two_widths_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="OPTForCausalLM has 24 entries a token and its layers 48"):
        build_head("eagle", toys.randomised(*DECODERS["opt-350m"], seed=0, spread=0.2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_soft_loss_is_its_definition(dtype: torch.dtype) -> None:
    """Value and gradient, with a factor after it, and places that do not count; the gradient has the rounding of the logits."""
    generator = torch.Generator().manual_seed(6)
    logits, target_logits = (4 * torch.randn(2, 5, 30, generator=generator).to(dtype) for _ in range(2))
    weights, probs = torch.rand(2, 5, generator=generator).round(decimals=1), target_logits.softmax(-1, torch.float32)
    weights[0, 1] = 0
    ours, plain = (logits.clone().requires_grad_() for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = 0.3 * soft(ours, probs, weights)
    expected = 0.3 * -(weights * (probs * plain.float().log_softmax(-1)).sum(-1)).sum()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()  # type: ignore[no-untyped-call]
    assert ours.grad is not None and ours.grad.dtype == dtype and not bool(ours.grad[0, 1].any())
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 0.01, "atol": 1e-5}
    torch.testing.assert_close(ours.grad, plain.grad, **tolerance)


def test_soft_targets_are_least_at_the_target() -> None:
    logits, weights = torch.randn(1, 6, 10), torch.ones(1, 6)
    probs = logits.softmax(-1)
    entropy = -(probs * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(soft(logits, probs, weights), entropy)
    assert soft(torch.randn(1, 6, 10), probs, weights) > entropy


def test_only_eagle_trains_on_noise() -> None:
    features, generator = torch.zeros(4000), torch.Generator().manual_seed(0)
    noise = noised(features, head_class("eagle").recipe, 512, generator)
    assert 0.099 < float(noise.max()) <= 0.1 and -0.1 <= float(noise.min()) < -0.099
    assert noised(features, head_class("eagle3").recipe, 512, generator) is features


def test_depths_one_at_a_time_have_the_gradient_of_their_sum(target: PreTrainedModel, data: Data) -> None:
    plan = TrainingConfig("eagle3", 10, options=(("draft_vocab_size", 60),))
    ids = data.batch(0, 0, 4)
    gradients = []
    for parts in (True, False):
        torch.manual_seed(0)
        head: Any = build_head("eagle3", target, draft_vocab_size=60)
        if parts:
            learn(Teacher(target, head), ids, 3, plan, 0)
        else:
            with mixed_precision(target):
                given = Teacher(target, head).examples(ids, 3, True)
                states = unroll(head, given, given.features, 3)
                torch.stack([depth_loss(head, s, given, k, plan.recipe) for k, s in enumerate(states)]).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in head.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0.05, atol=2e-3)


@pytest.mark.parametrize("is_emulated", [True, False])
@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_no_product_of_training_is_emulated(
    target: PreTrainedModel, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, is_emulated: bool
) -> None:
    """A target in bfloat16 teaches in float32 where the processor cannot multiply it; it stays as it is, and the head has its numbers."""
    own, products, linear = copy.deepcopy(target).to(torch.bfloat16), set(), F.linear

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = linear(x, weight, bias)
        products.add(out.dtype)
        return out

    monkeypatch.setattr(precision, "IS_EMULATED", is_emulated)
    monkeypatch.setattr(F, "linear", noted)
    train_head(own, data, tmp_path, TrainingConfig(method, 2, every=1, options=OPTIONS.get(method, ())))
    assert products == {torch.float32 if is_emulated else torch.bfloat16}
    assert own.dtype == torch.bfloat16
    with safe_open(tmp_path / "model.safetensors", "pt") as written:
        written_in = {written.get_tensor(key).dtype for key in written.keys()}  # noqa: SIM118
    assert torch.bfloat16 in written_in and torch.float32 not in written_in
    assert teaching(target) is target


# ---- runs that end early


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "checkpoint.pt", weights_only=True)["head"]
    return state


RUN = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2].split(":")
import torch
import test_train_heads as t
torch.set_num_threads(int(sys.argv[3]))
t.train_head(t.tiny_target(), t.counting(), Path(sys.argv[1]), t.RESUMED)
"""
RESUMED = TrainingConfig("eagle", steps=20, every=4)


def test_a_killed_run_ends_where_an_unbroken_one_does(target: PreTrainedModel, data: Data, tmp_path: Path) -> None:
    """kill -9 at some moment after the first checkpoint: wherever it strikes, the weights at the end have the same bits."""
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    tests = ":".join(str(Path(file).parent) for file in (__file__, str(toys.__file__)))
    process = subprocess.Popen([sys.executable, "-c", RUN, str(broken), tests, str(torch.get_num_threads())])
    while process.poll() is None and not (broken / "checkpoint.pt").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    checkpoint = load_checkpoint(broken / "checkpoint.pt")
    assert checkpoint is not None and checkpoint["step"] >= 4
    for folder in (broken, whole):
        train_head(target, data, folder, RESUMED)
    ours, theirs = weights(broken), weights(whole)
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)
    lines = [[json.loads(x) for x in (f / "log.jsonl").read_text().splitlines()] for f in (broken, whole)]
    assert [x["step"] for x in lines[0]] == [x["step"] for x in lines[1]]
    assert [x.get("loss") for x in lines[0]] == [x.get("loss") for x in lines[1]]
    assert os.path.getsize(broken / "model.safetensors") == os.path.getsize(whole / "model.safetensors")


def test_a_run_with_other_settings_is_refused(target: PreTrainedModel, data: Data, tmp_path: Path) -> None:
    train_head(target, data, tmp_path, TrainingConfig("eagle", steps=2, every=2))
    with pytest.raises(ConfigError, match=r"holds a run with other settings \(steps = 2 there, 3 here\); choose another folder"):
        train_head(target, data, tmp_path, TrainingConfig("eagle", steps=3, every=2))
    other = Data(data.text, data.continuations[::-1], data.held_out_continuations)
    with pytest.raises(ConfigError, match="data = "):
        train_head(target, other, tmp_path, TrainingConfig("eagle", steps=2, every=2))
    with pytest.raises(ConfigError, match="there is no recipe for 'hydra'"):
        train_head(target, data, tmp_path / "other", TrainingConfig("hydra", steps=3))


def test_batches_are_functions_of_their_number(data: Data) -> None:
    assert torch.equal(data.batch(1, 7, 8), data.batch(1, 7, 8))
    for other in (data.batch(2, 7, 8), data.batch(1, 6, 8)):
        for half in (slice(0, 4), slice(4, 8)):  # text, and what the target says
            assert not torch.equal(data.batch(1, 7, 8)[half], other[half])
    rows = batch({"a": np.arange(50), HELD_OUT: np.full(50, 99)}, 3, 10, 20)
    assert rows.shape == (20, 11) and int(rows.max()) < 50


# ---- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target on disk, with the embedded pair's tokenizer, and a text."""
    place = tmp_path_factory.mktemp("model")
    toys.llama(num_hidden_layers=2, vocab_size=4096, tie_word_embeddings=True, spread=0.1, eos_token_id=0).save_pretrained(place)
    PreTrainedTokenizerFast.from_pretrained(EMBEDDED).save_pretrained(place)
    (place / "text.txt").write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(900)))
    return place


def call(*arguments: object) -> int:
    sys.argv = ["echelon", *map(str, arguments)]
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_the_command_trains(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    shared = ("--text", folder / "text.txt", "--data", tmp_path / "data", "--steps", 1, "--every", 1, "--num-continuations", 8)
    out = tmp_path / "clover"
    assert call("train", folder, "--method", "clover", "--output", out, *shared, "--ablate", "augmenting,attention-decoder") == 0
    said = capsys.readouterr().err
    assert "the model first writes 8 texts, then 1 steps follow; how long" in said and "docs/training.md" in said
    assert f"{out} holds the clover head" in said
    assert f"echelon serve {folder} --speculative-config.method clover --speculative-config.model {out}" in said
    target, _ = load_plain(str(folder))
    head: Any = load_head(str(out), target)
    assert (head.options.augmenting, head.options.regressive, head.options.attention_decoder) == (False, True, False)
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    assert call("train", folder, "--method", "draft_model", "--output", tmp_path / "draft", *shared) == 0
    assert f"echelon drafters {folder} --drafter {tmp_path / 'draft' / 'model'} --input PROMPTS" in capsys.readouterr().err
    draft, tokenizer = load_plain(str(tmp_path / "draft" / "model"))
    assert draft.config.vocab_size == 4096 and tokenizer is not None
    for changed in (["--steps", 2], ["--rate", 0.5], ["--seed", 1]):
        assert call("train", folder, "--method", "draft_model", "--output", tmp_path / "draft", *shared, *changed) == 2
        said = capsys.readouterr().err.replace("\n", " ")
        assert "holds a run with other settings" in said and f"{str(changed[0])[2:]} = " in said
    assert call("train", folder, "--method", "draft_model", "--output", tmp_path / "draft", *shared) == 0, "a finished run stays"


def test_a_draft_model_goes_on_with_the_continuations_it_began_with(
    target: PreTrainedModel, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run from before these were noted goes on with what is there."""
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    _, tokenizer = load_plain(str(EMBEDDED))
    kept, run = tmp_path / "continuations.npy", tmp_path / "run"

    def train() -> None:
        train_draft_model(target, tokenizer, data.text, run, tmp_path, DraftTraining(steps=1))

    np.save(kept, data.continuations)
    train()
    train()
    np.save(kept, data.continuations[::-1])
    with pytest.raises(ConfigError, match=r"holds a run with other settings \(said = '\w+' there, '\w+' here\)"):
        train()
    settings = json.loads((run / "training.json").read_text())
    del settings["said"]
    (run / "training.json").write_text(json.dumps(settings))
    train()


def test_a_draft_model_is_evaluated_within_the_context() -> None:
    """Of a model with learned positions, which has no more of them."""
    models = [GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=n, n_embd=32, n_layer=1, n_head=2)).eval() for n in (48, 40)]
    losses = losses_of(*models, np.arange(500, dtype=np.uint16) % 50, num_windows=3)
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "clover", "--ablate", "brakes"], "--ablate 'brakes' is no block of Clover; known: augmenting, regressive"),
        (["--method", "eagle", "--num-heads", "3"], "method eagle has no option for num_heads; leave it out"),
        (["--method", "draft_model", "--targets", "hard"], "method draft_model learns the model's distribution"),
        (["--method", "draft_model", "--steps", "0"], "DraftTraining.steps = 0"),
        (["--method", "medusa", "--text", "nowhere.txt"], "--text 'nowhere.txt' is no file"),
        (["--method", "eagle3", "--draft-vocab-size", "5000"], "draft_vocab_size = 5000, of a vocabulary of 4096"),
    ],
)
def test_the_command_refuses(
    arguments: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    assert call("train", folder, "--output", tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err


def test_convert_is_a_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    assert call("convert", tmp_path, tmp_path / "out") == 2
    assert "holds neither medusa_lm_head.pt" in capsys.readouterr().err.replace("\n", " ")


def test_texts_of_another_target_are_refused(folder: Path, tmp_path: Path, target: PreTrainedModel) -> None:
    model, tokenizer = load_plain(str(folder))
    prepared = prepare(model, tokenizer, [folder / "text.txt"], tmp_path, count=4)
    assert len(prepared.text["text"]) > 18 * len(prepared.text[HELD_OUT]) and prepared.continuations.shape == (4, 128)
    with pytest.raises(ConfigError, match="texts of another target, of other files"):
        prepare(target, tokenizer, [folder / "text.txt"], tmp_path, count=4)
    with pytest.raises(ConfigError, match="no fast tokenizer"):
        prepare(target, None, None, tmp_path)
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(ConfigError, match="training needs at least 256"):
        prepare(model, tokenizer, [tmp_path / "short.txt"], tmp_path / "short", count=4)
    more = prepare(model, tokenizer, [tmp_path / "short.txt", folder / "text.txt"], tmp_path / "short", count=4)
    assert more.continuations.shape == (4, 128), "what was refused binds nobody"
    with pytest.raises(ConfigError, match=r"holds .*, where the run writes its own files"):
        prepare(model, tokenizer, [folder], folder / "run" / "data", count=4)
    prepare(model, tokenizer, [folder], folder / ".runs" / "data", count=4)
    (tmp_path / "tokens.npz").unlink()
    with pytest.raises(ConfigError, match="texts of another target, of other files"):
        prepare(target, tokenizer, [folder / "text.txt"], tmp_path, count=4)


@pytest.fixture
def no_continuations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target writes nothing."""
    monkeypatch.setattr(texts, "target_continuations", lambda *_: np.zeros((4, WINDOW), np.uint16))


@pytest.mark.usefixtures("no_continuations")
def test_a_text_that_is_given_twice_is_read_once(folder: Path, tmp_path: Path, target: PreTrainedModel) -> None:
    """Or what is held out at the end would have been learned from before."""
    _, tokenizer = load_plain(str(EMBEDDED))
    (tmp_path / "copy.txt").write_text((folder / "text.txt").read_text())
    once = prepare(target, tokenizer, [folder / "text.txt"], tmp_path / "once").text
    twice = prepare(target, tokenizer, [folder / "text.txt", tmp_path / "copy.txt"], tmp_path / "twice").text
    assert once.keys() == twice.keys() and all(np.array_equal(once[group], twice[group]) for group in once)


@pytest.mark.usefixtures("no_continuations")
def test_of_texts_that_are_too_short_the_part_is_named(tmp_path: Path, target: PreTrainedModel) -> None:
    _, tokenizer = load_plain(str(EMBEDDED))
    (tmp_path / "short.txt").write_text("x = 1\n" * 400)
    with pytest.raises(ConfigError, match=r"tokens \(held-out, a 20th of all text\); training needs at least 256 there: give more"):
        prepare(target, tokenizer, [tmp_path / "short.txt"], tmp_path / "data")


@pytest.mark.usefixtures("no_continuations")
def test_another_number_of_continuations_is_named(folder: Path, tmp_path: Path, target: PreTrainedModel) -> None:
    _, tokenizer = load_plain(str(EMBEDDED))
    prepare(target, tokenizer, [folder / "text.txt"], tmp_path, count=4)
    with pytest.raises(ConfigError, match=r"holds the texts of .* with another number of continuations; choose another folder"):
        prepare(target, tokenizer, [folder / "text.txt"], tmp_path, count=5)


def test_a_target_is_known_under_another_version_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    known = fingerprint(target)
    monkeypatch.setattr(transformers.configuration_utils, "__version__", "0.0.1")
    assert '"0.0.1"' in target.config.to_json_string() and fingerprint(target) == known
    target.config.rms_norm_eps *= 2
    assert fingerprint(target) != known


def test_files_are_encoded_a_few_at_a_time_to_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tokenizer = load_plain(str(EMBEDDED))
    assert tokenizer is not None
    files = [Document("text", str(i), f"x{i} = {i}\n" * i) for i in range(8)]
    whole = texts.tokenize(tokenizer.backend_tokenizer, files, 0)
    monkeypatch.setattr(texts, "FILES_AT_ONCE", 3)
    assert np.array_equal(texts.tokenize(tokenizer.backend_tokenizer, files, 0), whole)

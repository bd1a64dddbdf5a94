"""The baselines of `transformers` itself: plain `generate` on static left-padded batches, and assisted generation, which takes one row."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from echelon import SamplingParams
from echelon.bench.clock import clock_of
from echelon.bench.kernels import fastest_dtype
from echelon.bench.throughput import Contender, Prompts, Run, ThroughputResult
from echelon.bench.verify import cut, generate_padded
from echelon.inputs import dtype_name


class StepTimes(StoppingCriteria):  # type: ignore[misc]
    """Never stops anything; notes when each step ended and how long the rows were. The first call comes after prefill."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # noqa: ARG002
        self.steps.append((clock_of(input_ids.device)(), input_ids.shape[1]))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    @property
    def decode(self) -> tuple[int, float]:
        """New tokens of a row and seconds after the first step."""
        (start, shortest), (end, longest) = self.steps[0], self.steps[-1]
        return longest - shortest, end - start


class FrameworkRun:
    """`generate` of `model`; `extra` are its arguments for assisted generation. Finished rows stay in the batch until all are done.
    `notes`: what to make of its speed.
    """

    def __init__(self, name: str, model: PreTrainedModel, batch_size: int, notes: SequenceOf[str] = (), **extra: Any) -> None:
        self.name, self._model, self._batch_size, self._notes, self._extra = name, model, batch_size, notes, extra
        self._num_tokens, self._num_steps = 0, 0

    def warm_up(self, prompts: Prompts, params: SamplingParams) -> None:
        self._generate(prompts[: self._batch_size], params, StepTimes())

    def run(self, prompts: Prompts, params: SamplingParams) -> Run:
        outputs: list[list[int]] = []
        tokens, seconds = 0.0, 0.0
        now = clock_of(self._model.device)
        start = now()
        for first in range(0, len(prompts), self._batch_size):
            rows, clock = prompts[first : first + self._batch_size], StepTimes()
            outputs += self._generate(rows, params, clock)
            new, elapsed = clock.decode
            tokens, seconds = tokens + new * len(rows), seconds + elapsed
            self._num_steps += len(clock.steps)
        self._num_tokens += sum(map(len, outputs))
        return Run(outputs, now() - start, (tokens, seconds))

    def _generate(self, rows: Prompts, params: SamplingParams, clock: StepTimes) -> list[list[int]]:
        eos = None if params.ignore_eos else self._model.generation_config.eos_token_id
        timed = StoppingCriteriaList([clock])
        done = generate_padded(self._model, rows, params.most_tokens, eos_token_id=eos, stopping_criteria=timed, **self._extra)
        stops = frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)
        return [cut(row, stops) for row in done]

    def result(self, batch_size: int, runs: SequenceOf[Run]) -> ThroughputResult:
        """tokens_per_step is emitted tokens over steps of one row; acceptance is not reported by the framework."""
        per_step = self._num_tokens / self._num_steps if self._batch_size == 1 and self._num_steps else 1.0
        speeds = [sum(map(len, r.outputs)) / r.seconds for r in runs]
        decode = [r.decoding_speed for r in runs]
        return ThroughputResult(
            self.name,
            batch_size,
            speeds,
            per_step,
            0.0,
            0,
            0,
            strategy="transformers",
            decode_tokens_per_second=decode,
            notes=list(self._notes),
        )


def in_fastest_dtype(model: PreTrainedModel) -> tuple[PreTrainedModel, list[str]]:
    """The model in float32 where the framework multiplies that faster than what the model has, and a note that says so."""
    if model.dtype == torch.float32 or fastest_dtype(model.device) != torch.float32:
        return model, []
    narrow = dtype_name(model.dtype)
    return model.to(torch.float32), [f"in float32, which transformers multiplies faster than {narrow} on this processor"]


def framework_runs(
    model: PreTrainedModel,
    draft: PreTrainedModel | None,
    batch_size: int,
    lookup: Mapping[str, Any],
    num_draft_tokens: int,
    notes: SequenceOf[str] = (),
) -> list[Contender]:
    """Plain generation, and at batch 1 both kinds of assisted generation. `lookup`: num_speculative_tokens and prompt_lookup_max."""
    runs: list[Contender] = [FrameworkRun("transformers", model, batch_size, notes)]
    if batch_size > 1:
        return runs
    words = {"prompt_lookup_num_tokens": lookup["num_speculative_tokens"], "max_matching_ngram_size": lookup["prompt_lookup_max"]}
    runs.append(FrameworkRun("transformers, prompt lookup", model, 1, notes, **words))
    if draft is not None:
        draft.generation_config.num_assistant_tokens = num_draft_tokens
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0  # the same draft length as ours
        runs.append(FrameworkRun("transformers, assisted", model, 1, notes, assistant_model=draft))
    return runs

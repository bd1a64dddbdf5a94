"""`LLM`: the door for users, the command line, benchmarks and everything else outside the engine."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from echelon.config import EngineConfig, SpeculativeConfig, speculative
from echelon.drafters.base import Drafter, NoDrafter
from echelon.drafters.draft_model import DraftModelDrafter
from echelon.drafters.ngram import NgramDrafter
from echelon.engine import Engine
from echelon.errors import ConfigError, RequestError
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.memory import MemoryPlan, plan_kv
from echelon.sampling import SamplingParams
from echelon.scheduler import Scheduler
from echelon.sequence import Sequence
from echelon.stats import Stats
from echelon.target.attention import record_layers
from echelon.target.loading import LoadedModel, load_model
from echelon.target.runner import ModelRunner
from echelon.text import Detokenizer, decode_output

Prompt = str | SequenceOf[int]


@dataclass(frozen=True)
class RequestMetrics:
    """How one request ran. `tokens_per_step` counts the extra token, `acceptance_rate` does not."""

    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    tokens_per_step: float
    acceptance_rate: float


@dataclass(frozen=True)
class CompletionOutput:
    """One generated continuation; `is_accepted[i]` says whether token i came from the draft."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    seed: int
    is_accepted: list[bool]


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its continuations, as in vLLM."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics


class LLM:
    """A model ready to generate for many prompts at once.

    Parameters
    ----------
    model               folder or hub name, or a model loaded already
    speculative_config  what drafts: a `SpeculativeConfig` or a mapping with vLLM's keys; `None` decodes plainly
    draft_model         a draft model loaded already, instead of the name in `speculative_config`
    settings            see `EngineConfig`: dtype, max_num_seqs, max_num_batched_tokens, max_model_len, block_size,
                        kv_cache_memory_bytes

    Raises
    ------
    ConfigError, ModelLoadError, UnsupportedModelError
    """

    def __init__(
        self,
        model: str | LoadedModel,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        draft_model: LoadedModel | None = None,
        **settings: Any,
    ) -> None:
        self.config = EngineConfig(**settings)
        self.speculative_config = speculative(speculative_config)
        self.target = load_model(model, self.config.dtype) if isinstance(model, str) else model
        self.draft = self._check_draft(draft_model)
        self.max_len = self._context()
        self.memory_plan, runners = self._build_runners()
        self.engine = self._build_engine(runners)
        self._ids = count()

    def _check_draft(self, given: LoadedModel | None) -> LoadedModel | None:
        config = self.speculative_config
        if config is None or config.method != "draft_model":
            return None
        draft = given
        if draft is None:
            if config.model is None:
                raise ConfigError("method 'draft_model' needs the key 'model': a folder or hub name of a small model")
            draft = load_model(config.model, self.config.dtype)
        if draft.vocab_size != self.target.vocab_size:
            raise ConfigError(
                f"the draft model {draft.name!r} has {draft.vocab_size:,} tokens, the target {self.target.vocab_size:,}; "
                "a draft model must share the target's vocabulary"
            )
        return draft

    def _context(self) -> int:
        """Longest text, prompt included: what both models can hold, or less if asked."""
        longest = min(m.max_len for m in (self.target, self.draft) if m is not None)
        asked = self.config.max_model_len or longest
        if asked > longest:
            raise ConfigError(f"max_model_len = {asked} exceeds the models' context of {longest} tokens; lower it")
        return asked

    def _build_runners(self) -> tuple[MemoryPlan, list[ModelRunner]]:
        """One runner a model, on pools of equally many blocks."""
        config = self.config
        models = [m for m in (self.target, self.draft) if m is not None]
        layers = [record_layers(m.model) for m in models]
        per_token = sum(s.num_entries * m.model.dtype.itemsize for m, shapes in zip(models, layers, strict=True) for s in shapes)
        plan = plan_kv(per_token, config.block_size, config.max_num_seqs, self.max_len, config.kv_cache_memory_bytes)
        runners = []
        for loaded, shapes in zip(models, layers, strict=True):
            tables = BlockTables(plan.num_blocks, plan.block_size, -(-self.max_len // plan.block_size))
            runners.append(ModelRunner(loaded, KVCache(shapes, tables, loaded.model.dtype, torch.device("cpu"))))
        return plan, runners

    def _build_engine(self, runners: list[ModelRunner]) -> Engine:
        config, spec = self.config, self.speculative_config
        drafter: Drafter = NoDrafter()
        if spec is not None and spec.method == "ngram":
            drafter = NgramDrafter(spec)
        elif spec is not None:
            drafter = DraftModelDrafter(runners[1], config.max_num_batched_tokens)
        scheduler = Scheduler(
            [r.cache.tables for r in runners],
            config.max_num_seqs,
            config.max_num_batched_tokens,
            spec.num_speculative_tokens if spec else 0,
        )
        return Engine(runners[0], drafter, scheduler)

    @property
    def stats(self) -> Stats:
        """Counters since this object was made."""
        return self.engine.stats

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        on_finish: Callable[[int, RequestOutput], None] | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt (a string, or a list of token ids); outputs in the order of the prompts.

        Parameters
        ----------
        sampling_params  one for all, or one a prompt
        on_finish        called with (index of the prompt, output) as soon as a request is done
        on_step          called after each step with the number of tokens it emitted

        Raises
        ------
        RequestError     a prompt is empty or too long, or the counts differ; nothing has run then
        """
        given = _as_list(prompts)
        params = _one_each(sampling_params, len(given))
        sequences = [self._sequence(p, q) for p, q in zip(given, params, strict=True)]
        place = {s.id: i for i, s in enumerate(sequences)}
        outputs: dict[int, RequestOutput] = {}
        try:
            for sequence in sequences:
                self.engine.add(sequence)
            while self.engine.has_work:
                before = self.stats.num_emitted_tokens
                for sequence in self.engine.step():
                    i = place[sequence.id]
                    outputs[i] = self._output(sequence, given[i])
                    if on_finish:
                        on_finish(i, outputs[i])
                if on_step:
                    on_step(self.stats.num_emitted_tokens - before)
        finally:
            for sequence in sequences:
                if not sequence.is_finished:
                    self.engine.abort(sequence)
        return [outputs[i] for i in range(len(given))]

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens the tokenizer adds."""
        if self.target.tokenizer is None:
            raise RequestError(f"{self.target.name!r} has no tokenizer; give prompts as lists of token ids")
        ids: list[int] = self.target.tokenizer.encode(text)
        return ids

    def encode_chat(self, messages: SequenceOf[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the assistant's turn."""
        tokenizer = self.target.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise RequestError(f"{self.target.name!r} has no chat template; give a prompt instead of messages")
        ids: list[int] = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        return ids

    def check_prompt(self, tokens: SequenceOf[int], params: SamplingParams) -> None:
        """Raise `RequestError` for what this model cannot serve."""
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        if len(tokens) >= self.max_len:
            raise RequestError(f"the prompt has {len(tokens)} tokens, the context holds {self.max_len} with at least one new; shorten it")
        if bad := [t for t in tokens if not 0 <= t < self.target.vocab_size]:
            raise RequestError(f"token id {bad[0]} is outside the vocabulary of {self.target.vocab_size}; check the tokenizer")
        if params.stop and self.target.tokenizer is None:
            raise RequestError(f"stop strings need a tokenizer, and {self.target.name!r} has none; use stop_token_ids")

    def _sequence(self, prompt: Prompt, params: SamplingParams) -> Sequence:
        tokens = self.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        self.check_prompt(tokens, params)
        tokenizer = self.target.tokenizer
        return Sequence(
            id=next(self._ids),
            tokens=tokens,
            num_prompt_tokens=len(tokens),
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            eos_token_ids=self.target.eos_token_ids,
            max_len=self.max_len,
            detokenizer=Detokenizer(tokenizer, tokens, params.stop) if tokenizer and params.stop else None,
        )

    def _output(self, sequence: Sequence, prompt: Prompt) -> RequestOutput:
        tokens = sequence.output_tokens
        text = ""
        if sequence.detokenizer is not None:
            text = sequence.detokenizer.finish()
        elif self.target.tokenizer is not None:
            text = decode_output(self.target.tokenizer, sequence.tokens[: sequence.num_prompt_tokens], tokens)
        assert sequence.finish_reason is not None
        completion = CompletionOutput(sequence.index, text, tokens, sequence.finish_reason.value, sequence.seed, list(sequence.is_accepted))
        steps, drafted, accepted = sequence.num_steps, sequence.num_draft_tokens, sequence.num_accepted_tokens
        metrics = RequestMetrics(steps, drafted, accepted, len(tokens) / steps, accepted / drafted if drafted else 0.0)
        return RequestOutput(
            str(sequence.id),
            prompt if isinstance(prompt, str) else None,
            sequence.tokens[: sequence.num_prompt_tokens],
            [completion],
            metrics,
        )


def _as_list(prompts: Prompt | SequenceOf[Prompt]) -> list[Prompt]:
    """A lone string or a flat list of token ids is one prompt."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(params: SamplingParams | SequenceOf[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise RequestError(f"{len(params)} sampling parameters for {num_prompts} prompts; give one for all or one each")
    return list(params)

"""`LLM`: the door for users, the command line, benchmarks and everything else outside the engine."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import asdict, fields
from itertools import count
from typing import Any

from echelon.assembly import build_engine
from echelon.baselines.strategies import STRATEGIES
from echelon.chat import encode_text, render_chat
from echelon.config import EngineConfig, SpeculativeConfig, check_together, speculative
from echelon.drafters.head_selftest import warn_of_chance
from echelon.drafters.heads import attach_head, head_for
from echelon.engine import Engine
from echelon.errors import ConfigError, RequestError
from echelon.heads.base import Head
from echelon.inputs import (
    Prompt,
    check_callable,
    check_kind,
    conversation,
    conversations_of,
    kind_of,
    name_of,
    prompts_of,
    shown,
    token_ids,
    valid_text,
)
from echelon.memory import MemoryPlan
from echelon.model.load.loading import LoadedModel, check_vocabularies, load_model
from echelon.ops import compiled
from echelon.outputs import RequestOutput, request_output
from echelon.sampling import Sampler, SamplingParams, one_each
from echelon.sequence import Sequence, check_requests
from echelon.stats import Stats
from echelon.text import Detokenizer

MOST_CHARACTERS_PER_TOKEN = 64  # on average over a prompt
logger = logging.getLogger("echelon")


class LLM:
    """A model ready to generate for many prompts at once.

    Parameters
    ----------
    model               folder (also as a path) or hub name, or a model loaded already
    speculative_config  what drafts: a `SpeculativeConfig` or a mapping with vLLM's keys; `None` decodes plainly
    draft_model         a draft model loaded already, instead of the name in `speculative_config`
    draft_head          likewise a head of the target
    settings            see `EngineConfig`: dtype, device, numerics, max_num_seqs, max_num_batched_tokens, max_model_len,
                        block_size, kv_cache_memory_bytes; and how rows become a batch: strategy, pad, grouping, group_window, refill

    Raises
    ------
    ConfigError, ModelLoadError, UnsupportedModelError
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        draft_model: LoadedModel | None = None,
        draft_head: Head | None = None,
        **settings: Any,
    ) -> None:
        self.config = EngineConfig(**settings)
        self.speculative_config = speculative(speculative_config)
        check_together(self.config, self.speculative_config)
        if draft_head is not None:
            check_kind("draft_head", draft_head, Head)
        self.target = self._loaded(model, self.config.device)
        if self.target.device.type == "cpu":
            compiled.warn_once_if_missing()
        self.draft = self._check_draft(draft_model)
        self.head = head_for(self.speculative_config, self.target, draft_head)
        self.max_len = self._context()
        models = [m for m in (self.target, self.draft) if m is not None]
        head = None if self.head is None else attach_head(self.head, self.target)
        if head is not None:
            warn_of_chance(self.target, head.head, head.reader, head.shapes)
        self.storage = STRATEGIES[self.config.strategy](self.config, models, self.max_len, self._num_speculative_tokens, head)
        logger.info("%s", self.memory_plan)
        self.engine = build_engine(self.config, self.speculative_config, self.storage, head)
        self._ids = count()
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread whose requests are running

    def _loaded(self, model: str | os.PathLike[str] | LoadedModel, device: str, field: str = "model") -> LoadedModel:
        """On this device; one that is loaded already stays where it is, and must be there."""
        if not isinstance(model, LoadedModel):
            return load_model(name_of(model, field), dtype=self.config.dtype, device=device, numerics=self.config.numerics)
        if model.is_fast and self.config.numerics == "invariant":
            raise ConfigError(f"{model.name!r} was loaded with numerics = 'fast', and 'invariant' is wanted; load it so, or ask for 'fast'")
        if device not in ("auto", model.device.type):
            raise ConfigError(f"{model.name!r} is on {model.device}, and device = {device!r} is wanted; load it there")
        return model

    def _check_draft(self, given: LoadedModel | None) -> LoadedModel | None:
        config = self.speculative_config
        if config is None or config.method != "draft_model":
            return None
        if given is None and config.model is None:
            raise ConfigError("method 'draft_model' needs the key 'model': a folder or hub name of a small model")
        draft = self._loaded(config.model if given is None else given, self.target.device.type, "draft_model")  # type: ignore[arg-type]
        check_vocabularies(self.target, draft)
        return draft

    @property
    def memory_plan(self) -> MemoryPlan:
        return self.storage.plan

    def _context(self) -> int:
        """Longest text, prompt included: what the target can hold, or less if asked."""
        longest = self.target.max_len
        asked = self.config.max_model_len or longest
        if asked > longest:
            raise ConfigError(f"max_model_len = {asked} exceeds the model's context of {longest} tokens; lower it")
        return asked

    @property
    def _num_speculative_tokens(self) -> int:
        return self.speculative_config.num_speculative_tokens if self.speculative_config else 0

    @property
    def acceptance_name(self) -> str:
        """The rule by which drafted tokens are kept, as reports name it."""
        return self.speculative_config.acceptance_name if self.speculative_config else "exact"

    @property
    def stats(self) -> Stats:
        """Counters since this object was made."""
        return self.engine.stats

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        on_finish: Callable[[int, RequestOutput], None] | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt (a string, or a list of token ids); outputs in the order of the prompts.

        Parameters
        ----------
        sampling_params  one for all, or one a prompt
        on_finish        called with (index of the prompt, output) as soon as a request is done
        on_step          called after each step

        Raises
        ------
        RequestError     a prompt is none, is empty or too long, or the counts differ; nothing has run then
        """
        check_callable("on_finish", on_finish)
        check_callable("on_step", on_step)
        given = prompts_of(prompts)
        outputs: dict[int, RequestOutput] = {}
        requests = self._requests(given, sampling_params, watch_text=False)
        texts = list(given.values())
        for grown in self.run(requests):
            for i in grown:
                if all(s.is_finished for s in requests[i]):
                    outputs[i] = self._output(requests[i], texts[i])
                    if on_finish:
                        on_finish(i, outputs[i])
            if on_step:
                on_step()
        return [outputs[i] for i in range(len(given))]

    def chat(
        self,
        messages: SequenceOf[Mapping[str, str]] | SequenceOf[SequenceOf[Mapping[str, str]]],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, in the model's own chat template; a message is a mapping with `role` and `content`."""
        return self.generate([self.encode_chat(c, name) for name, c in conversations_of(messages).items()], sampling_params)

    def stream(
        self, prompts: Prompt | SequenceOf[Prompt], sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Like `generate`, but yields (index of the prompt, output so far) for every request that grew in a step.

        Closing the iterator, or dropping it, takes its rows out of the engine.
        """
        given = prompts_of(prompts)
        requests = self._requests(given, sampling_params, watch_text=True)
        texts = list(given.values())
        for grown in self.run(requests):
            for i in grown:
                yield i, self._output(requests[i], texts[i])

    def get_metrics(self) -> dict[str, Any]:
        """Counters since this object was made: tokens, acceptance (also by position in the draft), steps, KV use, preemptions."""
        stats, pool = self.stats, self.engine.target.cache.tables.pool
        counters = {f.name: getattr(stats, f.name) for f in fields(stats) if f.name != "acceptance"}
        return counters | {
            "seconds": dict(stats.seconds),
            "drafter_faults": dict(stats.drafter_faults),
            "target": asdict(stats.target),
            "draft": asdict(stats.draft),
            "num_drafts_by_position": stats.num_drafts_by_position,
            "num_accepted_by_position": stats.num_accepted_by_position,
            "tokens_per_step": stats.tokens_per_step,
            "acceptance_rate": stats.acceptance_rate,
            "num_group_choices": stats.num_group_choices,
            "num_group_hits": stats.num_group_hits,
            "acceptance": self.acceptance_name,
            "num_running": len(self.engine.scheduler.running),
            "num_waiting": len(self.engine.scheduler.waiting),
            "num_kv_blocks": pool.num_blocks,
            "num_free_kv_blocks": pool.num_free,
        }

    def run(self, requests: SequenceOf[SequenceOf[Sequence]]) -> Iterator[list[int]]:
        """Run requests (each a list of samples) to their end; after each step, the indices of those that grew in it.

        One caller at a time: a second thread waits, and a second call inside a running stream is refused. However this ends, no row is
        left in the engine.
        """
        check_requests(requests)
        place = {s.id: i for i, samples in enumerate(requests) for s in samples}
        with self.exclusive() as engine:
            try:
                for samples in requests:
                    for sequence in samples:
                        engine.add(sequence)
                while engine.has_work:
                    yield list(dict.fromkeys(place[s.id] for s in engine.step()))
            finally:
                for sequence in (s for samples in requests for s in samples):
                    if not sequence.is_finished:
                        engine.abort(sequence)

    @contextmanager
    def exclusive(self) -> Iterator[Engine]:
        """The engine, for this thread alone: others wait, and a second call inside the first is refused."""
        if self._owner == threading.get_ident():
            raise RequestError("this LLM is in the middle of a stream of the same thread; finish or close that first")
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield self.engine
            finally:
                self._owner = None

    def _requests(
        self, prompts: Mapping[str, Prompt], params: SamplingParams | SequenceOf[SamplingParams] | None, watch_text: bool
    ) -> list[list[Sequence]]:
        pairs = zip(prompts.items(), one_each(params, len(prompts)), strict=True)
        return [self.samples(p, q, watch_text, name) for (name, p), q in pairs]

    def encode(self, text: str, add_special_tokens: bool = True, name: str = "prompt") -> list[int]:
        """Token ids of a prompt, with the special tokens the tokenizer adds; errors call it `name`."""
        if not isinstance(text, str):
            raise RequestError(f"{name} is {kind_of(text)}; give a string")
        check_kind("add_special_tokens", add_special_tokens, bool)
        if self.target.tokenizer is None:
            raise RequestError(f"{self.target.name!r} has no tokenizer; give prompts as lists of token ids")
        self._check_characters(len(text), name)
        try:
            valid_text(text)
        except ValueError as error:
            raise RequestError(f"{name} is {error}") from None
        return encode_text(self.target.tokenizer, text, add_special_tokens)

    def _check_characters(self, count: int, name: str) -> None:
        """Before work that grows with the text: no token is that long."""
        if count > (most := MOST_CHARACTERS_PER_TOKEN * self.max_len):
            raise RequestError(
                f"{name} has {count:,} characters, more than {most:,} cannot fit the context of {self.max_len} tokens; shorten it"
            )

    def encode_chat(self, messages: SequenceOf[Mapping[str, Any]], name: str = "messages") -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the assistant's turn; errors call it `name`."""
        messages = conversation(messages, name)
        tokenizer = self.target.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise RequestError(f"{self.target.name!r} has no chat template; give a prompt instead of messages")
        self._check_characters(sum(len(text) for m in messages for text in m.values() if isinstance(text, str)), name)
        rendered = render_chat(tokenizer, messages, MOST_CHARACTERS_PER_TOKEN * self.max_len)
        return self.encode(rendered, add_special_tokens=False, name=name)

    def room_after(self, num_tokens: int) -> int:
        """How many tokens can follow a prompt of so many, in the context and in the KV pool."""
        check_kind("num_tokens", num_tokens, int)
        return min(self.max_len, self.engine.scheduler.capacity) - num_tokens

    def check_prompt(self, tokens: SequenceOf[int], params: SamplingParams, name: str = "prompt") -> None:
        """Raise `RequestError` for what this model cannot serve; the message calls the prompt `name`."""
        size, tokens, (params,) = self.target.vocab_size, token_ids(tokens, name), one_each(params, 1)
        if not tokens:
            raise RequestError(f"{name} is empty; give at least one token")
        if len(tokens) >= self.max_len:
            raise RequestError(f"{name} has {len(tokens)} tokens, the context holds {self.max_len} with at least one new; shorten it")
        for field, ids in ((name, tokens), *params.token_ids.items()):
            if (bad := next((t for t in ids if not 0 <= t < size), None)) is not None:
                raise RequestError(
                    f"{field}: token id {shown(bad)} is outside the vocabulary of {size}, 0 to {size - 1}; check the tokenizer"
                )
        if (params.stop or params.bad_words) and self.target.tokenizer is None:
            raise RequestError(f"stop strings and bad words need a tokenizer, and {self.target.name!r} has none; use token ids")
        self.engine.scheduler.check_size(min(self.max_len, len(tokens) + params.max_tokens))

    def samples(self, prompt: Prompt, params: SamplingParams, watch_text: bool, name: str = "prompt") -> list[Sequence]:
        """The `n` sequences of one request, checked and ready for the engine; all but the first share the first one's prompt.

        With `watch_text` each has a `watcher` that holds its text after every token. Errors call the prompt `name`.

        Raises
        ------
        RequestError  the prompt or the parameters cannot be served
        """
        tokens = self.encode(prompt, name=name) if isinstance(prompt, str) else token_ids(prompt, name)
        self.check_prompt(tokens, params, name)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        eos = self.target.eos_token_ids
        samples: list[Sequence] = []
        for index in range(params.n):
            sampler = Sampler(params, seed, index, len(tokens), eos | set(params.stop_token_ids), self._bad_words(params))
            samples.append(
                Sequence(
                    id=next(self._ids),
                    tokens=list(tokens),
                    num_prompt_tokens=len(tokens),
                    sampler=sampler,
                    eos_token_ids=eos,
                    max_len=self.max_len,
                    watcher=self._detokenizer(tokens, params) if watch_text or params.stop else None,
                    parent=samples[0] if samples else None,
                )
            )
        return samples

    def _detokenizer(self, tokens: list[int], params: SamplingParams) -> Detokenizer | None:
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            return None
        include, skip = params.include_stop_str_in_output, params.skip_special_tokens
        return Detokenizer(tokenizer, tokens, params.stop, include, skip, params.min_tokens)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of every bad word, as it begins a text and as it follows a space."""
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            return ()
        forms = [form for word in params.bad_words for form in (word, " " + word.lstrip())]
        encoded = (tuple(tokenizer.encode(form, add_special_tokens=False)) for form in forms)
        return tuple(dict.fromkeys(ids for ids in encoded if ids))

    def _output(self, samples: list[Sequence], prompt: Prompt) -> RequestOutput:
        return request_output(samples, prompt if isinstance(prompt, str) else None, self.target.tokenizer, self.acceptance_name)

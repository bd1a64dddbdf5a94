"""Prompts and conversations as sequences: text to token ids, everything checked before the engine sees it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from itertools import count
from typing import Any

from echelon.chat import encode_text, render_chat
from echelon.errors import RequestError
from echelon.inputs import Prompt, check_kind, conversation, kind_of, shown, token_ids, unwrapped, valid_text
from echelon.model.load.loading import LoadedModel
from echelon.sampling import Parameters, Sampler, SamplingParams, one_each
from echelon.scheduler import Scheduler
from echelon.sequence import Sequence
from echelon.text import Detokenizer

MOST_CHARACTERS_PER_TOKEN = 64  # on average over a prompt
GENERATION_SETTINGS = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")} | {
    "max_new_tokens": "max_tokens"
}


class InputProcessor:
    """Turn requests into sequences for one engine; `max_len` bounds a text, its prompt included. `seed`: of the seeds of requests that have
    none of their own; None draws them.
    """

    def __init__(self, target: LoadedModel, max_len: int, scheduler: Scheduler, seed: int | None = None) -> None:
        self._target, self._max_len, self._scheduler = target, max_len, scheduler
        self._ids, self._seeds = count(), random.SystemRandom() if seed is None else random.Random(seed)

    def encode(self, text: str, add_special_tokens: bool = True, name: str = "prompt") -> list[int]:
        """Token ids of a prompt, with the special tokens the tokenizer adds; errors call it `name`."""
        if not isinstance(text, str):
            raise RequestError(f"{name} is {kind_of(text)}; give a string")
        check_kind("add_special_tokens", add_special_tokens, bool)
        if self._target.tokenizer is None:
            raise RequestError(f"{self._target.name!r} has no tokenizer; give prompts as lists of token ids")
        self._check_characters(len(text), name)
        try:
            valid_text(text)
        except ValueError as error:
            raise RequestError(f"{name} is {error}") from None
        return encode_text(self._target.tokenizer, text, add_special_tokens)

    def _check_characters(self, count: int, name: str) -> None:
        """Refuse a text that cannot fit the context, before work that grows with it: no token is that long."""
        if count > (most := MOST_CHARACTERS_PER_TOKEN * self._max_len):
            raise RequestError(
                f"{name} has {count:,} characters, more than {most:,} cannot fit the context of {self._max_len} tokens; shorten it"
            )

    def encode_chat(
        self, messages: SequenceOf[Mapping[str, Any]], name: str = "messages", variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the assistant's turn; errors call it `name`. `variables` are
        those of the template, such as `enable_thinking`.
        """
        messages = conversation(messages, name)
        tokenizer = self._target.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise RequestError(f"{self._target.name!r} has no chat template; give a prompt instead of messages")
        self._check_characters(sum(len(text) for m in messages for text in m.values() if isinstance(text, str)), name)
        rendered = render_chat(tokenizer, messages, MOST_CHARACTERS_PER_TOKEN * self._max_len, variables)
        return self.encode(rendered, add_special_tokens=False, name=name)

    def room_after(self, num_tokens: int) -> int:
        """How many tokens can follow a prompt of so many, in the context and in the KV pool."""
        check_kind("num_tokens", num_tokens, int)
        return min(self._max_len, self._scheduler.capacity) - num_tokens

    def check_prompt(self, tokens: SequenceOf[int], params: SamplingParams, name: str = "prompt") -> None:
        """Raise `RequestError` for what this model cannot serve; the message calls the prompt `name`."""
        size, tokens, (params,) = self._target.vocab_size, token_ids(tokens, name), one_each(params, 1)
        if not tokens:
            raise RequestError(f"{name} is empty; give at least one token")
        if len(tokens) >= self._max_len:
            raise RequestError(f"{name} has {len(tokens)} tokens, the context holds {self._max_len} with at least one new; shorten it")
        for field, ids in ((name, tokens), *params.token_ids.items()):
            if (bad := next((t for t in ids if not 0 <= t < size), None)) is not None:
                raise RequestError(
                    f"{field}: token id {shown(bad)} is outside the vocabulary of {size}, 0 to {size - 1}; check the tokenizer"
                )
        if (params.stop or params.bad_words) and self._target.tokenizer is None:
            raise RequestError(f"stop strings and bad words need a tokenizer, and {self._target.name!r} has none; use token ids")
        fits = params.max_tokens is not None and len(tokens) < self._scheduler.capacity
        instead = "lower max_tokens" if fits else "shorten the prompt"
        self._scheduler.check_size(min(self._max_len, len(tokens) + (params.max_tokens or 1)), instead)

    def samples(self, prompt: Prompt, params: Parameters, watch_text: bool, name: str = "prompt", salt: bytes = b"") -> list[Sequence]:
        """The `n` sequences of one request, checked and ready for the engine; all but the first share the first one's prompt.

        With `watch_text` each has a `watcher` that holds its text after every token. Errors call the prompt `name`. Keys and values are
        shared only with requests of the same `salt`.

        Raises
        ------
        RequestError  the prompt or the parameters cannot be served
        """
        check_kind("salt", salt, bytes, RequestError)
        (params,) = one_each(params, 1)
        prompt = unwrapped(prompt, name)
        tokens = self.encode(prompt, name=name) if isinstance(prompt, str) else token_ids(prompt, name)
        self.check_prompt(tokens, params, name)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        longest = self._max_len if params.max_tokens is not None else self.room_after(0)
        eos, bad_words = self._target.eos_token_ids, self._bad_words(params)
        samples: list[Sequence] = []
        for index in range(params.n):
            sampler = Sampler(params, seed, index, len(tokens), eos | set(params.stop_token_ids), bad_words)
            samples.append(
                Sequence(
                    id=next(self._ids),
                    tokens=list(tokens),
                    num_prompt_tokens=len(tokens),
                    sampler=sampler,
                    eos_token_ids=eos,
                    max_len=longest,
                    watcher=self._detokenizer(tokens, params) if watch_text or params.stop else None,
                    parent=samples[0] if samples else None,
                    salt=salt,
                )
            )
        return samples

    def generation_settings(self) -> dict[str, Any]:
        """Sampling parameters that the model's generation settings name, unchecked."""
        said = {name: getattr(self._target.model.generation_config, key, None) for key, name in GENERATION_SETTINGS.items()}
        return {name: value for name, value in said.items() if value is not None}

    def default_params(self) -> SamplingParams:
        """The parameters of requests that bring none: the model's own, as vLLM takes them from its generation settings."""
        try:
            return SamplingParams(**self.generation_settings())
        except RequestError as error:
            raise RequestError(f"the generation settings of {self._target.name!r} cannot be used ({error}); give sampling_params") from None

    def _detokenizer(self, tokens: list[int], params: SamplingParams) -> Detokenizer | None:
        tokenizer = self._target.tokenizer
        if tokenizer is None:
            return None
        include, skip = params.include_stop_str_in_output, params.skip_special_tokens
        return Detokenizer(tokenizer, tokens, params.stop, include, skip, params.min_tokens)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of every bad word, as it begins a text and as it follows a space, that the model can say."""
        tokenizer = self._target.tokenizer
        if tokenizer is None:
            return ()
        forms = [form for word in params.bad_words for form in (word, " " + word.lstrip())]
        encoded = (tuple(tokenizer.encode(form, add_special_tokens=False)) for form in forms)
        return tuple(dict.fromkeys(ids for ids in encoded if ids and max(ids) < self._target.vocab_size))

"""The drafter of a call of `generate`: chosen by the arguments of `transformers`, or by a `SpeculativeConfig`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from transformers import GenerationConfig, PreTrainedModel

from echelon.errors import ConfigError, RequestError
from echelon.hf.arguments import check_model
from echelon.methods import METHODS
from echelon.speculative_config import SpeculativeConfig, speculative

Config = SpeculativeConfig | Mapping[str, Any]
NUM_TOKENS = 4  # drafted by an assistant, where nothing says how many
UNSAID = GenerationConfig._get_default_generation_params()["num_assistant_tokens"]  # what a field says that nobody has set


@dataclass(frozen=True)
class Drafting:
    """assistant: a model, or the name of one; num_assistant_tokens: as an argument of the call."""

    assistant: PreTrainedModel | str | None
    config: SpeculativeConfig | None
    num_assistant_tokens: int | None = None

    @classmethod
    def of(
        cls, assistant: PreTrainedModel | str | os.PathLike[str] | None, config: Config | None, num_assistant_tokens: int | None = None
    ) -> Self:
        """Checked.

        Raises
        ------
        ConfigError, UnsupportedModelError  one of them is no assistant or configuration, or they contradict each other
        """
        if config is not None and not isinstance(config, (SpeculativeConfig, Mapping)):
            raise ConfigError(f"speculative_config is a {type(config).__name__}; give a SpeculativeConfig or a mapping of its keys")
        checked = speculative(config)
        if isinstance(assistant, os.PathLike):
            assistant = os.fspath(assistant)
        if isinstance(assistant, PreTrainedModel):
            check_model(assistant)
        elif assistant is not None and not isinstance(assistant, str):
            raise ConfigError(f"assistant_model is a {type(assistant).__name__}; give a transformers model, or the folder or name of one")
        if checked is not None and checked.own_copy is not None:
            raise ConfigError(
                f"model = {checked.model!r} reads the target's checkpoint again, and a model in memory has none; name a draft model"
            )
        if checked is not None and assistant is not None and (METHODS[checked.method].needs != "model" or checked.model is not None):
            raise ConfigError(f"assistant_model and speculative_config with method {checked.method!r} name two drafters; leave one out")
        if checked is not None and METHODS[checked.method].needs == "model" and assistant is None:
            assistant = checked.model
        return cls(assistant, checked, num_assistant_tokens)

    def resolved(self, generation: GenerationConfig) -> SpeculativeConfig | None:
        """With what the fields of a call say; None: nothing drafts.

        Raises
        ------
        RequestError  a field is out of range, or contradicts the rest
        """
        lookup, ngram = generation.prompt_lookup_num_tokens, generation.max_matching_ngram_size
        asked = self.num_assistant_tokens
        if asked is None and generation.num_assistant_tokens != UNSAID:
            asked = generation.num_assistant_tokens
        if self.num_assistant_tokens is not None and self.assistant is None:
            raise RequestError("num_assistant_tokens is how many tokens an assistant_model drafts, and there is none; leave it out")
        if lookup is not None:
            if self.config is not None or self.assistant is not None:
                raise RequestError("prompt_lookup_num_tokens, assistant_model and speculative_config name two drafters; leave one out")
            longest = _in_range("max_matching_ngram_size", 2 if ngram is None else ngram, 16)
            count = _in_range("prompt_lookup_num_tokens", lookup, 64)
            return SpeculativeConfig(method="ngram", num_speculative_tokens=count, prompt_lookup_max=longest, prompt_lookup_min=1)
        if self.assistant is None or asked is None:
            is_unsaid = self.config is None and self.assistant is not None
            return SpeculativeConfig(method="draft_model", num_speculative_tokens=NUM_TOKENS) if is_unsaid else self.config
        if self.config is not None:
            raise RequestError("num_assistant_tokens and speculative_config both say how long drafts are; leave one of them out")
        return SpeculativeConfig(method="draft_model", num_speculative_tokens=_in_range("num_assistant_tokens", asked, 64))


def _in_range(name: str, value: Any, most: int) -> int:
    if not isinstance(value, int) or not 1 <= value <= most:
        raise RequestError(f"{name} = {value!r} is not an integer from 1 to {most}, which echelon.hf drafts at most; change it")
    return value

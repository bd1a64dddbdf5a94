"""Batched speculative decoding inside `transformers`: the model, the batch and the arguments stay the caller's.

    out = echelon.hf.generate(model, **batch, assistant_model=draft, max_new_tokens=64)
    out = model.generate(**batch, custom_generate=echelon.hf.speculate(assistant_model=draft), max_new_tokens=64)

Both take padded batches larger than one, which `transformers` refuses with an assistant. Everything that `generate` prepares (logits
processors, stopping criteria, num_return_sequences, the generation config) is honoured; what cannot be is refused by name. How long drafts
are is said by `speculative_config`, not by `num_assistant_tokens` and `assistant_confidence_threshold`, whose defaults are for one
sequence. In float32 the greedy result is `generate`'s own.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from echelon.api import LLM
from echelon.config import SpeculativeConfig
from echelon.errors import ConfigError, RequestError
from echelon.sampling import Sampler, SamplingParams
from echelon.sequence import Sequence
from echelon.target.loading import borrowed

REFUSED_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
Config = SpeculativeConfig | Mapping[str, Any] | None


def generate(
    model: PreTrainedModel, *args: Any, assistant_model: PreTrainedModel | None = None, speculative_config: Config = None, **kwargs: Any
) -> Any:
    """`model.generate(*args, **kwargs)` with a drafter: a draft model, or what `speculative_config` says (see `SpeculativeConfig`)."""
    for name in ("streamer", "custom_generate"):
        if kwargs.get(name) is not None:
            raise RequestError(f"echelon.hf.generate does not take {name}; leave it out, or use echelon.LLM.stream")
    return model.generate(*args, custom_generate=speculate(assistant_model, speculative_config), **kwargs)


def speculate(assistant_model: PreTrainedModel | None = None, speculative_config: Config = None) -> Callable[..., Any]:
    """A decoding method for `model.generate(..., custom_generate=...)`."""
    if assistant_model is None and speculative_config is None:
        warnings.warn("echelon.hf: no drafter, decoding plainly; pass assistant_model= or speculative_config=", stacklevel=2)
    config = speculative_config
    if assistant_model is not None and config is None:
        config = {"method": "draft_model", "num_speculative_tokens": 4}

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        return _decode(model, assistant_model, config, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)

    return decode


class Ending:
    """When a batch is complete, in the terms of `generate`.

    With an end-of-text token a row ends where its criteria say so, and is filled up. Without one `generate` lets every row go on until
    the criteria have stopped them all, and cuts all rows at that length.
    """

    def __init__(self, criteria: StoppingCriteriaList, num_rows: int) -> None:
        self.criteria = criteria
        self.has_end_token = any(hasattr(c, "eos_token_id") for c in criteria)
        self._num_rows = num_rows
        self._stops: dict[int, int] = {}  # row → tokens it had when the criteria first stopped it

    def is_over(self, row: int, ids: list[int], num_new: int) -> bool:
        """Ask after `num_new` new tokens of a row."""
        if row not in self._stops and bool(self.criteria(torch.tensor([ids]), None).all()):
            self._stops[row] = num_new
        if self.has_end_token:
            return row in self._stops
        return len(self._stops) == self._num_rows and num_new >= self.width

    @property
    def width(self) -> int:
        """New tokens of the longest row."""
        return max(self._stops.values())


class CriteriaWatcher:
    """Shows a row to the stopping criteria after every token, as `generate` would: with its padding."""

    def __init__(self, ending: Ending, row: int, padded: list[int]) -> None:
        self.text = ""
        self._ending, self._row, self._ids, self._num_new = ending, row, list(padded), 0

    def push(self, token: int) -> bool:
        self._ids.append(token)
        self._num_new += 1
        return self._ending.is_over(self._row, self._ids, self._num_new)

    def finish(self) -> str:
        return self.text


def _decode(
    model: PreTrainedModel,
    assistant: PreTrainedModel | None,
    config: Config,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    generation: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> Any:
    _refuse(model, generation, model_kwargs)
    mask = model_kwargs.get("attention_mask")
    kept = torch.ones_like(input_ids) if mask is None else mask
    prompts = [row[keep.bool()].tolist() for row, keep in zip(input_ids, kept, strict=True)]
    longest = max(map(len, prompts)) + generation.max_length - input_ids.shape[1]
    ending = Ending(criteria, len(prompts))
    with ExitStack() as stack:
        target = stack.enter_context(borrowed(model))
        draft = stack.enter_context(borrowed(assistant)) if assistant is not None else None
        llm = LLM(target, config, draft, max_num_seqs=len(prompts), max_num_batched_tokens=max(2048, len(prompts)), max_model_len=longest)
        rows = _sequences(prompts, input_ids, longest, generation, processors, ending)
        for prompt, row in zip(prompts, rows, strict=True):
            llm.check_prompt(prompt, row.params)
        for _ in llm.run([[row] for row in rows]):
            pass
    for row in rows:
        if row.error is not None:
            error = row.error.__cause__ or row.error
            error.add_note(f"raised in {row.error.place}")
            raise error
    width = max(row.num_output_tokens for row in rows) if ending.has_end_token else ending.width
    pad = generation._pad_token_tensor
    new = torch.full((len(rows), width), 0 if pad is None else int(pad), dtype=input_ids.dtype)
    for line, row in zip(new, rows, strict=True):
        output = row.output_tokens[:width]
        line[: len(output)] = torch.tensor(output)
    sequences = torch.cat([input_ids, new.to(input_ids.device)], dim=1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if generation.return_dict_in_generate else sequences


def _sequences(
    prompts: list[list[int]], input_ids: Tensor, max_len: int, generation: GenerationConfig, processors: LogitsProcessorList, ending: Ending
) -> list[Sequence]:
    """The rows. The processors hold temperature and filters already, so what is left is greedy, or sampling at temperature 1."""
    num_new = generation.max_length - input_ids.shape[1]
    seed = int(torch.randint(0, 2**62, ())) if generation.do_sample else 0
    rows = []
    for i, (prompt, padded) in enumerate(zip(prompts, input_ids.tolist(), strict=True)):
        process = functools.partial(_process, processors, padded, i, len(prompts))
        temperature = 1.0 if generation.do_sample else 0.0
        params = SamplingParams(temperature=temperature, max_tokens=num_new, logits_processors=(process,) if len(processors) else ())
        sampler = Sampler(params, seed, i, len(prompt))
        watcher = CriteriaWatcher(ending, i, padded)
        rows.append(Sequence(i, prompt, len(prompt), sampler, frozenset(), max_len, watcher))
    return rows


def _process(processors: LogitsProcessorList, padded: list[int], row: int, num_rows: int, output: list[int], logits: Any) -> Any:
    """Some processors keep state by place in the batch, so a row is shown to them at its own place, in a batch of its likes."""
    ids = torch.tensor([padded + output]).expand(num_rows, -1)
    return processors(ids, torch.from_numpy(logits).expand(num_rows, -1).clone())[row].numpy()


def _refuse(model: PreTrainedModel, generation: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """What cannot be honoured, by name."""
    if model.training:
        raise ConfigError(f"{type(model).__name__} is in training mode, where dropout changes the text; call model.eval() first")
    for name in REFUSED_OUTPUTS:
        if getattr(generation, name, None):
            raise RequestError(f"{name} is not available with echelon.hf; ask echelon.LLM for logprobs instead")
    if (generation.num_beams or 1) > 1:
        raise RequestError(f"num_beams = {generation.num_beams} is not available with echelon.hf; use 1")
    if model_kwargs.get("inputs_embeds") is not None:
        raise RequestError("inputs_embeds is not available with echelon.hf; pass input_ids")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise RequestError("past_key_values that hold tokens are not available with echelon.hf; pass the whole text as input_ids")

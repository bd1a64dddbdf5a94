"""Batched speculative decoding inside `transformers`: the model, the batch and the arguments stay the caller's.

    out = echelon.hf.generate(model, **batch, assistant_model=draft, max_new_tokens=64)
    out = model.generate(**batch, custom_generate=echelon.hf.speculate(assistant_model=draft), max_new_tokens=64)

Both take padded batches larger than one, which `transformers` refuses with an assistant. Every argument of `generate` and every field of
`GenerationConfig` is honoured or refused by name (`echelon.hf.arguments` lists them). In float32 the greedy result is `generate`'s own;
what is sampled follows `torch.manual_seed`, whatever drafts, but is not what `generate` would draw with that seed.

Logits processors and stopping criteria of `transformers` that keep no state are asked about drafted tokens. All others (the watermark of
SynthID, classifier-free guidance, your own) are called as `generate` calls them, once a place for the whole batch; then none is drafted.
One of your own whose answer for a row depends on that row's ids and scores alone says so by an attribute `is_pure = True`.

`return_dict_in_generate` gives scores and logits, 0 in rows that have ended, and no cache. `streamer` may be a list, one a row.

The model is never changed: a copy that shares its weights is served, and kept until the model changes, goes or is released. Linear layers
of the copy have packed weights, on a processor as large again as the model's own, which the caller's calls still need. A second thread with
the same model waits.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from echelon.errors import RequestError
from echelon.hf.arguments import check_arguments, check_fields, check_model, checked_mask
from echelon.hf.batch import Batch, BatchStreamer, longest, output_of
from echelon.hf.drafting import Config, Drafting
from echelon.hf.in_order import decode_in_order
from echelon.hf.prepared import in_use, named_assistant, release
from echelon.hf.processors import stateful
from echelon.hf.speculation import decode_ahead
from echelon.llm import LLM
from echelon.methods import METHODS
from echelon.ops import devices

__all__ = ["generate", "release", "speculate"]


def generate(
    model: PreTrainedModel,
    *args: Any,
    assistant_model: PreTrainedModel | str | os.PathLike[str] | None = None,
    speculative_config: Config | None = None,
    **kwargs: Any,
) -> Any:
    """`model.generate(*args, **kwargs)` with a drafter: a draft model (or the folder or name of one), `prompt_lookup_num_tokens`, or what
    `speculative_config` says (see `SpeculativeConfig`).

    Raises
    ------
    ConfigError, UnsupportedModelError   the model or the drafter cannot be served
    RequestError                         an argument is not available here, by name, or a row cannot be served
    ValueError, TypeError                what `transformers` itself refuses
    """
    check_model(model)
    arguments = _by_name(args, kwargs)
    drafting = Drafting.of(assistant_model, speculative_config, arguments.get("num_assistant_tokens"))
    check_arguments(model, arguments)
    arguments.pop("custom_generate", None)
    streamer, tokenizer = arguments.pop("streamer", None), arguments.pop("tokenizer", None)
    stream = None if streamer is None else BatchStreamer(streamer)
    shell = copy.copy(model)  # the same modules; `generate` hands no tokenizer on to a custom method by itself
    vars(shell)["_extract_generation_mode_kwargs"] = lambda *_: {"tokenizer": tokenizer}
    vars(shell)["_validate_generation_mode"] = lambda *_: None  # which refuses what its own assisted decoding cannot do
    return shell.generate(custom_generate=_decoder(model, drafting, stream), streamer=stream, **arguments)


def speculate(
    assistant_model: PreTrainedModel | str | os.PathLike[str] | None = None, speculative_config: Config | None = None
) -> Callable[..., Any]:
    """A decoding method for `model.generate(..., custom_generate=...)`. What `transformers` does not hand on to one (an assistant, a
    streamer) is refused: there `echelon.hf.generate` is needed.
    """
    return _decoder(None, Drafting.of(assistant_model, speculative_config), None)


def _decoder(given: PreTrainedModel | None, drafting: Drafting, stream: BatchStreamer | None) -> Callable[..., Any]:
    """given: the model of `echelon.hf.generate`; without one the method is called by a `generate` that others have called."""

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> Any:
        if given is None:
            _refuse_lost(sys._getframe(1).f_locals)
        owner = model if given is None else given
        check_model(owner)
        check_fields(generation_config)
        inputs.pop("tokenizer", None)  # the stopping criteria have it
        kept = checked_mask(owner, input_ids, inputs, longest(stopping_criteria, generation_config))
        return _decode(owner, drafting, Batch(input_ids, kept, logits_processor, stopping_criteria, generation_config, stream))

    return decode


def _by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate`, those by position included."""
    names = list(signature(GenerationMixin.generate).parameters)[1:-1]
    placed = dict(zip(names, args, strict=False))
    if len(args) > len(names) or placed.keys() & kwargs.keys() or "assistant_model" in placed:
        raise RequestError(f"{len(args)} arguments by position, of which some are too many or given twice; pass them by name")
    return placed | kwargs


def _refuse_lost(callers: dict[str, Any]) -> None:
    """`transformers` takes these out before it calls a custom method, so they are looked up where it has them."""
    for name in ("streamer", "assistant_model", "synced_gpus"):
        if callers.get(name):
            raise RequestError(f"{name} does not reach a custom_generate; pass it to echelon.hf.generate(model, ..., {name}=...)")


def _decode(model: PreTrainedModel, drafting: Drafting, batch: Batch) -> Any:
    config = drafting.resolved(batch.generation)
    names = stateful([*batch.processors, *batch.criteria])
    if config is None:
        warnings.warn("echelon.hf: no drafter, decoding plainly; pass assistant_model= or speculative_config=", stacklevel=2)
    elif names:
        warnings.warn(
            f"echelon.hf: {', '.join(names)} may keep state from call to call, so no token is drafted; set is_pure = True on what answers "
            "for a row by its ids and scores alone",
            stacklevel=2,
        )
        config = None
    assistant = drafting.assistant if config is not None and METHODS[config.method].needs == "model" else None
    owners = [model, assistant] if isinstance(assistant, PreTrainedModel) else [model]
    with in_use(*owners) as served, devices.current(model.device):
        target = served[0]
        if batch.max_len > target.max_len:
            raise RequestError(
                f"a prompt of {batch.max_len - batch.num_new} tokens and {batch.num_new} new ones exceed the context of {target.max_len}; "
                "lower max_new_tokens"
            )
        if isinstance(assistant, str):
            quantization = config.quantization if config is not None else None
            served.append(named_assistant(assistant, quantization, model, target.device.type))
        llm = LLM(
            target,
            config,
            served[1] if len(served) > 1 else None,
            max_num_seqs=batch.num_rows,
            max_model_len=batch.max_len,
        )
        decoded = decode_in_order(llm, batch) if names else decode_ahead(llm, batch)
    if batch.stream is not None:
        batch.stream.end()
    return output_of(batch, decoded)

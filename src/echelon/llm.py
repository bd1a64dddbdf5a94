"""`LLM`: the door for users, the command line, benchmarks and everything else outside the engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields, replace
from types import TracebackType
from typing import Any, Self, cast

from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from echelon.adaptive.cost_files import CostRecord
from echelon.build import build, fit_to_memory
from echelon.config import EngineConfig
from echelon.engine import Engine
from echelon.engine_costs import measured_costs
from echelon.errors import ClosedError, ConfigError, RequestError
from echelon.heads.base import Head
from echelon.input_processor import InputProcessor
from echelon.inputs import Prompt, check_callable, conversations_of, prompts_of
from echelon.metrics import Metric, families
from echelon.model.load.loading import LoadedModel
from echelon.ops import devices
from echelon.outputs import OutputBuilder, RequestOutput
from echelon.sampling import Parameters, SamplingParams, one_each
from echelon.sequence import Sequence, check_requests
from echelon.speculative_config import SpeculativeConfig, speculative
from echelon.stats import Stats


class _Closed:
    """Stands for each part that a closed `LLM` had."""

    def __getattr__(self, name: str) -> Any:
        raise ClosedError("this LLM has been closed and its memory freed; make a new one: LLM(...)")


class LLM:
    """A model ready to generate for many prompts at once. `close` frees its memory, as does leaving a `with LLM(...) as llm:`.

    Parameters
    ----------
    model               folder (also as a path) or hub name, or what `load_model` returned
    speculative_config  what drafts: a `SpeculativeConfig` or a mapping with vLLM's keys; `None` decodes plainly
    draft_model         a draft model loaded already, instead of the name in `speculative_config`
    draft_head          likewise a head of the target, which runs as it is, by the framework's operations; one that `speculative_config`
                        names runs by ours
    settings            the fields of `EngineConfig`, such as dtype, max_num_seqs, max_model_len, quantization or memory

    Raises
    ------
    ConfigError            a setting cannot be, or two of them do not go together
    ModelLoadError         files of a model or head are missing, damaged or not what they say
    UnsupportedModelError  a model cannot be batched exactly, or the drafter does not fit the target
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        draft_model: LoadedModel | None = None,
        draft_head: Head | None = None,
        **settings: Any,
    ) -> None:
        self.config, self.speculative_config = EngineConfig(**settings), speculative(speculative_config)
        self.fitting = fit_to_memory(self.config, self.speculative_config, model, draft_model, draft_head)
        if self.fitting is not None:
            self.config, self.speculative_config = self.fitting.config, self.fitting.spec
        self.engine, self.storage, self.max_len = build(self.config, self.speculative_config, model, draft_model, draft_head)
        self.target, self.memory_plan = self.storage.runners[0].loaded, self.storage.plan
        if self.config.skip_tokenizer_init:
            self.target = replace(self.target, tokenizer=None)
        self.inputs = InputProcessor(self.target, self.max_len, self.engine.scheduler, self.config.seed)
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread whose requests are running

    def close(self) -> None:
        """End running requests and free keys, values and, unless something else holds them, weights. Closing again does nothing.

        Requests of another thread are waited for. A stream of this thread ends early.
        """
        with nullcontext() if self._owner == threading.get_ident() else self._lock:
            if isinstance(self.engine, _Closed):
                return
            try:
                for sequence in (*self.engine.scheduler.running, *self.engine.scheduler.waiting):
                    self.engine.abort(sequence)
            finally:
                self.storage.free()
            self.engine = self.target = self.storage = self.inputs = cast(Any, _Closed())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

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
        sampling_params: Parameters | SequenceOf[Parameters] | None = None,
        on_finish: Callable[[int, RequestOutput], None] | None = None,
        on_step: Callable[[], None] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """Continue every prompt (a string, a list of token ids, or a mapping with `prompt` or `prompt_token_ids`); outputs in the order of
        the prompts.

        Parameters
        ----------
        sampling_params  `SamplingParams` or mappings with the same keys; one for all, or one a prompt; without,
                         `get_default_sampling_params`
        on_finish        called with (index of the prompt, output) as soon as a request is done
        on_step          called after each step
        use_tqdm         shows how many are done, in a terminal or a notebook; or what makes such a bar

        Raises
        ------
        RequestError     a prompt is none, is empty or too long, or the counts differ; nothing has run then
        """
        check_callable("on_finish", on_finish)
        check_callable("on_step", on_step)
        check_callable("use_tqdm", None if isinstance(use_tqdm, bool) else use_tqdm)
        outputs: dict[int, RequestOutput] = {}
        builders = self._requests(prompts, sampling_params, watch_text=False)
        with _bar(use_tqdm, len(builders)) as bar:
            for grown in self.run([b.samples for b in builders]):
                for i in grown:
                    if all(s.is_finished for s in builders[i].samples):
                        outputs[i] = builders[i].output()
                        bar.update(1)
                        if on_finish:
                            on_finish(i, outputs[i])
                if on_step:
                    on_step()
        if len(outputs) < len(builders):
            raise ClosedError("this LLM was closed while requests were running; close it after `generate` has returned")
        return [outputs[i] for i in range(len(builders))]

    def chat(
        self,
        messages: SequenceOf[Mapping[str, str]] | SequenceOf[SequenceOf[Mapping[str, str]]],
        sampling_params: Parameters | SequenceOf[Parameters] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, in the model's own chat template; a message is a mapping with `role` and `content`.
        `chat_template_kwargs` are variables of the template, such as `{"enable_thinking": False}`.
        """
        prompts = [self.inputs.encode_chat(c, name, chat_template_kwargs) for name, c in conversations_of(messages).items()]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompts: Prompt | SequenceOf[Prompt], sampling_params: Parameters | SequenceOf[Parameters] | None = None
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Like `generate`, but yields (index of the prompt, output so far) for every request that grew in a step.

        Closing the iterator, or dropping it, takes its rows out of the engine.
        """
        builders = self._requests(prompts, sampling_params, watch_text=True)
        for grown in self.run([b.samples for b in builders]):
            for i in grown:
                yield i, builders[i].output()

    def _requests(
        self, prompts: Prompt | SequenceOf[Prompt], params: Parameters | SequenceOf[Parameters] | None, watch_text: bool
    ) -> list[OutputBuilder]:
        """Every request's samples, ready to run, in what reads their outputs."""
        named = prompts_of(prompts)
        pairs = zip(named.items(), one_each(self.get_default_sampling_params() if params is None else params, len(named)), strict=True)
        tokenizer, rule = self.target.tokenizer, self.acceptance_name
        return [OutputBuilder(self.inputs.samples(p, q, watch_text, name), p, tokenizer, rule) for (name, p), q in pairs]

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without parameters of their own run with: as the model's generation_config.json says, otherwise the defaults.

        Raises
        ------
        RequestError  that file says what `SamplingParams` refuses
        """
        return self.inputs.default_params()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer.

        Raises
        ------
        ConfigError  it has none, or `skip_tokenizer_init` left it out
        """
        if self.target.tokenizer is None:
            raise ConfigError(f"{self.target.name!r} has no tokenizer here; prompts are lists of token ids")
        return self.target.tokenizer

    def get_metrics(self) -> list[Metric]:
        """Counters since this object was made, in vLLM's form: `Counter`, `Gauge` and `Vector` of `echelon.metrics` under vLLM's names."""
        return [metric for family in families(self.get_counters()) for metric in family.metrics()]

    def get_counters(self) -> dict[str, Any]:
        """Counters by name since this object was made: tokens, acceptance (also by position in the draft), steps, KV use, preemptions;
        tokens looked up in the prefix cache and found there, and free blocks that it fills.

        May be called while another thread runs the engine.
        """
        stats, tables, prefixes = self.stats, self.engine.target.cache.tables, self.engine.scheduler.blocks.prefix_cache
        counters = {f.name: getattr(stats, f.name) for f in fields(stats) if f.name != "acceptance"}
        return counters | {
            "seconds": dict(stats.seconds),
            "drafter_faults": dict(stats.drafter_faults),
            "target": asdict(stats.target),
            "draft": asdict(stats.draft),
            "num_drafts_by_position": stats.num_drafts_by_position,
            "num_accepted_by_position": stats.num_accepted_by_position,
            "num_steps_by_draft_length": stats.num_steps_by_length,
            "tokens_per_step": stats.tokens_per_step,
            "acceptance_rate": stats.acceptance_rate,
            "num_group_choices": stats.num_group_choices,
            "num_group_hits": stats.num_group_hits,
            "acceptance": self.acceptance_name,
            "adaptive": self.engine.controller.as_metrics() if self.engine.controller is not None else None,
            "num_running": len(self.engine.scheduler.running),
            "num_waiting": len(self.engine.scheduler.waiting),
            "num_kv_blocks": tables.num_blocks,
            "num_free_kv_blocks": tables.num_free,
            "num_prefix_queries": prefixes.num_queries if prefixes is not None else 0,
            "num_prefix_hits": prefixes.num_hits if prefixes is not None else 0,
            "num_cached_kv_blocks": prefixes.num_unused if prefixes is not None else 0,
        }

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values that are kept for texts that begin alike; needed after weights have been changed in place."""
        with self.exclusive() as engine:
            if engine.scheduler.blocks.prefix_cache is not None:
                engine.scheduler.blocks.prefix_cache.clear()

    def measure_costs(self) -> CostRecord:
        """Measure anew what steps and drafting cost; needs a drafter whose lengths are "auto"."""
        spec = self.speculative_config
        if spec is None or self.engine.controller is None:
            raise ConfigError("costs are those of a drafter with num_speculative_tokens = 'auto'; configure one")
        with self.exclusive() as engine, devices.current(self.target.device):
            if engine.has_work:
                raise RequestError("requests are running; costs are measured between them")
            return measured_costs(self.config, spec, self.storage, engine.drafter.unguarded)

    def run(self, requests: SequenceOf[SequenceOf[Sequence]]) -> Iterator[list[int]]:
        """Run requests (each a list of samples) to their end; after each step, the indices of those that grew in it.

        One caller at a time: a second thread waits, and a second call inside a running stream is refused. However this ends, no row is
        left in the engine.
        """
        check_requests(requests)
        index = {s.id: i for i, samples in enumerate(requests) for s in samples}
        with self.exclusive() as engine:
            try:
                for samples in requests:
                    for sequence in samples:
                        engine.add(sequence)
                while engine.has_work:
                    yield list(dict.fromkeys(index[s.id] for s in engine.step()))
            except BaseException:  # an interrupt among them, which may come while a row ends
                for sequence in (s for samples in requests for s in samples):
                    engine.abort(sequence)
                raise

    @contextmanager
    def exclusive(self) -> Iterator[Engine]:
        """The engine, for this thread alone: others wait, and a second call inside the first is refused."""
        if self._owner == threading.get_ident():
            raise RequestError("this LLM is in the middle of a stream of the same thread; finish or close that first")
        with self._lock:
            try:
                self._owner = threading.get_ident()
                yield self.engine
            finally:
                self._owner = None


def _bar(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    """A bar of requests that are done; where nobody watches, none."""
    try:
        make = use_tqdm if callable(use_tqdm) else tqdm
        return make(total=total, desc="Processed prompts", dynamic_ncols=True, disable=None if use_tqdm else True)
    except TypeError as error:
        raise RequestError(f"use_tqdm makes no bar ({error}); give a class such as tqdm.tqdm, True or False") from None

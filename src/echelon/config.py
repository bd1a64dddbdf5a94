"""Settings of the engine and of what drafts."""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator

from echelon.errors import ConfigError
from echelon.inputs import LARGEST, Text, kind_of, shown
from echelon.methods import ALIASES, METHODS, Can, method_names
from echelon.settings import Settings
from echelon.sizes import parse_bytes
from echelon.trees import Growth

MOST_CHAIN, MOST_NODES = 8, 64  # drafted tokens of a row in a step that adapts, unless told otherwise
RANKS = ("tensor_parallel_size", "pipeline_parallel_size")  # settings that make several processes run the target
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
OWN_COPY = "self:"  # before the integers that a model's own copy drafts in
Quantization = Literal["int8", "int4"]


def _known_method(name: str) -> str:
    if name not in METHODS:
        raise ValueError(f"there is no such method; known: {', '.join(METHODS)}")
    return name


class SpeculativeConfig(Settings):
    """What proposes tokens. `method`, `model`, `num_speculative_tokens`, `prompt_lookup_max` and `_min`, `quantization` and
    `speculative_token_tree` are vLLM's keys; the others are ours.

    `ngram` is LLMA (Yang et al. 2023): the last `prompt_lookup_max` tokens down to `prompt_lookup_min` are looked up in the source,
    and what followed them there is proposed. `draft_model` runs the small model in `model`, with `quantization` in integers; it is meant,
    too, where a model is given and no method. `model="self:int4"` (or `self:int8`) is the target's own copy in integers, read from its
    checkpoint once more and kept beside it.

    `acceptance="exact"` keeps a drafted token if plain decoding would choose it: the same text. `"rejection"` (Leviathan et al. 2023) keeps
    the distribution, not the text. `"typical"` (Cai et al. 2024) keeps neither and is LOSSY: at a temperature above 0 a drafted token stays
    if its probability exceeds min(`posterior_threshold`, `posterior_alpha` · exp(−entropy)).

    `num_speculative_tokens="auto"`, the default, lets the engine decide in every step, by what steps cost here and what has been accepted
    lately: which rows draft, how far, and which drafted tokens are verified, `max_speculative_tokens` a row at most (8 of a chain, 64 of
    a tree). Where nothing pays the step is a plain one. Costs are measured when the engine is made, kept in the user's cache folder and
    corrected as it runs; `cost_table` names a file of them that is not corrected (`echelon bench step --cost-table` writes one). With
    another rule than "exact" each row's own past decides alone, by costs that are not corrected: the text of a seed then depends on the
    cost table too. On CUDA a draft model whose chains are drafted without the host drafts 5 tokens by default: steps that adapt are not
    launched ahead.

    With `confidence_threshold` above 0 a model or head drafts a token only where the probability, as it sees it, that this token and all
    before it in the draft are chosen is at least that: drafts of unequal length, and no work for tokens unlikely to be kept. Under sampling
    this is a probability among the 128 likeliest tokens, with the noise that the target will draw with; no other is drafted.
    (`assistant_confidence_threshold` of transformers compares the last token's alone, and applies to one sequence.)

    `medusa`, `clover`, `clover2`, `eagle`, `eagle3` and `scylla` run the head in the folder `model`. `tree` shapes what a head or a model
    drafts: `chain`: one path of `num_speculative_tokens`. `static`: the paths of ranks in `speculative_token_tree` (a list, or as in vLLM a
    string of one), by default Medusa's 63 or EAGLE-1's 25, and of them the first `num_speculative_tokens`. `dynamic`: at most
    `num_speculative_tokens` nodes in all, no path longer than `tree_depth`: EAGLE-2's, `tree_top_k` children a node and nodes a level, by
    sharpened probabilities (`echelon.trees.SHARPNESS`; not with `medusa`); for `clover` and `clover2` Clover's, of a
    node's `tree_top_k` likeliest children those that make up `tree_top_p`.
    """

    method: Annotated[StrictStr, AfterValidator(_known_method)] = Field(description=f"What drafts: {', '.join(METHODS)}")
    model: Text | None = Field(default=None, description="Folder or hub name of the draft model or head; self:int8, self:int4.")
    num_speculative_tokens: Annotated[StrictInt, Field(ge=1, le=64)] | Literal["auto"] = Field(
        default="auto", description="Drafted tokens of a row in a step, at most; auto: decided in every step."
    )
    max_speculative_tokens: StrictInt | None = Field(default=None, ge=1, le=64, description="The most that auto drafts.")
    cost_table: Text | None = Field(default=None, description="File of costs that auto decides by, instead of measuring them.")
    prompt_lookup_max: StrictInt = Field(default=2, ge=1, le=16, description="Longest n-gram that is looked up.")
    prompt_lookup_min: StrictInt = Field(default=1, ge=1, le=16, description="Shortest one; of the two lengths one alone is both.")
    prompt_lookup_source: Literal["prompt", "prompt_and_output"] = Field(
        default="prompt_and_output", description="Where n-grams are looked up."
    )
    acceptance: Literal["exact", "rejection", "typical"] = Field(
        default="exact", description="Which drafted tokens stay: for the same text, the same distribution, or neither."
    )
    confidence_threshold: StrictFloat = Field(
        default=0.0, ge=0.0, lt=1.0, description="A draft ends where the drafter gives the whole of it less than this chance."
    )
    posterior_threshold: StrictFloat = Field(default=0.09, gt=0.0, lt=1.0, description="Of typical acceptance.")
    posterior_alpha: StrictFloat = Field(default=0.3, gt=0.0, lt=1.0, description="Of typical acceptance.")
    tree: Literal["chain", "static", "dynamic"] = Field(default="chain", description="Shape of drafts.")
    speculative_token_tree: tuple[tuple[StrictInt, ...], ...] | None = Field(default=None, description="Paths of a static tree, by ranks.")
    tree_top_k: StrictInt = Field(default=4, ge=1, le=64, description="Children of a node of a dynamic tree, and nodes of a level.")
    tree_top_p: StrictFloat = Field(default=0.8, gt=0.0, le=1.0, description="Mass of a node's children that Clover keeps.")
    tree_depth: StrictInt = Field(default=5, ge=1, le=64, description="Longest path of a dynamic tree.")
    quantization: Quantization | None = Field(default=None, description="Weights of the draft model or head in integers.")

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Aliases of `method`, a model without one drafts as it is, and a lone length of n-grams means that length only, as in vLLM."""
        values = dict(values)
        if "model" in values:
            values.setdefault("method", "draft_model")
        if isinstance(method := values.get("method"), str):
            values["method"] = ALIASES.get(method, method)
        if isinstance(paths := values.get("speculative_token_tree"), str):
            values["speculative_token_tree"] = _parsed_tree(paths)
        for one, other in (("prompt_lookup_max", "prompt_lookup_min"), ("prompt_lookup_min", "prompt_lookup_max")):
            if one in values:
                values.setdefault(other, values[one])
        return values

    @model_validator(mode="after")
    def _method_can_do_it(self) -> Self:
        can, name = METHODS[self.method].can, self.method
        is_rejection, ranked = self.acceptance == "rejection", f"tree = {self.tree!r}" if self.grows_trees else None
        if is_rejection and Can.REJECTION not in can:
            ranked = repr(name)
        elif self.grows_trees and Can.TREES not in can:
            growing = ", ".join(method_names(Can.TREES))
            raise ValueError(f"tree = {self.tree!r} belongs to {growing}; method {name!r} drafts chains: leave it out")
        if is_rejection and ranked:
            raise ValueError(f"acceptance = 'rejection' is defined on chains of drawn tokens, and {ranked} ranks them; leave it out")
        if self.confidence_threshold and Can.CONFIDENCE not in can:
            raise ValueError(
                f"confidence_threshold = {self.confidence_threshold} needs a drafter with probabilities, and {name!r} has none: "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _adapts_or_not(self) -> Self:
        for key, value in (("max_speculative_tokens", self.max_speculative_tokens), ("cost_table", self.cost_table)):
            if value is not None and not self.is_adaptive:
                raise ValueError(
                    f"{key} = {value!r} belongs to num_speculative_tokens = 'auto', not to {self.num_speculative_tokens}; leave one out"
                )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min = {self.prompt_lookup_min} exceeds prompt_lookup_max = {self.prompt_lookup_max}; lower the first"
            )
        if self.speculative_token_tree is not None and self.tree != "static":
            raise ValueError("speculative_token_tree needs tree = 'static'; set it, or leave the paths out")
        if self.speculative_token_tree is not None and not self.speculative_token_tree:
            raise ValueError("speculative_token_tree has no paths; name some, or leave it out for the method's own tree")
        if self.confidence_threshold and self.acceptance == "rejection":
            raise ValueError(
                "confidence_threshold would choose among drawn tokens, and acceptance = 'rejection' keeps the distribution only if nothing "
                "does; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _is_a_copy(self) -> Self:
        if self.model is None or not self.model.startswith(OWN_COPY):
            return self
        if self.own_copy not in get_args(Quantization):
            raise ValueError(f"model = {self.model!r} is the target's own copy in integers: write {OWN_COPY}int8 or {OWN_COPY}int4")
        if METHODS[self.method].needs != "model":
            raise ValueError(f"model = {self.model!r} is a draft model, and method {self.method!r} has none: use method 'draft_model'")
        if self.quantization not in (None, self.own_copy):
            raise ValueError(f"quantization = {self.quantization!r} differs from model = {self.model!r}; leave it out")
        return self

    @model_validator(mode="after")
    def _has_weights(self) -> Self:
        if self.quantization is not None and METHODS[self.method].needs == "nothing":
            raise ValueError(
                f"quantization = {self.quantization!r} is of a model or head that drafts, and {self.method!r} has none: leave it out"
            )
        return self

    @property
    def acceptance_name(self) -> str:
        """What reports call the rule by which drafted tokens are kept."""
        return f"{self.acceptance} (LOSSY)" if self.acceptance == "typical" else self.acceptance

    @property
    def own_copy(self) -> str | None:
        """The integers of the target's own copy, where that drafts."""
        return self.model.removeprefix(OWN_COPY) if self.model is not None and self.model.startswith(OWN_COPY) else None

    def named_model(self) -> str:
        """The key `model`, of a method that needs one.

        Raises
        ------
        ConfigError  it is missing
        """
        if self.model is None:
            needed = "a folder or hub name of a small model"
            if self.is_head:
                needed = "the folder of a head that was trained on the target"
            raise ConfigError(f"method {self.method!r} needs the key 'model': {needed}")
        return self.model

    @property
    def is_adaptive(self) -> bool:
        """Whether the engine decides in every step how much is drafted."""
        return self.num_speculative_tokens == "auto"

    @property
    def most_tokens(self) -> int:
        """Most drafted tokens of a row in a step."""
        most = self.max_speculative_tokens or (MOST_NODES if self.grows_trees else MOST_CHAIN)
        if self.num_speculative_tokens != "auto":
            most = self.num_speculative_tokens
        return min(most, len(self._static_tree)) if self.tree == "static" else most

    @property
    def longest_path(self) -> int:
        """Most drafted tokens on one path."""
        if self.tree == "dynamic":
            return min(self.tree_depth, self.most_tokens)
        if self.tree == "chain":
            return self.most_tokens
        return max(map(len, self.paths), default=1)

    @property
    def widest_level(self) -> int:
        """Most drafted tokens of a row that stand at the same depth."""
        if self.tree == "dynamic":
            return min(self._growth.widest, self.most_tokens)
        return 1 if self.tree == "chain" else max(Counter(map(len, self.paths)).values(), default=1)

    @property
    def usual_level(self) -> int:
        """As many as usually do."""
        return min(self._growth.breadth, self.most_tokens) if self.tree == "dynamic" else self.widest_level

    @property
    def _growth(self) -> Growth:
        return METHODS[self.method].dynamic(self.tree_top_k, self.tree_top_p, self.tree_depth)

    @property
    def _static_tree(self) -> SequenceOf[SequenceOf[int]]:
        """All paths of a static tree."""
        return METHODS[self.method].paths if self.speculative_token_tree is None else self.speculative_token_tree

    @property
    def paths(self) -> SequenceOf[SequenceOf[int]]:
        """Of a static tree those that are drafted."""
        return self._static_tree[: self.most_tokens]

    @property
    def min_score(self) -> float:
        """The logarithm of `confidence_threshold`."""
        return math.log(self.confidence_threshold) if self.confidence_threshold else -math.inf

    @property
    def is_head(self) -> bool:
        """Whether a head of the target drafts."""
        return METHODS[self.method].needs == "head"

    @property
    def grows_trees(self) -> bool:
        """Whether drafts are trees."""
        return self.tree != "chain"


def _parsed_tree(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # all of which it raises for text that is too deep or no list
        raise ValueError(f"speculative_token_tree = {shown(text)} is no list of paths such as '[(0,), (1,), (0, 0)]'") from None


def speculative(config: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig | None:
    """`config` as an object; a mapping is checked key by key."""
    if config is None or isinstance(config, SpeculativeConfig):
        return config
    if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
        what = shown(config) if isinstance(config, str | Mapping) else kind_of(config)
        raise ConfigError(f"speculative_config is {what}; give a SpeculativeConfig or a mapping such as {{'method': 'ngram'}}")
    return SpeculativeConfig(**config)


def most_drafted(spec: SpeculativeConfig | None) -> int:
    """Most drafted tokens of a row in a step; 0 where nothing drafts."""
    return spec.most_tokens if spec is not None else 0


class EngineConfig(Settings):
    """How the engine runs a model; names are vLLM's where vLLM has one. The last five choose how rows become a batch.

    `unpadded` (EMS-SD) is the engine's own. The others are the field's, on the framework's attention, with heads and trees on ours:
    `padded`, with `pad` saying what is padded, and `realign` (EQSPEC), with `grouping="same_length"` EXSPEC: up to `group_window` rows are
    held, by default 3 × max_num_seqs, and max_num_seqs of them with equal lengths run in a step. With `refill=False` rows enter only when
    all others are done.
    `device="auto"` is CUDA where PyTorch sees a device; with `enforce_eager` no step is captured there as a CUDA graph,
    and none is launched before the last one is settled.

    `enable_prefix_caching` keeps whole blocks of keys and values, of prompts and of generated text, while nothing else needs their memory;
    a request that begins alike starts behind them, with the same bits. The strategy `unpadded` alone does so, and requests that want
    `prompt_logprobs` read all of their prompt.

    `dtype` may also be PyTorch's own or its other names, half and float.

    `numerics` matters on CUDA alone: "invariant" linear layers give a row the same bits in any batch, by a kernel of ours, so that texts
    are the same in every dtype; "fast" ones are the vendor library's, whose rounding may change with the number of rows. "fast" permits the
    vendor's kernels and does not demand them: the CPU's kernels are invariant and the fastest there, so there it changes nothing.

    `kv_cache_dtype="int8"` keeps keys and values in 8 bits, each head of each token by a scale of its own, in little more than half the
    memory of 16 bits, and attention reads them so. It belongs to the compiled kernels and the strategy `unpadded`; a head that drafts keeps
    its own as they are.

    `memory` ("8GiB", "8GB" or bytes) is a budget for all that the process takes. Settings that are left out are then chosen by a plan: long
    texts and many rows where there is room; where there is not, kept prefixes, drafted tokens, the bits of keys and values and of weights,
    rows and at last the length of texts are given up, in this order, until the plan fits (docs/memory.md).

    `tensor_parallel_size` processes hold a share of the target each and run every step together, this one among them; the texts are those
    of one. `pipeline_parallel_size` processes hold some of its layers each, one after the other. One of the two may be above 1. They are
    started on this machine, unless `torchrun` has started them (docs/parallel.md).

    `quantization` rounds the weights of linear layers and experts when the model is loaded, and every token's activations in each of them
    to 8 bits: another model than the one in 16 bits, with the promises of any other, and the same sums on every processor.
    """

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(default="auto", description="auto: as stored.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: CUDA where there is a device.")
    numerics: Literal["invariant", "fast"] = Field(
        default="invariant",
        description="Linear layers on CUDA: the same bits in any batch, or the vendor library's. On the CPU they are invariant.",
    )
    quantization: Quantization | None = Field(
        default=None, description="Weights of linear layers in 8 bits, or in 4 with 8 in the output layer; CPU."
    )
    tensor_parallel_size: StrictInt = Field(
        default=1,
        ge=1,
        lt=LARGEST,
        description="Processes that each have a part of every layer of the target, on CPUs. On one machine no faster than one process.",
    )
    pipeline_parallel_size: StrictInt = Field(
        default=1,
        ge=1,
        lt=LARGEST,
        description="Processes that each have some of the target's layers, on CPUs: for a model that one machine does not hold.",
    )
    max_num_seqs: StrictInt = Field(default=64, ge=1, lt=LARGEST, description="Rows that run at once.")
    max_num_batched_tokens: StrictInt = Field(
        default=2048,
        ge=1,
        lt=LARGEST,
        description="Most tokens of a step, without drafted ones; longer prompts are read in pieces, smaller ones while other rows decode.",
    )
    max_model_len: StrictInt | None = Field(
        default=None, ge=2, lt=LARGEST, description="Context limit in tokens; the model's own by default."
    )
    block_size: StrictInt = Field(default=16, ge=1, lt=LARGEST, description="Tokens of a block of keys and values.")
    kv_cache_dtype: Literal["auto", "int8"] = Field(
        default="auto", description="Keys and values: as the model's numbers, or in 8 bits with a scale a token and head; CPU."
    )
    kv_cache_memory_bytes: Annotated[StrictInt, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="Bytes of the KV pool. auto: all rows at full length, at most half of the free memory, on CUDA four fifths.",
    )
    memory: StrictInt | Text | None = Field(
        default=None, description="Memory that the whole process may take, such as 8GiB: settings that are left out are chosen to fit."
    )
    gpu_memory_utilization: StrictFloat | None = Field(
        default=None, gt=0.0, le=1.0, description="The same as a share of the device's memory, on a CPU of the machine's."
    )
    enable_prefix_caching: StrictBool = Field(
        default=True, description="Read texts that begin alike once: keys and values stay until their memory is needed."
    )
    seed: StrictInt | None = Field(
        default=None, ge=0, lt=1 << 64, description="Of the seeds of requests that have none; without it they are drawn and reported."
    )
    skip_tokenizer_init: StrictBool = Field(default=False, description="Prompts are token ids and outputs have no text.")
    trust_remote_code: Literal[False] = Field(default=False, description="No code from a checkpoint runs; False is all there is.")
    enforce_eager: StrictBool = Field(default=False, description="No CUDA graphs, and no step launched ahead.")
    strategy: Literal["unpadded", "padded", "realign"] = Field(
        default="unpadded", description="How rows become a batch; all but `unpadded` are there to be compared with."
    )
    pad: Literal["both", "kv", "inputs"] = Field(default="both", description="What `padded` pads.")
    grouping: Literal["none", "same_length"] = Field(
        default="none", description="What `realign` runs together: the first rows, or rows of equal length."
    )
    group_window: StrictInt | None = Field(
        default=None, ge=1, lt=LARGEST, description="Rows that a group is chosen from; three times max_num_seqs by default."
    )
    refill: StrictBool = Field(default=True, description="Rows enter as others finish, or in static batches.")

    def budget(self, device_bytes: int) -> int | None:
        """Bytes that may be taken, of a device or machine that has `device_bytes`; None where nobody has said."""
        if self.gpu_memory_utilization is not None:
            return int(self.gpu_memory_utilization * device_bytes)
        return None if self.memory is None else parse_bytes(self.memory, "memory")

    def model_len(self, context: int) -> int:
        """Most tokens of a text, of a model whose own context is so long.

        Raises
        ------
        ConfigError  the context is shorter
        """
        length = self.max_model_len or context
        if length > context:
            raise ConfigError(f"max_model_len = {length} exceeds the model's context of {context} tokens; lower it")
        return length

    @property
    def num_rows_held(self) -> int:
        """Rows that hold keys and values at once: those of a step, or the window that its group is chosen from."""
        if self.grouping == "none":
            return self.max_num_seqs
        return self.group_window or 3 * self.max_num_seqs

    @property
    def num_ranks(self) -> int:
        """Processes that run the target."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @model_validator(mode="before")
    @classmethod
    def _other_names(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A dtype by PyTorch's other name of it."""
        dtype = values.get("dtype")
        return {**values, "dtype": DTYPE_ALIASES[dtype]} if isinstance(dtype, str) and dtype in DTYPE_ALIASES else values

    @model_validator(mode="before")
    @classmethod
    def _default_holds_every_row(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A step's tokens that are left out are one of each row at least, as in vLLM."""
        rows, default = values.get("max_num_seqs"), cls.model_fields["max_num_batched_tokens"].default
        left_out = "max_num_batched_tokens" not in values and type(rows) is int and default < rows < LARGEST
        return {**values, "max_num_batched_tokens": rows} if left_out else values

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        given = [name for name in ("memory", "gpu_memory_utilization") if getattr(self, name) is not None]
        if self.kv_cache_memory_bytes != "auto":
            given.append("kv_cache_memory_bytes")
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} say how much memory is taken; leave all but one out")
        if self.memory is not None:
            try:
                parse_bytes(self.memory, "memory")
            except ConfigError as error:
                raise ValueError(str(error)) from None
        if given[:1] != ["kv_cache_memory_bytes"] and given and self.strategy != "unpadded":
            raise ValueError(f"{given[0]} belongs to strategy = 'unpadded', not to {self.strategy!r}; change one of them")
        return self

    @model_validator(mode="after")
    def _ranks_take_what_they_need(self) -> Self:
        asked = [f"{name} = {size}" for name in RANKS if (size := getattr(self, name)) > 1]
        if len(asked) > 1:
            raise ValueError(f"{' and '.join(asked)} are not served together: a model is split one way; leave one of them out")
        budget = next((name for name in ("memory", "gpu_memory_utilization") if getattr(self, name) is not None), None)
        if asked and budget is not None:
            raise ValueError(
                f"{budget} is planned for one process, and {asked[0]} makes several; leave one out, or bound keys and values by "
                "kv_cache_memory_bytes"
            )
        return self

    @model_validator(mode="after")
    def _every_row_can_step(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} is less than max_num_seqs = {self.max_num_seqs}; "
                "every decoding row feeds at least one token a step: raise the first"
            )
        return self

    @model_validator(mode="after")
    def _strategy_is_consistent(self) -> Self:
        belonging = (
            ("pad", self.pad, "both", "padded"),
            ("grouping", self.grouping, "none", "realign"),
            ("kv_cache_dtype", self.kv_cache_dtype, "auto", "unpadded"),
            *((name, getattr(self, name), 1, "unpadded") for name in RANKS),
        )
        for key, value, default, home in belonging:
            if value != default and self.strategy != home:
                raise ValueError(f"{key} = {value!r} belongs to strategy = {home!r}, not to {self.strategy!r}; change one of them")
        if self.group_window is not None and self.grouping == "none":
            raise ValueError(f"group_window = {self.group_window} needs grouping = 'same_length'; set it, or leave the window out")
        if self.num_rows_held < self.max_num_seqs:
            raise ValueError(
                f"group_window = {self.group_window} is less than max_num_seqs = {self.max_num_seqs}; a group is chosen from it: raise it"
            )
        return self


def check_settings(**values: Any) -> EngineConfig:
    """The values as settings.

    Raises
    ------
    ConfigError  `EngineConfig` refuses one
    """
    return EngineConfig(**values)

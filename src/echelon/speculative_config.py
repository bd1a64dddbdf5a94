"""Settings of what drafts."""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, StrictFloat, StrictInt, StrictStr, model_validator

from echelon.errors import ConfigError
from echelon.inputs import Text, kind_of, shown
from echelon.methods import ALIASES, METHODS, Can, method_names
from echelon.settings import Quantization, Settings
from echelon.trees import Growth

MOST_CHAIN, MOST_NODES = 8, 64  # drafted tokens of a row in a step that adapts, unless told otherwise
OWN_COPY = "self:"  # before the integers that a model's own copy drafts in


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

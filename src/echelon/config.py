"""Settings of the engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictBool, StrictFloat, StrictInt, model_validator

from echelon.errors import ConfigError
from echelon.inputs import LARGEST, Text
from echelon.settings import Quantization, Settings
from echelon.sizes import parse_bytes

RANKS = ("tensor_parallel_size", "pipeline_parallel_size")  # settings that make several processes run the target
DTYPE_ALIASES = {"half": "float16", "float": "float32"}


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
        default=None, gt=0.0, le=1.0, description="The same budget as a share of the GPU's memory, or on a CPU of the machine's."
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

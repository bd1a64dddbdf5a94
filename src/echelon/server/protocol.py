"""Requests of clients, after OpenAI's API: one description for every route, which validates, and documents itself as OpenAPI.

Fields that OpenAI documents are accepted. Those that ask for what this server cannot do are refused by name unless they ask for nothing;
unknown fields are refused. Fields beyond OpenAI's have vLLM's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from echelon.errors import EchelonError
from echelon.inputs import Message, TextPart, real_path
from echelon.sampling import SamplingParams
from echelon.server.responses import ErrorDetail, ErrorResponse

MOST_SAMPLES = 16
MOST_PROMPTS = 32
MOST_LOGPROBS = 20
MOST_STOPS = 16
REFUSED = {
    "response_format": "structured output",
    "guided_json": "structured output",
    "guided_regex": "structured output",
    "guided_choice": "structured output",
    "guided_grammar": "structured output",
    "structured_outputs": "structured output",
    "lora": "LoRA",
    "lora_request": "LoRA",
    "lora_name": "LoRA",
    "adapter_id": "LoRA",
    "tools": "tool calling",
    "tool_choice": "tool calling",
    "tool_calls": "tool calling",
    "functions": "tool calling",
    "function_call": "tool calling",
    "audio": "audio",
    "modalities": "anything but text",
    "web_search_options": "web search",
    "moderation": "moderation",
    "prompt_logprobs": "a list of its own for the prompt's log-probabilities, which `echo` with `logprobs` gives,",
    "suffix": "insertion before a suffix",
    "use_beam_search": "beam search",
    "chat_template": "a chat template from a client",
}

OPEN = {"metadata", "logit_bias", "chat_template_kwargs", "prediction"}  # fields whose keys are the client's own

REMEDIES = {
    "too_long": "; send fewer in one request",
    "too_short": "; send more",
    "string_too_long": "; shorten it",
    "string_too_short": "; leave it out, or send more",
}

MOST_ENTRIES = 1024  # of a mapping
FAST: Any = Field(fail_fast=True)  # one error tells enough, and a million of them take seconds

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, StringConstraints(max_length=2**21)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
IdKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]


class Strict(BaseModel):
    """Unknown fields are refused, and no type stands in for another."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _is_no_heap_of_fields(cls, given: Any) -> Any:
        """Before every one of them makes an error of its own."""
        if isinstance(given, dict):
            for what, value in (("body or message", given), *given.items()):
                if isinstance(value, dict) and len(value) > MOST_ENTRIES:
                    raise ValueError(f"{what[:64]} has {len(value)} fields, more than {MOST_ENTRIES}; send fewer")
        return given


class StreamOptions(Strict):
    """`stream_options` of a request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(default=None, description="Accepted; nothing is padded.")


class GenerationRequest(Strict):
    """Fields that completions and chat share."""

    model: Text | None = None
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    logit_bias: dict[IdKey, Bias] | None = Field(default=None, max_length=MOST_ENTRIES)
    max_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    n: int | None = Field(default=None, ge=1, le=MOST_SAMPLES)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Stop | Annotated[list[Stop], FAST, Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0.0, le=100.0)
    top_p: float | None = Field(default=None, ge=0.0, le=1.0)
    user: Text | None = Field(default=None, description="Accepted; changes nothing.")

    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100.0)
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    stop_token_ids: Annotated[list[TokenId], FAST] | None = Field(default=None, max_length=1024)
    allowed_token_ids: Annotated[list[TokenId], FAST] | None = Field(default=None, min_length=1, max_length=65536)
    bad_words: Annotated[list[Stop], FAST] | None = Field(default=None, max_length=256)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    num_speculative_tokens: int | None = Field(default=None, ge=0, le=64, description="Most drafted tokens a step; 0: none.")
    return_tokens: bool | None = Field(
        default=None, description="Give the text of each choice also in pieces, token by token, and say of each whether it was drafted."
    )
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = Field(
        default=None, description="Share the keys and values of prompts only with requests of the same API key and this salt."
    )

    @model_validator(mode="after")
    def _streams_what_it_counts(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream = true; leave them out or stream")
        return self

    def params(self, defaults: Mapping[str, Any], max_tokens: int, **more: Any) -> SamplingParams:
        """The engine's parameters, with `defaults` where the body says nothing; `RequestError` where they contradict each other."""
        values = {
            "max_tokens": max_tokens,
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "seed": self.seed if self.seed in (None, -1) else self.seed % 2**64,
            "top_p": None if self.top_p is None else max(self.top_p, 1e-9),
            "logit_bias": {int(token): bias for token, bias in self.logit_bias.items()} if self.logit_bias else None,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "allowed_token_ids": tuple(self.allowed_token_ids) if self.allowed_token_ids else None,
            "bad_words": tuple(self.bad_words or ()),
            **{name: getattr(self, name) for name in _SAME_NAME},
            **more,
        }
        given = {name: value for name, value in values.items() if value is not None}
        return SamplingParams(**{**defaults, **given})


_SAME_NAME = (
    "n", "temperature", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "num_speculative_tokens",
)  # fmt: skip


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: (
        Text
        | Annotated[list[Text], FAST, Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[TokenId], FAST, Field(min_length=1, max_length=2**20)]
        | Annotated[list[Annotated[list[TokenId], FAST, Field(max_length=2**20)]], FAST, Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    best_of: int | None = Field(default=None, ge=1, le=MOST_SAMPLES, description="Draw so many, return the `n` likeliest; not streamed.")
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError(f"best_of = {self.best_of} is less than n = {self.n or 1}; raise it")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise ValueError("best_of cannot be streamed: the best are known at the end; leave out one of the two")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens = 0 gives nothing without echo; raise it")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts of the request, each a text or token ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    @property
    def prompt_names(self) -> list[str]:
        """What errors call the prompts."""
        count = len(self.prompts)
        return ["prompt"] if count == 1 else [f"prompt[{i}]" for i in range(count)]

    def sampling_params(self, room: int, defaults: Mapping[str, Any]) -> SamplingParams:
        """`room`: tokens that can follow the prompt, which bounds the default of 16; the model's own `defaults` as in `params`."""
        draws = self.best_of or self.n or 1
        count = 0 if self.logprobs is None and draws > (self.n or 1) else self.logprobs  # they rank the draws
        most = min(16, room) if self.max_tokens is None else self.max_tokens
        return self.params(defaults, max(most, 1), n=draws, logprobs=count, prompt_logprobs=self.logprobs if self.echo else None)


class ChatMessage(Message, Strict):
    """One turn of a conversation, with the fields that OpenAI documents."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[TextPart], FAST, Field(max_length=1024)] | None = None
    name: Text | None = None
    refusal: Text | None = None
    tool_call_id: Text | None = None
    tool_calls: list[Any] | None = Field(default=None, max_length=0)
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = Field(default=None, max_length=1024)  # of an answer that is sent back; not read

    def for_template(self) -> dict[str, Any]:
        """Role and content as one text; templates know `system`, which OpenAI has renamed `developer`."""
        role = {"developer": "system"}.get(self.role, self.role)
        return super().for_template() | {"role": role} | ({"name": self.name} if self.name else {})


class ResponseFormat(Strict):
    """The one response format that is served."""

    type: Literal["text"]


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FAST] = Field(min_length=1, max_length=1024)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    chat_template_kwargs: dict[Text, Any] | None = Field(default=None, max_length=64, description="Variables of the chat template.")
    prompt_names: ClassVar[tuple[str, ...]] = ("messages",)

    response_format: ResponseFormat | None = None
    tools: list[Any] | None = Field(default=None, max_length=0)
    tool_choice: Literal["none", "auto"] | None = None
    functions: list[Any] | None = Field(default=None, max_length=0)
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], FAST] | None = Field(default=None, max_length=1)
    audio: None = None
    web_search_options: None = None

    metadata: dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]] | None = Field(
        default=None, max_length=16, description="Accepted; changes nothing, as do the fields below."
    )
    parallel_tool_calls: bool | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: Text | None = None
    reasoning_effort: Text | None = None
    safety_identifier: Text | None = None
    service_tier: Text | None = None
    store: bool | None = None
    verbosity: Text | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs need logprobs = true")
        if self.max_tokens == 0:
            raise ValueError("max_tokens = 0 gives nothing; raise it")
        return self

    def sampling_params(self, room: int, defaults: Mapping[str, Any]) -> SamplingParams:
        """`room`: tokens that can follow the prompt, which an answer may use where neither it nor the model's `defaults` have a limit."""
        most = self.max_completion_tokens or self.max_tokens or max(min(defaults.get("max_tokens", room), room), 1)
        return self.params(defaults, most, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


class TokenizeRequest(Strict):
    """A text or a conversation."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], FAST] | None = Field(default=None, min_length=1, max_length=1024)
    chat_template_kwargs: dict[Text, Any] | None = Field(default=None, max_length=64)
    add_special_tokens: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens = true belongs to prompt: a chat template writes them itself; leave it out")
        if self.prompt is not None and self.chat_template_kwargs:
            raise ValueError("chat_template_kwargs belong to messages; leave them out")
        return self


class DetokenizeRequest(Strict):
    """Body of /detokenize."""

    model: Text | None = None
    tokens: Annotated[list[TokenId], FAST] = Field(max_length=2**20)


RETRY = {"Retry-After": "1"}


class ApiError(EchelonError):
    """An error response, in OpenAI's terms."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the error response."""
        kind = "server_error" if self.status >= 500 else "rate_limit_error" if self.status == 429 else "invalid_request_error"
        return ErrorResponse(error=ErrorDetail(message=str(self), type=kind, param=self.param, code=self.code)).model_dump()


def unavailable(message: str, code: str = "unavailable") -> ApiError:
    """The error response where this server cannot serve now."""
    return ApiError(503, message, code, headers=RETRY)


def validation_error(problems: SequenceOf[Mapping[str, Any]], body: Any = None) -> ApiError:
    """The error response for a body's first bad field, named; never with its value, which may be long or private."""
    problem = _most_telling(problems, body)
    missing = problem["loc"][-1:] if problem["type"] == "missing" else ()
    path = [str(part) for part in (*real_path(problem["loc"][1:], body), *missing)]
    param = path[0] if path else None
    named = next((REFUSED[p] for p in path if p in REFUSED and param not in OPEN), None)
    if named is not None:
        return ApiError(400, f"{'.'.join(path)}: {named} is not supported by this server; remove the field", param=param)
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {problem['ctx']['error']} at character {problem['loc'][-1]}")
    if problem["loc"] == ("body",) and problem["type"] in ("model_attributes_type", "dict_type", "model_type"):
        return ApiError(400, "the body is no JSON object; send one, with Content-Type: application/json")
    if problem["type"] == "extra_forbidden":
        return ApiError(
            400,
            f"unknown field {'.'.join(path)[:100]!r}; remove it (GET /openapi.json lists the known ones)",
            param=param[:100] if param else None,
        )
    return ApiError(400, f"{'.'.join(path) or 'body'}: {problem['msg']}{REMEDIES.get(problem['type'], '')}", param=param)


def _most_telling(problems: SequenceOf[Mapping[str, Any]], body: Any) -> Mapping[str, Any]:
    """The problem to report of a field with alternative types: that of the one that fits furthest by its type, or by more entries."""
    field = _field_of_forms(problems[0], body)
    if field is None:
        return problems[0]

    def fit(problem: Mapping[str, Any]) -> tuple[bool, list[int]]:
        return not problem["type"].endswith("_type"), [part for part in problem["loc"] if isinstance(part, int)]

    return max((p for p in problems if p["loc"][: len(field)] == field), key=fit)


def _field_of_forms(problem: Mapping[str, Any], body: Any) -> tuple[int | str, ...] | None:
    """Path of the field whose form a problem's path names: pydantic puts a label between, which leads nowhere in the body."""
    path = problem["loc"][: -1 if problem["type"] in ("missing", "extra_forbidden") else None]
    return next((path[:i] for i in range(1, len(path)) if len(real_path(path[1 : i + 1], body)) < i), None)

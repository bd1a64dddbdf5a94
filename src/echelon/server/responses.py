"""Response bodies, after OpenAI's API."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    prompt: str


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class VersionResponse(BaseModel):
    version: str


class DrafterCard(BaseModel):
    """What drafts: a method with the name of its model or head, where it has one, and its most tokens a step, or "auto"."""

    method: str
    model: str | None
    num_speculative_tokens: int | Literal["auto"]


class StatsResponse(BaseModel):
    """What runs here, and how it does; from `num_running` on with the names of `LLM.get_counters`, counted since the start."""

    model: ModelCard
    drafter: DrafterCard | None
    acceptance: str
    status: Literal["ready", "draining", "unhealthy"]
    uptime_seconds: float
    max_num_seqs: int
    num_running: int
    num_waiting: int
    num_emitted_tokens: int
    num_row_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_drafts_by_position: list[int]
    num_accepted_by_position: list[int]
    num_steps_by_draft_length: dict[int, int]
    num_kv_blocks: int
    num_free_kv_blocks: int
    num_cached_kv_blocks: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_preemptions: int
    drafter_faults: dict[str, int]


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class TokenUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class SpeculativeDecoding(BaseModel):
    """Speculation statistics of one sequence; `mean_acceptance_length` counts the extra token of every step that drafted, as in vLLM."""

    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class ResponseMetrics(BaseModel):
    """`acceptance`: the rule by which drafted tokens are kept; one that changes the text says so."""

    acceptance: str
    speculative_decoding: SpeculativeDecoding | None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenPiece(BaseModel):
    """What one token adds to the text, and whether it was drafted."""

    text: str
    is_accepted: bool


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    tokens: list[TokenPiece] | None = None


class GenerationResponse(BaseModel):
    """What completions and conversations share; the two know what their `object` and `choices` are."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: TokenUsage | None = None
    metrics: ResponseMetrics | None = None


class CompletionResponse(GenerationResponse):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    tokens: list[TokenPiece] | None = None


class ChatResponse(GenerationResponse):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail

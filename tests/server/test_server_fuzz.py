"""Requests made from the server's own description of itself, right and wrong ones: no 5xx, and nothing that the description forbids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
import servers
import toys
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance
from servers import Running

NUM_CASES = 2000 if toys.PROVE else 50  # an operation
OPERATIONS = [
    "POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize", "POST /detokenize", "GET /v1/models", "GET /v1/models/{model}",
    "GET /health", "GET /livez", "GET /readyz", "GET /metrics", "GET /version", "GET /", "GET /stats",
]  # fmt: skip
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with servers.serving(servers.build("ngram", max_model_len=48)) as server:
        yield server


@pytest.fixture(scope="module")
def schema(running: Running) -> Any:
    return schemathesis.openapi.from_url(running.url + "/openapi.json")


def test_every_operation_is_tried(schema: Any) -> None:
    described = [f"{o.ok().method.upper()} {o.ok().path}" for o in schema.get_all_operations()]
    assert sorted(described) == sorted(OPERATIONS)


def try_cases(running: Running, schema: Any, operation: str, mode: GenerationMode, count: int) -> list[int]:
    """Status codes of `count` requests."""
    method, path = operation.split(" ")
    seen: list[int] = []

    @settings(
        max_examples=count, derandomize=True, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        seen.append(case.call_and_validate(base_url=running.url, checks=CHECKS, timeout=60).status_code)

    run()
    assert max(seen) < 500
    return seen


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.startswith("POST")])
def test_the_description_is_kept(running: Running, schema: Any, operation: str) -> None:
    with servers.unharmed(running, growth=2**30):  # the client, in this process, keeps what it has tried
        right = try_cases(running, schema, operation, GenerationMode.POSITIVE, NUM_CASES)
        wrong = try_cases(running, schema, operation, GenerationMode.NEGATIVE, NUM_CASES)
    assert len(right) >= NUM_CASES // 2
    assert min(wrong) >= 400
    assert 200 in right or operation == "POST /detokenize"  # random ids lie outside the vocabulary


def test_what_is_read_stays_readable(running: Running, schema: Any) -> None:
    for operation in OPERATIONS:
        if operation.startswith("GET"):
            seen = try_cases(running, schema, operation, GenerationMode.POSITIVE, min(NUM_CASES, 50) if "{" in operation else 1)
            assert 200 in seen or "{" in operation

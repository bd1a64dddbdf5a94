"""What Prometheus reads of an engine, without a server."""

from __future__ import annotations

import toys

from echelon import LLM, SamplingParams
from echelon.server.metrics import ServerMetrics


def test_adaptive_lengths_have_metrics_of_their_own() -> None:
    llm = LLM(toys.adopted(toys.llama()), {"method": "ngram", "num_speculative_tokens": "auto"}, max_num_seqs=4)
    llm.generate(toys.prompts((5, 9)), SamplingParams(max_tokens=8, temperature=0.0))
    text = ServerMetrics(llm, "echelon:", "toy").text().decode()
    for name in ("num_proposed_tokens_total", "predicted_ms_total", "measured_ms_total", "prediction_error", "regret"):
        assert f"echelon:spec_decode_{name}{{" in text, name
    assert 'echelon:spec_decode_num_steps_per_length_total{length="0",model_name="toy"}' in text
    plain = ServerMetrics(LLM(toys.adopted(toys.llama())), "echelon:", "toy").text().decode()
    assert "regret" not in plain

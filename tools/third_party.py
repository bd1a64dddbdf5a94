"""Clients that others have written, against `echelon serve` on the embedded pair: `python -m tools.third_party lm-eval` or `guidellm`.

They are installed by name, pinned by `third_party.txt`, into an environment of their own (`build/third-party`), and find tokenizer, tasks
and data in local folders. lm-eval's scores and texts must be those of `LLM.generate`, and its log-likelihoods those of `transformers`;
guidellm's requests must all succeed, and the server must have counted what they got.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from functools import cache
from typing import Any

import httpx
import servers
import torch
from transformers import AutoModelForCausalLM

from echelon import LLM, SamplingParams
from echelon.bench.serve import totals
from echelon.bench.workloads import code_texts
from echelon.demo import TARGET, held_out_files
from tools import ROOT

ROOM = ROOT / "build" / "third-party"
PINS = ROOT / "tools" / "third_party.txt"
TOOLS = ("lm-eval[api]", "guidellm")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(ROOM / "hub"), "TOKENIZERS_PARALLELISM": "false"}
MARGIN = 2e-4  # in a log-likelihood of some twenty tokens: float32 sums in another order
UNTIL, LONGEST = ["\n\n", "return"], 40
NUM_CASES, NUM_REQUESTS, NUM_STREAMS, NUM_NEW = 24, 48, 8, 24


def python() -> str:
    """The interpreter of the environment, which is made once for every state of the pins."""
    state, mark, interpreter = hashlib.sha256(PINS.read_bytes()).hexdigest(), ROOM / "installed", ROOM / "env" / "bin" / "python"
    if not mark.exists() or mark.read_text("utf-8") != state:
        venv.create(ROOM / "env", with_pip=True)
        install = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", str(PINS)]
        subprocess.run([*install, "torch"], check=True)  # before all others, so that none of them brings another build along
        subprocess.run([*install, *TOOLS], check=True)
        mark.write_text(state, "utf-8")
    return str(interpreter)


def run(*arguments: str) -> None:
    subprocess.run([python(), *arguments], check=True, env=os.environ | OFFLINE, cwd=ROOM)


def lm_eval(url: str) -> str:
    """Local tasks of all three kinds by the harness, and the same computed here."""
    cases = _cases()
    (ROOM / "cases.jsonl").write_text("".join(json.dumps(c) + "\n" for c in cases), "utf-8")
    for name, task in TASKS.items():
        (ROOM / "tasks").mkdir(exist_ok=True)
        text = json.dumps(task | {"task": name, "dataset_kwargs": {"data_files": {"test": str(ROOM / "cases.jsonl")}}})
        (ROOM / "tasks" / f"{name}.yaml").write_text(text, "utf-8")
    found = _harness(url)
    llm = servers.build("plain")
    params = SamplingParams(temperature=0.0, max_tokens=LONGEST, stop=tuple(UNTIL))
    texts = llm.generate([c["head"] for c in cases], params)
    _compare("log-likelihood", found["echelon_line"], [[_score(llm, c["head"], c["line"])] for c in cases])
    _compare("choice", found["echelon_choice"], [[_score(llm, c["head"], "\n" + choice) for choice in c["choices"]] for c in cases])
    _compare("text", found["echelon_text"], [[o.outputs[0].text] for o in texts])
    return f"lm-eval: {3 * len(cases)} scores and texts are those of LLM.generate"


def _cases() -> list[dict[str, Any]]:
    """Held-out code cut in two, with the continuations of two others to choose among."""
    pieces = code_texts(held_out_files(), NUM_CASES, 260)
    heads, tails = [p[:200].rstrip() for p in pieces], [p[200:].rstrip() or "pass" for p in pieces]
    return [
        {"head": head, "line": "\n" + tails[i], "choices": [tails[(i + j) % NUM_CASES] for j in range(3)], "gold": 0}
        for i, head in enumerate(heads)
    ]


_COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{head}}"}
TASKS: dict[str, dict[str, Any]] = {
    "echelon_line": _COMMON
    | {"output_type": "loglikelihood", "doc_to_target": "{{line}}", "metric_list": [{"metric": "acc"}]},
    "echelon_choice": _COMMON
    | {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}", "target_delimiter": "\n",
       "metric_list": [{"metric": "acc"}]},
    "echelon_text": _COMMON
    | {"output_type": "generate_until", "doc_to_target": "{{line}}", "metric_list": [{"metric": "exact_match"}],
       "generation_kwargs": {"until": UNTIL, "max_gen_toks": LONGEST, "do_sample": False}},
}  # fmt: skip


def _harness(url: str) -> dict[str, list[Any]]:
    """What lm-eval got: by task, a list of responses a case."""
    results = ROOM / "results"
    for old in results.rglob("*.json*"):
        old.unlink()
    model = f"model={servers.MODEL},base_url={url}/v1/completions,tokenizer_backend=huggingface,tokenizer={TARGET},num_concurrent=8"
    run(
        *("-m", "lm_eval", "run", "--model", "local-completions", "--model_args", model),
        *("--tasks", ",".join(TASKS), "--include_path", str(ROOM / "tasks"), "--batch_size", "2"),
        *("--log_samples", "--output_path", str(results)),
    )
    found = {}
    for name in TASKS:
        (path,) = results.rglob(f"samples_{name}_*.jsonl")
        samples = sorted(map(json.loads, path.read_text("utf-8").splitlines()), key=lambda s: s["doc_id"])
        found[name] = [[r[0] for r in s["resps"]] for s in samples]
    return found


def _compare(what: str, found: SequenceOf[Any], truth: SequenceOf[Any]) -> None:
    assert len(found) == len(truth) == NUM_CASES, (len(found), len(truth))
    for case, (one, other) in enumerate(zip(found, truth, strict=True)):
        read = [[float(r[0]), str(r[1]) == "True"] if isinstance(r, list) else r for r in one]
        assert read == other, f"{what} of case {case}: lm-eval has {read}, LLM.generate {other}"


@cache
def _reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


def _score(llm: LLM, head: str, tail: str) -> list[Any]:
    """Log-likelihood of `tail` after `head`, and whether it is the greedy text; that of `transformers` must agree."""
    tokens, start = llm.inputs.encode(head + tail), len(llm.inputs.encode(head))
    places = llm.generate([tokens], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1))[0].prompt_logprobs
    assert places is not None
    asked = [
        (place[token].logprob, max(p.logprob for p in place.values()))
        for place, token in zip(places[start:], tokens[start:], strict=True)
        if place
    ]
    total = sum(own for own, _ in asked)
    with torch.no_grad():
        logits = _reference()(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    reference = float(logits[torch.arange(start - 1, len(tokens) - 1), torch.tensor(tokens[start:])].sum())
    assert math.isclose(total, reference, rel_tol=1e-5, abs_tol=MARGIN), (total, reference)
    return [total, all(own == best for own, best in asked)]


def guidellm(url: str) -> str:
    """A synthetic load at a fixed concurrency on both routes; the server's counters grow by what the client has counted."""
    for route in ("/v1/completions", "/v1/chat/completions"):
        before, output = totals(httpx.get(url + "/metrics").text), ROOM / "guidellm.json"
        run(
            *("-m", "guidellm", "run", "--disable-console-interactive"),
            *("--backend", f"kind=openai_http,target={url},model={servers.MODEL},request_format={route}"),
            *("--profile", f"kind=concurrent,streams={NUM_STREAMS}", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
            *("--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={NUM_NEW}"),
            *("--tokenizer", f"kind=huggingface_auto,model={TARGET}", "--output", f"kind=json,path={output}"),
        )
        after = totals(httpx.get(url + "/metrics").text)
        _check_report(json.loads(output.read_text("utf-8")), {name: after[name] - before.get(name, 0.0) for name in after})
    return f"guidellm: {2 * NUM_REQUESTS} requests, none failed; the server counted the same"


def _check_report(report: Mapping[str, Any], counted: Mapping[str, float]) -> None:
    (benchmark,) = report["benchmarks"]
    totals, metrics = benchmark["metrics"]["request_totals"], benchmark["metrics"]
    assert totals == {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}, totals
    assert counted["request_success"] == NUM_REQUESTS, counted
    for theirs, ours in (("prompt_token_count", "prompt_tokens"), ("output_token_count", "generation_tokens")):
        assert metrics[theirs]["successful"]["total_sum"] == counted[ours] > 0, (theirs, counted)
    assert 0 < counted["spec_decode_num_accepted_tokens"] < counted["spec_decode_num_draft_tokens"], counted


CLIENTS: dict[str, Callable[[str], str]] = {"lm-eval": lm_eval, "guidellm": guidellm}


def main(name: str) -> int:
    python()
    with servers.process("draft_model", "--metrics-prefix", "vllm:") as (_, url, _log):
        print(CLIENTS[name](url))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

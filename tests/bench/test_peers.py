"""llama.cpp as a peer: what its worker asks of the server, and the file that is made of a checkpoint."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import gguf  # type: ignore[import-untyped]
import pytest
import torch
from safetensors.torch import load_file

from echelon import ConfigError
from echelon.bench import peers
from echelon.bench.throughput import ThroughputResult, default_methods
from echelon.demo import DRAFT

SERVER = """#!{python}
import http.server, json, sys
if "--version" in sys.argv: raise SystemExit
assert "--no-cache-prompt" in sys.argv, sys.argv
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, value):
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def do_GET(self):
        self.answer({{"status": "ok"}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["temperature"] == 0.0 and asked["ignore_eos"]
        self.answer({{"tokens": [asked["prompt"][0] + i for i in range(asked["n_predict"])]}})
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_the_worker_of_llama_cpp_asks_its_server(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    program = tmp_path / "llama-server"
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o755)
    peer = peers.Peer("llama_cpp", sys.executable, str(tmp_path))
    task = peers.job(str(tmp_path), None, [[5, 6], [7], [9, 9, 9]], "plain", 2, 3, 1, 1, default_methods()[1].config or {}, 4)
    value = peers.run_worker(peer, task, 60.0)
    assert value["outputs"] == [[5, 6, 7], [7, 8, 9], [9, 10, 11]]
    assert value["versions"]["llama.cpp"] == "unknown"
    program.write_text(f"#!{sys.executable}\nraise SystemExit('no such flag')")
    with pytest.raises(ConfigError, match="no such flag"):
        peers.run_worker(peer, task, 60.0)


def test_a_gguf_file_holds_the_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(peers.WORKERS))
    target = tmp_path / "x.gguf"
    runpy.run_path(str(peers.WORKERS / "llama_cpp_worker.py"))["convert"](Path(DRAFT), target)
    tensors = {t.name: t for t in gguf.GGUFReader(target).tensors}
    weights, config = load_file(next(Path(DRAFT).glob("*.safetensors"))), json.loads((Path(DRAFT) / "config.json").read_text("utf-8"))
    assert len(tensors) == len(weights)
    found = weights["model.layers.0.self_attn.k_proj.weight"]
    stored = torch.from_numpy(tensors["blk.0.attn_k.weight"].data.copy()).view(torch.bfloat16).reshape(found.shape)
    half = found.shape[0] // config["num_key_value_heads"] // 2
    paired = torch.stack([found[i // 2 + i % 2 * half] for i in range(2 * half)])  # of the first head: pairs that are rotated lie together
    assert torch.equal(stored[: 2 * half], paired.to(torch.bfloat16))
    assert torch.equal(torch.from_numpy(tensors["output_norm.weight"].data.copy()), weights["model.norm.weight"].float())


def test_one_new_token_tells_the_time_to_the_first() -> None:
    result = ThroughputResult("x, plain", 1, [4.0], 1.0, 0.0, 1, 1, strategy="peer", decode_tokens_per_second=[0.0])
    table = peers.as_markdown([result], {})
    assert "ms a prompt" in table and "| x, plain | 250.0 |" in table

"""Runs one job on llama.cpp's server; started by `echelon bench peers --llama-cpp DIR`. `llama_cpp_worker.py JOB RESULT`

A folder that has a GGUF file is served from it. Otherwise one is made of a Llama checkpoint, its weights in bfloat16, which needs `gguf`
(requirements-llama_cpp.txt); for another architecture llama.cpp's own `convert_hf_to_gguf.py` writes the file into the folder.
"""

import hashlib
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import Outputs, measured, read_job, write_result  # type: ignore[import-not-found]

PLACES = {  # of a checkpoint's weights in a GGUF file; {} is the layer
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "blk.{}.attn_norm",
    "post_attention_layernorm": "blk.{}.ffn_norm",
    "self_attn.q_proj": "blk.{}.attn_q",
    "self_attn.k_proj": "blk.{}.attn_k",
    "self_attn.v_proj": "blk.{}.attn_v",
    "self_attn.o_proj": "blk.{}.attn_output",
    "mlp.gate_proj": "blk.{}.ffn_gate",
    "mlp.up_proj": "blk.{}.ffn_up",
    "mlp.down_proj": "blk.{}.ffn_down",
}
START = 300.0  # seconds that loading may take


def quantised(source: Path, programs: str, quantization: str | None) -> Path:
    """The file in the integers that llama.cpp has, made once by its own program."""
    if quantization is None:
        return source
    kind = {"int8": "Q8_0", "int4": "Q4_0"}[quantization]
    target = source.with_name(f"{source.stem}-{kind}.gguf")
    if not target.exists():
        part = target.with_suffix(".part")
        subprocess.run([str(Path(programs) / "llama-quantize"), str(source), str(part), kind], check=True, stdout=subprocess.DEVNULL)
        part.rename(target)
    return target


def as_gguf(folder: str) -> Path:
    """The model's GGUF file: the one in the folder, or made once in the temporary folder."""
    source = Path(folder)
    for found in sorted(source.glob("*.gguf")):
        return found
    stamp = hashlib.sha256(f"{source.resolve()} {(source / 'config.json').stat().st_mtime_ns}".encode()).hexdigest()[:12]
    target = Path(tempfile.gettempdir()) / f"peer-{stamp}.gguf"
    if not target.exists():
        part = target.with_suffix(".part")
        convert(source, part)
        part.rename(target)
    return target


def convert(source: Path, target: Path) -> None:
    import gguf

    config = json.loads((source / "config.json").read_text("utf-8"))
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] != "llama" or scaling.get("rope_type", "default") != "default":
        raise SystemExit(f"{source} is no plain Llama model: put a GGUF file into the folder, made by llama.cpp's convert_hf_to_gguf.py")
    writer = gguf.GGUFWriter(target, "llama")
    describe(writer, config, scaling)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in weights(source):
        layer, place = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.weight", name).groups()  # type: ignore[union-attr]
        add(writer, PLACES[place].format(layer) + ".weight", weight, heads.get(place.rpartition(".")[2]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: Any, config: dict[str, Any], scaling: dict[str, Any]) -> None:
    """Sizes, and a vocabulary of bytes and names: prompts and answers are token ids."""
    import gguf

    size = config["vocab_size"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0))
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<0x{i:02X}>" if i < 256 else f"t{i}" for i in range(size)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([gguf.TokenType.BYTE if i < 256 else gguf.TokenType.NORMAL for i in range(size)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def weights(source: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def add(writer: Any, name: str, weight: Any, num_heads: int | None) -> None:
    """One tensor: matrices in bfloat16, vectors in float32; queries and keys in the order that llama.cpp rotates pairs in."""
    import gguf
    import torch

    if num_heads is not None:
        rows, columns = weight.shape
        weight = weight.reshape(num_heads, 2, rows // num_heads // 2, columns).transpose(1, 2).reshape(rows, columns)
    if weight.dim() == 1:
        writer.add_tensor(name, weight.to(torch.float32).numpy())
    else:
        stored = weight.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType.BF16)


def speculation(job: dict[str, Any]) -> list[str]:
    """The server's flags for the same drafter."""
    if job["mode"] == "draft_model":
        most = ["--spec-draft-n-max", str(job["num_draft_tokens"])]
        return ["--spec-type", "draft-simple", "--spec-draft-model", str(as_gguf(job["draft_model"])), *most]
    if job["mode"] == "ngram":
        sizes = ["--spec-ngram-simple-size-n", str(job["match_length"]), "--spec-ngram-simple-size-m", str(job["num_ngram_tokens"])]
        return ["--spec-type", "ngram-simple", *sizes]
    return []


@contextmanager
def served(job: dict[str, Any]) -> Iterator[str]:
    """The address of a server that runs `batch_size` requests at once and reads every prompt again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    longest = max(map(len, job["prompts"])) + job["max_tokens"] + job["num_draft_tokens"] + 8
    threads, size = str(job["num_threads"]), job["batch_size"]
    model = quantised(as_gguf(job["model"]), job["programs"], job["quantization"])
    command = [str(Path(job["programs"]) / "llama-server"), "--model", str(model), "--port", str(port)]
    command += [
        "--ctx-size",
        str(-(-longest // 256) * 256 * size),
        "--parallel",
        str(size),
        "--threads",
        threads,
        "--threads-batch",
        threads,
    ]
    command += ["--no-cache-prompt", "--cache-ram", "0", "--ctx-checkpoints", "0", *speculation(job)]
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(command, stdout=said, stderr=said) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            end = time.monotonic() + START
            while not healthy(address):
                if server.poll() is not None or time.monotonic() > end:
                    said.seek(0)
                    raise SystemExit("llama-server did not start:\n" + "".join(said.readlines()[-12:]))
                time.sleep(0.1)
            yield address
        finally:
            server.terminate()


def healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def complete(address: str, prompt: list[int], num_tokens: int) -> list[int]:
    asked = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0.0, "top_k": 1, "ignore_eos": True, "return_tokens": True}
    request = urllib.request.Request(f"{address}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return list(json.load(answer)["tokens"])


def version_of(programs: str) -> str:
    """As the server says it, such as `8123 (abcdef1)`."""
    answer = subprocess.run([str(Path(programs) / "llama-server"), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version: (.+)", answer.stdout + answer.stderr)
    return found[1] if found else "unknown"


def main(given: str, taken: str) -> None:
    job = read_job(given)
    with served(job) as address, ThreadPoolExecutor(job["batch_size"]) as pool:

        def generate(num_tokens: int) -> Outputs:
            return list(pool.map(lambda prompt: complete(address, prompt, num_tokens), job["prompts"]))

        found = measured(job, generate, ["gguf"])
    found["versions"]["llama.cpp"] = version_of(job["programs"])
    write_result(taken, found)


if __name__ == "__main__":
    main(*sys.argv[1:])

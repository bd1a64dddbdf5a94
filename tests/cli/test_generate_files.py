"""`echelon generate` from file to file: bad rows fail alone, results are not overwritten, and one file holds one model."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from echelon.adaptive.cost_files import CostRecord, write_costs
from echelon.adaptive.cost_table import CostCurve, CostTable
from echelon.cli import fingerprint, main
from echelon.demo import DRAFT, TARGET
from echelon.ops import compiled
from echelon.requests import read_requests

Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(DRAFT, tmp_path_factory.mktemp("models") / "model"))


@pytest.fixture
def run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`echelon generate MODEL … --output out.jsonl`: exit code and standard error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*arguments: object, name: Path = model) -> tuple[int, str]:
        words = ["echelon", "generate", name, "--max-tokens", 3, "--output", tmp_path / "out.jsonl", *arguments]
        monkeypatch.setattr(sys, "argv", [str(w) for w in words])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), capsys.readouterr().err

    return call


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Every row as it stands in the file, in the order of the input."""
    _, *lines = (folder / "out.jsonl").read_bytes().split(b"\n")[:-1]
    return sorted(map(json.loads, lines), key=lambda row: row["index"])


def test_a_byte_order_mark_is_no_part_of_a_prompt(run: Run, tmp_path: Path) -> None:
    for name, content in (("a.jsonl", '{"prompt": "import os"}\n'), ("a.txt", "import os\n")):
        for encoding in ("utf-8", "utf-8-sig"):
            (tmp_path / name).write_text(content, encoding)
            assert run("--input", tmp_path / name, "--overwrite")[0] == 0
            assert [row.get("prompt") for row in rows_of(tmp_path)] == ["import os"], (name, encoding)


def test_a_line_of_ids_or_messages_has_no_prompt(tmp_path: Path) -> None:
    """Results repeat the prompt of a line that has one, be it empty."""
    lines = [{"prompt_token_ids": [5]}, {"messages": [{"role": "user", "content": "a"}]}, {"prompt": ""}, {"turns": ["b", "c"]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [request.prompt for request in read_requests(tmp_path / "prompts.jsonl")] == [None, None, "", "b"]


BAD_LINES = [
    b'{"id": "\\ud800", "prompt": "a"}',
    b'{"id": "x", "prompt": "a\\udfff"}',
    b'{"prompt": "a", "params": {"stop": ["\\ud800"]}}',
    b'{"prompt": "a", "params": {"bad_words": ["\\ud800"]}}',
    b'{"\\ud800": 1, "prompt": "a"}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"turns": ["\\udc00"]}',
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b'{"prompt": "a", "params": {"stop": ' + b"[" * 5_000 + b"]" * 5_000 + b"}}",
    b'{"prompt": "a", "params": {"stop": ' + b"[" * 150 + b"]" * 150 + b"}}",
    b'{"id": ' + b"[" * 150 + b"]" * 150 + b', "prompt": "a"}',
    b'{"prompt": ' + b"[" * 150 + b"]" * 150 + b"}",
    b'{"prompt_token_ids": [' + b"[" * 150 + b"]" * 150 + b"]}",
    b'{"prompt_token_ids": [true]}',
    b'{"prompt_token_ids": [1e400]}',
    b'{"prompt_token_ids": [1180591620717411303424]}',
    b'{"id": 1' + b"0" * 5_000 + b', "prompt": "a"}',
    b'{"prompt": "a", "params": {"seed": 1' + b"0" * 4_000 + b"}}",
    b'{"prompt": "a", "params": {"self": 1}}',
    b'{"prompt": "a", "params": {"temperature": NaN}}',
    b'{"messages": [{"role": "user", "content": 5}]}',
    b'{"messages": "hi"}',
    b'{"prompt": null}',
    b"null",
    b'{"prompt": "a"} trailing',
]


def test_a_row_that_cannot_be_read_fails_alone_and_resumes(run: Run, tmp_path: Path) -> None:
    """Lone surrogates anywhere, depth, digits: an error row each, between rows that are served; and the same once more with --resume."""
    source = tmp_path / "prompts.jsonl"
    source.write_bytes(b"".join(b'{"id": "good", "prompt": "import os"}\n' + line + b"\n" for line in BAD_LINES))
    for resume in ([], ["--resume"]):
        code, said = run("--input", source, *resume)
        assert (code, "Traceback" in said) == (3, False), said[-2000:]
        rows = rows_of(tmp_path)
        assert [row["index"] for row in rows] == list(range(2 * len(BAD_LINES)))
        assert ["error" in row for row in rows] == [False, True] * len(BAD_LINES)
        assert len({row["text"] for row in rows[::2]}) == 1
        assert all(row["error"].strip() and len(row["error"]) < 1000 for row in rows[1::2])


def test_prompts_of_the_command_line_that_are_no_text_fail_alone(run: Run, tmp_path: Path) -> None:
    for resume in ([], ["--resume"]):
        code, said = run("import os", "a\udcff", *resume)  # how Python hands on bytes that are no UTF-8
        assert (code, "Traceback" in said) == (3, False)
        assert ["error" in row for row in rows_of(tmp_path)] == [False, True]
    assert "lone surrogate" in rows_of(tmp_path)[1]["error"]


def other_weights(folder: Path) -> None:
    """The same sizes and names, other numbers: one bit of one of them."""
    for file in sorted(folder.glob("*.safetensors"))[:1]:
        tensors = load_file(file)
        name = sorted(tensors)[0]
        tensors[name].view(torch.int16).view(-1)[0] ^= 1
        size = file.stat().st_size
        save_file(tensors, file, {"format": "pt"})
        assert file.stat().st_size == size


def edited(name: str, **values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return edit


CHANGES: dict[str, Callable[[Path], None]] = {
    "model.model": other_weights,
    "model.generation_config.json": edited("generation_config.json", eos_token_id=5),
    "model.config.json": edited("config.json", rms_norm_eps=1e-3),
    "model.tokenizer_config.json": edited("tokenizer_config.json", eos_token="x"),
}


@pytest.mark.parametrize("part", CHANGES)
def test_resume_refuses_another_model_by_what_differs(run: Run, model: Path, tmp_path: Path, part: str) -> None:
    """A folder of the same name and sizes, but for one of its files; a copy elsewhere is the same model."""
    run("import os", "import sys")
    content = (tmp_path / "out.jsonl").read_bytes()
    copy = Path(shutil.copytree(model, tmp_path / "elsewhere"))
    assert run("import os", "import sys", "--resume", name=copy)[0] == 0
    CHANGES[part](copy)
    code, said = run("import os", "import sys", "--resume", name=copy)
    assert code == 2 and f"{part}" in said and "differs" in said and "Traceback" not in said
    assert (tmp_path / "out.jsonl").read_bytes() == content


@pytest.mark.parametrize(("acceptance", "code"), [("typical", 2), ("rejection", 2), ("exact", 0)])
def test_resume_refuses_another_draft_where_it_changes_the_text(run: Run, model: Path, tmp_path: Path, acceptance: str, code: int) -> None:
    draft = Path(shutil.copytree(model, tmp_path / "draft"))
    spec = ["--speculative-config", json.dumps({"method": "draft_model", "model": str(draft), "acceptance": acceptance})]
    arguments = ["import os", "--temperature", "0.5", "--seed", "1", *spec]
    assert run(*arguments, name=TARGET)[0] == 0
    other_weights(draft)
    found, said = run(*arguments, "--resume", name=TARGET)
    assert found == code and ("draft.model" in said) == (code == 2)


def test_resume_refuses_other_costs_where_they_change_the_text(run: Run, tmp_path: Path) -> None:
    """By which lengths of drafts are chosen: under a rule that lets them change the text, and under no other."""
    costs = tmp_path / "costs.json"
    for acceptance, code in (("exact", 0), ("typical", 2)):
        spec = {"method": "ngram", "acceptance": acceptance, "cost_table": str(costs)}
        arguments = ["import os", "--temperature", "0.5", "--seed", "1", "--speculative-config", json.dumps(spec)]
        for milliseconds, flag in ((2.0, "--overwrite"), (3.0, "--resume")):
            step = CostCurve(tokens=(1, 64), milliseconds=(1.0, milliseconds))
            write_costs(costs, CostRecord(key={}, table=CostTable(step=step)))
            found, said = run(*arguments, flag)
            assert found == (code if flag == "--resume" else 0), said
        assert ("costs = '" in said) == (code == 2)


@pytest.mark.skipif(not compiled.is_built(), reason="integers need the compiled kernels")
def test_the_own_copy_of_a_model_is_looked_for_nowhere(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it drafts under a rule that lets it change the text: it has no files of its own."""
    monkeypatch.setattr(fingerprint, "snapshot_download", lambda *_, **__: pytest.fail("the hub is asked for it"))
    spec = {"model": "self:int4", "acceptance": "rejection", "num_speculative_tokens": 2}
    arguments = ["import os", "--temperature", "0.5", "--seed", "1", "--speculative-config", json.dumps(spec)]
    assert [run(*arguments, *more)[0] for more in ([], ["--resume"])] == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "0.5"], "params.temperature = 0.0 there, 0.5 here"),
        (["--stop", "x"], "params.stop = "),
        (["--max-model-len", "64"], "max_model_len = 2048 there, 64 here"),
        (["--dtype", "float32"], "dtype = 'bfloat16' there, 'float32' here"),
        (["--strategy", "padded"], "strategy = 'unpadded' there, 'padded' here"),
        (["--speculative-config.method", "ngram"], "speculative_config.method = none there, 'ngram' here"),
        (["--quantization", "int8"], "quantization = None there, 'int8' here"),
        (["--kv-cache-dtype", "int8"], "kv_cache_dtype = 'auto' there, 'int8' here"),
        (["another prompt"], "input differs"),
    ],
)
def test_resume_names_the_option_that_differs(run: Run, tmp_path: Path, arguments: list[str], words: str) -> None:
    run("import os")
    code, said = run("import os", *arguments, "--resume")
    assert code == 2 and words in said.replace("\n", " ")


def test_results_are_not_overwritten_unless_told(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert run("import os")[0] == 0
    content = out.read_bytes()
    code, said = run("import sys")
    assert code == 2 and all(word in said for word in ("--resume", "--overwrite", "--output"))
    assert out.read_bytes() == content
    assert run("import sys", "--overwrite", "--resume")[0] == 2
    assert out.read_bytes() == content
    assert run("import sys", "--overwrite")[0] == 0
    assert out.read_bytes() != content and len(rows_of(tmp_path)) == 1
    out.write_text("notes that somebody keeps\n")
    assert run("import sys")[0] == 2 and out.read_text() == "notes that somebody keeps\n"


def test_a_refused_output_is_refused_before_the_model_is_loaded(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("notes\n")
    code, said = run("a", name=tmp_path / "no model")
    assert code == 2 and "--overwrite" in said and "no model" not in said


def test_resume_runs_failed_rows_again(run: Run, tmp_path: Path) -> None:
    """Rows that failed for what has been mended since, here by hand, are not counted as done."""
    run("import os", "import sys", "def f():")
    header, *lines = (tmp_path / "out.jsonl").read_text().splitlines()
    good = rows_of(tmp_path)
    failed = json.dumps({"index": 1, "id": "1", "error": "RowError: no memory"})
    (tmp_path / "out.jsonl").write_text("\n".join([header, lines[0], failed, lines[2]]) + "\n")
    code, said = run("import os", "import sys", "def f():", "--resume")
    assert code == 0 and "2 of 3 rows are done already" in said
    rows = rows_of(tmp_path)
    assert [(r["index"], r["text"]) for r in rows] == [(r["index"], r["text"]) for r in good]


def test_large_files_are_hashed_once_until_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "WORTH_NOTING", 4)
    monkeypatch.setattr(fingerprint, "SETTLED_NS", -(2**62))
    read: list[Path] = []
    whole = fingerprint.file_hash
    monkeypatch.setattr(fingerprint, "file_hash", lambda path: read.append(path) or whole(path))
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights 1")
    first = fingerprint.noted_hash(file)
    assert fingerprint.noted_hash(file) == first == whole(file) and len(read) == 1
    file.write_bytes(b"other weights")
    assert fingerprint.noted_hash(file) == whole(file) != first and len(read) == 2
    (tmp_path / "cache" / "echelon" / "hashes.json").write_text("torn")
    assert fingerprint.noted_hash(file) == whole(file) and len(read) == 3
    monkeypatch.setattr(fingerprint, "SETTLED_NS", 2**62)  # a file that has just changed may change again unseen
    file.write_bytes(b"still other weights")
    assert [fingerprint.noted_hash(file) for _ in range(2)] == [whole(file)] * 2 and len(read) == 5

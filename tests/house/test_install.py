"""Missing kernels are said, with their cause and the command that mends it: by the build, by the first engine and by the doctor."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import toys
from typer.testing import CliRunner

from echelon import LLM, ConfigError
from echelon.cli import app
from echelon.model.load.publishing import publish
from echelon.model.patches.packing import packing_of
from echelon.ops import compiled

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = "import pathlib; found = pathlib.Path.is_file; pathlib.Path.is_file = lambda p: p.name != 'library.h' and found(p)"
BUILD = "import sys, runpy; sys.argv[0] = 'setup.py'; runpy.run_path('setup.py', run_name='__main__')"


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where the installation could build none."""
    monkeypatch.setattr(compiled, "kernels", compiled.MISSING)
    monkeypatch.setattr(compiled, "REASON", "compilation failed: no such file: Python.h")
    monkeypatch.setattr(compiled.platform, "machine", lambda: "x86_64")
    compiled.warn_once_if_missing.cache_clear()
    yield
    compiled.warn_once_if_missing.cache_clear()


def built(code: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """setup.py run in a process of its own, after some code."""
    command = [sys.executable, "-c", f"{code}\n{BUILD}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, check=False)


def test_a_build_in_isolation_installs_why_there_are_no_kernels(tmp_path: Path) -> None:
    done = built(WITHOUT_TORCH, "build_py", "--build-lib", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "PyTorch was not there" in (tmp_path / "echelon" / compiled.NOTE.name).read_text("utf-8")
    assert (tmp_path / "echelon/llm.py").is_file(), "the package is installed all the same"
    assert (tmp_path / "echelon/server/page.html").is_file(), "and so is what the server shows"
    assert (tmp_path / "echelon/estimate/devices.json").is_file() and (tmp_path / "echelon/estimate/shapes.json").is_file()


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler")
def test_a_failed_compilation_is_installed_with_its_cause(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    fault = "kernels.cpp:1: fatal error: Python.h: No such file or directory"
    script = f'#!/bin/sh\ncase " $* " in *" -c "*) echo "{fault}" >&2; exit 1;; esac\nexec {shutil.which("c++")} "$@"\n'
    compiler.write_text(script, "utf-8")
    compiler.chmod(0o755)
    folders = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    older = tmp_path / "lib/echelon/_kernels.abi3.so"
    older.parent.mkdir(parents=True)
    older.write_bytes(b"of older sources")
    os.utime(older, (0, 0))
    done = built("", "build_ext", *folders, CXX=str(compiler), CC=str(compiler))
    assert done.returncode == 0, done.stderr
    said = (tmp_path / "lib/echelon" / compiled.NOTE.name).read_text("utf-8")
    assert "compilation failed" in said
    assert "Python.h: No such file" in said
    assert "Python.h: No such file" in done.stdout, "and the compiler's own words are in the build's output"
    assert not older.exists(), "kernels of other sources would serve without a word"


@pytest.mark.usefixtures("without_kernels")
def test_the_first_engine_says_once_that_kernels_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    loaded = toys.adopted(toys.llama())
    with caplog.at_level(logging.WARNING, "echelon"):
        for _ in range(2):
            LLM(loaded, max_num_seqs=1, kv_cache_memory_bytes=1 << 20)
    (said,) = [record.getMessage() for record in caplog.records if "no compiled kernels" in record.getMessage()]
    assert "Python.h" in said
    assert "pip install --no-deps --force-reinstall" in said
    assert "\n" not in said


@pytest.mark.usefixtures("without_kernels")
def test_the_doctor_says_it_too() -> None:
    said = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["compiled kernels"]
    assert said.startswith("MISSING (compilation failed")
    assert "pip install --no-deps --force-reinstall" in said


@pytest.mark.usefixtures("without_kernels")
def test_the_remedy_installs_from_where_the_package_came(monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed:
        """A distribution with this record of where it came from."""

        def __init__(self, **source: object) -> None:
            self.source = source

        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return json.dumps(self.source) if self.source else None

    for source, ending in (
        (Installed(), ["echelon"]),
        (Installed(url="file:///a%20b/c", dir_info={}), ["/a b/c"]),
        (Installed(url="file:///src", dir_info={"editable": True}), ["--editable", "/src"]),
        (Installed(url="https://example.org/echelon.tar.gz"), ["https://example.org/echelon.tar.gz"]),
    ):
        monkeypatch.setattr(compiled, "distribution", lambda _, source=source: source)
        words = shlex.split(compiled.remedy())
        assert words[-len(ending) :] == ending
        assert {"--no-deps", "--force-reinstall"} < set(words)
    monkeypatch.setattr(compiled.shutil, "which", lambda _: None)
    assert "compiler" in compiled.remedy()
    monkeypatch.setattr(compiled.platform, "machine", lambda: "aarch64")
    assert compiled.remedy() == "", "a processor for which there are no kernels misses none"


@pytest.mark.skipif(shutil.which("nm") is None or not compiled.is_built(), reason="there is no nm, or no kernels")
def test_kernels_know_nothing_of_a_version_of_pytorch_or_python() -> None:
    """Of PyTorch they import functions of C alone, of Python nothing."""
    symbols = subprocess.run(["nm", "-D", "-C", "--undefined-only", compiled.LIBRARY], capture_output=True, text=True, check=True).stdout
    names = [line.split(maxsplit=1)[1] for line in symbols.splitlines()]
    assert any(name.startswith("aoti_torch_") for name in names)
    assert not [name for name in names if name.startswith(("c10::", "at::", "torch::", "Py", "_Py", "pybind11::"))]


@pytest.mark.skipif(not compiled.is_built(), reason="there are no kernels")
def test_nothing_is_said_where_there_are_kernels() -> None:
    assert compiled.remedy() == ""
    assert not compiled.NOTE.exists()


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(("machine", "is_built_for"), [("x86_64", True), ("aarch64", False)])
def test_refusals_end_with_what_mends_them_or_with_their_reason(
    machine: str, is_built_for: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled.platform, "machine", lambda: machine)
    refused: list[Callable[[], object]] = [
        lambda: compiled.kernels.rms_norm,
        lambda: packing_of("int8", False, torch.device("cpu")),
        lambda: publish(str(tmp_path), tmp_path / "out", "int8"),
        lambda: LLM("nowhere", device="cpu", tensor_parallel_size=2),
    ]
    for call in refused:
        with pytest.raises(ConfigError, match=r"Python\.h") as told:
            call()
        assert ("; " in str(told.value)) == ("pip install" in str(told.value)) == is_built_for
        assert str(told.value) == str(told.value).rstrip("; ")

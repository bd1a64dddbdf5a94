"""Proofs on record: what makes one stale, and that a mutant counts only beside a control run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import dependencies, mutants, prove

ROOT = Path(__file__).parents[2]
LOSSLESS = next(proof for proof in prove.PROOFS if proof.name == "lossless")


def names(files: frozenset[Path]) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in files}


@pytest.mark.parametrize("cell", prove.PROOFS, ids=lambda cell: cell.name)
def test_every_proof_depends_on_files_that_exist(cell: prove.Proof) -> None:
    files = dependencies.of_command(cell.command)
    assert files
    assert all(path.is_file() for path in files)
    if cell.mutant is not None:
        assert (ROOT / cell.mutant.killer.split("::")[0]).is_file()


def test_a_proof_depends_on_what_its_test_imports_and_on_nothing_else() -> None:
    kernels = names(dependencies.of_command(["python", "-m", "pytest", "tests/core/test_sampling.py"]))
    assert kernels >= {
        "tests/core/test_sampling.py",
        "tests/conftest.py",
        "src/echelon/sampling.py",
        "src/echelon/csrc/sampling/sample.cpp",
        "setup.py",
    }
    others = {"src/echelon/server/app.py", "src/echelon/train/heads.py", "src/echelon/hf/__init__.py", "docs/benchmarks.md"}
    assert all((ROOT / name).is_file() for name in others)
    assert not kernels & others
    server = names(dependencies.of_command(["python", "-m", "pytest", "tests/server/test_server.py"]))
    assert server >= {
        "tests/support/servers.py",
        "src/echelon/server/app.py",
        "src/echelon/engine.py",
        "src/echelon/demo/pair/target/config.json",
    }
    assert "src/echelon/engine.py" in names(dependencies.of_command(["python", "-m", "echelon", "bench", "step"]))
    assert names(dependencies.of_command(["make", "sanitize"])) >= {"Makefile", "src/echelon/csrc/harness/main.cpp"}


def test_imports_inside_functions_and_commands_in_lists_are_followed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def late():\n    from echelon import LLM\n    return ['python', '-m', 'echelon.demo'], LLM\n", "utf-8")
    found = names(dependencies.closure({script}) - {script})
    assert found >= {"src/echelon/llm.py", "src/echelon/demo/__main__.py"}


def test_only_a_change_of_its_own_files_makes_a_proof_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not another machine, not another commit; a change of the command too."""
    record = {"passed": True, "sources": prove.sources_of(LOSSLESS), "cpu": "another", "commit": "another"}
    assert prove.state_of(LOSSLESS, {}) == "missing"
    assert prove.state_of(LOSSLESS, {"lossless": record}) == "proven"
    assert prove.state_of(LOSSLESS, {"lossless": record | {"passed": False}}) == "failed"
    content = dependencies._content

    def changed(name: str) -> None:
        monkeypatch.setattr(dependencies, "_content", lambda path: b"changed" if path == ROOT / name else content(path))

    for name, state in (("src/echelon/server/app.py", "proven"), ("LOG.md", "proven"), ("src/echelon/engine.py", "stale")):
        changed(name)
        assert prove.state_of(LOSSLESS, {"lossless": record}) == state
    monkeypatch.undo()
    longer = prove.Proof("lossless", [*LOSSLESS.command, "-x"])
    assert prove.state_of(longer, {"lossless": record}) == "stale"


def test_a_run_that_was_cut_off_goes_on_with_what_is_not_proven(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cells = [prove.Proof("a", ["make", "a"]), prove.Proof("b", ["make", "b"])]
    ran = []

    def run(cell: prove.Proof) -> dict[str, object]:
        ran.append(cell.name)
        return {"passed": cell.name == "a", "sources": prove.sources_of(cell), "commit": "c", "cpu": "m"}

    monkeypatch.setattr(prove, "run", run)
    monkeypatch.setattr(prove, "EVIDENCE", tmp_path / "prove.json")
    monkeypatch.setattr(prove, "PROOFS", cells)
    assert prove.main(["--status"]) == 1
    assert ran == []
    assert prove.main([]) == 1
    assert prove.main([]) == 1
    assert ran == ["a", "b", "b"], "what has failed is run again"
    assert prove.main(["a"]) == 0
    assert prove.main(["no such"]) == 2


def test_a_mutant_counts_only_where_its_test_passes_without_it(tmp_path: Path) -> None:
    package = tmp_path / "echelon"
    package.mkdir()
    (package / "engine.py").write_text("good = 1\n", "utf-8")
    fault = mutants.Mutant("a fault", "engine.py", "good = 1", "good = 0", "killer")

    class Copy(mutants.Copy):
        """Tests that look at the copy: "killer" for the fault, "fails" at nothing, "sleeps" at all."""

        def passes(self, killer: str) -> bool:
            return {"killer": "good = 1" in (self.folder / "echelon/engine.py").read_text("utf-8"), "fails": False, "sleeps": True}[killer]

    found = {
        killer: mutants.verdicts([mutants.Mutant(killer, fault.file, fault.old, fault.new, killer)], Copy(tmp_path))[killer]
        for killer in ("killer", "fails", "sleeps")
    }
    assert found == {"killer": "killed", "fails": "NO CONTROL", "sleeps": "SURVIVED"}
    assert (package / "engine.py").read_text("utf-8") == "good = 1\n"

"""One-line faults in the reductions of the C++ kernels; each must be found by the harness of random shapes (`csrc/harness`).

`python -m tools.kernel_mutants [NAME ...]` builds the kernels alone, as `make sanitize` does but without sanitisers, patches a copy of the
sources, one fault at a time, builds what that changes and runs the check that is named. A fault that survives, a check that fails without
it too, or a patch that no longer applies, fails.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools import ROOT
from tools.mutants import Mutant, survives

SOURCES = ROOT / "src/echelon/csrc"
CASES = 300
SECONDS = 600.0  # that a check may take: a fault may lead round in circles
COMPILE = "g++ -std=c++20 -O1 -fopenmp -ffp-contract=off -Wno-psabi -MMD -MF $out.d -c $in -o $out"
WRITTEN_KEYS = "size, size, call_.slots + first, begin, end, to"
MUTANTS = [
    Mutant("a section's sums keep their scale", "attention/tiles.h", "all.weights[j] * shrink + section.weights[j]", "all.weights[j] + section.weights[j]", "attention"),
    Mutant("a section's outputs keep their scale", "attention/tiles.h", "all.out[i * width + j] * shrink + section", "all.out[i * width + j] + section", "attention"),
    Mutant("sums of earlier tiles keep their scale", "attention/tiles.h", "load(sums) * all_lanes(shrink)", "load(sums)", "attention"),
    Mutant("two of four chains are never added", "attention/tiles.h", "  add_pairs<2>(v);\n", "", "attention"),
    Mutant("half the lanes of transposed keys are lost", "attention/tiles.h", "sum[i][j] += more[i][j]", "sum[i][j] += Register{}", "attention"),
    Mutant("a key too many is seen", "attention/tiles.h", "(key <= to)", "(key <= to + 1)", "attention"),
    Mutant("the last key's value is left out", "attention/tiles.h", "for (int64_t k = 0; k < depth; ++k) {\n    Register right", "for (int64_t k = 0; k + 1 < depth; ++k) {\n    Register right", "attention"),
    Mutant("what is not seen weighs something", "attention/tiles.h", "replace(Math::round_weights(exponentials(score - all_lanes(highest))), minus_infinity, score, Lanes{})", "Math::round_weights(exponentials(score - all_lanes(highest)))", "attention"),
    Mutant("one thread reads a long row among short ones", "attention/division.cpp", "keys.count() > most && sections.count > 1", "false", "division"),
    Mutant("sections leave what came of them in one place", "attention/division.cpp", "++i, division.num_partials += partial_size(call, unit)", "++i", "layer"),
    Mutant("half of every block of depth is left out", "linear/linear.cpp", "k < padded; k += visit", "k < padded; k += family.depth_block", "linear"),
    Mutant("tiles side by side begin with old sums", "linear/linear.cpp", "std::memset(sums, 0, (end - start) * sums_per_tile * 4)", "std::memset(sums, 0, sums_per_tile * 4)", "linear"),
    Mutant("the last entry of a weight's row is lost", "linear/linear.cpp", "n < columns && k + i < depth", "n < columns && k + i + 1 < depth", "linear"),
    Mutant("a tile's sums go to its neighbour's rows", "linear/linear.cpp", "sums + (t - start) * sums_per_tile + unit", "sums + (t - start) * tile + unit", "linear"),
    Mutant("the last row of a short block is lost", "linear/linear.cpp", "b == 1 ? units - family.short_block : units", "b == 1 ? units - family.short_block : units - 1", "linear"),
    Mutant("keys of the first rows again", "layer/layer.cpp", WRITTEN_KEYS, WRITTEN_KEYS.replace(" + first", ""), "layer"),
    Mutant("the first rows are read again", "layer/layer.cpp", "past(call_.hidden, first * call_.width * size_), memory", "past(call_.hidden, 0), memory", "layer"),
    Mutant("queries and keys are not normed", "layer/layer.cpp", "if (norm.weight) normalise", "if (false) normalise", "layer"),
    Mutant("angles of the first rows again", "layer/layer.cpp", "angles = first * call_.rotary * linear::size_of(call_.angle_type)", "angles = 0", "layer"),
    Mutant("attention of the first rows again", "layer/layer.cpp", "at_.attended + first * depth * size_", "at_.attended", "layer"),
    Mutant("all ranks' columns in the first rank's place", "layer/ranks.cpp", "slot + row * width + first, own", "slot + row * width, own", "layer"),
    Mutant("the last tile is not activated", "layer/layer.cpp", "activate_tiles(memory, rows, begin, end)", "activate_tiles(memory, rows, begin, end - 1)", "layer"),
    Mutant("the last tile of a share is left out", "workers.h", "if (first >= end) break;", "if (first >= end - 1) break;", "layer"),
    Mutant("a head of 8 bits has no scale but the first", "elementwise/elementwise.cpp", "std::memcpy(slot + size, &scale, scale_bytes);", "if (head == 0) std::memcpy(slot + size, &scale, scale_bytes);", "elementwise"),
    Mutant("the last entry of a row is no candidate for the largest", "elementwise/round.cpp", "for (int64_t k = 0; k < depth; ++k) {\n      const uint16_t bits", "for (int64_t k = 0; k + 1 < depth; ++k) {\n      const uint16_t bits", "elementwise"),
    Mutant("keys of 8 bits are read without their scale", "attention/float_math.h", "Register) * splat(scale));", "Register));", "attention"),
    Mutant("4 bits: what a group is shifted by is forgotten", "linear/integers.h", "D::multiply_low(zero, D::all(group_sum(x + r * x_stride, g)))", "D::all(0)", "integers"),
    Mutant("4 bits in tiles: half a register is not empty", "linear/tiles.h", "std::memset(own + integers.group * tile, 0,", "std::memset(own + integers.group * tile, 1,", "integers"),
    Mutant("4 bits in tiles: a group has the last one's products", "linear/tiles.h", "= products[g % 2][r]", "= products[0][r]", "integers"),
    Mutant("4 bits in tiles: the last group is not scaled", "linear/tiles.h", "  scale(groups - 1);\n", "", "integers"),
    Mutant("4 bits in tiles: all columns have the same zero", "linear/tiles.h", "static_cast<int8_t>(group[2 * tile + i / 4])", "static_cast<int8_t>(8)", "integers"),
    Mutant("4 bits in tiles: the next group's bytes in this one's place", "linear/tiles.h", "bytes[(g + 1) % 2]", "bytes[0]", "integers"),
    Mutant("4 bits: a group has the first one's sums", "linear/integers.h", "= D::all(group_sum(x + r * x_stride, g))", "= D::all(group_sum(x + r * x_stride, 0))", "integers"),
    Mutant("4 bits: weights without zeros are shifted by 7", "linear/linear.cpp", "integers.has_zeros ? 1 : 8", "integers.has_zeros ? 1 : 7", "integers"),
    Mutant("4 bits: the last part of a group is left out", "linear/integers.h", "s < group_steps; s += 4", "s + 4 < group_steps; s += 4", "integers"),
    Mutant("8 bits: what the weight is shifted by stays in the sums", "linear/finish.h", "integers[i] + too_much", "integers[i]", "integers"),
    Mutant("a row of x has the scale of its weight alone", "linear/finish.h", "v[i] * (of_row.scale * scales[i])", "v[i] * scales[i]", "integers"),
    Mutant("a token beyond the nucleus is drawn", "sampling/sample.cpp", "if (larger + doubt < wanted) return token;", "return token;", "sample"),
    Mutant("the nucleus is that of the whole vocabulary", "sampling/sample.cpp", "total += mass_from(values + first, weights + first, threshold)", "total += mass_from(values + first, weights + first, -infinity)", "sample"),
]  # fmt: skip


def stale() -> list[str]:
    """Names of mutants whose patch does not apply exactly once."""
    return [m.name for m in MUTANTS if (SOURCES / m.file).read_text("utf-8").count(m.old) != 1]


class Harness:
    """A copy of the kernels in `folder`, built by ninja: after a change only what depends on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(SOURCES, folder / "csrc", ignore=shutil.ignore_patterns("bindings"))
        sources = sorted(path.relative_to(folder) for path in (folder / "csrc").rglob("*.cpp"))
        rules = [
            "rule cxx",
            f"  command = {COMPILE}",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule link",
            "  command = g++ -fopenmp $in -o $out",
        ]
        objects = [f"build {source.with_suffix('.o')}: cxx {source}" for source in sources]
        program = "build harness: link " + " ".join(str(source.with_suffix(".o")) for source in sources)
        (folder / "build.ninja").write_text("\n".join([*rules, *objects, program, ""]), "utf-8")

    def passes(self, check: str) -> bool:
        """Whether a check finds nothing in the sources as they are."""
        subprocess.run([Path(sys.executable).with_name("ninja"), "--quiet"], cwd=self.folder, check=True)
        command = [str(self.folder / "harness"), str(CASES), "0", check]
        try:
            return subprocess.run(command, capture_output=True, check=False, timeout=SECONDS).returncode == 0
        except subprocess.TimeoutExpired:
            return False


def main(names: list[str]) -> int:
    if stale() or set(names) - {m.name for m in MUTANTS}:
        print("patches that no longer apply, or names of none:", *stale(), *sorted(set(names) - {m.name for m in MUTANTS}), sep="\n  ")
        return 1
    chosen = [m for m in MUTANTS if not names or m.name in names]
    with tempfile.TemporaryDirectory() as folder:
        harness = Harness(Path(folder))
        failing = [check for check in dict.fromkeys(m.killer for m in chosen) if not harness.passes(check)]
        survivors = []
        for mutant in chosen:
            is_alive = survives(mutant, harness.folder / "csrc", harness.passes)
            survivors += [mutant.name] if is_alive else []
            print(f"{'SURVIVED' if is_alive else 'killed':10}  {mutant.name}  ({mutant.killer})", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed; checks that fail without a fault: {', '.join(failing) or 'none'}")
    return 0 if not survivors and not failing else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

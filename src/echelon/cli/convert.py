"""`echelon convert`: a pickled head, once, to safetensors."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from echelon import ModelLoadError
from echelon.cli import unpickle
from echelon.cli.words import errors
from echelon.inputs import made_apart

PICKLED = ("medusa_lm_head.pt", "pytorch_model.bin")


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help=f"Folder with config.json and {' or '.join(PICKLED)}.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder for config.json and model.safetensors.")],
) -> None:
    """Convert a published head whose weights are pickled, so that it can be loaded.

    The file is read in a process of its own by a reader that builds tensors and nothing else.
    """
    pickled = next((source / name for name in PICKLED if (source / name).is_file()), None)
    if pickled is None:
        raise ModelLoadError(f"{source} holds neither {' nor '.join(PICKLED)}; point to the folder of a published head")
    if not (source / "config.json").is_file():
        raise ModelLoadError(f"{source} holds no config.json; a head needs its configuration beside its weights")
    made_apart(destination, source, "DST")
    weights = destination / "model.safetensors"
    done = subprocess.run(
        [sys.executable, "-I", unpickle.__file__, str(pickled), str(weights)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        weights.unlink(missing_ok=True)
        raise ModelLoadError(f"{pickled} cannot be read as plain tensors: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    shutil.copyfile(source / "config.json", destination / "config.json")
    errors.print(f"{escape(str(weights))} holds the tensors of {escape(str(pickled))}", highlight=False)

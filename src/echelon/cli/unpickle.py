"""Run as a program: the tensors of a pickled file, as safetensors. A process of its own, so that a bad file hurts nothing else."""

import sys

import torch
from safetensors.torch import save_file


def main(source: str, destination: str) -> None:
    state = torch.load(source, map_location="cpu", weights_only=True)
    odd = [k for k, v in state.items() if not isinstance(v, torch.Tensor)] if isinstance(state, dict) else [type(state).__name__]
    if odd:
        raise SystemExit(f"{source} holds other things than named tensors: {', '.join(map(str, odd[:5]))}")
    save_file({k: v.clone().contiguous() for k, v in state.items()}, destination, {"format": "pt"})


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Whether two machines have the same checkpoint, without reading all of it."""

from __future__ import annotations

import hashlib
import json
import os

from echelon.checkpoint.folder import Folder
from echelon.checkpoint.tensors import STORED, open_weights, weight_files

SAMPLE = 256  # bytes of every tensor


def checkpoint_digest(name: str) -> str:
    """Hex digits that differ where the configuration, a tensor's name, type or shape, or the first bytes of one do.

    Raises
    ------
    ModelLoadError  as of `Folder.locate` and `open_weights`
    """
    folder = Folder.locate(name, "model")
    digest = hashlib.blake2b(json.dumps(folder.read_json("config.json"), sort_keys=True).encode(), digest_size=16)
    with open_weights(folder, weight_files(folder)) as weights:
        for key, tensor in sorted(weights.tensors.items()):
            size = tensor.numel * STORED[tensor.code].itemsize if tensor.code in STORED else 0
            digest.update(f"{key} {tensor.code} {tensor.shape}\0".encode())
            digest.update(os.pread(tensor.descriptor, min(SAMPLE, size), tensor.offset))
    return digest.hexdigest()

"""All patches of a model, in the one order in which they fit together."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from echelon.model.patches.causal_lm import patch_causal_lm
from echelon.model.patches.decoder_layer import patch_decoder_layers
from echelon.model.patches.elementwise import patch_elementwise
from echelon.model.patches.linear import patch_linear
from echelon.model.patches.packing import Packing
from echelon.model.patches.rope import OriginalContext, patch_rope
from echelon.model.patches.rotary_tables import tabulate_rotary
from echelon.model.patches.split import Share, connect, cut_model
from echelon.model.patches.vectors import patch_sensitive


def patch_model(
    model: PreTrainedModel, keep_weights: bool, packing: Packing, in_place: bool = False, share: Share | None = None
) -> tuple[dict[str, int], OriginalContext | None]:
    """Return how many modules of each class now run our operations, and where longer texts have rotary frequencies of their own. With
    `share` the model is cut first, and its layers gather what lies on other ranks.

    Element-wise patches compare a module with its own forward, so they come before those of the layers within; a decoder layer takes the
    forwards that its modules have by then. Packed weights are no inference tensors: heads are trained on patched targets.
    """
    cuts = cut_model(model, share) if share is not None else None
    with torch.inference_mode():
        original_context = patch_rope(model)
        replaced = patch_elementwise(model)
    tabulate_rotary(model)
    replaced |= patch_linear(model, keep_weights, packing, in_place)
    if cuts is not None and share is not None:
        connect(model, cuts, share)
    replaced |= patch_decoder_layers(model)
    replaced |= patch_causal_lm(model)
    patch_sensitive(model)
    return replaced, original_context

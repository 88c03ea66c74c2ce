"""What `nn.TransformerEncoder` gives at padded places: zeros, as torch's evaluation without gradients has them.

torch has two ways through an encoder with a padding mask. Without gradients it leaves padded places out (its fast path,
in nested tensors) and fills them with zeros; with gradients it computes something there, which nobody should read. A
secure model does what `with torch.no_grad()` does.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def zeros_at_padded_places(model: nn.Module) -> None:
    """Change a copy of a model: its encoders give zeros where torch's fast path gives them."""
    for layer in model.modules():
        inherited = isinstance(layer, nn.TransformerEncoder) and type(layer).forward is nn.TransformerEncoder.forward
        if inherited and getattr(layer, "use_nested_tensor", False):
            layer.__dict__["forward"] = MethodType(_forward, layer)


def _forward(
    self: Any,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> torch.Tensor:
    """`nn.TransformerEncoder.forward`, with its conditions for the fast path."""
    given = src_key_padding_mask
    if given is None or mask is not None or src.dim() != 3 or not torch.backends.mha.get_fastpath_enabled():
        return nn.TransformerEncoder.forward(self, src, mask, given, is_causal)
    padded = given if given.dtype == torch.bool else given != 0
    if getattr(self, "mask_check", True) and padded.shape[1] > 1:  # the places before must be whole rows' beginnings
        padded = padded & (padded[:, :-1] & padded[:, 1:].logical_not()).any().logical_not()
    keys = F._canonical_mask(given, "src_key_padding_mask", None, "mask", src.dtype)
    for layer in self.layers:
        src = layer(src, src_mask=None, is_causal=bool(is_causal), src_key_padding_mask=keys)
    src = src.masked_fill(padded.unsqueeze(-1), 0.0)
    return src if self.norm is None else self.norm(src)

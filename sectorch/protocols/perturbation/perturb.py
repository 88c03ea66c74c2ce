"""The server's pass over the weights: Eqs. 6 and 13 in training, III-D for inference."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

from .errors import NonFiniteGradientError, StateMismatchError
from .noise import Key, Noise, draw_scales
from .plan import Plan, make_plan


def check_state(state: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Raise unless `state` has the model's names and shapes and finite real numbers.

    Raises:
        StateMismatchError: names and shapes that differ. NonFiniteGradientError: names the tensors.
    """
    if missing := [name for name in shapes if name not in state]:
        raise StateMismatchError(f"the state dict lacks {', '.join(missing[:5])}")
    if extra := [name for name in state if name not in shapes]:
        raise StateMismatchError(f"the state dict has {', '.join(extra[:5])}, which the model lacks")
    for name, shape in shapes.items():
        if state[name].shape != shape:
            raise StateMismatchError(f"'{name}' has shape {list(state[name].shape)}; the model's is {list(shape)}")
    bad = [name for name, tensor in state.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if bad:
        raise NonFiniteGradientError(f"the state dict is not finite at {', '.join(bad[:5])}; the run has diverged")
    kinds = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if len(kinds) != 1 or kinds - {torch.float32, torch.float64}:
        raise StateMismatchError(
            f"the weights are of {kinds or 'no real dtype'}; all float32 or all float64 is expected"
        )


def ratio_vector(
    plan: Plan,
    names: list[str],
    shapes: Mapping[str, torch.Size],
    scales: torch.Tensor,
    state: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """R of the trainable parameters, flat [P], in the weights' dtype."""
    like = state[names[0]]
    out = torch.empty(sum(shapes[name].numel() for name in names), dtype=like.dtype, device=like.device)
    for name, part in zip(names, out.split([shapes[name].numel() for name in names]), strict=True):
        part.view(shapes[name]).copy_(plan.parameters[name].factors(scales, len(shapes[name])).expand(shapes[name]))
    return out


def head_size(plan: Plan, state: Mapping[str, torch.Tensor], scales: torch.Tensor) -> float:
    """Root mean square of the last layer's scaled weights; 1 / n_{L-1} where they are all zero."""
    weight = state[f"{plan.head}.weight"].detach()
    factors = plan.parameters[f"{plan.head}.weight"].factors(scales, 2).to(weight)
    return float((weight * factors).square().mean().sqrt()) or 1 / plan.features


def perturbed_state(
    plan: Plan, model: nn.Module, state: Mapping[str, torch.Tensor], key: Key | None, scales: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """W^ = R o W, plus R^a in the last layer if there is a key; running statistics only where a norm uses them.

    R^a is added to the bias as well: the bias is the weight of a feature that is 1, so alpha = sum_j y^_j + 1.
    """
    scales = key.scales if key is not None else scales
    out = {}
    for name, scaled in plan.parameters.items():
        weight = state[name].detach()
        out[name] = weight * scaled.factors(scales, weight.dim()).to(weight)
    if key is not None:
        for name in (f"{plan.head}.weight", f"{plan.head}.bias"):
            if name in out:
                shift = key.shift.to(out[name])
                out[name] = out[name] + (shift[:, None] if out[name].dim() == 2 else shift)
    for name, own in plan.batch_norms.items():
        if not own:
            mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
            r = scales[torch.from_numpy(plan.norm_inputs[name])].to(mean)
            eps = model.get_submodule(name).eps
            out[f"{name}.running_mean"] = r * mean
            out[f"{name}.running_var"] = r.square() * (variance + eps) - eps
            out[f"{name}.num_batches_tracked"] = state[f"{name}.num_batches_tracked"].clone()
    return out


def inference_copy(
    model: nn.Module, state: Mapping[str, torch.Tensor], noise: Noise, channels: int | None = None
) -> nn.Module:
    """A perturbed copy of `model` in eval mode: fresh scales, no additive noise (III-D)."""
    copied = copy.deepcopy(model).eval()
    plan = make_plan(copied, channels)
    scales = draw_scales(plan.roots, plan.scale_count, noise)
    noisy = {name: tensor.detach().clone() for name, tensor in state.items()}
    noisy |= perturbed_state(plan, copied, state, None, scales)
    copied.to(next(iter(state.values())).dtype)
    copied.load_state_dict(noisy)
    return copied.requires_grad_(False)

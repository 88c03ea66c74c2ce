"""What a leak is of: the sentence about the inputs that some bits agree with most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

BITS = (*range(8), 19, 20, 21, 31, 32, 47, 61, 62)
"""Bits of an input that are named; the sign is named as such."""


def predicates(inputs: Sequence[torch.Tensor], names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Sentences about the inputs, and for each element whether it is so."""
    for x, name in zip(inputs, names, strict=True):
        yield f"{name} < 0", x < 0
        yield f"{name} == 0", x == 0
        yield f"|{name}| is large", x.abs() > x.abs().double().median().long()
        for bit in BITS:
            yield f"bit {bit} of {name}", (x >> bit & 1).bool()
    for i in range(len(inputs)):
        for j in range(i + 1, len(inputs)):
            if inputs[i].shape == inputs[j].shape:
                yield f"{names[i]} < {names[j]}", inputs[i] < inputs[j]
                yield f"bit 0 of {names[i]} + {names[j]}", ((inputs[i] + inputs[j]) & 1).bool()
                yield f"bit 0 of {names[i]} * {names[j]}", ((inputs[i] * inputs[j]) & 1).bool()


def best(found: torch.Tensor, inputs: Sequence[torch.Tensor], names: Sequence[str]) -> tuple[str, float, float]:
    """The sentence that a bit of each element agrees with most beyond chance: it, how often, and its distance in
    standard deviations from a coin. No sentence where none is beyond 8."""
    most = ("", 0.5, 0.0)
    n = found.numel()
    for said, truth in predicates(inputs, names):
        if truth.shape != found.shape:
            continue
        share = float(truth.double().mean())
        if not 0.02 < share < 0.98:
            continue
        # Given that a sentence is true in this share, by chance they agree in a known number of elements.
        ones = float(found.double().mean())
        chance = share * ones + (1 - share) * (1 - ones)
        spread = max((chance * (1 - chance) / n) ** 0.5, 1e-9)
        agree = float((found.bool() == truth).double().mean())
        sigmas = abs(agree - chance) / spread
        if sigmas > max(most[2], 8.0):
            most = (said, max(agree, 1 - agree), sigmas)
    return most

"""Einsums of two tensors mod 2^64, as products of matrices on a device whose kernels have none of int64."""

from __future__ import annotations

import math

import torch

from .products import matmul


def letters_of(equation: str, operands: tuple) -> list[str]:
    """The letter of every dimension of every operand; an ellipsis stands for letters of its own."""
    letters = []
    for part, operand in zip(equation.replace(" ", "").split("->")[0].split(","), operands, strict=True):
        missing = operand.dim() - len(part.replace("...", ""))
        letters += _spelled(part, missing)
    return letters


def _spelled(part: str, missing: int) -> list[str]:
    if "..." not in part:
        return list(part)
    before, after = part.split("...")
    return [*before, *(f".{i}" for i in range(missing, 0, -1)), *after]


def kept_letters(equation: str, letters: list[str]) -> set[str]:
    """The letters of an einsum's result."""
    out = equation.replace(" ", "").split("->")[1] if "->" in equation else None
    kept = {x for x in letters if (letters.count(x) == 1 if out is None else x in out)}
    return kept | {x for x in letters if x.startswith(".") and (out is None or "..." in out)}


def result_letters(equation: str, letters: list[str]) -> list[str]:
    """The letters of the result's dimensions; without an arrow the ellipsis and then the alphabet."""
    kept = kept_letters(equation, letters)
    around = sorted((x for x in kept if x.startswith(".")), key=lambda x: -int(x[1:]))
    if "->" not in equation:
        return around + sorted(x for x in kept if not x.startswith("."))
    return _spelled(equation.replace(" ", "").split("->")[1], len(around))


def einsum(equation: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`torch.einsum` of two int64 tensors, exact mod 2^64."""
    return by_matmul(equation, x, y) if x.device.type == "cuda" else torch.einsum(equation, x, y)


def by_matmul(equation: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same by one product of matrices for each place of the letters that both operands keep."""
    letters = letters_of(equation, (x, y))
    of_x, of_y, out = letters[: x.dim()], letters[x.dim() :], result_letters(equation, letters)
    sizes: dict[str, int] = {}
    for letter, n in zip(letters, (*x.shape, *y.shape), strict=True):
        sizes[letter] = n if sizes.get(letter, 1) == 1 else sizes[letter]  # one dimension may stand for a longer one
    both = [a for a in out if a in of_x and a in of_y]
    inner = [a for a in dict.fromkeys(of_x) if a in of_y and a not in out]
    left, right = ([a for a in out if a in mine and a not in both] for mine in (of_x, of_y))
    number = {letter: i for i, letter in enumerate(sizes)}

    def arranged(v: torch.Tensor, mine: list[str], *parts: list[str]) -> torch.Tensor:
        order = [a for part in parts for a in part]
        v = torch.einsum(v, [number[a] for a in mine], [number[a] for a in order])  # diagonals, sums, permutations
        v = v.expand([sizes[a] for a in order])
        return v.reshape([sizes[a] for a in both] + [math.prod(sizes[a] for a in part) for part in parts[1:]])

    product = matmul(arranged(x, of_x, both, left, inner), arranged(y, of_y, both, inner, right))
    made = [*both, *left, *right]
    return product.view([sizes[a] for a in made]).permute([made.index(a) for a in out])

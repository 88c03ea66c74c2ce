"""Values of which A and S have halves and D both, and what can be claimed of them in a proof (`prove.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...choreography import Located, leaf
from ...choreography.located import compute
from ...ring.bitplanes import words_for
from ...ring.claimed import columns_of
from .shares import Shares

ROWS = 6
"""Variables of the first step of bits: 64 words become one."""
WORD_ROWS = 3
"""Variables of the first step of words, in 8 rows of 8 parts."""


@dataclass(frozen=True)
class Halves:
    """A value in XOR shares, of which D knows both: one at A and D, the other at S and D."""

    A: Located
    S: Located

    @property
    def whole(self) -> Located:
        """At D."""
        return self.A ^ self.S

    @property
    def shares(self) -> Shares:
        """Without D."""
        return Shares(self.A, self.S)

    @property
    def shape(self) -> torch.Size:
        return self.A.shape

    def __getitem__(self, index: Any) -> Halves:
        return Halves(self.A[index], self.S[index])


@dataclass(frozen=True)
class Words:
    """Claims base + sum X Y = 0 in GF(2^64), for each element of tensors [copies, ...].

    Attributes:
        base: words. terms_A, terms_S: pairs of X, words of A or of S, and of bits Y of the other, packed for each copy
            (`ring/bitplanes.py`); D knows both.
    """

    base: Halves
    copies: int
    terms_A: tuple[tuple[Located, Located], ...] = ()
    terms_S: tuple[tuple[Located, Located], ...] = ()

    @property
    def width(self) -> int:
        """Words of packed bits."""
        return self.copies * words_for(self.base.shape.numel() // self.copies)


@dataclass(frozen=True)
class Term:
    """A term X Y: `place`, the columns of its claim; of so many copies."""

    X: Located
    Y: Located
    copies: int
    place: tuple[int, int]


@dataclass(frozen=True)
class Terms:
    """All terms: those with X at A, and then those with X at S."""

    of_A: list[Term]
    of_S: list[Term]

    @classmethod
    def of(cls, words: Sequence[Words]) -> Terms:
        ends = itertools.accumulate(w.width for w in words)
        placed = [(w, (end - w.width, end)) for w, end in zip(words, ends, strict=True)]
        return cls(
            [Term(*term, w.copies, place) for w, place in placed for term in w.terms_A],
            [Term(*term, w.copies, place) for w, place in placed for term in w.terms_S],
        )

    @property
    def places(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """The columns of their claims, of those of A and those of S."""
        return tuple(term.place for term in self.of_A), tuple(term.place for term in self.of_S)

    def factors(self, nothing: Halves) -> tuple[Halves, Halves]:
        """What A and S have of X, [64, C], and of Y, packed [C]."""
        return (
            Halves(_words(self.of_A, nothing.A), _words(self.of_S, nothing.S)),
            Halves(_bits(self.of_S, nothing.A), _bits(self.of_A, nothing.S)),
        )


def _words(terms: Sequence[Term], nothing: Located) -> Located:
    return compute(columns, tuple(term.copies for term in terms), nothing, *(term.X for term in terms))


def _bits(terms: Sequence[Term], nothing: Located) -> Located:
    return compute(flat, nothing, *(term.Y for term in terms))


def gathered(f: Callable, nothing: Halves, found: Sequence[Halves], *public: Any) -> Halves:
    """All of them beside each other, by f, which is given nothing first."""
    sides = [nothing.A, *(v.A for v in found)], [nothing.S, *(v.S for v in found)]
    return Halves(*(compute(f, *public, *side) for side in sides))


@leaf
def flat(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


@leaf
def columns(copies: tuple[int, ...], nothing: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    """The elements of all parts as bits of packed words stand: [64, W], with zeros at the end of each copy."""
    return columns_of(parts, copies, nothing)

"""Layers of ANDs from a circuit of ANDs: each as early as its operands allow."""

from __future__ import annotations

from dataclasses import dataclass, field

from .layers import Layer


@dataclass(frozen=True)
class _And:
    """left & right, xor onto where there is one; all by number."""

    left: int
    right: int
    onto: int | None
    depth: int

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.left, self.right) if self.onto is None else (self.left, self.right, self.onto)


@dataclass
class Circuit:
    """A circuit on so many input rows, which have the numbers 0 .. rows - 1; every AND has the next number."""

    rows: int
    _ands: list[_And] = field(default_factory=list)

    def land(self, left: int, right: int, onto: int | None = None) -> int:
        """left & right, xor onto; its number."""
        made = _And(left, right, onto, 0)
        depth = 1 + max(self.depth(x) for x in made.operands)
        self._ands.append(_And(left, right, onto, depth))
        return self.rows + len(self._ands) - 1

    def depth(self, number: int) -> int:
        """The layer that makes it; 0 for what is there."""
        return 0 if number < self.rows else self._ands[number - self.rows].depth

    def layers(self, results: tuple[int, ...]) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
        """The layers that compute these results, and the rows of the last state where they stand."""
        wanted = set(results)
        for number in reversed(range(self.rows, self.rows + len(self._ands))):
            if number in wanted:
                wanted.update(self._ands[number - self.rows].operands)
        by_depth: dict[int, list[int]] = {}
        for number, made in enumerate(self._ands, self.rows):
            if number in wanted:
                by_depth.setdefault(made.depth, []).append(number)
        state = list(range(self.rows))
        layers = []
        for depth in sorted(by_depth):
            place = {number: row for row, number in enumerate(state)}
            numbers = sorted(by_depth[depth], key=lambda n: self._ands[n - self.rows].onto is None)
            ands = [self._ands[n - self.rows] for n in numbers]
            later = set(results) | {x for d in by_depth if d > depth for n in by_depth[d] for x in self._operands(n)}
            opened = tuple(dict.fromkeys([*(a.left for a in ands), *(a.right for a in ands)]))
            index = {number: i for i, number in enumerate(opened)}
            kept = [number for number in state if number in later]
            layers.append(
                Layer(
                    tuple(place[number] for number in opened),
                    tuple(index[a.left] for a in ands),
                    tuple(index[a.right] for a in ands),
                    tuple(place[a.onto] for a in ands if a.onto is not None),
                    tuple(place[number] for number in kept),
                )
            )
            state = [*numbers, *kept]
        place = {number: row for row, number in enumerate(state)}
        return tuple(layers), tuple(place[number] for number in results)

    def _operands(self, number: int) -> tuple[int, ...]:
        return self._ands[number - self.rows].operands

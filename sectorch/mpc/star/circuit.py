"""Layers of ANDs from a circuit of gates: each as early as its operands allow."""

from __future__ import annotations

from dataclasses import dataclass, field

from .layers import Layer


@dataclass(frozen=True)
class _Gate:
    """The xor of ANDs of two operands or more, and of onto where there is one; all by number."""

    ands: tuple[tuple[int, ...], ...]
    onto: int | None

    @property
    def operands(self) -> tuple[int, ...]:
        """Each once, in the order in which they come."""
        onto = () if self.onto is None else (self.onto,)
        return tuple(dict.fromkeys([number for operands in self.ands for number in operands] + list(onto)))

    @property
    def multiplied(self) -> tuple[int, ...]:
        return tuple(number for operands in self.ands for number in operands)


@dataclass
class Circuit:
    """A circuit on so many input rows, which have the numbers 0 .. rows - 1; every gate has the next number."""

    rows: int
    _gates: list[_Gate] = field(default_factory=list)
    _depths: list[int] = field(default_factory=list)
    _numbers: dict[_Gate, int] = field(default_factory=dict)

    def gate(self, *ands: tuple[int, ...], onto: int | None = None) -> int:
        """The xor of these ANDs, and of onto; its number, which is that of an equal gate where there is one."""
        made = _Gate(ands, onto)
        if made not in self._numbers:
            self._depths.append(1 + max(self.depth(x) for x in made.operands))
            self._gates.append(made)
            self._numbers[made] = self.rows + len(self._gates) - 1
        return self._numbers[made]

    def depth(self, number: int) -> int:
        """The layer that makes it; 0 for what is there."""
        return 0 if number < self.rows else self._depths[number - self.rows]

    def layers(self, results: tuple[int, ...]) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
        """The layers that compute these results, and the rows of the last state where they stand."""
        wanted = set(results)
        for number in reversed(range(self.rows, self.rows + len(self._gates))):
            if number in wanted:
                wanted.update(self._of(number).operands)
        by_depth: dict[int, list[int]] = {}
        for number in range(self.rows, self.rows + len(self._gates)):
            if number in wanted:
                by_depth.setdefault(self.depth(number), []).append(number)
        state = list(range(self.rows))
        layers = []
        for depth in sorted(by_depth):
            place = {number: row for row, number in enumerate(state)}
            numbers = sorted(by_depth[depth], key=lambda n: self._of(n).onto is None)
            gates = [self._of(n) for n in numbers]
            later = set(results) | {x for d in by_depth if d > depth for n in by_depth[d] for x in self._of(n).operands}
            opened = tuple(dict.fromkeys(number for gate in gates for number in gate.multiplied))
            index = {number: i for i, number in enumerate(opened)}
            kept = [number for number in state if number in later]
            layers.append(
                Layer(
                    tuple(place[number] for number in opened),
                    tuple(tuple(index[x] for x in operands) for gate in gates for operands in gate.ands),
                    tuple(row for row, gate in enumerate(gates) for _ in gate.ands),
                    tuple(place[gate.onto] for gate in gates if gate.onto is not None),
                    tuple(place[number] for number in kept),
                )
            )
            state = [*numbers, *kept]
        place = {number: row for row, number in enumerate(state)}
        return tuple(layers), tuple(place[number] for number in results)

    def _of(self, number: int) -> _Gate:
        return self._gates[number - self.rows]

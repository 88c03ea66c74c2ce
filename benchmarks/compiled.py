"""What `torch.compile` would gain on the hot loops of comparison and selection: microseconds on one thread.

python benchmarks/compiled.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from sectorch.bitplanes import planes, rows
from sectorch.mpc.compare import blocks_of, thermometer

N = 65536


def online(e, c, h, s0, s1, v0, v1, w0, w1):
    """The online part of `select` at one party, with one temporary as the protocol has it."""
    out = s1.bitwise_and(e).bitwise_xor_(s0).mul_(c)
    v = v1.bitwise_and(e).bitwise_xor_(v0)
    out -= v
    out += torch.bitwise_and(w1, e, out=v).bitwise_xor_(w0).bitwise_and_(h)
    return out


def written_out(e, c, h, s0, s1, v0, v1, w0, w1):
    """The same as one expression, for the compiler."""
    return ((s1 & e) ^ s0) * c - ((v1 & e) ^ v0) + (((w1 & e) ^ w0) & h)


def codes(bit_planes: torch.Tensor) -> torch.Tensor:
    return thermometer(blocks_of(bit_planes, 20, 63))


def microseconds(f: Callable, *arguments: torch.Tensor) -> float:
    """The lower quartile of fifty calls."""
    f(*arguments)
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        f(*arguments)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[12] * 1e6


def main() -> None:
    torch.set_num_threads(1)
    x = [torch.randint(-(1 << 62), 1 << 62, (N,)) for _ in range(9)]
    bits = planes(rows(x[0]))
    for name, plain, source, arguments in (
        ("select, online", online, written_out, x), ("bit planes", planes, planes, [rows(x[0])]),
        ("thermometer codes", codes, codes, [bits]),
    ):  # fmt: skip
        start = time.perf_counter()
        compiled = torch.compile(source)
        if not torch.equal(compiled(*arguments), plain(*arguments)):
            raise SystemExit(f"{name}: the compiled loop gives another result")
        first = time.perf_counter() - start
        print(
            f"{name}: torch {microseconds(plain, *arguments):.0f}, compiled {microseconds(compiled, *arguments):.0f} "
            f"microseconds; {first:.1f} s to compile"
        )


if __name__ == "__main__":
    main()

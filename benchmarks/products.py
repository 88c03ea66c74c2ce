"""Exact int64 products: torch's own kernels against the tiled ones of sectorch/products.py, in the same run.

python benchmarks/products.py
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from sectorch.products import Conv2d, matmul

CONVOLUTIONS = [(3, 64, 32), (64, 128, 16), (128, 256, 8), (256, 256, 8), (256, 512, 4), (512, 512, 4)]
MATRICES = [(512, 4608, 512), (2048, 2304, 256), (128, 768, 3072)]


def ring(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, shape)


def best(f, repeats: int = 7) -> float:
    f()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        f()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    table = Table(title=f"GMAC/s mod 2^64, {torch.get_num_threads()} threads")
    table.add_column("product")
    table.add_column("torch", justify="right")
    table.add_column("sectorch", justify="right")
    for batch in (1, 32):
        for c_in, c_out, size in CONVOLUTIONS:
            x, w = ring(batch, c_in, size, size), ring(c_out, c_in, 3, 3)
            conv = Conv2d(padding=(1, 1))
            tiles = conv.prepare(w) if conv.tiled(x.shape, w.shape) else None
            macs = batch * c_out * c_in * 9 * size * size / 1e9
            own, ours = best(lambda: F.conv2d(x, w, padding=1)), best(lambda: conv(x, w, tiles))
            table.add_row(f"conv {batch}x{c_in}->{c_out} at {size}", f"{macs / own:.1f}", f"{macs / ours:.1f}")
    for n, k, m in MATRICES:
        x, y = ring(n, k), ring(k, m)
        macs = n * k * m / 1e9
        own, ours = best(lambda: x @ y), best(lambda: matmul(x, y))
        table.add_row(f"[{n}, {k}] @ [{k}, {m}]", f"{macs / own:.1f}", f"{macs / ours:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()

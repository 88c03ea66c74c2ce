"""Exact int64 products: torch's own kernels against those of sectorch/ring/products.py and limbs.py, in the same run.

A convolution by Karatsuba (sectorch/ring/products.py) makes fewer products; counted are those of the definition.

python benchmarks/products.py
python benchmarks/products.py --batches                # matrices alone: minutes less without AVX-512
python benchmarks/products.py --limbs                  # limb products too (slow on a CPU: they are for CUDA)
python benchmarks/products.py --limbs --device cuda    # where torch has no int64 products
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from sectorch.choreography.pages import keep_pages
from sectorch.ring import products
from sectorch.ring.products import Conv2d, matmul

CONVOLUTIONS = [
    (64, 64, 56),
    (128, 128, 28),
    (3, 64, 32),
    (64, 128, 16),
    (128, 256, 8),
    (256, 256, 8),
    (256, 512, 4),
    (512, 512, 4),
]
MATRICES = [(512, 4608, 512), (2048, 2304, 256), (128, 768, 3072)]


def ring(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, shape)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def best(f: Callable, device: str = "cpu", repeats: int = 7) -> float:
    f()
    seconds = []
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        f()
        wait(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def by_limbs(device: str) -> Table:
    """GMAC/s of both kinds of limbs on matrices, checked against the CPU's wrapping product."""
    table = Table(title=f"GMAC/s mod 2^64 by limbs on {device}")
    for column in ("product", *products.KINDS, "float32, for comparison"):
        table.add_column(column, justify="left" if column == "product" else "right")
    for n, k, m in (*MATRICES, (512, 4608, 3136)):
        x, y = ring(n, k).to(device), ring(k, m).to(device)
        macs = n * k * m / 1e9
        expected = matmul(x.cpu(), y.cpu())
        seconds = []
        for kind in products.KINDS:
            if not torch.equal(products.limb_matmul(x, y, kind).cpu(), expected):
                raise SystemExit(f"{kind} limbs gave a wrong product")
            seconds.append(best(lambda kind=kind: products.limb_matmul(x, y, kind), device, 3))
        left, right = x.float(), y.float()
        seconds.append(best(lambda: left @ right, device, 3))
        table.add_row(f"[{n}, {k}] @ [{k}, {m}]", *(f"{macs / s:.1f}" for s in seconds))
    return table


def row(table: Table, name: str, macs: float, torchs: Callable, seconds: Callable[[], float]) -> None:
    """torch's product, ours without the processor's matrix unit in both ways, and with it where there is one."""
    with mock.patch.object(products, "unit", lambda: None):
        by_words, by_vectors = (_with_tiles(seconds, wide) for wide in (False, True))
    by_unit = "none here" if products.unit() is None else f"{macs / seconds():.1f}"
    table.add_row(name, f"{macs / best(torchs):.2f}", f"{macs / by_vectors:.2f}", f"{macs / by_words:.2f}", by_unit)


def of_convolution(conv: Conv2d, x: torch.Tensor, weight: torch.Tensor, ready: bool) -> float:
    """Seconds of a convolution whose weight was made ready for it before, or was not."""
    return best(partial(conv, x, weight, conv.prepare(weight) if ready else None))


def _with_tiles(seconds: Callable[[], float], wide: bool) -> float:
    """With tiles by the loop for vector products of 64-bit words, or by that for products of 32-bit ones."""
    loops = (mock.patch.object(module, "wide_products", lambda: wide) for module in (products, products))
    with next(loops), next(loops):
        return seconds()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limbs", action="store_true")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32], help="of the convolutions")
    options = parser.parse_args()
    keep_pages()
    if options.limbs:
        Console().print(by_limbs(options.device))
    if options.device != "cpu":
        return
    table = Table(title=f"GMAC/s mod 2^64, {torch.get_num_threads()} threads")
    for column in ("product", "torch", "tiles, 64-bit products", "32-bit products", "by the matrix unit"):
        table.add_column(column, justify="left" if column == "product" else "right")
    for batch in options.batches:
        for c_in, c_out, size in CONVOLUTIONS:
            x, w, conv = ring(batch, c_in, size, size), ring(c_out, c_in, 3, 3), Conv2d(padding=(1, 1))
            macs = batch * c_out * c_in * 9 * size * size / 1e9
            torchs = lambda x=x, w=w: F.conv2d(x, w, padding=1)
            form = conv.prepared(x.shape, w.shape)
            ways = [("", form or conv, form is not None)]
            if form is not None and form.form == "sums":
                ways = [("", conv, False), (", by Karatsuba", form, True)]
            for said, way, ready in ways:
                name = f"conv {batch}x{c_in}->{c_out} at {size}{said}"
                row(table, name, macs, torchs, partial(of_convolution, way, x, w, ready))
    for n, k, m in MATRICES:
        x, y = ring(n, k), ring(k, m)
        plain, ours = lambda x=x, y=y: x @ y, lambda x=x, y=y: best(lambda: matmul(x, y))
        row(table, f"[{n}, {k}] @ [{k}, {m}]", n * k * m / 1e9, plain, ours)
    Console().print(table)


if __name__ == "__main__":
    main()

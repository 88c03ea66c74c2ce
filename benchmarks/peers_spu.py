"""Private inference in SPU, for benchmarks/peers.py, which runs this in an environment of its own.

    python benchmarks/peers_spu.py FOLDER CALLS

FOLDER has the layers of a net of convolutions, with their norms folded in, the input and the plain result. The three
parties of ABY3 over 64-bit words are threads of this process; the weights are shared before, as they are once a
session in sectorch, and the program is compiled before. Prints a line of JSON: the seconds of each call, and the
largest error of the last one. (Its links between threads do not tell how many bytes they carried.)
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

jax = importlib.import_module("jax")
library = importlib.import_module("spu.libspu")
api = importlib.import_module("spu.api")
frontend = importlib.import_module("spu.utils.frontend")
PARTIES = 3


def net(layers: list[str]) -> Any:
    """The net as a function of its input and of the weight and bias of each layer that has them."""

    def forward(x: Any, *weights: Any) -> Any:
        taken = iter(weights)
        for layer in layers:
            if layer == "conv":
                weight, bias = next(taken), next(taken)
                x = jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
                x = x + bias
            elif layer == "relu":
                x = jax.numpy.maximum(x, 0.0)
            elif layer == "pool":
                x = jax.lax.reduce_window(x, -jax.numpy.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            elif layer == "mean":
                x = x.mean((1, 2))
            else:
                x = x @ next(taken) + next(taken)
        return x

    return forward


def main(folder: Path, calls: int) -> None:
    """Compiles, shares the weights, and calls."""
    layers = json.loads((folder / "layers.json").read_text())
    arrays = np.load(folder / "arrays.npz")
    x, plain = arrays["input"], arrays["plain"]
    weights = [arrays[f"w{i}"] for i in range(len(arrays.files) - 2)]
    config = library.RuntimeConfig(protocol=library.ProtocolKind.ABY3, field=library.FieldType.FM64)
    names, secret = [f"in{i}" for i in range(1 + len(weights))], library.Visibility.VIS_SECRET
    program, _ = frontend.compile(
        frontend.Kind.JAX, net(layers), (x, *weights), {}, names, [secret] * len(names),
        lambda out: [f"out{i}" for i in range(len(out))],
    )  # fmt: skip
    io, description = api.Io(PARTIES, config), library.link.Desc()
    for rank in range(PARTIES):
        description.add_party(f"party {rank}", f"thread {rank}")
    kept = [io.make_shares(w, secret) for w in weights]

    def party(rank: int, query: list[Any]) -> list[Any]:
        link = library.link.create_mem(description, rank)
        runtime = api.Runtime(link, library.RuntimeConfig(config))
        for name, shares in zip(names, (query, *kept), strict=True):
            runtime.set_var(name, shares[rank])
        runtime.run(program)
        return [runtime.get_var(name) for name in program.output_names]

    seconds, result = [], None
    for _ in range(calls):
        began = time.perf_counter()
        query = io.make_shares(x, secret)
        with ThreadPoolExecutor(PARTIES) as pool:
            found = list(pool.map(party, range(PARTIES), [query] * PARTIES))
        result = io.reconstruct([out[0] for out in found])
        seconds.append(time.perf_counter() - began)
    error = float(np.abs(result - plain).max())
    print(json.dumps({"seconds": seconds, "error": error}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""Small descriptions that ask for very much, and a program that runs one as a party would before it takes part.

Run as a script, it takes descriptions as JSON lines on standard input and writes for each what came of it, and MiB of
memory at its highest; the address space is limited, so that what allocates more fails here and not at the machine.
"""

from __future__ import annotations

import base64
import contextlib
import json
import resource
import sys
from pathlib import Path

import torch

from sectorch.errors import SectorchError
from sectorch.nn.module import SecureModule
from sectorch.serving.description import from_json, load_program
from sectorch.session import Session
from sectorch.tensor import Scheme

END = (1 << 63) - 1


def outcome(text: bytes, rows: int = 2, network: str = "lan") -> str:
    """What a description comes to: "runs", or the name of a typed error."""
    try:
        served = load_program(from_json(text))
        session = Session(dry=True)
        module = SecureModule(served, session, session.answering[0], Scheme(network=network), None)
        inputs = served.calls[0].of(rows if served.calls[0].least else 0)
        for piece in module.pieces(inputs):
            module._check(piece).budget.check_call()
    except SectorchError as error:
        said = str(error)
        return f"untyped {said}" if any(word in said for word in OUT_OF_MEMORY) else type(error).__name__
    return "runs"


def described(row: list, *calls: tuple, dtype: str = "torch.float32", before: tuple = ()) -> dict:
    """A program of one input, the constants and weights `before`, and calls (name, args, kwargs).

    {"ref": i} is the input, one of `before` or the result of a call, counted in this order; "x" is what came last.
    """
    kinds = ["weight" if "name" in entry else "constant" for entry in before]
    places = [{"input": 0}, *({kind: kinds[:i].count(kind)} for i, kind in enumerate(kinds))]
    start, nodes = len(places), []

    def placed(a):
        if isinstance(a, dict) and "ref" in a:
            return places[a["ref"]] if a["ref"] < len(places) else {"node": a["ref"] - start}
        if isinstance(a, dict):
            return {key: [placed(v) for v in value] if isinstance(value, list) else value for key, value in a.items()}
        if isinstance(a, list) and {type(v) for v in a} == {int}:  # a million of them would take a second
            return list(a)
        last = {"node": len(nodes) - 1} if nodes else {"input": 0}
        return last if a == "x" else [placed(v) for v in a] if isinstance(a, (list, tuple)) else a

    for name, args, kwargs in calls:
        nodes.append({"name": name, "args": placed(args), "kwargs": kwargs})
    program = {
        "inputs": [{"name": "x", "shape": [2, *row], "dtype": dtype, "held": None}],
        "call": {"tuple": [{"tuple": [{"input": 0}]}, {"dict": []}]}, "learned": None, "rows": 1, "nodes": nodes,
        "result": {"node": len(nodes) - 1},
    }  # fmt: skip
    return {
        "version": 2, "dtype": "torch.float32", "programs": [program], "texts": None,
        "weights": [entry for entry in before if "name" in entry],
        "constants": [entry for entry in before if "name" not in entry],
    }  # fmt: skip


def constant(shape: list, data: object, dtype: str = "torch.int64") -> dict:
    """A public constant; what is no list of numbers is written as it is."""
    known = {"torch.int64": torch.int64, "torch.bool": torch.bool}[dtype]
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        data = base64.b64encode(torch.tensor(data, dtype=known).numpy().tobytes()).decode()
    return {"shape": shape, "dtype": dtype, "data": data}


def weight(shape: list) -> dict:
    return {"name": "w", "shape": shape, "dtype": "torch.float32", "statistic": False}


def one(name: str, row: list, *args, **kwargs) -> dict:
    return described(row, (name, args, kwargs))


def on_constant(name: str, data: list, *args, **kwargs) -> dict:
    """A public value grows, and is then added to the input."""
    made = [{"ref": 1} if a == "c" else a for a in args]
    return described([1], (name, made, kwargs), ("torch.add", [{"ref": 0}, {"ref": 2}], {}),
                     before=(constant([len(data)], data),))  # fmt: skip


ALL = {"slice": [None] * 3}
AT = {"tuple": [ALL, {"ref": 1}]}
IMAGE = [1, 8, 8]
BOMBS = {
    "an item of a text": one("item", [4], "abc", 0),
    "an item of the input": one("item", [4], "x", 0),
    "padding": one("F.pad", [4], "x", [0, 1 << 31]),
    "padding that reflects": one("F.pad", [1, 1 << 20], "x", [(1 << 20) - 1] * 2, "reflect"),
    "circular padding": one("F.pad", [1, 1 << 28], "x", [1 << 27] * 2, "circular"),
    "repeat": one("Tensor.repeat", [4], "x", [1 << 20, 1 << 20]),
    "repeat that overflows": one("Tensor.repeat", [4], "x", [1 << 31] * 3),
    "repeat again and again": described([4], *[("Tensor.repeat", ["x", [1, 64]], {}) for _ in range(12)]),
    "tile": one("Tensor.tile", [4], "x", [1 << 31, 1 << 31]),
    "expand": one("Tensor.expand", [1], "x", [2, 1 << 31]),
    "upsample": one("F.interpolate", IMAGE, "x", [1 << 15, 1 << 15], None),
    "upsample by a factor": one("F.interpolate", IMAGE, "x", None, [1e9, 1e9]),
    "upsample smoothly": one("F.interpolate", IMAGE, "x", [1 << 13, 1 << 13], None, "bilinear"),
    "upsample a long one": one("F.interpolate", [1, 1 << 20], "x", 3),
    "upsample beyond numbers": one("F.interpolate", IMAGE, "x", None, [1e308, 1e308]),
    "adaptive": one("F.adaptive_avg_pool2d", IMAGE, "x", [1 << 14, 1 << 14]),
    "adaptive of a side": one("F.adaptive_avg_pool2d", IMAGE, "x", [1 << 27, 1]),
    "adaptive of one": one("F.adaptive_avg_pool1d", [1, 8], "x", [1 << 27]),
    "adaptive maximum": one("F.adaptive_max_pool2d", IMAGE, "x", [1 << 12, 1 << 12]),
    "adaptive of none": one("F.adaptive_avg_pool2d", [1, 1 << 13, 1 << 13], "x", [None, None]),
    "a kernel": one("torch.max_pool2d", [1, 5000, 5000], "x", [4000, 4000]),
    "an average": one("F.avg_pool2d", [1, 5000, 5000], "x", [5000, 5000]),
    "pooling with padding": one("F.avg_pool2d", IMAGE, "x", [2, 2], [1, 1], [1 << 30, 1 << 30]),
    "patches": one("Tensor.unfold", [1, 5000, 5000], "x", [1000, 1000]),
    "windows": one("Tensor.unfold", [1, 1, 1 << 20], "x", [1, 1 << 19]),
    "unbind": described([1 << 26], ("Tensor.unbind", ["x", 1], {}), ("item", ["x", 0], {})),
    "split": described([1 << 26], ("Tensor.split", ["x", 1, 1], {}), ("item", ["x", 0], {})),
    "chunk": described([1 << 26], ("Tensor.chunk", ["x", 1 << 31, 1], {}), ("item", ["x", 0], {})),
    "tensor_split": described([64], ("Tensor.tensor_split", ["x", 1 << 31, 1], {}), ("item", ["x", 0], {})),
    "tensor_split by a public number": described([64],
        ("Tensor.tensor_split", [{"ref": 1}, {"ref": 2}], {}), ("item", ["x", 0], {}),
        before=(constant([4], [1] * 4), constant([], [1 << 31]))),
    "chunk of nothing": described([0], ("Tensor.chunk", ["x", 1 << 31, 1], {}), ("item", ["x", 0], {})),
    "sort": one("Tensor.sort", [1 << 26], "x"),
    "topk": described([1 << 24], ("Tensor.topk", ["x", 1 << 24], {}), ("item", ["x", 0], {})),
    "topk of more": described([4], ("Tensor.topk", ["x", END], {}), ("item", ["x", 0], {})),
    "argmax": one("Tensor.argmax", [1 << 27], "x"),
    "one_hot": described([4], ("F.one_hot", ["x", 1 << 31], {}), dtype="torch.int64"),
    "one_hot of more": described([4], ("F.one_hot", ["x", END], {}), dtype="torch.int64"),
    "cumsum": one("Tensor.cumsum", [1 << 20], "x", 1),
    "a power": one("Tensor.pow", [4], "x", 1 << 31),
    "a negative power": one("Tensor.pow", [4], "x", -(1 << 31)),
    "diagonals": one("Tensor.diag_embed", [1 << 18], "x"),
    "an outer product": described([1 << 20], ("Tensor.flatten", ["x"], {}), ("Tensor.outer", ["x", "x"], {})),
    "an equation": one("torch.einsum", [4], ",".join(["ab"] * 2000) + "->ab", ["x"] * 2000),
    "a long equation": one("torch.einsum", [4, 4], "ijk,ijl->" + "kl" * 100, ["x", "x"]),
    "a product that grows": one("torch.einsum", [1 << 16], "ij,kl->ijkl", ["x", "x"]),
    "neighbours": one("F.local_response_norm", [4, 4], "x", 1 << 31),
    "groups": one("torch.group_norm", [64, 4], "x", 1 << 31),
    "a shape like itself": one("torch.zeros_like", [1 << 27], "x"),
    "ones of any size": one("Tensor.new_ones", [4], "x", [1 << 28]),
    "a full one": one("Tensor.new_full", [4], "x", [1 << 15, 1 << 15], 1.0),
    "a public repeat": on_constant("Tensor.repeat", [1, 2], "c", [1 << 28]),
    "a public outer product": on_constant("Tensor.outer", list(range(100_000)), "c", "c"),
    "a public one-hot": on_constant("F.one_hot", list(range(9)), "c", 1 << 30),
    "a public repetition": on_constant("Tensor.repeat_interleave", [1 << 40, 1 << 50], "c"),
    "a public pad": on_constant("F.pad", [1, 2], "c", [0, 1 << 31]),
    "a public expansion": described([1], ("Tensor.expand", [{"ref": 1}, [1 << 20, 1 << 20]], {}),
        ("Tensor.clone", ["x"], {}), before=(constant([1], [1]),)),
    "public positions": described([100_000], ("Tensor.__getitem__", [{"ref": 0}, AT], {}),
        ("Tensor.unsqueeze", ["x", -1], {}), ("Tensor.expand", ["x", [2, 100_000, 100_000]], {}),
        ("Tensor.relu", ["x"], {}), before=(constant([100_000], [0] * 100_000),)),
    "a repetition by a public number": described([1],
        ("Tensor.repeat_interleave", [{"ref": 0}, {"ref": 1}, 1], {}), before=(constant([1], [1 << 60]),)),
    "a large weight": described([4], ("Tensor.expand", [{"ref": 1}, [1 << 30, 1, 4]], {}),
        ("Tensor.add", [{"ref": 0}, "x"], {}), before=(weight([4]),)),
    "a large product": described([4], ("F.linear", [{"ref": 0}, {"ref": 1}], {}), before=(weight([1 << 30, 4]),)),
    "a convolution": described(IMAGE, ("F.conv2d", ["x", {"ref": 1}, None, 1, [1 << 20, 1 << 20]], {}),
        before=(weight([1, 1, 1, 1]),)),
    "a transposed one": described(IMAGE, ("F.conv_transpose2d",
        [{"ref": 0}, {"ref": 1}, None, [1 << 20, 1 << 20]], {}), before=(weight([1, 1, 1, 1]),)),
    "a softmax": one("Tensor.softmax", [1 << 27], "x", -1),
    "a gelu of many": one("F.gelu", [1 << 27], "x"),
    "lists in lists": one("Tensor.repeat", [4], "x", json.loads("[" * 60 + "]" * 60)),
    "a long list": one("Tensor.repeat", [4], "x", [1] * 200_000),
    "many lists": one("Tensor.repeat", [4], "x", [[1] * 4000] * 200),
    "a long text": one("F.pad", [4], "x", [1, 1], "c" * 1_000_000),
    "a long number": one("Tensor.repeat", [4], "x", [10**4000]),
    "many dimensions": one("Tensor.view", [4], "x", [1] * 4000),
    "a row of many": one("Tensor.relu", [1] * 100_000),
    "a large row": one("Tensor.relu", [1 << 39]),
    "names of arguments": described([4], ("Tensor.relu", ["x"], {"a" * n: 0 for n in range(1, 41)})),
    "a constant of lists": described([4], ("Tensor.add", [{"ref": 0}, {"ref": 1}], {}),
        before=(constant([1], [[[1] * 1000] * 100]),)),
    "a constant beyond its dtype": described([4], ("Tensor.add", [{"ref": 0}, {"ref": 1}], {}),
        before=(constant([1], [1 << 80]),)),
}  # fmt: skip
GROWN = {
    "a size of many rows": one("Tensor.reshape", [4], "x", [{"rows": (1 << 31) - 1}, 4]),
    "a constant for each row": described([1], ("torch.add", [{"ref": 0}, {"each 0": 0}], {}),
        before=(constant([1, 1 << 17], [0] * (1 << 17)),)),
    "a product of constants that grow": described([1], ("torch.add", [{"ref": 0}, {"count": 2}], {}),
        ("Tensor.repeat", ["x", [1 << 15, 1 << 15]], {})),
    "a tuple of tuples": one("Tensor.repeat", [4], "x", json.loads('{"tuple": [' * 60 + "]}" * 60)),
    "a dictionary of many": one("Tensor.repeat", [4], "x", {"dict": [[f"{i}", 1] for i in range(5000)]}),
    "a result of many": described([4], ("F.relu", ["x"], {})) | {},
}  # fmt: skip
GROWN["a result of many"]["programs"][0]["result"] = [[{"node": 0}] * 4000] * 200
BOMBS |= GROWN
HARMLESS = {
    "a layer": described([4], ("F.linear", [{"ref": 0}, {"ref": 1}], {}), ("Tensor.relu", ["x"], {}),
        before=(weight([3, 4]),)),
    "a slice to the end": one("Tensor.__getitem__", [4], "x", {"tuple": [ALL, {"slice": [1, END, None]}]}),
    "sizes": described([4, 3], ("Tensor.reshape", [{"ref": 0}, [{"rows": 4}, 3]], {})),
    "pooling": one("F.adaptive_avg_pool2d", IMAGE, "x", [2, 2]),
    "upsample": one("F.interpolate", IMAGE, "x", [16, 16], None, "bilinear"),
    "the largest": described([64], ("Tensor.topk", ["x", 3], {}), ("item", ["x", 0], {})),
    "many results": described([1000], ("Tensor.unbind", ["x", 1], {}), ("item", ["x", 7], {})),
    "public positions": described([5], ("Tensor.__getitem__", [{"ref": 0}, AT], {}),
        before=(constant([2], [3, 1]),)),
    "a public mask": described([3], ("Tensor.__getitem__", [{"ref": 0}, AT], {}),
        before=(constant([3], [True, False, True], "torch.bool"),)),
    "a repetition": described([2], ("Tensor.repeat_interleave", [{"ref": 0}, {"ref": 1}, 1], {}),
        before=(constant([2], [2, 3]),)),
}  # fmt: skip

LIMIT = 2 << 30
"""Bytes of address space beside what torch reserves before it does anything."""
OUT_OF_MEMORY = ("bad_alloc", "allocate memory", "to allocate", "MemoryError", "length_error", "max_size")


def main() -> None:
    torch.set_num_threads(1)
    outcome(json.dumps(HARMLESS["a layer"]).encode())
    most = LIMIT + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    highest = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    before = highest()
    for line in sys.stdin.buffer:
        try:
            came = outcome(line.strip())
        except BaseException as error:
            came = f"untyped {type(error).__name__}: {error}"[:200]
        print(json.dumps([came, highest() - before]), flush=True)


if __name__ == "__main__":
    main()

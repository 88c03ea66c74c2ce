"""Ways out of a tensor, as data: everything that plain torch, numpy and Python offer to get at its content."""

from __future__ import annotations

import copy
import io
import json
import operator
import pickle

import numpy as np
import torch
import torch.nn.functional as F

import sectorch

VALUES = torch.tensor([[1.5, -2.25, 3.0], [0.125, 7.5, -0.5]])


def assign(x: torch.Tensor, name: str, value) -> None:
    setattr(x, name, value)


def branch(x: torch.Tensor) -> bool:
    return True if x else False  # noqa: SIM210


def loop(x: torch.Tensor) -> None:
    while x > 0:
        break


SCALAR = {
    "item": lambda x: x.item(),
    "float": float,
    "int": int,
    "bool": bool,
    "complex": complex,
    "index": operator.index,
    "if": branch,
    "if comparison": lambda x: branch(x > 0),
    "while": loop,
    "not": lambda x: not x,
    "and": lambda x: x and 1,
    "range": lambda x: range(x),
    "list index": lambda x: [1, 2, 3][x],
    "min of two": lambda x: min(x, x + 1),
    "sorted": lambda x: sorted([x, x + 1]),
    "string times": lambda x: "a" * x,
    "format spec": lambda x: f"{x:.3f}",
    "percent format": lambda x: "%f" % x,  # noqa: UP031
    "is_nonzero": torch.is_nonzero,
    "shape from a secret": lambda x: torch.zeros(x),
    "fill value": lambda x: torch.full((2,), x),
    "slice bound": lambda x: torch.arange(4)[:x],
    "scalar_tensor": lambda x: torch.scalar_tensor(x),
}
TENSOR = {
    "numpy": lambda x: x.numpy(),
    "numpy force": lambda x: x.numpy(force=True),
    "tolist": lambda x: x.tolist(),
    "np.asarray": np.asarray,
    "np.array": np.array,
    "np.add": lambda x: np.add.reduce(x),
    "np.stack": lambda x: np.stack([x, x]),
    "numpy out": lambda x: np.add(x, 1, out=np.ones((2, 3))),
    "torch.tensor": torch.tensor,
    "torch.tensor of a list": lambda x: torch.tensor([x[0, 0], x[0, 1]]),
    "torch.asarray": lambda x: torch.asarray(x, copy=True),
    "plain new_tensor": lambda x: torch.zeros(1).new_tensor(x),
    "Tensor constructor": lambda x: torch.Tensor(x),
    "FloatTensor": lambda x: torch.FloatTensor(x),
    "set data": lambda x: assign(x, "data", torch.zeros(2, 3)),
    "storage": lambda x: x.storage(),
    "untyped_storage": lambda x: x.untyped_storage(),
    "data_ptr": lambda x: x.data_ptr(),
    "from_dlpack": torch.from_dlpack,
    "__dlpack__": lambda x: x.__dlpack__(),
    "bytes": lambda x: bytes(x),
    "contains": lambda x: 1.5 in x,
    "in a list": lambda x: x in [x + 1, x],
    "torch.equal": lambda x: torch.equal(x, x),
    "equal to plain": lambda x: torch.equal(VALUES, x),
    "allclose": lambda x: torch.allclose(x, VALUES),
    "nonzero": torch.nonzero,
    "argwhere": torch.argwhere,
    "count_nonzero": lambda x: bool(torch.count_nonzero(x)),
    "unique": torch.unique,
    "one-armed where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "mask index": lambda x: x[x > 0],
    "write with a secret index": lambda x: operator.setitem(torch.zeros(2, 3), x > 0, 1.0),
    "write a secret into plain": lambda x: operator.setitem(torch.zeros(2, 3), 0, x[0]),
    "plain add_": lambda x: torch.zeros(2, 3).add_(x),
    "plain mul_": lambda x: torch.ones(2, 3).mul_(x),
    "plain copy_": lambda x: torch.zeros(2, 3).copy_(x),
    "plain fill_": lambda x: torch.zeros(2, 3).fill_(x[0, 0]),
    "plain relu into out": lambda x: torch.add(x, 1, out=torch.zeros(2, 3)),
    "cat into out": lambda x: torch.cat([x, x], out=torch.zeros(4, 3)),
    "matmul into out": lambda x: torch.matmul(x, torch.ones(3, 2), out=torch.zeros(2, 2)),
    "set_": lambda x: torch.zeros(2, 3).set_(x),
    "plain masked_fill value": lambda x: torch.zeros(2, 3).masked_fill(torch.ones(2, 3) > 0, x[0, 0]),
    "plain take": lambda x: torch.take(VALUES, sectorch.share(torch.tensor([0]), session=x.session)),
    "plain add_ into float64": lambda x: torch.zeros(2, 3, dtype=torch.float64).add_(x),
    "sum into float64 out": lambda x: torch.add(x.double(), 1, out=torch.zeros(2, 3, dtype=torch.float64)),
    "repeat_interleave by secret": lambda x: torch.repeat_interleave(
        VALUES, sectorch.share(torch.tensor([1, 2]), session=x.session), 0
    ),
    "bincount": lambda x: torch.bincount(sectorch.share(torch.tensor([1, 2]), session=x.session)),
    "bitcast": lambda x: x.view(torch.int32),
    "pickle": pickle.dumps,
    "old pickle": lambda x: pickle.dumps(x, protocol=2),
    "torch.save": lambda x: torch.save(x, io.BytesIO()),
    "torch.save in a dict": lambda x: torch.save({"x": x}, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "deepcopy in a list": lambda x: copy.deepcopy([x]),
    "share_memory_": lambda x: x.share_memory_(),
    "to meta": lambda x: x.to("meta"),
    "to device": lambda x: x.to(torch.device("cuda", 0)),
    "cuda": lambda x: x.cuda(),
    "Parameter": torch.nn.Parameter,
    "requires_grad_": lambda x: x.requires_grad_(),
    "requires_grad =": lambda x: assign(x, "requires_grad", True),
    "backward": lambda x: x.sum().backward(),
    "autograd.grad": lambda x: torch.autograd.grad(x.sum(), x),
    "grad of plain": lambda x: (torch.ones(2, 3, requires_grad=True) * x).sum().backward(),
    "register_hook": lambda x: x.register_hook(print),
    "retain_grad": lambda x: x.retain_grad(),
    "unsupported function": torch.erfinv,
    "unsupported method": lambda x: x.erfinv(),
    "linalg": torch.linalg.svd,
    "eigenvalues": torch.linalg.eigvals,
    "random": lambda x: torch.bernoulli(x),
    "dropout": F.dropout,
    "to_sparse": lambda x: x.to_sparse(),
    "complex view": lambda x: torch.view_as_real(x),
    "apply_": lambda x: x.apply_(abs),
    "map_": lambda x: x.map_(VALUES, max),
    "shift": lambda x: x << 1,
    "secret ^": lambda x: x ^ x,
    "aten": lambda x: torch.ops.aten.lgamma.default(x),
    "aten relu": lambda x: torch.ops.aten._local_scalar_dense.default(x[0, 0]),
    "functorch": lambda x: torch.vmap(torch.erfinv)(x),
    "compiled away": lambda x: torch._C._nn.gelu_(x, approximate="nope"),
    "share again": lambda x: sectorch.share(x, session=x.session),
    "histc": lambda x: torch.histc(x),
    "quantize": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "numpy ufunc": lambda x: np.spacing(x),
    "unpack": lambda x: dict(enumerate(x[0].tolist())),
}
FOREIGN = {
    "memoryview": memoryview,
    "np.frombuffer": np.frombuffer,
    "torch.from_numpy": torch.from_numpy,
    "json": json.dumps,
    "round": round,
    "assert_close": lambda x: torch.testing.assert_close(x, VALUES),
}
"""Ways that Python, numpy or torch close themselves, before they ask the tensor."""

PRIVATE = [
    "numpy",
    "tolist",
    "np.asarray",
    "torch.tensor",
    "storage",
    "data_ptr",
    "contains",
    "torch.equal",
    "nonzero",
    "unique",
    "one-armed where",
    "mask index",
    "pickle",
    "torch.save",
    "deepcopy",
    "copy",
    "plain add_",
    "plain copy_",
    "write a secret into plain",
    "plain relu into out",
    "bytes",
    "requires_grad_",
    "share_memory_",
    "from_dlpack",
    "allclose",
    "Parameter",
]
"""What is tried on private tensors too."""

ALIASES = {
    "+x": operator.pos,
    "positive": torch.positive,
    "to its own dtype": lambda x: x.to(torch.float32),
    "float": lambda x: x.float(),
    "contiguous": lambda x: x.contiguous(),
    "cpu": lambda x: x.cpu(),
    "type_as": lambda x: x.type_as(x),
    "detach": lambda x: x.detach(),
    "dropout": lambda x: F.dropout(x, 0.5, False),
    "requires_grad_": lambda x: x.requires_grad_(False),
    "relu in place": lambda x: F.relu(x, inplace=True),
    "expand": lambda x: x.expand(2, 3),
    "reshape": lambda x: x.reshape(3, 2),
    "flatten": lambda x: x.flatten(),
    "split": lambda x: x.split(1)[0],
    "T": lambda x: x.T,
}


WRITES = {"add_": lambda x: x.add_(1), "+=": lambda x: operator.iadd(x, 1), "relu": lambda x: F.relu(x, inplace=True)}

"""What an engineer types in the first hour: each gives the plain result, or one line that says the way out."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import sectorch
from sectorch.choreography import Message, protocol
from sectorch.errors import (
    ArgumentError,
    CaptureWarning,
    DtypeError,
    SecretAccessError,
    SectorchError,
    TopologyError,
    UnsupportedOpError,
)
from sectorch.mpc.star.share import reveal, share

ROWS = torch.tensor([[0.5, -1.0, 2.0, 0.25], [1.0, 1.5, -0.5, 0.0]])


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()


@pytest.fixture(scope="module")
def secure(plain):
    return sectorch.secure(plain)


def refused(error: type[SectorchError], way: str, f) -> None:
    with pytest.raises(error) as raised:
        f()
    text = str(raised.value)
    assert way in text and "\n" not in text, text


class Catching(nn.Module):
    """Takes another way where its input is secret, since it catches the refusal."""

    def forward(self, x):
        try:
            return 2 * x if bool((x > 5).any()) else x
        except Exception:
            return 3 * x


def test_a_forward_that_catches_refusals_is_warned_of():
    with pytest.warns(CaptureWarning, match="catches their errors") as warned:
        found = sectorch.secure(Catching().eval())(ROWS)
    assert len(warned) == 1 and not torch.allclose(found, Catching()(ROWS))


def test_what_is_no_module_is_told_how_it_becomes_one(plain):
    for given, way in (
        ([plain, plain], "nn.Sequential(*layers)"), (torch.relu, "sectorch.share(x)"), (nn.Linear, "Linear(...)"),
        (plain.state_dict(), "load_state_dict"), ("model.pt", "load the model first"), (None, "a model of torch"),
    ):  # fmt: skip
        refused(ArgumentError, way, lambda given=given: sectorch.secure(given))


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_torch_jit_is_told_what_to_give(plain, secure):
    refused(ArgumentError, "made from", lambda: sectorch.secure(torch.jit.script(plain)))
    refused(ArgumentError, "call it as it is", lambda: torch.jit.trace(secure, ROWS))
    refused(ArgumentError, "call it as it is", lambda: torch.export.export(secure, (ROWS,)))


def test_a_compiled_secure_module_is_the_secure_module(plain, secure):
    found = torch.compile(secure)(ROWS)
    torch.testing.assert_close(found, plain(ROWS).detach(), rtol=0, atol=1e-4)
    assert secure.program(ROWS) is not None


def test_a_move_that_would_change_nothing_is_refused(secure):
    for move in (secure.half, secure.double, lambda: secure.to("meta")):
        refused(ArgumentError, "call secure() again", move)
    assert secure.float().cpu().to("cpu").requires_grad_(False) is secure


def test_preprocess_says_what_it_takes(secure):
    for given in (ROWS.shape, (2, 4), 2.5, "4", True):
        refused(ArgumentError, "preprocess(x)", lambda given=given: secure.preprocess(given))


def test_inputs_that_are_no_tensors_are_told_the_way(secure):
    refused(DtypeError, "torch.from_numpy(x)", lambda: secure(ROWS.numpy()))
    refused(DtypeError, "torch.as_tensor(x)", lambda: secure(ROWS.tolist()))
    refused(DtypeError, "share() takes a torch tensor", lambda: sectorch.share("x"))  # type: ignore[arg-type]


def test_other_dtypes_are_errors_of_dtypes(secure):
    conv = sectorch.secure(nn.Conv1d(1, 1, 1).eval())
    refused(DtypeError, "x.to(weight.dtype)", lambda: conv(torch.ones(1, 1, 4, dtype=torch.float64)))
    refused(DtypeError, "dtype", lambda: secure(ROWS.double()))
    shared = sectorch.share(torch.ones(1, 2, 2))
    refused(DtypeError, "x.to(weight.dtype)", lambda: torch.bmm(shared, torch.ones(1, 2, 2, dtype=torch.float64)))


def test_a_secret_tensor_in_a_notebook_and_in_an_f_string():
    shared = sectorch.share(ROWS)
    assert {"reveal", "shape", "scale_bits"} <= set(dir(shared))
    assert f"{shared}" == repr(shared)
    refused(SecretAccessError, "reveal", lambda: f"{shared.sum():.2f}")


def test_arrays_and_scalars_of_numpy_are_public_operands():
    shared, array = sectorch.share(ROWS), np.arange(4, dtype=np.float32)
    for found, expected in (
        (shared + array, ROWS + torch.arange(4)), (array - shared, torch.arange(4) - ROWS),
        (np.float32(2) * shared, 2 * ROWS), (shared * np.float32(2), 2 * ROWS), (np.add(shared, 1), ROWS + 1),
        (shared / np.float64(4), ROWS / 4),
    ):  # fmt: skip
        assert isinstance(found, sectorch.SharedTensor)
        torch.testing.assert_close(found.reveal(), expected, rtol=0, atol=1e-5)
    assert (shared > np.float32(0)).reveal().equal(ROWS > 0)
    for f in (
        lambda: np.add.reduce(shared),
        lambda: np.spacing(shared),
        lambda: np.add(shared, 1, out=np.zeros((2, 4))),
    ):
        refused(UnsupportedOpError, "torch.from_numpy", f)


def test_gradients_name_what_trains_on_shares():
    shared = sectorch.share(ROWS)
    refused(UnsupportedOpError, "sectorch.shared(model)", lambda: shared.sum().backward())
    refused(UnsupportedOpError, "sectorch.shared(model)", lambda: shared.requires_grad_())


def test_a_plain_layer_on_a_secret_tensor_warns_of_nothing(plain):
    torch.testing.assert_close(plain(sectorch.share(ROWS)).reveal(), plain(ROWS).detach(), rtol=0, atol=1e-4)


@protocol("by_name", "this test", [Message("x", "A", "S", "nothing")])
def by_name(net, x):
    return x.send("A", "S", "x")


def test_a_protocol_author_s_mistakes_are_told_the_way():
    session = sectorch.Session()
    with session.call(session.answering[0]) as net:
        located = net.own(net.A, torch.arange(3))
        shared = share(net, net.own(net.Q, torch.arange(3)))
        refused(TopologyError, "net.Q", lambda: by_name(net, located))
        refused(TopologyError, "net.Q", lambda: net.common("Q", "A", (3,), "mask"))
        refused(ArgumentError, "multiply", lambda: shared * shared)
        refused(DtypeError, "sectorch.ring.encode", lambda: share(net, net.own(net.Q, torch.rand(3))))
        with pytest.raises(AttributeError, match=r"Shares\(at_A, at_S\)"):
            reveal(net, located)
        with pytest.raises(AttributeError, match=r"each\(torch.sum, x\)"):
            shared.sum()
        assert net.read(reveal(net, 2 * (1 - shared) + 1), net.Q).equal(torch.tensor([3, 1, -1]))


def test_the_import_brings_torch_numpy_and_cryptography_alone():
    heavy = "tenseal scipy opendp numba matplotlib sklearn torchvision transformers pandas flwr ray onnx torch._dynamo"
    code = (
        "import torch, sys; before = set(sys.modules); import sectorch; "
        f"print([m for m in {heavy.split()} if m in sys.modules and m not in before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" and not done.stderr


def test_the_command_as_a_module():
    done = subprocess.run([sys.executable, "-m", "sectorch", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: sectorch COMMAND")

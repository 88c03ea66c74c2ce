"""What an engineer types in the first hour: each gives the plain result, or one line that says the way out."""

import ast
import copy
import dataclasses
import os
import pickle
import re
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_command
from torch import nn
from torch.nn.utils import prune

import sectorch
from sectorch.choreography import Message, Roles, protocol
from sectorch.cli.command import STOPPED, TERMINATED, Parser, command_status
from sectorch.cli.main import run as sectorchs
from sectorch.errors import (
    ArgumentError,
    CaptureWarning,
    DtypeError,
    PlotError,
    SecretAccessError,
    SectorchError,
    ShapeError,
    TopologyError,
    UnsupportedDeviceError,
    UnsupportedOpError,
)
from sectorch.mpc.star.masking import open_masked
from sectorch.mpc.star.multiply import multiply, square
from sectorch.mpc.star.shares import Shares, reveal, reveal_to_A, share
from sectorch.mpc.star.truncate import truncate
from sectorch.network.commands import serve
from sectorch.network.commands.array_files import check_out
from sectorch.network.federation.programs import source_of
from sectorch.optional_deps import EXTRA, required_imports
from sectorch.testing import Given, check_protocol

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(sectorch.__file__).parents[1]
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
@pytest.mark.filterwarnings("ignore:SecureModule:DeprecationWarning")  # torch asks for every attribute, old names too
def test_torch_jit_is_told_what_to_give(plain, secure):
    refused(ArgumentError, "made from", lambda: sectorch.secure(torch.jit.script(plain)))
    refused(ArgumentError, "call it as it is", lambda: torch.jit.trace(secure, ROWS))
    refused(ArgumentError, "call it as it is", lambda: torch.export.export(secure, (ROWS,)))


def test_a_compiled_secure_module_is_the_secure_module(plain, secure):
    found = torch.compile(secure)(ROWS)
    torch.testing.assert_close(found, plain(ROWS).detach(), rtol=0, atol=1e-4)
    assert secure.program(ROWS) is not None


def test_compiled_code_on_secrets_is_not_looked_into_and_warns_of_nothing(plain, secure):
    """In place, in a function of one's own, of shares, and of a shared model with its gradients."""
    secure.compile()
    torch.testing.assert_close(secure(ROWS), plain(ROWS).detach(), rtol=0, atol=1e-4)
    shared = sectorch.share(ROWS)
    found = torch.compile(lambda x: (2 * x + 1).relu())(shared).reveal()
    torch.testing.assert_close(found, (2 * ROWS + 1).relu(), rtol=0, atol=1e-4)
    training = sectorch.shared(copy.deepcopy(plain))
    gradients = []
    for model in (training, torch.compile(training)):
        training.zero_grad()
        model(shared).sum().backward()
        gradients.append([p.grad.reveal() for p in training.parameters()])
    assert all(one.equal(other) for one, other in zip(*gradients, strict=True)) and not secure.training
    encrypting = sectorch.secure(nn.Linear(4, 2).eval(), backend="ckks")
    encrypting.compile()
    assert torch.compile(encrypting) is not encrypting and encrypting.train(False) is encrypting


def test_weights_of_a_secure_module_are_saved_and_loaded_in_plain(plain, secure):
    for module in (secure, nn.Sequential(secure), sectorch.secure(plain, backend="ckks"), sectorch.reference(plain)):
        refused(ArgumentError, "take that of the plain model", module.state_dict)
    for given in (plain.state_dict(), {}):
        refused(ArgumentError, "load them into the plain model", lambda given=given: secure.load_state_dict(given))


def test_a_move_that_would_change_nothing_is_refused(secure):
    for move in (secure.half, secure.double, lambda: secure.to("meta")):
        refused(ArgumentError, "call secure() again", move)
    assert secure.float().cpu().to("cpu").requires_grad_(False) is secure


@pytest.mark.skipif(torch.cuda.is_available(), reason="the way out is for machines without CUDA")
def test_a_gpu_that_is_not_there_is_one_line_with_the_way_out(plain, secure):
    encrypting = sectorch.secure(plain, backend="ckks")
    training = sectorch.shared(nn.Linear(4, 3))
    for move in (secure.cuda, lambda: secure.to("cuda:1"), encrypting.cuda, lambda: encrypting.to("cuda")):
        refused(ArgumentError, "leave the move out", move)
    for x in (sectorch.share(ROWS), training, training.weight):
        refused(UnsupportedOpError, "leave .cuda() out", lambda x=x: x.cuda())
        refused(UnsupportedOpError, "leave the call out", lambda x=x: x.to("cuda"))
    refused(UnsupportedOpError, "leave the call out", lambda: sectorch.encrypt(ROWS).to("cuda"))
    refused(UnsupportedDeviceError, "leave the device out", lambda: sectorch.Session(device="cuda"))
    assert training.to("cpu") is training and encrypting.cpu() is encrypting


def test_a_call_that_is_refused_leaves_the_module_as_it_was(plain):
    """Of another dtype the plain forward raises too; that does not make later calls run operation by operation."""
    module = sectorch.secure(plain)
    for given in (torch.ones(2, 4, dtype=torch.int64), ROWS.double(), torch.ones(2, 5), ROWS.to_sparse()):
        refused(SectorchError, "", lambda given=given: module(given))
    torch.testing.assert_close(module(ROWS), plain(ROWS).detach(), rtol=0, atol=1e-4)
    assert module.preprocess(2) and "operation by operation" not in repr(module)


def test_inputs_and_models_that_need_one_more_step_are_told_it(plain, secure):
    refused(DtypeError, "x.to_dense()", lambda: secure(ROWS.to_sparse()))
    refused(DtypeError, "x.to(torch.float32)", lambda: secure(ROWS.double()))
    quantised = type("Linear", (nn.Linear,), {"__module__": "torch.ao.nn.quantized.dynamic.modules.linear"})(4, 3)
    refused(UnsupportedOpError, "give the model as it was before", lambda: sectorch.secure(quantised))
    refused(ArgumentError, "secure already", lambda: sectorch.network.save_model(secure, ROWS, "x.safetensors"))
    refused(ArgumentError, "it is a folder; name a file", lambda: sectorch.network.save_model(plain, ROWS, "."))
    refused(ArgumentError, "these are empty", lambda: sectorch.secure(plain, calibrate=ROWS[:0]))
    pruned = nn.Sequential(nn.Linear(4, 3)).eval()
    prune.l1_unstructured(pruned[0], "weight", 0.5)
    refused(ArgumentError, "prune.remove(layer, 'weight')", lambda: sectorch.secure(pruned))


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


@protocol("stumble_by_name", "this test", [Message("x", "A", "S", "nothing")])
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
            located.A  # noqa: B018
        with pytest.raises(AttributeError, match=r"each\(torch.sum, x\)"):
            shared.sum()
        array = np.arange(3)
        assert net.read(reveal(net, array * shared), net.Q).tolist() == [0, 1, 4]
        for fraction in (0.5, torch.rand(3), torch.rand(3, dtype=torch.float64), np.float32(2), array / 2):
            for f in (lambda v: shared * v, lambda v: v * shared, lambda v: shared + v, lambda v: v - shared):
                refused(DtypeError, "sectorch.ring.encode", lambda f=f, v=fraction: f(v))
        refused(ArgumentError, "truncate(net, x, bits)", lambda: shared / 2)
        assert net.read(reveal(net, 2 * (1 - shared) + 1), net.Q).equal(torch.tensor([3, 1, -1]))


@protocol("stumble_forgetful", "this test")
def forgetful(net):
    reveal  # noqa: B018  and no return


def test_values_of_another_kind_are_told_what_makes_them():
    session = sectorch.Session()
    with session.call(session.answering[0]) as net:
        at_Q, plain = net.own(net.Q, torch.arange(3)), torch.arange(3)
        shared, before = share(net, at_Q), net._steps
        for f in (square, truncate, reveal, reveal_to_A):
            more = (4,) if f is truncate else ()
            refused(ArgumentError, "share(net, x)", lambda f=f, more=more: f(net, at_Q, *more))
            refused(ArgumentError, "plain tensor of shape (3,)", lambda f=f, more=more: f(net, plain, *more))
            refused(ArgumentError, "without a return", lambda f=f, more=more: f(net, forgetful(net), *more))
        refused(ArgumentError, "share(net, x)", lambda: multiply(net, torch.mul, shared, y=at_Q))
        refused(ArgumentError, "share(net, x)", lambda: open_masked(net, at_Q))  # type: ignore[arg-type]
        refused(ArgumentError, "net.own(party, tensor)", lambda: share(net, plain))
        refused(DtypeError, "x.long()", lambda: share(net, net.own(net.Q, plain > 1)))
        for way, f in (
            ("net.own(party, tensor)", lambda: net.read(plain, net.Q)),
            ("net.own(party, tensor)", lambda: net.send(plain, net.Q, net.S, "x")),
            ("net.own(party, tensor)", lambda: net.agreed(plain, [net.Q])),
            ("without a return", lambda: net.read(forgetful(net), net.Q)),
            ("reveal(net, x)", lambda: net.read(shared, net.Q)),
            ("torch.as_tensor(x)", lambda: net.own(net.Q, [1, 2])),
            ("torch.empty(shape", lambda: net.own(net.Q, None)),
            ("take as it is", lambda: net.own(net.A, at_Q)),
            ("take as it is", lambda: net.own(net.A, shared)),
        ):
            refused(ArgumentError, way, f)
        for f in (lambda: net.read(at_Q, "Q"), lambda: net.own("Q", plain)):
            refused(TopologyError, "net.Q", f)
        assert net._steps == before  # nothing was drawn or sent
        assert net.read(reveal(net, square(net, shared)), net.Q).equal(torch.tensor([0, 1, 4]))


@pytest.mark.parametrize("how", [["sectorch"], ["-m", "sectorch"]])
def test_ctrl_c_while_torch_loads_is_one_line(how: list[str], tmp_path):
    """A torch whose import is stopped stands for torch; a line after it says that Python would have gone on."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('went on')\n")
    script = tmp_path / "sectorch"
    script.write_text("from sectorch.cli.main import main\nmain()\n")
    command = how if how[0] == "-m" else [str(script)]
    places = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *command, "ops"], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": places}
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")
    done = subprocess.run(  # whoever imports sectorch has Ctrl-C as before
        [sys.executable, "-c", "import sectorch"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": places},
    )  # fmt: skip
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


def test_what_is_missing_names_the_extra_that_brings_it():
    """Each import of what is no dependency stands in `required_imports`, and the extra brings its package."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    have = lambda lines: {re.split(r"[\[>=<;]", line)[0] for line in lines}
    brought = {"nacl", "dp_accounting", "llvmlite", "setuptools"}  # pynacl, dp-accounting, and what numba stands on
    known = {*sys.stdlib_module_names, "sectorch", *brought, *have(about["dependencies"])}
    ways, bare = set(), []
    for path in (ROOT / "sectorch").rglob("*.py"):
        tree = ast.parse(path.read_text())
        calls = [
            n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "required_imports"
        ]
        for call in calls:
            extra = next((k.value.value for k in call.keywords if k.arg == "extra"), None)
            ways.add((call.args[1].value, extra or EXTRA[call.args[1].value]))
        typed = [n for n in ast.walk(tree) if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING"]
        passed = {id(n) for block in typed for n in ast.walk(block)}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in passed and not calls:
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                if not getattr(node, "level", 0) and any(n.split(".")[0] not in known for n in names):
                    bare.append(f"{path.name}:{node.lineno} {names}")
    assert bare == []
    brings = {"pillow": "torchvision"}
    for package, extra in ways:
        assert brings.get(package, package) in have(about["optional-dependencies"][extra]), (package, extra)
    assert len(ways) >= 9 and set(EXTRA) <= {package for package, _ in ways}


def test_by_name_an_extra_is_asked_of_what_is_installed_alone(monkeypatch):
    """pip takes a name that it does not find installed from an index, where it is anybody's."""

    def missing(name: str):
        raise metadata.PackageNotFoundError(name)

    def plot() -> None:
        with required_imports("a plot", "matplotlib", PlotError, "or leave it out"):
            raise ImportError("no such thing")

    refused(PlotError, "matplotlib, which is not installed: pip install 'sectorch[plots]', or leave it out", plot)
    monkeypatch.setattr(metadata, "distribution", missing)
    refused(PlotError, "pip install '.[plots]', or leave it out", plot)


def test_the_import_brings_torch_numpy_and_cryptography_alone():
    heavy = "tenseal scipy opendp numba matplotlib sklearn torchvision transformers pandas flwr ray onnx torch._dynamo"
    code = (
        "import torch, sys; before = set(sys.modules); import sectorch; "
        f"print([m for m in {heavy.split()} if m in sys.modules and m not in before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" and not done.stderr


def test_a_first_call_needs_no_compiler_and_one_that_is_imported_hides_what_it_hides():
    """torch imports its compiler to hide its kernels for shapes from it: 2 s of each process that is started."""
    code = (
        "import sys, torch, sectorch; from torch import nn; "
        "model = sectorch.secure(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), "
        "nn.Flatten(), nn.Linear(18, 3), nn.Softmax(-1)).eval()); model(torch.randn(2, 1, 8, 8)); "
        "print('torch._dynamo' in sys.modules); import torch._dynamo; a = torch.empty(2, device='meta'); "
        "print((a + a).shape); from sectorch.choreography import located as kernels; "
        "hidden, *_ = kernels._hidden_in(torch._refs.add, set()); "
        "print(getattr(hidden, '__dynamo_disable').__module__ == kernels.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\ntorch.Size([2])\nFalse\n"


def test_all_names_can_be_imported_where_optional_packages_are_missing():
    """`__all__` names modules that are loaded on demand: one that needs an optional package fails when it is used."""
    missing = "sklearn hypothesis matplotlib torchvision PIL transformers ray opentelemetry prometheus_client shapiq"
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing.split()})); from sectorch import *\n"
        "try: estimators.Ridge\n"
        "except errors.ArgumentError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("sectorch.estimators needs scikit-learn, which is not installed: pip install")


def test_the_command_as_a_module():
    done = run_command([sys.executable, "-m", "sectorch", "--help"])
    assert done.returncode == 0 and done.stdout.startswith("usage: sectorch COMMAND")


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.first(x))


class Refusing(nn.Module):
    def forward(self, x):
        raise ValueError("the author's own")


def test_what_a_layer_says_of_its_input_names_the_layer():
    model = Normed().eval()
    secured, reference = sectorch.secure(model), sectorch.reference(model)
    for f in (secured, reference, lambda x: sectorch.explain(model, x)):
        refused(ShapeError, "expected 2D or 3D input (got 1D input)", lambda f=f: f(ROWS[0]))
        refused(ShapeError, "layer 'norm' (BatchNorm1d) at ", lambda f=f: f(ROWS[0]))
    torch.testing.assert_close(secured(ROWS), model(ROWS).detach(), rtol=0, atol=1e-4)
    recurrent = sectorch.secure(nn.LSTM(4, 3).eval())
    refused(ShapeError, "LSTM", lambda: recurrent(torch.ones(2, 2, 2, 4)))
    with pytest.raises(ValueError, match=r"^the author's own$"):  # what a model says itself is not changed
        sectorch.secure(Refusing().eval())(ROWS)


def test_a_misspelt_option_of_a_scheme_names_the_nearest(plain):
    for f, way in (
        (lambda: sectorch.Scheme(fracbits=20), "Scheme(frac_bits=...)"),
        (lambda: sectorch.Scheme(limit=12), "Scheme(limit_bits=...)"),
        (lambda: sectorch.secure(plain, verify=True), "Scheme(verified=...)"),
    ):
        with pytest.raises(TypeError, match="unexpected keyword argument") as raised:
            f()
        assert str(raised.value).endswith(f"; did you mean {way}?")
    with pytest.raises(TypeError, match=r"'answering'$"):
        sectorch.Scheme(answering=3)
    given = sectorch.Scheme(16, network="wan")
    assert copy.deepcopy(given) == dataclasses.replace(given, frac_bits=16) == pickle.loads(pickle.dumps(given))


def test_the_nearest_names_have_a_word_in_common():
    x = sectorch.share(torch.eye(3))
    for f, near in (
        (torch.erfinv, "erf."),
        (torch.special.erfcx, "erfc, erf."), (torch.pinverse, ""), (torch.linalg.svd, ""), (torch.linalg.eigh, ""),
        (torch.linalg.pinv, "inv."), (torch.special.i1, ""),
    ):  # fmt: skip
        refused(UnsupportedOpError, f"supported: {near}" if near else "similar name", lambda f=f: f(x))


def test_wrapped_for_several_devices_is_told_what_to_give(plain):
    wrapped, within = nn.DataParallel(plain), nn.Sequential(nn.DataParallel(nn.Linear(4, 3)), nn.ReLU())
    for f in (sectorch.secure, sectorch.reference, sectorch.shared):
        refused(ArgumentError, "give what it wraps: model.module", lambda f=f: f(wrapped.eval()))
        refused(ArgumentError, "give what it wraps: model.0.module", lambda f=f: f(within.eval()))
    assert sectorch.secure(wrapped.module)(ROWS).shape == (2, 3)


def test_a_profile_s_repr_is_its_figures(secure):
    with sectorch.profile() as profile:
        secure(ROWS)
    found = repr(profile)
    assert found == str(profile) and len(found) < 110
    assert found.startswith(f"Profile(rounds={profile.rounds}, online_bytes={profile.online_bytes}, ")


ONE = Roles("G C", edges="G-C")


@protocol("stumble_told", "this test", [Message("x", "G", "C", "nothing", shows="the number")], roles=ONE)
def told(net, x):
    return x.send(net.G, net.C, "x")


def test_floats_in_a_protocol_of_one_s_own_are_told_to_be_encoded():
    session = sectorch.Session(roles=ONE)
    of = lambda dtype: lambda net: net.read(
        told(net, net.own(net.G, torch.empty(3, dtype=dtype), name="G")), net.C
    )  # fmt: skip
    refused(DtypeError, "sectorch.ring.encode", lambda: session.trace(of(torch.float32)))
    program = session.trace(of(torch.int64))
    refused(ShapeError, "sectorch.ring.encode", lambda: session.run(program, {"G": torch.rand(3)}))
    refused(ShapeError, "trace the program", lambda: session.run(program, {"G": torch.arange(4)}))
    assert session.run(program, {"G": torch.arange(3)}).equal(torch.arange(3))


def test_where_predictions_go_is_tried_before_there_are_any(tmp_path, monkeypatch):
    refused(ArgumentError, "is a folder; name a file in it", lambda: check_out(tmp_path))
    refused(ArgumentError, ".safetensors", lambda: check_out(tmp_path / "x.csv"))
    (tmp_path / "file").touch()
    refused(ArgumentError, "cannot write to", lambda: check_out(tmp_path / "file" / "x.npy"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # whoever runs the tests may be allowed to write everywhere
    check_out(tmp_path / "new" / "x.npy")
    refused(ArgumentError, "cannot be written; name another with --out", lambda: check_out(tmp_path / "file"))
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize("place", ["site-packages", "dist-packages", "beside"])
def test_a_program_s_digest_is_of_no_installed_package(place, tmp_path, monkeypatch):
    """Torch may be the system's, or where a .pth points: its thousands of files are the machine's, and none is read."""
    (tmp_path / place / "brought").mkdir(parents=True)
    (tmp_path / place / "brought" / "__init__.py").write_text("import torch\n")
    (tmp_path / "mine.py").write_text("import brought\n\n\ndef program(parties):\n    return {}\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / place)])
    used = source_of("mine.py:program", tmp_path).imports
    assert used == ((tmp_path / place / "brought" / "__init__.py",) if place == "beside" else ())


@protocol("stumble_drawn", "this test", [Message("c", "A", "S", "nothing")])
def drawn(net, x):
    """Draws a mask as in plain torch, which all parties would know."""
    r = torch.zeros(x.shape, dtype=torch.int64)
    return Shares(-r, x.S + (x.A + r).send(net.A, net.S, "c"))


def test_the_inputs_of_a_protocol_under_test():
    for f, way in (
        (lambda: check_protocol(drawn, [Given()], lambda x: x), "net.common and net.fresh draw one"),
        (lambda: check_protocol(drawn, Given(), lambda x: x), "[Given()]"),  # type: ignore[arg-type]
        (lambda: check_protocol(drawn, [torch.arange(3)], lambda x: x), "[Given()]"),  # type: ignore[list-item]
        (lambda: check_protocol(drawn, [Given("Z")], lambda x: x), "the roles are Q A S"),
        (lambda: Given("Q", low=0.5, high=2), "sectorch.ring.encode"),  # type: ignore[arg-type]
    ):
        refused(ArgumentError, way, f)


def test_what_cannot_be_saved_says_what_can(secure):
    for take in (pickle.dumps, copy.deepcopy):
        refused(ArgumentError, "save the plain model", lambda take=take: take(secure))
    model = sectorch.shared(nn.Linear(4, 3))
    for kept in (model.state_dict(), sectorch.share(ROWS)):
        refused(SecretAccessError, "sectorch.Checkpoints", lambda kept=kept: pickle.dumps(kept))
    refused(ArgumentError, "p.reveal(to='A')", lambda: sectorch.secure(model.eval()))


@pytest.mark.parametrize("sign, status", [(signal.SIGTERM, TERMINATED), (signal.SIGINT, STOPPED)])
def test_a_command_is_stopped_by_either_signal(sign: int, status: int, capsys):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    closed = []

    def run(*_):
        try:
            signal.raise_signal(sign)
        finally:
            closed.append(True)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert command_status(Parser("tried", "Tried.", []), [], run, "stopped here") == status
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert closed == [True] and capsys.readouterr().err == "stopped here\n"


def test_what_a_script_started_behind_an_ampersand_ignores_ctrl_c_and_heeds_sigterm(monkeypatch):
    """SIGINT is ignored there; whoever takes it all the same is stopped by another command's Ctrl-C."""
    before, seen = signal.signal(signal.SIGINT, signal.SIG_IGN), []

    def look(_: float) -> None:
        seen.append(signal.getsignal(signal.SIGINT))
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(serve.time, "sleep", look)
    try:
        assert serve._Workers([], 0.0).run() == 0
        assert seen == [signal.SIG_IGN] and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_misspelt_option_of_a_command_names_the_nearest(capsys):
    p = Parser("tried", "Tried.", [])
    p.add_argument("--queries", type=int)
    for words, way in (
        (["--querys", "20"], "--querys 20 (perhaps --queries); "), (["--querys=20"], "(perhaps --queries)"),
        (["--verbose"], "unrecognized arguments: --verbose; sectorch tried --help"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            p.parse_args(words)
        assert way in capsys.readouterr().err


@pytest.mark.parametrize("over", [torch.vmap, torch.func.jacrev, torch.func.vjp])
def test_a_transform_of_torch_over_a_secure_module(plain, over):
    secured = sectorch.secure(plain)
    with pytest.raises(UnsupportedOpError, match="call it on the whole batch"):
        found = over(secured, ROWS) if over is torch.func.vjp else over(secured)(ROWS)
        assert found is None


def test_calibration_with_a_list_of_batches(plain):
    with pytest.raises(ArgumentError, match=r"torch\.cat\(batches\) makes one batch of several"):
        sectorch.secure(plain, calibrate=[ROWS, ROWS])
    assert sectorch.secure(plain, calibrate=torch.cat([ROWS, ROWS])).scheme.frac_bits == 20


OPERANDS = {
    "divided": lambda x: x / 2, "whole": lambda x: x // 2, "rest": lambda x: x % 2, "under": lambda x: 2 / x,
    "an array first": lambda x: np.arange(1, 4) + x, "an array second": lambda x: x - np.arange(1, 4),
    "a numpy number": lambda x: np.int64(3) * x, "an array divided": lambda x: np.arange(1, 4) / x,
    "a matrix first": lambda x: torch.eye(3, dtype=torch.int64) @ x,
}  # fmt: skip

EXPECTED = {
    "divided": torch.tensor([0.5, 2.5, 4.5]), "whole": torch.tensor([0, 2, 4]), "rest": torch.tensor([1, 1, 1]),
    "under": 2 / torch.tensor([1.0, 5.0, 9.0]), "an array first": torch.tensor([2, 7, 12]),
    "an array second": torch.tensor([0, 3, 6]), "a numpy number": torch.tensor([3, 15, 27]),
    "an array divided": torch.tensor([1.0, 2.0, 3.0]) / torch.tensor([1.0, 5.0, 9.0]),
    "a matrix first": torch.tensor([1, 5, 9]),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERANDS)
def test_a_located_value_is_an_operand_as_its_tensor_is(name: str):
    given, session = torch.tensor([1, 5, 9]), sectorch.Session()
    with session.call() as net:
        found = OPERANDS[name](net.public(net.A, given))
        assert torch.equal(net.read(found, net.A), EXPECTED[name])
        with pytest.raises(SectorchError, match="cannot steer Python"):
            np.array(found)


def test_a_quotient_is_written_as_one():
    def halved(net):
        return net.read(net.own(net.A, torch.empty(3, dtype=torch.int64), name="x") // 2 % 5, net.A)

    program = sectorch.Session().trace(halved)
    said = program.party("A").code
    assert "// 2" in said and "% 5" in said


def test_calibration_with_a_loader(plain):
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ROWS), batch_size=2)
    for given in (batches, iter(batches), (x for x in [ROWS])):
        with pytest.raises(ArgumentError, match=r"takes one batch, .*next\(iter\(batches\)\) gives its first"):
            sectorch.secure(plain, calibrate=given)


@pytest.mark.parametrize("name", ["max", "min", "amax", "argmin", "sum", "std", "median", "logsumexp", "all"])
def test_numpys_names_of_arguments(name: str):
    found = getattr(sectorch.share(ROWS), name)(axis=1, keepdims=True)
    wanted = getattr(ROWS, name)(axis=1, keepdims=True)
    first = lambda x: x if isinstance(x, torch.Tensor) else x[0]
    torch.testing.assert_close(first(found).reveal(), first(wanted), atol=1e-4, rtol=0)


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("function", [torch.unique, torch.unique_consecutive])
def test_an_operation_without_a_shape_is_refused_in_our_words(function):
    """torch has no kernel that tells the shape, and says how to write one."""
    for called in (lambda: sectorch.secure(Applied(function).eval())(ROWS), lambda: function(sectorch.share(ROWS))):
        with pytest.raises(UnsupportedOpError, match=r"not supported on secret tensors|is not supported") as caught:
            called()
        assert "SharedTensor(" in str(caught.value)
        assert "Meta" not in str(caught.value) and "StandIn" not in str(caught.value)


def test_channels_that_do_not_fit():
    """torch's own text on shapes alone names neither tensor."""
    layer, x = nn.Conv2d(1, 8, 3).eval(), torch.rand(4, 3, 8, 8)
    for called in (lambda: sectorch.secure(layer)(x), lambda: layer(sectorch.share(x))):
        with pytest.raises(ShapeError, match=r"\[4, 3, 8, 8\], \[8, 1, 3, 3\]"):
            called()


def test_combinations_of_any_torch():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert torch.equal(torch.combinations(sectorch.share(x), 3).reveal(), torch.combinations(x, 3))


@protocol("stumbled", "test_stumbles", [Message("c", "A", "S", "r of k_QA")])
def stumbled(net, x):
    r = net.common(net.Q, net.A, x.shape, "r")
    return Shares(-r, x.S + (x.A + r).send(net.A, net.S, "c"))


@pytest.mark.parametrize("reference, options, way", [
    (lambda x, y: x, {}, r"the protocol's inputs as plain tensors, 1 of them: missing a required argument: 'y'"),
    (lambda x: x.sum(), {}, "pass elementwise=False"),
    (lambda x: x, {"elements": 0}, "a whole number from 1 on; got 0"),
    (lambda x: x, {"elements": "9"}, "a whole number from 1 on; got '9'"),
])  # fmt: skip
def test_a_check_is_asked_for_wrongly(reference, options, way):
    with pytest.raises(ArgumentError, match=way):
        check_protocol(stumbled, [Given()], reference, **{"elements": 64, **options})


def test_a_protocol_is_declared_or_written_wrongly():
    with pytest.raises(ArgumentError, match=r"are a list, \[Message\('c', \.\.\.\)\]"):
        protocol("one", "test_stumbles", Message("c", "A", "S", "r"))  # pyright: ignore[reportArgumentType]
    with sectorch.Session().call() as net:
        x = net.own(net.A, torch.arange(3))
        with pytest.raises(SectorchError, match=r"written into.*torch\.cat, torch\.where"):
            x[0] = 3


@pytest.mark.parametrize("given, way", [("mine.py", r"mine\.py:FUNCTION"), ("m.safetensors", "takes it as it is")])
def test_conversion_of_what_is_no_export(given, way, tmp_path, monkeypatch):
    from sectorch.network.convert import _read

    monkeypatch.chdir(tmp_path)
    Path(given).write_text("def lenet(): ...\n")
    with pytest.raises(ArgumentError, match=way):
        _read(Path(given), Path("x"), trust=True)


def test_a_text_that_is_named_as_an_array(tmp_path):
    """numpy would say that it is pickled, and how to run what is in it."""
    from sectorch.network.commands.array_files import read_arrays

    for name in ("x.npy", "x.npz", "empty.npy"):
        (tmp_path / name).write_text("" if "empty" in name else "1,2,3\n")
        with pytest.raises(ArgumentError, match=f"{name}: it is no file of arrays"):
            read_arrays(tmp_path / name)
    np.save(tmp_path / "x.npy", np.ones((1, 2)))
    np.savez(tmp_path / "x.npz", x=np.ones((1, 2)))
    np.savez_compressed(tmp_path / "y.npz", x=np.ones((1, 2)))
    assert all(read_arrays(tmp_path / name) is not None for name in ("x.npy", "x.npz", "y.npz"))


def test_a_reason_that_is_passed_on_twice_is_named_once():
    from sectorch.network.parties.session import abort_reason
    from sectorch.network.wire.channel import parse_error

    first = parse_error(abort_reason(KeyboardInterrupt(), "hospital-a"))
    assert str(parse_error(f"{type(first).__name__}: {first}")) == "stopped by its user"
    assert str(parse_error("ValueError: at S, whose own log says more")) == "ValueError: at S, whose own log says more"


def test_a_number_of_numpys_is_no_array(plain):
    with pytest.raises(DtypeError, match=r"got float32; x\.item\(\) is its number"):
        sectorch.secure(plain)(ROWS, np.float32(2.0))


def test_an_error_that_is_asked_of_the_package():
    with pytest.raises(AttributeError, match=r"it is sectorch\.errors\.UnsupportedOpError$"):
        assert sectorch.UnsupportedOpError  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match=r"has no attribute 'encrypted'$"):
        assert sectorch.encrypted  # pyright: ignore[reportAttributeAccessIssue]


def test_predictions_are_not_written_over_the_inputs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("in.npy", np.ones((1, 4), dtype=np.float32))
    os.symlink("in.npy", "also.npy")
    for out in ("in.npy", "also.npy", str(tmp_path / "in.npy")):
        assert sectorchs(["query", "m", "in.npy", "--out", out, "--server", "localhost:1"]) == 1
        assert "holds the inputs, which would be lost" in capsys.readouterr().err


def test_an_identity_file_that_is_none_is_named(tmp_path):
    from sectorch.errors import IdentityError
    from sectorch.network.identity.identity import fingerprint_of

    with pytest.raises(IdentityError, match=r"^b/hospital-b\.pem does not hold a PEM private key"):
        fingerprint_of(b"hello", "b/hospital-b.pem")


@pytest.mark.parametrize("target, code, way", [
    ("mine.py", "def lenet(): ...", r"not written over code or a key: mine\.py; name it NAME\.safetensors"),
    ("x.safetensors", "def lenet(:", r"cannot call mine\.py:lenet: SyntaxError: .*--debug shows where"),
    ("x.safetensors", "1 / 0", r"cannot call mine\.py:lenet: ZeroDivisionError: .*--debug shows where"),
    ("x.safetensors", "def lenet(): return 1 / 0", r"mine\.py:lenet ended with ZeroDivisionError: .*--debug shows"),
])  # fmt: skip
def test_conversion_of_code_that_is_wrong_or_would_be_lost(target, code, way, tmp_path, monkeypatch, capsys):
    from sectorch.network.convert import convert

    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(f"{code}\n")
    assert convert(["mine.py:lenet", target, "--trust"]) == 1
    said = capsys.readouterr().err
    assert re.search(way, said.replace("\n", " ")) and "please report" not in said
    assert Path("mine.py").read_text() == f"{code}\n"


def test_an_error_in_its_users_code_is_said_to_be_there(tmp_path, capsys):
    program = tmp_path / "mine.py"
    program.write_text("def total(net):\n    return {}['a']\n")
    assert sectorchs(["run", f"{program}:total"]) == 1
    assert f"error: {program}, line 2: KeyError: 'a'; --debug shows all of it" in capsys.readouterr().err


def test_a_profile_can_be_kept(secure):
    with sectorch.profile() as spent:
        secure(ROWS)
    for again in (pickle.loads(pickle.dumps(spent)), copy.deepcopy(spent)):
        assert again == spent and again.bytes == spent.bytes and str(again) == str(spent)
        assert again.bytes_between("Q", "S") == spent.bytes_between("Q", "S") > 0
        with again:  # and goes on
            secure(ROWS)
        assert again.online_bytes == 2 * spent.online_bytes


def test_what_the_package_lists_is_its_own():
    listed = dir(sectorch)
    assert {"secure", "Session", "testing", "encrypt", "__version__"} <= set(listed)
    assert not {"stoppable", "is_command", "import_module", "TYPE_CHECKING"} & set(listed)


def test_an_option_that_is_like_none_is_not_taken_for_another(capsys):
    with pytest.raises(SystemExit):
        sectorchs(["query", "m", "x.npy", "--frac-bits", "20"])
    assert "--frac-bits" in (said := capsys.readouterr().err) and "perhaps" not in said

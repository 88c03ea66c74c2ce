"""Models of public packages, unmodified, by `sectorch.secure`: right, refused, or wrong; one process each.

    python benchmarks/packages.py --install            # into an environment of its own beside the one that runs this
    python benchmarks/packages.py                      # all; results in benchmarks/results/packages.json
    python benchmarks/packages.py entmax "lpips squeeze"   # some, measured anew
    python benchmarks/packages.py --write              # docs/packages.md from the results

A case is a function that gives a model of a package and its arguments. Weights are random. A result is right if it
is within a thousandth of the plain one's largest magnitude in float64. A refusal is any `SectorchError`; its text is
in the table. A call that leaves its range is asked again with `calibrate=` the same input, as the error says.
Seconds are of the processor, on one thread, of `secure` and the first call.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import nn
from torch.utils import _pytree as pytree

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "packages.json"
PAGE = HERE.parent / "docs" / "packages.md"
ENVIRONMENT = HERE.parent / ".venv-packages"
NEEDED = [
    "einops", "einops-exts", "axial-positional-embedding", "product-key-memory", "hyper-connections", "jaxtyping",
    "wadler-lindig", "beartype", "loguru", "delu", "PyWavelets", "ema-pytorch", "accelerate", "assoc-scan",
    "torch-einops-utils", "colt5-attention", "typeguard", "gateloop-transformer",
]  # fmt: skip
"""What the packages import beside torch, numpy and scipy."""
ENOUGH = 1e-3
LIMIT = 600
"""Seconds after which a case is stopped."""

Case = tuple[str, Callable[[], tuple[Any, tuple]]]
CASES: dict[str, Case] = {}


def case(name: str, package: str) -> Callable:
    """Registers a function that gives a model and its arguments, under a name, of a package as pip knows it."""

    def register(build: Callable[[], tuple[Any, tuple]]) -> Callable[[], tuple[Any, tuple]]:
        CASES[name] = package, build
        return build

    return register


class Of(nn.Module):
    """A function of a package behind a linear layer."""

    def __init__(self, function: Callable, width: int = 8):
        super().__init__()
        self.linear, self.function = nn.Linear(width, width), function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self.linear(inputs[0]), *inputs[1:])


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


@case("EfficientNet-B0", "efficientnet-pytorch")
def _():
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-b0", image_size=64), (randn(1, 3, 64, 64),)


@case("InceptionResnetV1", "facenet-pytorch")
def _():
    from facenet_pytorch import InceptionResnetV1

    return InceptionResnetV1(), (randn(1, 3, 96, 96),)


@case("MTCNN's ONet", "facenet-pytorch")
def _():
    from facenet_pytorch.models.mtcnn import ONet

    return ONet(pretrained=False), (randn(2, 3, 48, 48),)


@case("ResNet-20 for CIFAR", "pytorchcv")
def _():
    from pytorchcv.model_provider import get_model

    return get_model("resnet20_cifar10"), (randn(1, 3, 32, 32),)


@case("SE-ResNet-20 for CIFAR", "pytorchcv")
def _():
    from pytorchcv.model_provider import get_model

    return get_model("seresnet20_cifar10"), (randn(1, 3, 32, 32),)


@case("ShakeShake-ResNet-20 for CIFAR", "pytorchcv")
def _():
    from pytorchcv.model_provider import get_model

    return get_model("shakeshakeresnet20_2x16d_cifar10"), (randn(1, 3, 32, 32),)


@case("DiaResNet (an LSTM over layers)", "pytorchcv")
def _():
    from pytorchcv.model_provider import get_model

    return get_model("diaresnet20_cifar10"), (randn(1, 3, 32, 32),)


@case("PlainConvUNet (nnU-Net)", "dynamic-network-architectures")
def _():
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    net = PlainConvUNet(
        1, 3, (8, 16, 32), nn.Conv3d, 3, (1, 2, 2), 2, 3, 2, conv_bias=True, norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"affine": True}, nonlin=nn.LeakyReLU, nonlin_kwargs={"inplace": True},
    )  # fmt: skip
    return net, (randn(1, 1, 8, 16, 16),)


@case("ResidualEncoderUNet (nnU-Net)", "dynamic-network-architectures")
def _():
    from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet

    net = ResidualEncoderUNet(
        1, 3, (8, 16, 32), nn.Conv2d, 3, (1, 2, 2), (1, 2, 2), 2, (1, 1), conv_bias=True, norm_op=nn.InstanceNorm2d,
        norm_op_kwargs={"affine": True}, nonlin=nn.LeakyReLU, nonlin_kwargs={"inplace": True}, deep_supervision=True,
    )  # fmt: skip
    return net, (randn(1, 1, 16, 16),)


@case("Linformer", "linformer")
def _():
    from linformer import Linformer

    return Linformer(dim=32, seq_len=32, depth=2, heads=4, k=8), (randn(1, 32, 32),)


@case("Linformer LM, shared keys and values", "linformer")
def _():
    from linformer import LinformerLM

    net = LinformerLM(num_tokens=50, dim=32, seq_len=16, depth=2, heads=4, k=8, one_kv_head=True, share_kv=True)
    return net, (torch.randint(0, 50, (1, 16)),)


@case("Axial attention", "axial-attention")
def _():
    from axial_attention import AxialAttention

    return AxialAttention(dim=16, dim_index=1, heads=4, num_dimensions=2), (randn(1, 16, 8, 8),)


@case("Perceiver", "perceiver-pytorch")
def _():
    from perceiver_pytorch import Perceiver

    net = Perceiver(
        input_channels=3, input_axis=2, num_freq_bands=4, max_freq=10.0, depth=2, num_latents=8, latent_dim=32,
        cross_heads=1, latent_heads=2, cross_dim_head=16, latent_dim_head=16, num_classes=5,
    )  # fmt: skip
    return net, (randn(1, 8, 8, 3),)


@case("MLP-Mixer", "mlp-mixer-pytorch")
def _():
    from mlp_mixer_pytorch import MLPMixer

    return MLPMixer(image_size=32, channels=3, patch_size=8, dim=32, depth=2, num_classes=5), (randn(1, 3, 32, 32),)


@case("gMLP", "g-mlp-pytorch")
def _():
    from g_mlp_pytorch import gMLPVision

    return gMLPVision(image_size=32, patch_size=8, num_classes=5, dim=32, depth=2), (randn(1, 3, 32, 32),)


@case("Lambda layer", "lambda-networks")
def _():
    from lambda_networks import LambdaLayer

    return LambdaLayer(dim=16, dim_out=16, r=5, dim_k=8, heads=4, dim_u=2), (randn(1, 16, 8, 8),)


@case("Bottleneck transformer", "bottleneck-transformer-pytorch")
def _():
    from bottleneck_transformer_pytorch import BottleStack

    net = BottleStack(
        dim=16, fmap_size=8, dim_out=32, proj_factor=4, downsample=True, heads=2, dim_head=8, rel_pos_emb=True,
        activation=nn.ReLU(),
    )  # fmt: skip
    return net, (randn(1, 16, 8, 8),)


@case("iTransformer", "iTransformer")
def _():
    from iTransformer import iTransformer

    net = iTransformer(num_variates=6, lookback_len=24, dim=32, depth=2, heads=2, dim_head=16, pred_length=(4, 8))
    return net, (randn(1, 24, 6),)


@case("TCN, causal, weight norm", "pytorch-tcn")
def _():
    from pytorch_tcn import TCN

    return TCN(num_inputs=4, num_channels=[8, 8], kernel_size=3, use_norm="weight_norm"), (randn(2, 4, 20),)


@case("STFT filterbank and back", "asteroid-filterbanks")
def _():
    from asteroid_filterbanks import STFTFB, Decoder, Encoder

    bank = STFTFB(n_filters=32, kernel_size=32, stride=16)
    return nn.Sequential(Encoder(bank), Decoder(bank)), (randn(1, 1, 256),)


@case("LPIPS squeeze", "lpips")
def _():
    import lpips

    net = lpips.LPIPS(net="squeeze", pretrained=False, pnet_rand=True, verbose=False)
    return net, (torch.rand(1, 3, 64, 64) * 2 - 1, torch.rand(1, 3, 64, 64) * 2 - 1)


@case("SSIM loss", "piq")
def _():
    import piq

    return piq.SSIMLoss(kernel_size=5), (torch.rand(1, 1, 24, 24), torch.rand(1, 1, 24, 24))


@case("total variation", "piq")
def _():
    import piq

    return piq.TVLoss(), (torch.rand(1, 1, 24, 24),)


@case("sparsemax", "entmax")
def _():
    from entmax import sparsemax

    return Of(lambda x: sparsemax(x, dim=-1)), (randn(3, 8),)


@case("1.5-entmax", "entmax")
def _():
    from entmax import entmax15

    return Of(lambda x: entmax15(x, dim=-1)), (randn(3, 8),)


@case("entmax by bisection", "entmax")
def _():
    from entmax import entmax_bisect

    return Of(lambda x: entmax_bisect(x, alpha=1.5, n_iter=20)), (randn(3, 8),)


@case("wavelet transform", "ptwt")
def _():
    import ptwt
    import pywt

    return Of(lambda x: ptwt.wavedec(x, pywt.Wavelet("db2"), level=2, mode="zero"), 32), (randn(2, 32),)


@case("SIREN", "siren-pytorch")
def _():
    from siren_pytorch import SirenNet

    return SirenNet(dim_in=2, dim_hidden=16, dim_out=3, num_layers=3, w0_initial=30.0), (torch.rand(5, 2),)


@case("Nystromformer", "nystrom-attention")
def _():
    from nystrom_attention import Nystromformer

    return Nystromformer(dim=32, dim_head=16, heads=2, depth=1, num_landmarks=8, pinv_iterations=4), (randn(1, 32, 32),)


@case("local attention", "local-attention")
def _():
    from local_attention import LocalAttention

    net = LocalAttention(dim=16, window_size=8, causal=True, look_backward=1, look_forward=0, autopad=True)
    return net, (randn(1, 2, 24, 16), randn(1, 2, 24, 16), randn(1, 2, 24, 16))


@case("local transformer LM", "local-attention")
def _():
    from local_attention import LocalTransformer

    net = LocalTransformer(
        num_tokens=40, dim=32, depth=2, max_seq_len=32, causal=True, local_attn_window_size=8, heads=2
    )
    return net, (torch.randint(0, 40, (1, 16)),)


@case("linear attention transformer", "linear-attention-transformer")
def _():
    from linear_attention_transformer import LinearAttentionTransformer

    return LinearAttentionTransformer(dim=32, heads=2, depth=2, max_seq_len=16), (randn(1, 16, 32),)


@case("SAM's image encoder, small", "segment-anything")
def _():
    from segment_anything.modeling.image_encoder import ImageEncoderViT

    net = ImageEncoderViT(
        img_size=64, patch_size=8, embed_dim=32, depth=2, num_heads=2, out_chans=8, use_rel_pos=True, window_size=4,
        global_attn_indexes=(1,),
    )  # fmt: skip
    return net, (randn(1, 3, 64, 64),)


@case("SAM's two-way transformer", "segment-anything")
def _():
    from segment_anything.modeling.transformer import TwoWayTransformer

    net = TwoWayTransformer(depth=1, embedding_dim=32, num_heads=2, mlp_dim=32)
    return net, (randn(1, 32, 4, 4), randn(1, 32, 4, 4), randn(1, 3, 32))


@case("spiking LIF net, four steps", "spikingjelly")
def _():
    from spikingjelly.activation_based import functional, layer, neuron

    net = nn.Sequential(layer.Linear(8, 16), neuron.LIFNode(), layer.Linear(16, 4), neuron.LIFNode())
    functional.set_step_mode(net, "m")
    return net, (randn(4, 2, 8),)


@case("hyperdimensional classifier", "torch-hd")
def _():
    import torchhd
    from torchhd.embeddings import Sinusoid
    from torchhd.models import Centroid

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.classes = Sinusoid(8, 64), Centroid(64, 3)
            nn.init.normal_(self.classes.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.classes(torchhd.hard_quantize(self.encode(x)))

    return Net(), (randn(2, 8),)


@case("tabular MLP", "rtdl-revisiting-models")
def _():
    from rtdl_revisiting_models import MLP

    return MLP(d_in=8, d_out=2, n_blocks=2, d_block=16, dropout=0.1), (randn(4, 8),)


@case("tabular ResNet", "rtdl-revisiting-models")
def _():
    from rtdl_revisiting_models import ResNet

    net = ResNet(
        d_in=8, d_out=2, n_blocks=2, d_block=16, d_hidden=None, d_hidden_multiplier=2.0, dropout1=0.1, dropout2=0.0
    )
    return net, (randn(4, 8),)


@case("FT-Transformer", "rtdl-revisiting-models")
def _():
    from rtdl_revisiting_models import FTTransformer

    kwargs = {**FTTransformer.get_default_kwargs(n_blocks=1), "d_block": 32, "attention_n_heads": 4}
    net = FTTransformer(n_cont_features=5, cat_cardinalities=[4, 3], d_out=2, **kwargs)
    return net, (randn(2, 5), torch.tensor([[1, 2], [3, 0]]))


@case("piecewise-linear embeddings", "rtdl-num-embeddings")
def _():
    from rtdl_num_embeddings import PiecewiseLinearEmbeddings, compute_bins

    bins = compute_bins(randn(100, 4), n_bins=6)
    return PiecewiseLinearEmbeddings(bins, 8, activation=True, version="B"), (randn(3, 4),)


@case("periodic embeddings", "rtdl-num-embeddings")
def _():
    from rtdl_num_embeddings import PeriodicEmbeddings

    return PeriodicEmbeddings(4, 8, lite=False), (randn(3, 4),)


@case("CRF log likelihood", "pytorch-crf")
def _():
    from torchcrf import CRF

    return CRF(4, batch_first=True), (randn(2, 5, 4), torch.randint(0, 4, (2, 5)))


@case("diffusion U-Net", "denoising-diffusion-pytorch")
def _():
    from denoising_diffusion_pytorch import Unet

    return Unet(dim=16, dim_mults=(1, 2), channels=3, flash_attn=False), (randn(1, 3, 16, 16), torch.tensor([7]))


@case("MS-SSIM", "pytorch-msssim")
def _():
    from pytorch_msssim import SSIM

    return SSIM(win_size=5, data_range=1.0, channel=1), (torch.rand(1, 1, 24, 24), torch.rand(1, 1, 24, 24))


@case("cosine transform", "torch-dct")
def _():
    import torch_dct

    return Of(torch_dct.dct), (randn(2, 8),)


@case("minGRU", "minGRU-pytorch")
def _():
    from minGRU_pytorch import minGRU

    return minGRU(16), (randn(1, 12, 16),)


@case("rotary embedding", "rotary-embedding-torch")
def _():
    from rotary_embedding_torch import RotaryEmbedding

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.rotary = nn.Linear(16, 16), RotaryEmbedding(dim=8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rotary.rotate_queries_or_keys(self.linear(x))

    return Net(), (randn(1, 2, 6, 16),)


@case("memory-efficient attention", "memory-efficient-attention-pytorch")
def _():
    from memory_efficient_attention_pytorch import Attention

    net = Attention(dim=32, dim_head=16, heads=2, memory_efficient=True, q_bucket_size=8, k_bucket_size=8, causal=True)
    return net, (randn(1, 16, 32),)


@case("mixture of experts", "st-moe-pytorch")
def _():
    from st_moe_pytorch import MoE

    return MoE(dim=16, num_experts=4, gating_top_n=2), (randn(1, 8, 16),)


@case("point transformer layer", "point-transformer-pytorch")
def _():
    from point_transformer_pytorch import PointTransformerLayer

    return PointTransformerLayer(dim=8, pos_mlp_hidden_dim=8, attn_mlp_hidden_mult=2), (randn(1, 6, 8), randn(1, 6, 3))


@case("point transformer, nearest neighbours", "point-transformer-pytorch")
def _():
    from point_transformer_pytorch import PointTransformerLayer

    net = PointTransformerLayer(dim=8, pos_mlp_hidden_dim=8, attn_mlp_hidden_mult=2, num_neighbors=3)
    return net, (randn(1, 6, 8), randn(1, 6, 3))


@case("ISAB (set transformer)", "isab-pytorch")
def _():
    from isab_pytorch import ISAB

    return ISAB(dim=16, heads=2, num_latents=4, latent_self_attend=True), (randn(1, 10, 16),)


@case("ResMLP", "res-mlp-pytorch")
def _():
    from res_mlp_pytorch import ResMLP

    return ResMLP(image_size=32, patch_size=8, dim=32, depth=2, num_classes=5), (randn(1, 3, 32, 32),)


@case("Halo attention", "halonet-pytorch")
def _():
    from halonet_pytorch import HaloAttention

    return HaloAttention(dim=16, block_size=4, halo_size=1, dim_head=8, heads=2), (randn(1, 16, 8, 8),)


@case("TimeSformer", "timesformer-pytorch")
def _():
    from timesformer_pytorch import TimeSformer

    net = TimeSformer(dim=32, image_size=16, patch_size=8, num_frames=2, num_classes=3, depth=1, heads=2, dim_head=16)
    return net, (randn(1, 2, 3, 16, 16), torch.tensor([[True, True]]))


@case("transformer in transformer", "transformer-in-transformer")
def _():
    from transformer_in_transformer import TNT

    net = TNT(image_size=32, patch_dim=32, pixel_dim=8, patch_size=8, pixel_size=4, depth=1, num_classes=5)
    return net, (randn(1, 3, 32, 32),)


@case("Charformer's pooling", "charformer-pytorch")
def _():
    from charformer_pytorch import GBST

    net = GBST(num_tokens=40, dim=16, max_block_size=4, downsample_factor=4, score_consensus_attn=True)
    return net, (torch.randint(0, 40, (1, 24)), torch.ones(1, 24).bool())


@case("Fastformer", "fast-transformer-pytorch")
def _():
    from fast_transformer_pytorch import FastTransformer

    net = FastTransformer(num_tokens=40, dim=32, depth=1, max_seq_len=16, absolute_pos_emb=True, heads=2, dim_head=16)
    return net, (torch.randint(0, 40, (1, 16)), torch.ones(1, 16).bool())


@case("H-Transformer-1D", "h-transformer-1d")
def _():
    from h_transformer_1d import HTransformer1D

    net = HTransformer1D(
        num_tokens=40, dim=32, depth=1, heads=2, dim_head=16, max_seq_len=16, block_size=4, causal=False
    )
    return net, (torch.randint(0, 40, (1, 16)),)


@case("Uformer", "uformer-pytorch")
def _():
    from uformer_pytorch import Uformer

    return Uformer(dim=16, stages=2, num_blocks=1, window_size=4, dim_head=8, heads=1, ff_mult=2), (
        randn(1, 3, 16, 16),
    )


@case("ESRGAN", "spandrel")
def _():
    from spandrel.architectures.ESRGAN.__arch.RRDB import RRDBNet

    return RRDBNet(in_nc=3, out_nc=3, num_filters=16, num_blocks=1, scale=2), (torch.rand(1, 3, 12, 12),)


@case("SwinIR", "spandrel")
def _():
    from spandrel.architectures.SwinIR.__arch.SwinIR import SwinIR

    net = SwinIR(
        img_size=16, window_size=4, depths=[2], embed_dim=16, num_heads=[2], mlp_ratio=2, upscale=2,
        upsampler="pixelshuffledirect", img_range=1.0,
    )  # fmt: skip
    return net, (torch.rand(1, 3, 16, 16),)


@case("EDSR", "torchsr")
def _():
    from torchsr.models import edsr_baseline

    return edsr_baseline(scale=2, pretrained=False), (torch.rand(1, 3, 12, 12),)


def measure(name: str) -> dict:
    """What a case comes to; in a process of its own."""
    import sectorch
    from sectorch.errors import RangeExceededError, SectorchError

    torch.manual_seed(0)
    torch.set_num_threads(1)
    package, build = CASES[name]
    model, arguments = build()
    model = model.eval().requires_grad_(False)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()
        wide = [x.double() if x.is_floating_point() else x for x in arguments]
        try:
            right = exact(*wide)
        except Exception:  # a package that makes float32 numbers inside
            right = model(*arguments)
    row: dict[str, Any] = {"package": package, "parameters": sum(p.numel() for p in model.parameters())}
    start = time.process_time()
    try:
        try:
            came = sectorch.secure(model)(*arguments)
        except RangeExceededError:
            row["settings"] = "calibrate="
            came = sectorch.secure(model, calibrate=sectorch.Inputs(*arguments))(*arguments)
    except SectorchError as error:
        return row | {"outcome": "refused", "why": text_of(error)}
    except Exception as error:
        return row | {"outcome": "raw error", "why": text_of(error)}
    row["seconds"] = time.process_time() - start
    tensors = lambda tree: [y for y in pytree.tree_leaves(tree) if isinstance(y, torch.Tensor)]
    worst = 0.0
    for y, z in zip(tensors(came), tensors(right), strict=True):
        if y.shape != z.shape:
            return row | {"outcome": "wrong", "why": f"shape {tuple(y.shape)} for {tuple(z.shape)}"}
        if z.numel():
            size = float(z.double().abs().max())
            worst = max(worst, float((y.double() - z.double()).abs().max()) / (size or 1.0))
    return row | {"outcome": "right" if worst < ENOUGH else "wrong", "error": worst}


def install(environment: Path, names: list[str]) -> None:
    """The packages without what they want of torch, in an environment that sees the packages of this one."""
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    inside = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    Path(inside, "zz_outside.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    wanted = [*NEEDED, *sorted({CASES[name][0] for name in names})]
    for package in track(wanted, "installing"):
        if subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", package]).returncode:
            print(f"{package} could not be installed", file=sys.stderr)


def run(name: str, environment: Path) -> dict:
    command = [environment / "bin" / "python", "-W", "ignore", __file__, "--one", name]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environ)
    except subprocess.TimeoutExpired:
        return {"package": CASES[name][0], "outcome": "stopped", "why": f"after {LIMIT} s"}
    if done.returncode:
        last = (done.stderr.strip() or "no words").splitlines()[-1]
        return {"package": CASES[name][0], "outcome": "not run", "why": last}
    return json.loads(done.stdout.splitlines()[-1])


def page(rows: dict[str, dict]) -> str:
    """docs/packages.md."""
    count = {
        o: sum(r["outcome"] == o for r in rows.values()) for o in ("right", "refused", "wrong", "raw error", "stopped")
    }
    lines = [
        "# Models of public packages",
        "",
        "Models as their packages build them, with random weights, by `sectorch.secure(model)(*arguments)`. Of "
        f"{sum(count.values())} cases {count['right']} are right (within {ENOUGH:g} of the largest magnitude), "
        f"{count['refused']} are refused by a typed error, {count['wrong']} are wrong, {count['raw error']} end in an "
        f"error that is not sectorch's, and {count['stopped']} took longer than {LIMIT} seconds. Seconds are of the "
        "processor, on one thread, of `secure` and the first call. `calibrate=` stands where a value left the default "
        "range and the format was chosen from the same input. Made by `python benchmarks/packages.py`.",
        "",
        "| model | package | parameters | outcome | error | s | |",
        "| --- | --- | ---: | --- | ---: | ---: | --- |",
    ]  # fmt: skip
    for name, row in rows.items():
        if row["outcome"] == "not run":
            continue
        said = row.get("why", row.get("settings", "")).replace("|", "\\|").replace("\n", " ")
        error = f"{row['error']:.0e}" if "error" in row else ""
        seconds = f"{row['seconds']:.1f}" if "seconds" in row else ""
        cells = (name, row["package"], f"{row.get('parameters', 0):,}", row["outcome"], error, seconds, said)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def text_of(error: Exception) -> str:
    """Its kind and words; files by their path inside the packages."""
    return f"{type(error).__name__}: {re.sub(r'/[^ ]*/site-packages/', '', str(error))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CASE", help="cases; all unless named")
    parser.add_argument("--install", action="store_true", help="install the packages first")
    parser.add_argument("--environment", type=Path, default=ENVIRONMENT, help="the folder that they are installed in")
    parser.add_argument("--write", action="store_true", help="write docs/packages.md from the results, and run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results stand")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    unknown = [name for name in options.names if name not in CASES]
    if unknown:
        parser.error(f"no case is called {unknown[0]!r}; there are: {', '.join(CASES)}")
    if options.install:
        install(options.environment, options.names or list(CASES))
    rows = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    for name in [] if options.write else track(options.names or list(CASES), "running"):
        rows[name] = row = run(name, options.environment)
        print(f"{name}: {row['outcome']} {row.get('error', row.get('why', ''))}", flush=True)
        rows = {n: rows[n] for n in CASES if n in rows}
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.out == RESULTS:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()

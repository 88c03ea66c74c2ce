"""Networks of timm, unmodified: error, processor seconds, bytes and rounds of each, or the reason of refusal.

    python benchmarks/timm_table.py                    # all that the results lack; benchmarks/results/timm.json
    python benchmarks/timm_table.py --only tnt_s_legacy_patch16_224 swin_tiny_patch4_window7_224
    python benchmarks/timm_table.py --write            # docs/timm.md from the results

The smallest network of each of timm's modules (`pip install timm`), none of which this project had seen before it was
put on the list. Weights are random and of a size that keeps a signal's (`drawn`), batch norms have the statistics of a
random batch (where a channel varies less than a twentieth of the layer's mean variance, that twentieth). One image, as
small as the network takes; the first of `SIZES` that it runs on. 'error' is the largest difference from the plain
result in float64 over its largest magnitude, 'float32' the same of the plain result in float32, and 'apart' how far the
plain results of two images are from each other by the same measure: a network that gives every image the same would
show nothing. Each runs in a process of its own, within 8 GiB and 20 minutes unless
named otherwise; the rows of docs/timm.md had 7 to 12 GiB and 280 s or more.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface import text_of
from rich.console import Console
from torch import nn
from torchvision_table import above, estimate_statistics, reaches

import sectorch
from sectorch import Scheme
from sectorch.config import limit_bits_of
from sectorch.errors import FixedPointRangeError, SectorchError

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "timm.json"
PAGE = HERE.parent / "docs" / "timm.md"
WRONG = 1e-3
SENSITIVE = 4.5e-5
"""What a network makes of float32's rounding from which on it gets 24 fraction bits: with 20 of them errors are about
twenty times as large."""
SIZES = (64, 96, 128, 160, 192, 224, 240, 256, 384)
_LIST = """
beit_base_patch16_224 cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 cpubone_nano crossvit_tiny_240
cs3darknet_focus_s csatv2 cspnext_tiny davit_tiny deepseek_vit_412m deit_tiny_patch16_224 densenet121 dla46x_c dpn48b
edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientvim_m1 efficientvit_b0 efficientvit_m0
ese_vovnet19b_slim_dw fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny gemma4_vit_167m ghostnet_050 gmlp_ti16_224
halonet_h1 hardcorenas_b hgnetv2_b0 hiera_tiny_224 hrnet_w18_small iformer_t inception_next_atto inception_resnet_v2
inception_v3 inception_v4 lcnetv2_small legacy_seresnet18 legacy_xception levit_128s lowformer_b0 mobilenetv3_small_050
mobilenetv5_base mobilevit_xxs mvitv2_tiny naflexvit_base_patch16_parfac_gap nasnetalarge nest_tiny nextvit_small
pit_ti_224 pnasnet5large poolformerv2_s12 pvt_v2_b0 qwen3_vit_88m rdnet_tiny regnetx_002 repghostnet_050 repvit_m1
res2next50 resnest14d resnetv2_18 rexnet_100 sam2_hiera_tiny samvit_base_patch16_224 selecsls42 sequencer2d_s shvit_s1
skresnet18 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_tiny_window16_256
test_byobnet test_coatnet test_convnext test_efficientnet test_mambaout test_nfnet test_resnet test_vit test_vit_relpos
tiny_vit_5m_224 tnt_s_legacy_patch16_224 tresnet_m twins_svt_small vgg11 visformer_tiny vit_tiny_patch16_dinov3_qkvb
vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 xception41p xcit_nano_12_p8_224
"""
NAMES = tuple(_LIST.split())


@torch.no_grad()
def drawn(model: nn.Module) -> None:
    """Weights that keep a signal's size: of layers by their fan-in; others about where they were."""
    layers = {id(p): layer for layer in model.modules() for p in layer.parameters(recurse=False)}
    for p in model.parameters():
        if p.dim() > 1 and isinstance(layers[id(p)], (nn.Linear, nn.modules.conv._ConvNd)):
            p.copy_(torch.randn(p.shape) / p[0].numel() ** 0.5)
        else:
            p.add_(0.1 * torch.randn(p.shape))


def built(name: str) -> tuple[nn.Module, torch.Tensor]:
    """The network and two images, at the smallest size that it takes."""
    import timm

    reason: Exception | None = None
    for size in SIZES:
        for options in ({"img_size": size}, {}):
            torch.manual_seed(0)
            try:
                model = timm.create_model(name, pretrained=False, **options).eval().requires_grad_(False)
                images = torch.randn(2, 3, size, size)
                model(images)
            except Exception as error:  # another size, or no such option
                reason = error
                continue
            drawn(model)
            estimate_statistics(model, torch.randn(16, 3, size, size))
            for layer in model.modules():
                if isinstance(layer, nn.BatchNorm2d) and layer.running_var is not None:
                    layer.running_var.clamp_(min=float(layer.running_var.mean()) / 20)
            return model, images
    raise RuntimeError(f"the plain network runs at none of the sizes: {reason}")


@torch.no_grad()
def measured(name: str) -> dict[str, Any]:
    """The row of one network."""
    model, images = built(name)
    x = images[:1]
    both = model(images)
    exact = copy.deepcopy(model).double()(x.double())
    row: dict[str, Any] = {
        "size": x.shape[-1], "parameters": sum(p.numel() for p in model.parameters()),
        "apart": off(both[:1], both[1:]),
    }  # fmt: skip
    start = time.process_time()
    row["float32"] = off(model(x), exact)
    row["plain_s"] = time.process_time() - start
    refused = ""
    for frac_bits, limit in ways(above(reaches(model, x)), row["float32"]):
        scheme = Scheme(frac_bits, limit_bits=limit_bits_of(limit))
        try:
            secured = sectorch.secure(model, scheme, session=sectorch.Session())
            secured(x)
            start = time.process_time()
            with sectorch.profile() as spent:
                found = secured(x)
        except FixedPointRangeError as error:  # weights too large for sums of values up to this limit
            refused = text_of(error)
        except SectorchError as error:
            return row | {"refused": text_of(error)}
        else:
            return row | {
                "secure_s": time.process_time() - start, "frac_bits": frac_bits, "limit": limit,
                "error": off(found, exact), "bytes": spent.bytes, "rounds": spent.rounds,
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }  # fmt: skip
    return row | {"refused": refused}


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference over the largest magnitude."""
    return float((found - exact).abs().max() / exact.abs().max())


def ways(needed: float, sensitive: float) -> Iterator[tuple[int, float]]:
    """Fraction bits and activation limit until the weights fit: the scheme's own, or a limit that the layers need.

    Where float32's rounding shows in the result, 20 fraction bits are too few, and 24 come first.
    """
    if sensitive > SENSITIVE:
        yield 24, needed
    yield 20, max(Scheme().activation_limit, needed)
    yield 20, needed


def limited(name: str, gigabytes: float, seconds: float) -> dict[str, Any]:
    """`measured` in a process of its own."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 2**30),) * 2)

    command = [sys.executable, "-W", "ignore", __file__, "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, preexec_fn=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"stopped": f"not finished after {seconds:.0f} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    scarce = "memory" in last.lower() or done.returncode == -signal.SIGKILL
    return {"stopped": f"needs more than {gigabytes:g} GiB" if scarce else last[:300]}


def verdict(row: dict[str, Any]) -> str:
    """right, differs, refused, or stopped."""
    if "error" not in row:
        return "refused" if "refused" in row else "stopped"
    return "right" if row["error"] <= WRONG and row["apart"] > 10 * WRONG else "differs"


def settings(row: dict[str, Any]) -> str:
    """What `secure` is told beyond the model: nothing, where the scheme is its default."""
    told = [] if row["frac_bits"] == Scheme().frac_bits else [f"frac_bits={row['frac_bits']}"]
    if row["limit"] != Scheme(row["frac_bits"]).activation_limit:
        told.append(f"limit_bits={limit_bits_of(row['limit'])}")
    return f"`{', '.join(told)}`" if told else ""


def page(rows: dict[str, dict]) -> str:
    """The table as a page of the documentation."""
    by = {kind: [n for n in sorted(rows) if verdict(rows[n]) == kind] for kind in ("right", "differs", "refused")}
    ran = [name for name in sorted(rows) if "error" in rows[name]]
    stopped = len(rows) - len(ran) - len(by["refused"])
    lines = [
        "# Networks of timm", "",
        "The smallest network of each of timm's modules, unmodified, by `sectorch.secure(model)(image)`. Of",
        f"{len(rows)} {len(by['right'])} are right (a relative error of at most {WRONG:g}), {len(by['refused'])}",
        f"refused by a typed error, {stopped} stopped at its limit, and {len(by['differs'])} differ.",
        "Random weights that keep a signal's size, batch norms with the statistics of a random batch (where a channel",
        "varies less than a twentieth of the layer's mean variance, that twentieth), one image of the size named.", "",
        "The error is the largest difference from the plain result in float64 over its largest magnitude; 'float32' is",
        "that of the plain result in float32, and 'apart' how far the plain results of two images are from each other.",
        f"{sum(not settings(rows[name]) for name in ran)} run with the default `Scheme()`; 'settings' has what the",
        "others were told: 24 fraction bits where float32's own rounding shows in the result, an activation limit",
        "where a layer's outputs go beyond the default one or its weights need the room. Processor seconds on one",
        "thread, of the second call, all three parties' work one after the other; GB is the process's largest memory,",
        "with the plain model in float32 and float64. Made by `python benchmarks/timm_table.py`.", "",
        "| network | input | weights, M | settings | error | float32 | apart | plain s | secure s | MB | rounds | GB |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for name in ran:
        row = rows[name]
        cells = (
            name + (" (differs)" if name in by["differs"] else ""), row["size"], f"{row['parameters'] / 1e6:.1f}",
            settings(row), f"{row['error']:.1e}", f"{row['float32']:.1e}", f"{row['apart']:.2f}",
            f"{row['plain_s']:.2f}", f"{row['secure_s']:.1f}", f"{row['bytes'] / 1e6:.0f}", row["rounds"],
            f"{row['peak_bytes'] / 1e9:.1f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "Without a result:", "", "| network | reason |", "| --- | --- |"]
    for name in sorted(set(rows) - set(ran)):
        reason = (rows[name].get("refused") or rows[name]["stopped"]).replace("|", "/")
        lines.append(f"| {name} | {verdict(rows[name])}: {reason} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these, measured anew")
    parser.add_argument("--one", metavar="NAME", help="one, in this process; prints its row as JSON")
    parser.add_argument("--write", action="store_true", help="write the page from the results and stop")
    parser.add_argument("--memory", type=float, default=8.0, help="limit in GiB for one network")
    parser.add_argument("--seconds", type=float, default=1200.0, help="limit for one network")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        print(json.dumps(measured(options.one)))
        return
    console, rows = Console(), json.loads(options.json.read_text()) if options.json.exists() else {}
    if not options.write:
        wanted = options.only or [name for name in NAMES if name not in rows]
        for place, name in enumerate(wanted):
            rows[name] = limited(name, options.memory, options.seconds)
            options.json.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
            said = rows[name].get("refused") or rows[name].get("stopped") or f"{rows[name]['error']:.1e}"
            console.print(
                f"{place + 1}/{len(wanted)} {name} {verdict(rows[name])}", said, soft_wrap=True, highlight=False
            )
    if options.json == RESULTS:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()

"""Networks of timm, unmodified: error, processor seconds, bytes and rounds of each, or the reason of refusal.

    python benchmarks/timm_table.py                    # all that the results lack; benchmarks/results/timm.json
    python benchmarks/timm_table.py --only tnt_s_legacy_patch16_224 swin_tiny_patch4_window7_224
    python benchmarks/timm_table.py --write            # docs/timm.md from the results

The smallest network of each of timm's modules (`pip install timm`), none of which this project had seen before it was
put on the list. Weights are random and of a size that keeps a signal's (`drawn`), batch norms have the statistics of a
random batch (of a channel that varies 20 times less than the others, which training would not leave so, a twentieth of
their variance). One image, as small as the network takes; the first of `SIZES` that it runs on. 'error' is the largest
difference over the largest magnitude of the plain result, and 'apart' how far the plain results of two images are from
each other by the same measure: a network that gives every image the same would show nothing. Each runs in a process of
its own, within 6 GB and 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from huggingface import text_of
from rich.console import Console
from torch import nn
from torchvision_table import above, estimate_statistics, reaches

import sectorch
from sectorch import Scheme
from sectorch.errors import SectorchError
from sectorch.ring.scheme import limit_bits_of

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "timm.json"
PAGE = HERE.parent / "docs" / "timm.md"
WRONG = 1e-3
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
    expected = model(x)
    row: dict[str, Any] = {
        "size": x.shape[-1], "parameters": sum(p.numel() for p in model.parameters()),
        "apart": float((both[0] - both[1]).abs().max() / both.abs().max()),
    }  # fmt: skip
    start = time.process_time()
    model(x)
    row["plain_s"] = time.process_time() - start
    limit = max(Scheme().activation_limit, above(reaches(model, x)))
    try:
        secured = sectorch.secure(model, Scheme(limit_bits=limit_bits_of(limit)), session=sectorch.Session())
        found = secured(x)
        start = time.process_time()
        with sectorch.profile() as spent:
            found = secured(x)
        row["secure_s"] = time.process_time() - start
    except SectorchError as error:
        return row | {"refused": " ".join(text_of(error).split())}
    row |= {
        "error": float((found - expected).abs().max() / expected.abs().max()), "bytes": spent.bytes,
        "rounds": spent.rounds, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip
    return row


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


def page(rows: dict[str, dict]) -> str:
    """The table as a page of the documentation."""
    counts = {
        kind: sum(verdict(row) == kind for row in rows.values()) for kind in ("right", "refused", "stopped", "differs")
    }
    said = (
        f"The smallest network of each of timm's modules, unmodified: of {len(rows)} {counts['right']} are right (a",
        f"relative error below {WRONG:g}), {counts['differs']} differ, {counts['refused']} are refused by a typed",
        f"error, and {counts['stopped']} were stopped at 6 GB or 20 minutes. Random weights that keep a signal's size,",
        "batch norms with the statistics of a random batch, one image of the size that is named. The error is the",
        "largest difference over the largest magnitude of the plain result; 'apart' is how far the plain results of",
        "two images are from each other. Processor seconds on one thread, of the second call, all three parties' work",
        "one after the other. Made by `python benchmarks/timm_table.py`.",
    )
    lines = [
        "# Networks of timm", "", *said, "",
        "| network | input | parameters, M | error | apart | plain s | secure s | MB | rounds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for name, row in sorted(rows.items()):
        if "error" not in row:
            reason = (row.get("refused") or row["stopped"]).replace("|", "/")
            lines.append(f"| {name} | {row.get('size', '')} | {reason} |  |  |  |  |  |  |")
            continue
        cells = (
            name, row["size"], f"{row['parameters'] / 1e6:.1f}", f"{row['error']:.0e}", f"{row['apart']:.2f}",
            f"{row['plain_s']:.2f}", f"{row['secure_s']:.1f}", f"{row['bytes'] / 1e6:.0f}", row["rounds"],
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these, measured anew")
    parser.add_argument("--one", metavar="NAME", help="one, in this process; prints its row as JSON")
    parser.add_argument("--write", action="store_true", help="write the page from the results and stop")
    parser.add_argument("--memory", type=float, default=6.0, help="limit in GiB for one network")
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

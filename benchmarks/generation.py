"""Generation of text with secret tokens: which models, and what a token costs.

    python benchmarks/generation.py families               # every causal model of huggingface_models.py, small
    python benchmarks/generation.py gpt2                    # GPT-2 small, 32 tokens after a prompt of 64
    python benchmarks/generation.py gpt2 --layers 2 --prompt 8 --tokens 4 --prepare 2
    python benchmarks/generation.py processes               # the same, S and A as processes of their own, over TLS
    python benchmarks/generation.py processes --network wan --round-trip 20    # over an emulated link

`families` generates 8 tokens of two texts, one padded, and holds them to the plain model's own `generate`. `gpt2` has
random weights of trained size; the steps of which material was prepared (--prepare) show what is left online.
Results: benchmarks/results/generation.json, which docs/generate.py shows in docs/huggingface.md and docs/your-model.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface import drawn, text_of
from huggingface_models import CASES, Case
from rich.console import Console

import sectorch
from sectorch.cli.command import add_link, chosen_network
from sectorch.errors import SectorchError
from sectorch.network import RemoteTexts, save_generation
from sectorch.testing.local_network import Stage

RESULTS = Path(__file__).parent / "results" / "generation.json"


def family(case: Case, tokens: int = 8) -> dict[str, Any]:
    """One row: whether all tokens are the plain model's."""
    torch.manual_seed(0)
    model = case.build()
    drawn(model, case)
    ids = torch.randint(3, 40, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, :2] = 0
    try:
        expected = model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    except Exception as error:
        return {"plain": text_of(error)}  # no model that generates
    start = time.process_time()
    try:
        run = sectorch.Generation(sectorch.secure(model, session=sectorch.Session()), tokens, eos_token_id=[])
        found = run(ids, mask)
    except SectorchError as error:
        return {"refused": text_of(error)}
    same = int((found == expected)[:, 7:].sum())
    row = {"same": same, "of": 2 * tokens, "seconds": time.process_time() - start}
    if run.secure.graphs.eager_reason is None:
        _, step = run.programs(ids, mask)
        row["bytes"] = sum(phase["bytes"] for name, phase in step.cost.items() if name != "setup")
    return row


def gpt2_model(layers: int) -> transformers.GPT2LMHeadModel:
    """GPT-2 small, or fewer layers of it, with random weights under which its greedy tokens differ from each other."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers)).eval().requires_grad_(False)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape) * (0.1 if "wte" in name or "wpe" in name else 2.0 / p.shape[0] ** 0.5))
    return model


def plain_text(
    model: transformers.GPT2LMHeadModel, prompt: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A prompt, what the plain model makes of it, and its seconds a token."""
    ids = torch.randint(0, model.config.vocab_size, (1, prompt))
    more = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    start = time.perf_counter()
    expected: Any = model.generate(ids, attention_mask=torch.ones_like(ids), **more)
    return ids, expected, (time.perf_counter() - start) / tokens


def gpt2(layers: int, prompt: int, tokens: int, ahead: int) -> dict[str, Any]:
    """Seconds of the clock for the first token and for later ones; the first step also traces and masks weights."""
    model = gpt2_model(layers)
    ids, expected, plain = plain_text(model, prompt, tokens)
    run = sectorch.Generation(sectorch.secure(model), tokens, eos_token_id=[])
    del model
    clock = [time.perf_counter()]
    see = lambda _: clock.append(time.perf_counter())
    found = run(ids, streamer=see)
    first, step = run.programs(ids)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    took = [b - a for a, b in itertools.pairwise(clock)]
    row: dict[str, Any] = {
        "layers": layers, "prompt": prompt, "tokens": tokens, "same": int((found == expected)[0, prompt:].sum()),
        "different_tokens": len(set(expected[0, prompt:].tolist())), "plain_s": plain, "first_s": took[0],
        "step_s": statistics.median(took[2:]), "peak_gb": peak, "prompt_cost": first.cost, "step_cost": step.cost,
    }  # fmt: skip
    if ahead:
        start = time.perf_counter()
        row["ahead_mb"] = run.preprocess(ids, steps=ahead) / 1e6
        row["ahead_s"] = time.perf_counter() - start
        clock[:] = [time.perf_counter()]
        run(ids, streamer=see)
        took = [b - a for a, b in itertools.pairwise(clock)]
        row |= {"prompt_online_s": took[0], "step_online_s": statistics.median(took[1 : 1 + ahead])}
        row["peak_ahead_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return row


def processes(layers: int, prompt: int, tokens: int, ahead: int, network: str | sectorch.Link) -> dict[str, Any]:
    """The same as three processes: seconds of the clock at Q, and resident memory of each party.

    The link is emulated, unless it is "lan".
    """
    scheme = sectorch.Scheme(network=network)
    link = None if network == "lan" else scheme.link
    model = gpt2_model(layers)
    ids, expected, plain = plain_text(model, prompt, tokens)
    write = lambda path: save_generation(model, [(1, prompt)], tokens, path, masked=False, eos_token_id=[])
    row: dict[str, Any] = {"layers": layers, "prompt": prompt, "tokens": tokens, "plain_s": plain}
    row["link"] = str(network)
    row["different_tokens"] = len(set(expected[0, prompt:].tolist()))
    start = time.perf_counter()
    with Stage({"chat": write}, link) as stage, stage.connect("alice") as connection:
        row["start_s"] = time.perf_counter() - start
        texts = RemoteTexts(connection.model("chat", scheme))
        for name in ("", "ahead_") if ahead else ("",):
            if name:
                start = time.perf_counter()
                texts.prepare(ids, steps=ahead)
                row["ahead_s"] = time.perf_counter() - start
            clock = [time.perf_counter()]
            with sectorch.profile() as spent:
                found = texts(ids, streamer=lambda _, clock=clock: clock.append(time.perf_counter()))
            took = [b - a for a, b in itertools.pairwise(clock)]
            steps = took[1 : 1 + ahead] if name else took[2:]
            row |= {f"{name}first_s": took[0], f"{name}step_s": statistics.median(steps), f"{name}bytes": spent.bytes}
            row[f"{name}same"] = int((found == expected)[0, prompt:].sum())
        pids = {"Q": "self", **{name: process.pid for name, process in stage.processes.items()}}
        for name, pid in pids.items():
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            row[f"{name}_peak_gb"] = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e6
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("families", "gpt2", "processes"))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these families")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prepare", type=int, default=0, help="how many steps of a second text are prepared")
    parser.add_argument("--json", type=Path, default=RESULTS)
    add_link(parser)
    options = parser.parse_args()
    network = chosen_network(options)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    console, rows = Console(), json.loads(options.json.read_text()) if options.json.exists() else {}
    if options.what != "families":
        sizes = options.layers, options.prompt, options.tokens, options.prepare
        row = rows[options.what] = gpt2(*sizes) if options.what == "gpt2" else processes(*sizes, network)
        console.print_json(json.dumps(row))
    else:
        causal = [name for name, c in CASES.items() if c.kind == "decoder" and "public" not in name]
        for name in options.only or [name for name in causal if name not in rows.get("families", {})]:
            row = rows.setdefault("families", {})[name] = family(CASES[name])
            console.print(f"{name:32}", row, soft_wrap=True, highlight=False)
            options.json.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    options.json.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

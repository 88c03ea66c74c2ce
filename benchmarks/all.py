"""Every benchmark at a small size, one after the other, with one results file. `make bench-all` runs it.

    python benchmarks/all.py                         # all; results in runs/benchmarks-all/results.json
    python benchmarks/all.py --only garbled capc     # those whose name begins so
    python benchmarks/all.py --list                  # names and commands
    python benchmarks/all.py --again                 # measure anew what is in the results already

Each runs in a process of its own, as the command that is printed: take it, and a larger size, for a figure that counts.
results.json holds for each its command, exit status, seconds and figures (what it printed, if it writes no JSON);
OUT/NAME/ holds what it wrote and printed.
Started again, it goes on with what is missing, failed, or has another command. The exit status is 0 if all succeeded.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent

_PRIVHFL = "--clients 2 --seeds 0 --queries 20 --test-samples 100 --work {work}/runs --json {work}/figures.json"
_CAPRIDE = "--seeds 0 --rounds 2 --out {work}"
_CAPC = "--json {work}/figures.json"
_PAPER = "--data digits --seeds 1 --counts 10 --out {work}"
_SECSV = "--json {work}/figures.json"

BENCHMARKS: dict[str, str] = {
    "models": "models.py --nets lenet vgg7 --batches 1 8 --repeats 3 --json {work}/figures.json",
    "models-paper-relu": "models.py --nets lenet --batches 1 --repeats 3 --relu privhfl --json {work}/figures.json",
    "against": "against.py . --what relu lenet:1 --repeats 3 --json {work}/figures.json",
    "ordinary": "ordinary.py resnet18 --size 64",
    "torchvision": "torchvision_table.py --one resnet18",
    "support": "support.py --only squeezenet1_1 fcos_resnet50_fpn XLMModel --json {work}/figures.json",
    "huggingface": "huggingface.py --only BertModel GPT2LMHeadModel CLIPTextModel --json {work}/figures.json",
    "processes": "processes.py --only mlp LSTM BertModel --json {work}/figures.json",
    "training": "training.py --model cnn --seeds 1 --epochs 1 --steps 3 --secure",
    "finetune": "finetune.py --layers 1 --length 8 --steps 1",
    "regression": "regression.py --rows 500 --columns 10 --json {work}/figures.json",
    "join": "join.py --rows 2000 --repeats 1 --json {work}/figures.json",
    "evaluation": "evaluation.py --rows 500 --repeats 1 --json {work}/figures.json",
    "tables": "tables.py --rows 500 --repeats 1 --json {work}/figures.json",
    "boosting": "boosting.py --rows 300 --columns 4 --trees 1 --ways vertical --json {work}/figures.json",
    "trees": "trees.py forest --trees 5 --depth 3 --rows 50 --repeats 1 --json {work}/figures.json",
    "tree-kinds": "trees.py kinds --rows 8 --json {work}/figures.json",
    "generation": "generation.py gpt2 --layers 1 --prompt 4 --tokens 3 --prepare 1 --json {work}/figures.json",
    "generation-apart": "generation.py processes --layers 1 --prompt 4 --tokens 3 --json {work}/figures.json",
    "timm": "timm_table.py --only test_resnet --json {work}/figures.json",
    "packages": "packages.py sparsemax --install --environment {work}/environment --out {work}/figures.json",
    "first-call": "first_call.py mlp --json {work}/figures.json",
    "real-size": "real_size.py vit-s --json {work}/figures.json",
    "headline": "headline.py lenet vgg7 --repeats 1 --json {work}/figures.json",
    "ranges": "ranges.py lenet --repeats 3 --json {work}/figures.json",
    "layers": "layers.py bert-base --json {work}/figures.json",
    "layer-rounds": "layer_rounds.py --tokens 4 --repeats 1",
    "domains": "domains.py --points 200 --sizes 1 768 --spreads 3 --json {work}/figures.json",
    "gpu": "gpu.py lenet --device cpu --repeats 1 --json {work}/figures.json",
    "products": "products.py",
    "streams": "streams.py --repeats 20 --json {work}/figures.json",
    "network": "network.py --nets lenet --batches 1 --repeats 3 --json {work}/figures.json",
    "network-floor": "floor.py --repeats 5",
    "network-many": "at_once.py --nets lenet cryptonets --queries 4 --clients 2",
    "network-serve": "serve.py --clients 1 2 --cores 2 --seconds 2 --warm 1 --json {work}/figures.json",
    "network-growth": "operating.py growth --queries 20",
    "network-memory": "operating.py memory --net lenet --clients 2",
    "network-core": "operating.py core --clients 2 --each 1",
    "network-large": "operating.py large --megabytes 2",
    "network-soak": "soak.py --queries 20 --json {work}/figures.json",
    "decoys": "decoys.py --cost lenet --repeats 1",
    "dealing": "dealing.py --nets lenet --counts 2 --repeats 3 --json {work}/figures.json",
    "ckks-linear": "ckks.py linear --repeats 1 --json {work}/figures.json",
    "ckks-cryptonets": "ckks.py cryptonets --repeats 1 --json {work}/figures.json",
    "ckks-cnn": "ckks.py cnn --repeats 1 --json {work}/figures.json",
    "ckks-matrices": "ckks.py matrices --repeats 1 --json {work}/figures.json",
    "garbled": "garbled.py --queries 100 --parties 5 --repeat 3 --json {work}/figures.json",
    "capc-steps": f"capc.py steps --repeat 1 {_CAPC}",
    "capc-labels": f"capc.py labels --parties 3 {_CAPC}",
    "capc-frequencies": f"capc.py frequencies --draws 500 {_CAPC}",
    "capc-gains": f"capc.py gains --counts 20 --seeds 1 {_CAPC}",
    **{f"capc-{figure}": f"capc_paper.py {figure} {_PAPER}" for figure in ("fig2", "fig3", "fig4", "fig9", "fig11")},
    "capride-gains": f"capride.py gains {_CAPRIDE} --samples 64 --methods local head",
    "capride-sensitivity": f"capride.py sensitivity {_CAPRIDE} --samples 64 --methods head",
    "capc-planner": f"capc_planner.py --data digits --seeds 1 --out {{work}} {_CAPC}",
    "capc-public-gains": f"capc_public.py gains --counts 20 --seeds 1 {_CAPC}",
    "capc-public-cost": f"capc_public.py cost --counts 4 --seeds 1 {_CAPC}",
    "perturbation-private": "perturbation_private.py --seeds 1 --rounds 2 --batches 4 --json {work}/figures.json",
    "capride-attack": "capride_meter.py attack --seeds 1 --out {work}",
    "capride-depths": "capride.py depths --out {work}",
    "perturbation-cost": "perturbation.py --table cost --nets mlp3 cnn --clients 2 --repeats 3 --out {work}",
    "perturbation-table5": "perturbation.py --table 5 --nets mlp3 --clients 2 --repeats 3 --out {work}",
    "perturbation-gradient": "perturbation.py --table gradient --out {work}",
    **{f"perturbation-table{n}": f"perturbation.py --table {n} --rounds 2 --out {{work}}" for n in "1234"},
    "perturbation-figure3": "perturbation.py --table figure3 --repeats 1 --out {work}",
    "perturbation-gamma": "perturbation.py --table gamma --out {work}",
    "perturbation-figure4": "perturbation.py --table figure4 --rounds 2 --repeats 1 --out {work}",
    **{
        f"privhfl-{what}": f"privhfl.py {what} {_PRIVHFL}"
        for what in (
            *("gains", "equal", "table1", "table5", "table6", "fig6", "fig7", "fig10", "fig11ab", "fig11c", "fig12"),
            *("fig13", "fig14", "fig15", "fig16", "noise"),
        )
    },
    **{
        f"privhfl-{what}": f"privhfl.py {what} --nets vgg7 {_PRIVHFL}"
        for what in ("table2", "table3", "fig8", "memory")
    },
    "privhfl-table4": f"privhfl.py table4 --nets cryptonets {_PRIVHFL}",
    **{
        f"secsv-{model}": f"secsv.py compare {model} --sample 2 --tests 100 {_SECSV}"
        for model in ("logistic", "logistic-2", "dnn", "cnn", "rnn")
    },
    "secsv-table2": f"secsv.py table2 --models logistic --tests 100 --hesv-limit 30 {_SECSV}",
    "secsv-table3": f"secsv.py table3 --models logistic --tests 100 --seeds 1 {_SECSV}",
    "secsv-table4": f"secsv.py table4 {_SECSV}",
    "secsv-intervals": f"secsv.py intervals --tests 200 {_SECSV}",
    "secsv-figure8": f"secsv.py figure8 --tests 100 {_SECSV}",
}
"""Name -> the script and its arguments; `{work}` is the benchmark's own folder."""


def figures(work: Path) -> dict[str, object]:
    """The JSON files that a benchmark wrote into its folder, by name; lines of JSON become a list."""
    found: dict[str, object] = {}
    for path in sorted(work.glob("*.json")):
        text = path.read_text(encoding="utf-8")
        try:
            found[path.stem] = json.loads(text)
        except json.JSONDecodeError:
            found[path.stem] = [json.loads(line) for line in text.splitlines() if line.strip()]
    return found


def run(command: str, work: Path, limit: float) -> dict:
    """One benchmark in a process group of its own: its command, exit status, seconds, and figures or printed lines.

    What it prints goes to work/output.txt. Past the limit, or at Ctrl-C, the whole group ends.
    """
    work.mkdir(parents=True, exist_ok=True)
    for old in work.glob("*.json"):
        old.unlink()  # some scripts append
    script, *arguments = shlex.split(command.format(work=shlex.quote(str(work))))
    start = time.monotonic()
    with open(work / "output.txt", "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = f"stopped after {limit:g} s"
    found: dict = {"command": command, "status": status, "seconds": round(time.monotonic() - start, 1)}
    found["figures"] = figures(work)
    if not found["figures"]:
        found["printed"] = (work / "output.txt").read_text(encoding="utf-8").splitlines()
    return found


def read(path: Path) -> dict[str, dict]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write(path: Path, results: dict[str, dict]) -> None:
    """Whole or not at all: an interrupted run leaves the file of the benchmark before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def said(status: int | str) -> str:
    return {0: "done"}.get(status, f"failed ({status})" if isinstance(status, int) else status)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="benchmarks whose name begins so")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks-all"))
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for one benchmark (%(default).0f)")
    parser.add_argument("--list", action="store_true", help="print names and commands and stop")
    parser.add_argument("--again", action="store_true", help="measure anew what succeeded before")
    options = parser.parse_args()
    console = Console()
    chosen = {name: command for name, command in BENCHMARKS.items() if name.startswith(tuple(options.only))}
    if not chosen:
        print(f"error: no benchmark begins with {' or '.join(options.only)}; --list shows them", file=sys.stderr)
        return 2
    if options.list:
        for name, command in chosen.items():
            print(f"{name:22} python benchmarks/{command}")
        return 0

    path = options.out / "results.json"
    results = read(path)
    for number, (name, command) in enumerate(chosen.items(), 1):
        before = results.get(name, {})
        there = before.get("status") == 0 and before.get("command") == command and not options.again
        if not there:
            try:
                with console.status(f"{number} of {len(chosen)}: {name}"):
                    results[name] = run(command, (options.out / name).resolve(), options.limit)
            except KeyboardInterrupt:
                print(f"stopped in {name}; the same command goes on there", file=sys.stderr)
                return 130
            write(path, results)
        note = "there already" if there else said(results[name]["status"])
        console.print(
            f"{number:3} of {len(chosen)}  {name:22} {results[name]['seconds']:8.1f} s  {note}", highlight=False
        )

    failed = [name for name in chosen if results[name]["status"] != 0]
    shown = Table(title=f"{len(chosen) - len(failed)} of {len(chosen)} benchmarks succeeded")
    for column in ("benchmark", "status", "look at"):
        shown.add_column(column, overflow="fold")
    for name in failed:
        shown.add_row(name, said(results[name]["status"]), str(options.out / name / "output.txt"))
    console.print(shown if failed else f"all {len(chosen)} benchmarks succeeded", highlight=False)
    console.print(f"results: {path}", highlight=False)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

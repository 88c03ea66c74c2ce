"""Three processes over TLS on loopback against all parties in one process, in one run.

    python benchmarks/network.py                              # LeNet on digits and VGG-7, batches 1 and 32
    python benchmarks/network.py --nets lenet --threads 2     # torch threads of each process
    python benchmarks/network.py --profile                    # where the querying process's seconds go
    python benchmarks/network.py --nets resnet50 --batches 1 --network wan --repeats 3    # an emulated link

S and A are processes of their own, Q is this one. Local and remote calls alternate, so that a machine whose speed
drifts favours neither; the medians are printed. While one side runs, the other's processes wait. The local run has the
better of one thread and all; `online, of both` is online / (ahead + online). Labels and bytes are compared each time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import sectorch
from sectorch.cli.command import add_link, chosen_network
from sectorch.testing.local_network import Stage, example


def digits(batch: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """LeNet trained on the handwritten digits, and test images."""
    from sklearn.datasets import load_digits

    from sectorch.nn.models import ZOO

    torch.manual_seed(0)
    model, data = ZOO["lenet"][0](), load_digits()
    images = F.interpolate(torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, size=28)
    labels = torch.tensor(data.target)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for chosen in torch.randint(0, 1500, (60, 64)):
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    return model.eval(), images[1500 : 1500 + max(2, batch)]


def timed(work) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def photographs(batch: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """ResNet-50 with random weights, and random images."""
    from torchvision.models import resnet50

    torch.manual_seed(0)
    return resnet50().eval(), torch.randn(max(2, batch), 3, 224, 224)


def compare(
    net: str, batches: list[int], repeats: int, threads: int, profile: bool, network: str | sectorch.Link
) -> list[dict]:
    """One net in one stage. The link between the processes is emulated, unless it is "lan"."""
    own = {"lenet": digits, "resnet50": photographs}
    model, images = own[net](max(batches)) if net in own else example(net, max(batches))
    scheme = sectorch.Scheme(network=network)
    link = None if network == "lan" else scheme.link
    everything = torch.get_num_threads()
    local, rows = sectorch.secure(model, scheme, session=sectorch.Session()), []
    with Stage({net: (model, images)}, link, threads) as stage, stage.connect("alice") as connection, torch.no_grad():
        for batch in batches:
            x, remote = images[:batch], connection.model(net, scheme)
            plain = model(x).argmax(1)
            remote(x), local(x)
            whole: dict = {"remote": [], **{n: [] for n in {1, everything}}}
            for _ in range(repeats):
                for n in {1, everything}:
                    torch.set_num_threads(n)
                    with sectorch.profile() as here:
                        took, y = timed(lambda: local(x))
                    whole[n].append(took)
                torch.set_num_threads(threads)
                with sectorch.profile() as there:
                    took, z = timed(lambda: remote(x))
                whole["remote"].append(took)
                agree(y, z, (here.bytes, here.online_bytes) == (there.bytes, there.online_bytes))
            ahead = [timed(lambda: remote.prepare(tuple(x.shape)))[0] for _ in range(repeats + 2)]
            online = []
            for _ in range(repeats + 2):
                with sectorch.profile() as there:
                    took, z = timed(lambda: remote(x))
                online.append(took)
                agree(y, z, (0, here.online_bytes) == (there.offline_bytes, there.online_bytes))
            if profile:
                show(lambda: remote(x))
            remote.close()
            medians = {k: statistics.median(v) for k, v in {**whole, "ahead": ahead, "online": online}.items()}
            # One process is faster with one thread or with all, as the net and the batch have it.
            threads_local = min({1, everything}, key=lambda n: medians[n])
            medians["local"] = medians[threads_local]
            rows.append(
                {
                    "net": net,
                    "batch": batch,
                    **{str(k): v for k, v in medians.items()},
                    "ratio": medians["remote"] / medians["local"],
                    "online_share": medians["online"] / (medians["ahead"] + medians["online"]),
                    "bytes": here.bytes,
                    "rounds": here.rounds,
                    "same_labels_as_plain": int((y.argmax(1) == plain).sum()),
                    "threads_each": threads,
                    "threads_local": threads_local,
                }
            )
            torch.set_num_threads(everything)
    return rows


def agree(here: torch.Tensor, there: torch.Tensor, bytes_agree: bool) -> None:
    if not torch.equal(here.argmax(1), there.argmax(1)):
        raise SystemExit("the labels differ")
    if not bytes_agree:
        raise SystemExit("the bytes differ")


def show(work) -> None:
    import cProfile
    import pstats

    with cProfile.Profile() as profiler:
        for _ in range(5):
            work()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=["lenet", "vgg7"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each of the three processes")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", help="write the figures to this file")
    add_link(parser)
    options = parser.parse_args()
    rows, network = [], chosen_network(options)
    for net in options.nets:
        rows += compare(net, options.batches, options.repeats, options.threads, options.profile, network)
    table = Table(title=f"Three processes with TLS ({network}) against one process")
    for column in ("net", "batch", "local s", "remote s", "ratio", "ahead s", "online s", "online, of both", "MB"):
        table.add_column(column, justify="left" if column == "net" else "right")
    for row in rows:
        table.add_row(
            row["net"], str(row["batch"]), f"{row['local']:.4f}", f"{row['remote']:.4f}", f"{row['ratio']:.2f}",
            f"{row['ahead']:.4f}", f"{row['online']:.4f}", f"{row['online_share']:.2f}", f"{row['bytes'] / 1e6:.2f}",
        )  # fmt: skip
    Console(width=110).print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()

"""Private inference in CrypTen, for benchmarks/peers.py, which runs this in an environment of its own.

    python benchmarks/peers_crypten.py NET FOLDER CALLS

FOLDER has the weights, the input and the plain result. Prints a line of JSON: the seconds of each call, the bytes that
both parties sent and the rounds of the last one, and its largest error.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from pathlib import Path

import torch

crypten = importlib.import_module("crypten")
multiprocess = importlib.import_module("crypten.mpc.context").run_multiprocess


def made(name: str, folder: Path) -> torch.nn.Module:
    """The net, by the same code as sectorch's, with the same weights."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "sectorch" / "nn"))
    zoo = importlib.import_module("models").ZOO
    model = zoo[name][0]() if name in zoo else getattr(importlib.import_module("torchvision.models"), name)()
    model.load_state_dict(torch.load(folder / "weights.pt"))
    return model.eval()


@multiprocess(world_size=2)
def infer(name: str, where: str, calls: int) -> str:
    """One of the two parties: the first has the model, the second the input."""
    torch.set_num_threads(1)
    folder = Path(where)
    communicator = crypten.communicator.get()
    importlib.import_module("crypten.config").cfg.communicator.verbose = True  # it counts bytes then
    x, plain = torch.load(folder / "input.pt"), torch.load(folder / "plain.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = crypten.nn.from_pytorch(made(name, folder), torch.zeros_like(x))
    model.encrypt(src=0)
    model.eval()
    seconds, sent, rounds, error = [], 0, 0, 0.0
    with crypten.no_grad():
        for _ in range(calls):
            communicator.reset_communication_stats()
            began = time.perf_counter()
            result = model(crypten.cryptensor(x, src=1)).get_plain_text()
            seconds.append(time.perf_counter() - began)
            sent, rounds = communicator.comm_bytes, communicator.comm_rounds
            error = float((result - plain).abs().max())
    return json.dumps({"seconds": seconds, "bytes": sent, "rounds": rounds, "error": error})


if __name__ == "__main__":
    parties = [json.loads(said) for said in infer(sys.argv[1], sys.argv[2], int(sys.argv[3]))]
    print(json.dumps({**parties[0], "bytes": sum(party["bytes"] for party in parties)}))

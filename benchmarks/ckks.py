"""CKKSTensor against TenSEAL's own `ckks_tensor.mm`, CryptoNets, an FHE-friendly CNN, and encrypted matrix products.

    python benchmarks/ckks.py linear        # 64 -> 32 on an encrypted batch of 4096, N = 8192
    python benchmarks/ckks.py cryptonets    # 28x28 digits, batch 2048 (PrivHFL, Table 4: HE-Transformer 17.6 s)
    python benchmarks/ckks.py cnn           # five layers on 32x32 digits, a batch of the slot count
    python benchmarks/ckks.py zeros         # fresh encryptions of zero, ours and SEAL's, N = 4096 and three primes
    python benchmarks/ckks.py matrices      # Matrix Squaring and Matrix Reducing, SecSV's Table 4 shapes

Each command prints a table; --json FILE appends its row.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from collections.abc import Callable

import torch
from torch import nn

from sectorch import ckks
from sectorch.ckks.scheme import ciphertext
from sectorch.ckks.scheme.encryption import encrypt_fresh
from sectorch.ckks.scheme.seal import load_seal_object


def best(f: Callable, repeats: int) -> float:
    """Seconds of the fastest of some runs: other processes only ever add to it."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        f()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def linear(repeats: int) -> dict:
    """One linear layer 64 -> 32 on a batch of 4096; both results decrypted and compared with plain torch."""
    import tenseal

    torch.manual_seed(0)
    x, layer = torch.randn(4096, 64, dtype=torch.float64), nn.Linear(64, 32).double()
    keys = ckks.keygen(depth=1, degree=8192, scale_bits=40, integer_bits=10)
    small = ckks.keygen(depth=1, degree=8192, scale_bits=30)
    context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=[50, 40, 54], n_threads=2)
    context.global_scale = 2.0**40
    theirs = tenseal.ckks_tensor(context, tenseal.plain_tensor(x.unsqueeze(1).numpy()), batch=True)
    weight = tenseal.plain_tensor(layer.weight.detach().t().contiguous().numpy())
    with torch.no_grad():
        expected = layer(x)
        tenseal_seconds = best(lambda: theirs.mm(weight), max(1, repeats // 3))
        result = torch.tensor(theirs.mm(weight).decrypt().tolist()).squeeze(1) + layer.bias
        row = {"tenseal_s": tenseal_seconds, "tenseal_error": float((result - expected).abs().max())}
        for name, each in (("2^40", keys), ("2^30", small)):
            e = ckks.encrypt(x, each)
            y = layer(e).smallest_form().cipher
            context = each.public.context
            row[f"layer_s {name}"] = best(lambda e=e: layer(e), repeats)
            row[f"with_rescale_s {name}"] = ours = best(lambda e=e: layer(e).smallest_form(), repeats)
            row[f"to_seal_s {name}"] = best(lambda y=y, c=context: [c.write(one, y.scale) for one in y.data], repeats)
            row[f"error {name}"] = float((layer(e).decrypt(each.secret) - expected).abs().max())
            row[f"apart {name}"] = float((layer(e).decrypt(each.secret) - result).abs().max())
            row[f"ratio, rescale pending {name}"] = tenseal_seconds / row[f"layer_s {name}"]
            row[f"ratio, with rescale {name}"] = tenseal_seconds / ours
            row[f"ratio, with rescale and SEAL's form {name}"] = tenseal_seconds / (ours + row[f"to_seal_s {name}"])
    return row


def digits(size: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """scikit-learn's digits resized; (training images, labels, test images, labels), the test set repeated to
    `count`.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    images = torch.nn.functional.interpolate(images, (size, size), mode="bilinear", align_corners=False)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1397], order[1397:]
    picked = test[torch.arange(count) % len(test)]
    return images[train], labels[train], images[picked], labels[picked]


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> nn.Module:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # batches of 64 small images: more threads only wait for each other
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(labels)).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(images[part]), labels[part]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
    torch.set_num_threads(threads)
    return model.eval()


def inference(model: nn.Module, x: torch.Tensor, labels: torch.Tensor, keys: ckks.Keys) -> dict:
    """Q encrypts, A evaluates, Q decrypts; all three timed."""
    start = time.perf_counter()
    e = ckks.encrypt(x, keys, bound=None)
    encrypted = time.perf_counter()
    with torch.no_grad():
        y = model(e).smallest_form()
    evaluated = time.perf_counter()
    logits = y.decrypt(keys.secret)
    end = time.perf_counter()
    with torch.no_grad():
        expected = model(x)
    return {
        "keys": str(keys.parameters),
        "batch": len(x),
        "encrypt_s": encrypted - start,
        "evaluate_s": evaluated - encrypted,
        "decrypt_s": end - evaluated,
        "total_s": end - start,
        "ciphertexts_GB": e.ciphertext_bytes / 1e9,
        "labels_as_plain": float((logits.argmax(1) == expected.argmax(1)).double().mean()),
        "accuracy": float((logits.argmax(1) == labels).double().mean()),
        "plain_accuracy": float((expected.argmax(1) == labels).double().mean()),
        "error": float((logits - expected).abs().max()),
        "largest_logit": float(expected.abs().max()),
        "peak_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def cryptonets(repeats: int) -> dict:
    """CryptoNets with squares, batch 2048."""
    from sectorch.nn.models import cryptonets as build

    images, labels, x, y = digits(28, 2048)
    torch.manual_seed(0)
    model = train(build(), images, labels, 15)
    keys = ckks.keygen(depth=5, slots=2048)
    rows = [inference(model, x, y, keys) for _ in range(repeats)]
    return min(rows, key=lambda row: row["total_s"])


def cnn(_: int) -> dict:
    """Three convolutions and two linear layers with squares on 32x32 digits, a batch that fills the slots."""
    from sectorch.nn.models import Square

    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 3, 5, 2, 2),
        Square(),
        nn.Conv2d(3, 6, 3, 2, 1),
        Square(),
        nn.Conv2d(6, 8, 3, 2, 1),
        Square(),
    ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 32), Square(), nn.Linear(32, 10))
    parameters = ckks.choose(9, scale_bits=30, degree=16384)
    images, labels, x, y = digits(32, parameters.slots)
    model = train(model, images, labels, 40)
    report = ckks.explain(model, x, parameters)
    if report.peak_bytes > ciphertext.limit():
        raise ckks.MemoryBudgetError(f"the run would take {report.peak_bytes / 2**30:.1f} GiB of ciphertexts")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    row = inference(model, x, y, ckks.keygen(9, scale_bits=30, degree=16384))
    return {"estimated_ciphertexts_GB": report.peak_bytes / 1e9, "process_before_GB": before} | row


def matrices(repeats: int) -> dict:
    """Reducing against Squaring, time a column of B, each at its largest batch m that fits the slots (SecSV, 7.2).

    The two are timed in turn, so that what else the machine does meets both; the fastest of each counts.
    """
    row: dict = {}
    slots = 2048
    # The matrices of SecSV's classifiers: logistic, CNN, DNN and RNN sizes (its Table 4), N = 4096.
    for d_out, d_in in ((4, 300), (10, 784), (2, 48), (64, 256), (10, 64), (32, 64), (2, 32)):
        runs, counts, best_of = {}, {}, {}
        for name, kind in (("reducing", ckks.MatrixReducing), ("squaring", ckks.MatrixSquaring)):
            m = slots // d_out if name == "reducing" else min(d_in, int(slots**0.5))
            plan = kind(d_out, d_in, m, slots)
            keys = ckks.keygen(1, degree=4096, rotations=plan.rotations())
            a, b = torch.randn(d_out, d_in, dtype=torch.float64), torch.randn(d_in, m, dtype=torch.float64)
            left = plan.prepare_left(a, keys, None)
            for how, right in (("c2c", plan.prepare_right(b, keys, None)), ("c2p", plan.prepare_right(b, None))):
                result = plan.multiply(left, right)
                error = float((result.decrypt(keys.secret) - a @ b).abs().max())
                if error > 0.05:
                    raise ValueError(f"{name} {d_out}x{d_in} is off by {error}")
                runs[name, how] = lambda p=plan, x=left, y=right: p.multiply(x, y)
                counts[name, how] = m, result.counts
        for _ in range(5 * repeats):
            for key, run in runs.items():
                best_of[key] = min(best_of.get(key, math.inf), best(run, 1) / counts[key][0])
        for (name, how), spent in best_of.items():
            m, c = counts[name, how]
            row[f"{d_out}x{d_in} {name} {how}"] = f"m={m} {c.products}*, {c.rotations} rot, {1e6 * spent:.1f} us/sample"
        for how in ("c2c", "c2p"):
            row[f"{d_out}x{d_in} speed-up {how}"] = best_of["squaring", how] / best_of["reducing", how]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(BENCHMARKS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="torch threads")
    parser.add_argument("--json", help="append the row to this file")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    row = BENCHMARKS[options.what](options.repeats)
    for name, value in row.items():
        print(f"{name:44} {value:.6g}" if isinstance(value, float) else f"{name:44} {value}")
    if options.json:
        with open(options.json, "a") as file:
            file.write(json.dumps({"what": options.what} | row) + "\n")


def zeros(repeats: int) -> dict:
    """A fresh encryption of zero as residues, on one thread: ours, and SEAL's with the way out of its memory."""
    from tenseal import sealapi

    torch.set_num_threads(1)
    keys = ckks.keygen(2, degree=4096)
    context, blob = keys.public.context, keys.public.blobs()["public"]
    encryptor = sealapi.Encryptor(context.seal, load_seal_object(sealapi.PublicKey(), context, blob, "public key"))

    def theirs() -> None:
        for _ in range(64):
            ciphertext = sealapi.Ciphertext(context.seal)
            encryptor.encrypt_zero(ciphertext)
            context.read(ciphertext)

    encrypt_fresh(keys.public, 64, 3)  # compiled
    row = {
        "ours, ms": best(lambda: encrypt_fresh(keys.public, 64, 3), 5 * repeats) / 64e-3,
        "seal's, ms": best(theirs, repeats) / 64e-3,
    }
    return {**row, "ratio": row["seal's, ms"] / row["ours, ms"]}


BENCHMARKS: dict[str, Callable[[int], dict]] = {
    "linear": linear,
    "cryptonets": cryptonets,
    "cnn": cnn,
    "matrices": matrices,
    "zeros": zeros,
}

if __name__ == "__main__":
    main()

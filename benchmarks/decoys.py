"""How often an S that falsifies messages is found out, whether an honest one is accused, and what a decoy costs.

python benchmarks/decoys.py --falsified 1000      words of messages, in parties apart; three of ten calls are decoys
python benchmarks/decoys.py --honest 10000        decoys, of which none may accuse S
python benchmarks/decoys.py --cost lenet vgg7     seconds of a call, of a signed call, and of A's check of a decoy
python benchmarks/decoys.py --looks 5000          a classifier over sizes, bytes and times of calls and decoys
python benchmarks/decoys.py --served 10000        the same over TLS: several clients, sessions that end, prepared calls
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

import sectorch
from sectorch.config import Scheme
from sectorch.decoys import DecoyCheck, Decoys, decoy_call
from sectorch.session import Session

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

torch.manual_seed(0)
NETS = {
    "linear": (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), torch.randn(2, 3)),
    "pictures": (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)).eval(),
        torch.randn(2, 1, 6, 6),
    ),
}


def interval(k: int, n: int) -> tuple[float, float]:
    """Wilson's interval of a fraction, 95 %."""
    z, p = 1.96, k / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def falsified(count: int, rate: float) -> None:
    """S falsifies every call: one bit, bit 63 or several words, of each message in turn, also of the first and last."""
    from server_cheats import flip, messages_of_S, run

    drawn = random.Random(0)
    for name, (model, x) in NETS.items():
        for network in ("lan", "wan"):
            scheme, coin = Scheme(accountable=True, network=network), Decoys(rate)
            headers = messages_of_S(sectorch.secure(model, scheme, session=Session()), x)
            changes, n = [], count // (2 * len(NETS))
            for i in range(n):
                at = i % len(headers)
                word = drawn.randrange(1 << 20)
                kind = i // len(headers) % 4
                words = [(word, drawn.randrange(64)), (word, 63), (0, 0)][kind : kind + 1] if kind < 3 else []
                change = {at: words} if words else {m: [(word, 63)] for m in range(at, len(headers))}
                changes.append(flip(change))
            calls = [(x, coin.flip()) for _ in range(n)]
            results = run(model, calls, changes, scheme, goes_on=True)
            for party, value in results.items():
                if isinstance(value, BaseException):
                    raise RuntimeError(f"{party} ended with {value!r}")
            found = [isinstance(y, sectorch.errors.FalseServerError) for y in results["A"][0]]
            decoys = [decoy for _, decoy in calls]
            wrong = sum(f != d for f, d in zip(found, decoys, strict=True))
            low, high = interval(sum(found), n)
            labels = sorted({header.label for header in headers})
            print(
                f"{name} {network}: {n} falsified calls, {len(headers)} messages ({', '.join(labels)}); {sum(decoys)} "
                f"decoys, {sum(found)} found ({sum(found) / n:.3f}, 95 % {low:.3f} to {high:.3f}; rate {rate}); "
                f"decoys missed or calls accused: {wrong}",
                flush=True,
            )


def honest(count: int) -> None:
    for name, (model, x) in NETS.items():
        for network in ("lan", "wan"):
            secure = sectorch.secure(model, Scheme(accountable=True, network=network), session=Session())
            n, start = count // (2 * len(NETS)), time.process_time()
            for _ in range(n):
                with decoy_call():
                    secure(x)
            checked = secure.session.statements.checked
            print(
                f"{name} {network}: {n} decoys, {checked} found right, {time.process_time() - start:.0f} s", flush=True
            )


def cost(names: list[str], repeats: int) -> None:
    from dealing import built

    for name in names:
        model, x = built(name)
        plain = sectorch.secure(model, session=Session())
        signed = sectorch.secure(model, Scheme(accountable=True), session=Session())
        own, checks = DecoyCheck.note, []

        def note(self: DecoyCheck, own=own, checks=checks) -> None:
            start = time.process_time()
            own(self)
            checks.append(time.process_time() - start)

        signed.session.statements.check = note
        seconds: dict[str, list[float]] = {"plain": [], "signed": [], "decoy": []}
        for kind, secure in (("plain", plain), ("signed", signed), ("decoy", signed)):
            with decoy_call(kind == "decoy"):
                secure(x)
        for _ in range(repeats):
            for kind, secure in (("plain", plain), ("signed", signed), ("decoy", signed)):
                start = time.process_time()
                with decoy_call(kind == "decoy"):
                    secure(x)
                seconds[kind].append(time.process_time() - start)
        with sectorch.profile() as of_plain:
            plain(x)
        with sectorch.profile() as of_signed:
            signed(x)
        p, s, c = median(seconds["plain"]), median(seconds["signed"]), median(checks[1:])
        print(
            f"{name}: a call {p:.4f} s of all parties, signed {s:.4f} ({s / p:.2f} times), A's check {c:.4f} s ("
            f"{c / p:.2f} calls); bytes {of_signed.bytes - of_plain.bytes} more than {of_plain.bytes}",
            flush=True,
        )


def looks(count: int) -> None:
    """A classifier over what S has seen of each call until its statement: bytes and times of all of its messages."""
    from server_cheats import run

    model, x = NETS["linear"]
    coin = Decoys(0.5)
    calls = [(x, False)] * 20 + [(x, coin.flip()) for _ in range(count)]
    clock: list = []

    def begin(session: Session) -> None:
        if hasattr(session.runtime, "falsify"):
            session.runtime.clock = clock

    run(model, calls, begin=begin)
    seen: dict[int, list] = {}
    for call, size, sent, at in clock:
        seen.setdefault(call, []).append((size, sent, at))
    of_calls = [lines for call, lines in sorted(seen.items()) if len(lines) > 20][-count:]
    labels = [decoy for _, decoy in calls[-count:]]
    shapes = {tuple((size, sent) for size, sent, _ in lines if not sent) for lines in of_calls}
    ends = [lines[-1][2] for lines in of_calls]
    rows = []
    for number, lines in enumerate(of_calls):
        times = [at for *_, at in lines]
        before = times[0] - ends[number - 1] if number else 0.0
        rows.append(
            [
                before,
                times[-1] - times[0],
                *(b - a for a, b in itertools.pairwise(times)),
                sum(size for size, *_ in lines),
            ]
        )
    judge(rows, labels, f"{len(shapes)} sequence of received bytes")


def judge(rows: list[list[float]], labels: list[bool], more: str) -> None:
    """How well two kinds of classifiers tell decoys, cross-validated. The first feature is the pause before a call."""
    import numpy as np
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    features, decoys = np.array(rows), np.array(labels)
    count = len(decoys)
    kinds = (make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)), HistGradientBoostingClassifier())
    for kind, first in ((kind, first) for kind in kinds for first in (0, 1)):
        guesses = cross_val_predict(kind, features[:, first:], decoys, cv=5, method="predict_proba")[:, 1]
        right = int(((guesses > 0.5) == decoys).sum())
        low, high = interval(right, count)
        print(
            f"{type(kind).__name__}, {'with' if first == 0 else 'without'} the pause before the call: {count} calls, "
            f"{decoys.sum()} decoys, {more}; right {right / count:.3f} (95 % {low:.3f} to {high:.3f}; always the "
            f"larger class {max(decoys.mean(), 1 - decoys.mean()):.3f}), AUC {roc_auc_score(decoys, guesses):.3f}",
            flush=True,
        )


def served(count: int) -> None:
    """The same over TLS: two clients ask at once, sessions end and others are opened, and some calls are prepared.

    The first thinks before each question, the second asks files of five rows in pieces of two. S also sees how many
    calls run when one begins, and the pauses, sizes and neighbours of the last three calls. Two more clients ask
    without signatures, in calls that S may batch; they are not judged.
    """
    import tempfile
    import threading

    from sectorch.choreography.run.party import PartyRuntime
    from sectorch.decoys import _Call
    from sectorch.network import Pins, Server, answer, connect
    from sectorch.network.identity.authority import make_authority
    from sectorch.network.identity.identity import Credentials, fingerprint_of, new_identity
    from sectorch.testing.local_network import enrol

    model, x = NETS["linear"]
    rows = torch.randn(5, 3)
    clock: dict[tuple[bytes, int], list[tuple[int, int, float]]] = {}
    running: set[tuple[bytes, int]] = set()
    beside: dict[tuple[bytes, int], int] = {}
    coins: dict[tuple[bytes, int], bool] = {}
    transfer, note = PartyRuntime.transfer, _Call.note

    def timed(self, line, value):
        moved = transfer(self, line, value)
        if self.me.role == "S" and line.path not in ("seed", "attest"):
            seen = clock.setdefault((self.session, line.call), [])
            if not seen:
                beside[self.session, line.call] = len(running)
                running.add((self.session, line.call))
            seen.append((line.bytes, int(line.src == self.me), time.perf_counter()))
        return moved

    def noting(self, message, digests, decoy, seed):
        coins[self._session.runtime.session, self._call] = decoy
        running.discard((self._session.runtime.session, self._call))
        return note(self, message, digests, decoy, seed)

    PartyRuntime.transfer, _Call.note = timed, noting
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_authority(folder)
        clients = ["alice", "bob", "carol", "dave"]
        made = {"server": enrol(folder, "server", hosts=("localhost",))}
        made |= {name: enrol(folder, name) for name in ["hospital-b", *clients]}
        own = made["server"]
        made["server"] = Credentials(own.certificate, own.key, own.authority, new_identity())
        pins = Pins(folder / "pins")
        for who, credentials in made.items():
            pins.pin(who, fingerprint_of(credentials.identity))
        server = Server("localhost:0", made["server"])
        party = answer(f"localhost:{server.port}", made["hospital-b"], model, x, pins=pins, audit_server=True)
        ended, failed = threading.Event(), []

        def ask(who: str, calls: int) -> None:
            try:
                with connect(f"localhost:{server.port}", made[who], pins=pins) as connection:
                    signed = calls > 0
                    scheme = Scheme(accountable=True) if signed else Scheme()
                    done = 0
                    while done < calls or (not signed and not ended.is_set()):
                        remote = connection.model("hospital-b", scheme, decoys=0.5 if signed else 0.0)
                        for number in range(50):
                            if number % 25 == 24 and signed:
                                remote.prepare(x, 2)
                            if who == "alice":
                                time.sleep(random.expovariate(50))
                            for piece in (rows[:2], rows[2:4], rows[4:]) if who == "bob" else (x,):
                                remote(piece)
                            time.sleep(0.0 if signed else 0.2)
                        done += 50 * (3 if who == "bob" else 1) + remote.decoys_asked
                        remote.close()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=ask, args=(who, count // 2 if who in clients[:2] else 0)) for who in clients]
        for thread in threads:
            thread.start()
        for thread in threads[:2]:
            thread.join()
        ended.set()
        for thread in threads[2:]:
            thread.join()
        party.close()
        server.stop()
    if failed:
        raise failed[0]
    features, labels, shapes, ends, past = [], [], set(), {}, {}
    usual = sorted(len(clock[key]) for key in coins)[len(coins) // 2]
    for key in sorted(coins, key=lambda key: clock[key][-1][2]):
        lines = clock[key]
        times = [at for *_, at in lines]
        before = times[0] - ends.get(key[0], times[0])
        ends[key[0]] = times[-1]
        shapes.add(tuple((size, sent) for size, sent, _ in lines))
        gaps = [b - a for a, b in itertools.pairwise(times)]
        if len(lines) != usual:
            continue
        now = [before, sum(size for size, *_ in lines), beside[key]]
        of_session = past.setdefault(key[0], [0.0] * 9)
        features.append([*now, *of_session[-9:], times[-1] - times[0], *gaps])
        of_session += now
        labels.append(coins[key])
    judge(features, labels, f"{len({session for session, _ in coins})} sessions, {len(shapes)} sequences of messages")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--falsified", type=int, default=0)
    p.add_argument("--rate", type=float, default=0.3)
    p.add_argument("--honest", type=int, default=0)
    p.add_argument("--looks", type=int, default=0)
    p.add_argument("--served", type=int, default=0)
    p.add_argument("--cost", nargs="*", default=[])
    p.add_argument("--repeats", type=int, default=7)
    options = p.parse_args()
    torch.set_num_threads(1)
    if options.falsified:
        falsified(options.falsified, options.rate)
    if options.honest:
        honest(options.honest)
    if options.looks:
        looks(options.looks)
    if options.served:
        served(options.served)
    if options.cost:
        cost(options.cost, options.repeats)


if __name__ == "__main__":
    main()

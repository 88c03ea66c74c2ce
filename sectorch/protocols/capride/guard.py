"""The guard: how many numbers about a model have been released, and whether a combination of them shows a sample.

Every release to P_k is a linear equation on the logits of P_l's model on P_k's samples. The n M logits of a version of
the model enter by n (M - 1) differences (a shift of a sample's logits enters no release), and as many equations as that
determine them. So P_l counts, per receiver and version of its model, and refuses while the numbers are still fewer.

Two things are checked, at the two places that can check them:

- P_l sees shapes only. It counts (`Guard.release`), and refuses aggregates over too few samples.
- P_k knows its own directions. Before they leave it checks that no combination of them isolates a sample
  (`leverages`); directions whose weight lies in one sample pass the count and fail here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .directions import Directions
from .errors import DisaggregationError
from .settings import LEAST_SAMPLES, Settings


class Guard:
    """What the model of one party, `peer`, has released so far. Counts are never taken back.

    Args:
        released: what was counted before, as `released` was then; that of other parties is left out.
        before_release: called after a release is counted and before anything is computed for it.
    """

    def __init__(
        self,
        peer: str,
        released: Mapping[str, list[int]] | None = None,
        before_release: Callable[[], None] = lambda: None,
    ):
        self.peer, self.before_release = peer, before_release
        self.released = {k: list(v) for k, v in (released or {}).items() if k.startswith(f"{peer}>")}
        """By receiver and version: numbers that were released, and the unknowns of the smallest batch they are of."""

    def release(self, receiver: str, version: str, numbers: int, samples: int, classes: int, how: Settings) -> None:
        """P_l's count, before it computes anything.

        Args:
            version: names the weights of the peer's model; a model that did not change keeps its count.
            samples: that the aggregates are over.

        Raises:
            DisaggregationError: too few samples, or too many numbers, or none. What was refused is not counted.
        """
        if numbers < 1 or samples < 1:
            raise DisaggregationError(f"{self.peer} releases no {numbers} numbers over {samples} samples of {receiver}")
        key = f"{self.peer}>{receiver}" if how.across else f"{self.peer}>{receiver}@{version}"
        unknowns = samples * (classes - 1)
        count, least = self.released.get(key, [0, unknowns])
        count, least = count + numbers, min(least, unknowns)
        if how.margin is not None:
            if samples < LEAST_SAMPLES:
                raise DisaggregationError(
                    f"{self.peer} releases no aggregate over {samples} samples of {receiver}; at least "
                    f"{LEAST_SAMPLES} are needed"
                )
            if count > how.margin * least:
                raise DisaggregationError(
                    f"{self.peer} refuses {numbers} more numbers to {receiver}: {count - numbers} of the "
                    f"{how.margin * least:.0f} that may be known of {least} unknowns ({samples} samples, {classes} "
                    f"classes, margin {how.margin}) are released already for this version of its model; ask for fewer "
                    f"(head_rank, directions) or over more samples"
                )
        self.released[key] = [count, least]
        self.before_release()


def leverages(directions: Directions) -> torch.Tensor:
    """How well each sample's logits are determined by the aggregates together: float64 [n], from 0 to 1.

    With P the projection on the span of the directions, the largest eigenvalue of a sample's block P_jj is 1 if and
    only if some combination of the released numbers depends on that sample alone. The mean over samples and classes is
    the share of released numbers in n M.
    """
    q = directions.weights.flatten(1)
    values, vectors = torch.linalg.eigh(q @ q.t())
    kept = values > 1e-10 * values[-1]
    rows = (vectors[:, kept] / values[kept].sqrt()).t() @ q
    block = rows.view(rows.shape[0], *directions.weights.shape[1:])
    return torch.linalg.eigvalsh(torch.einsum("rnm,rnk->nmk", block, block))[:, -1].clamp(0, 1)


def isolated(directions: Directions, how: Settings) -> torch.Tensor:
    """The samples that some combination of the aggregates would show: bool [n]."""
    if how.margin is None:
        return torch.zeros(directions.weights.shape[1], dtype=torch.bool)
    return leverages(directions) > how.isolation


def check_spread(owner: str, directions: Directions, how: Settings) -> None:
    """P_k's check of its own directions, before they are encrypted.

    Raises:
        DisaggregationError: a combination of aggregates would show a single sample's logits.
    """
    if how.margin is None:
        return
    found = leverages(directions)
    worst = int(found.argmax())
    if float(found[worst]) > how.isolation:
        raise DisaggregationError(
            f"{owner}'s directions would isolate single samples: a combination of the aggregates depends by "
            f"{float(found[worst]):.3f} on one sample alone (limit {how.isolation}); use fewer directions (head_rank, "
            f"directions), more samples, or a higher temperature"
        )

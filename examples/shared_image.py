"""Secret-share a picture and look at what each party holds (PrivHFL, Figures 19 and 20).

    python examples/shared_image.py [PICTURE.png]

Draws four pictures side by side: a mixup of two photographs, which Q wants to ask about and which anybody could
recognise; A's share; S's share; and the reconstruction, which only Q gets. A share's pixels are the highest eight bits
of its ring elements. All parties run in this process: it shows what they would hold, and protects nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from PIL import Image
from sklearn.datasets import load_sample_image

import sectorch
from sectorch.data.selection import mixup

SIDE, GAP, LAMBDA = 256, 8, 0.7


def photograph(name: str) -> torch.Tensor:
    """The middle of a photograph that comes with scikit-learn: [3, 256, 256] in [0, 1]."""
    pixels = torch.from_numpy(load_sample_image(name).copy()).permute(2, 0, 1)
    top, left = ((size - SIDE) // 2 for size in pixels.shape[1:])
    return pixels[:, top : top + SIDE, left : left + SIDE].double() / 255


def high_bits(share: torch.Tensor) -> torch.Tensor:
    """Ring elements as pixels: the highest eight of 64 bits, in [0, 1]."""
    return (share >> 56).bitwise_and(255).double() / 255


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Pearson's, over all pixels."""
    return float(torch.corrcoef(torch.stack((first.flatten(), second.flatten())))[0, 1])


def main(path: Path) -> None:
    query = mixup(photograph("china.jpg"), photograph("flower.jpg"), LAMBDA)

    session = sectorch.Session()
    (A,), S = session.answering, session.S
    shared = sectorch.share(query, session=session)
    net = session.net(A)  # each party looks at what it holds itself
    at_A, at_S = net.read(shared.shares.A, A), net.read(shared.shares.S, S)
    revealed = shared.reveal()

    panels = {
        f"mixup, {LAMBDA}": query,
        "A's share": high_bits(at_A),
        "S's share": high_bits(at_S),
        "reconstruction": revealed,
    }
    picture = torch.ones(3, SIDE, 4 * SIDE + 3 * GAP)
    for i, (title, pixels) in enumerate(panels.items()):
        picture[:, :, i * (SIDE + GAP) : i * (SIDE + GAP) + SIDE] = pixels
        counts = (pixels.clamp(0, 1) * 255).round().long().flatten().bincount(minlength=256)
        print(
            f"{title:15} correlation with the mixup {correlation(query, pixels):+.4f}; of 256 grey levels the rarest "
            f"comes {int(counts.min())} times, the commonest {int(counts.max())}"
        )

    # Encoding rounds to the nearest multiple of 2^-20, and sharing is exact.
    torch.testing.assert_close(revealed, query, rtol=0, atol=2.0**-21)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy()).save(path)
    print(f"written: {path}; largest error of the reconstruction {float((revealed - query).abs().max()):.1e}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/shared_image.png"))

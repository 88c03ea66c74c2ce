"""Data sets that lie on disk as folders of picture files."""

from __future__ import annotations

import csv
from pathlib import Path

import torch

from ..extras import needed
from .errors import DatasetMissingError
from .reading import ROOT_VARIABLE, Dataset, Split
from .seeds import generator

TINY_FOLDER = "tiny-imagenet-200"
HAM_SIDE = 64
"""Pixels a side that HAM10000's pictures (450 x 600) are resized to."""


def tiny_imagenet(root: Path) -> Dataset:
    """3 x 64 x 64, 200 classes, from the unpacked archive."""
    folder = root if (root / "wnids.txt").is_file() else root / TINY_FOLDER
    annotations = folder / "val" / "val_annotations.txt"
    missing = [p for p in (folder / "wnids.txt", folder / "train", annotations) if not p.exists()]
    if missing:
        raise DatasetMissingError(
            f"tiny-imagenet is not on disk: looked for {', '.join(map(str, missing))}; unpack "
            f"http://cs231n.stanford.edu/tiny-imagenet-200.zip in {root}, or name another folder (root=, --data-root, "
            f"or ${ROOT_VARIABLE})"
        )
    names = (folder / "wnids.txt").read_text().split()
    number = {name: i for i, name in enumerate(names)}
    train = [(p, number[name]) for name in names for p in sorted((folder / "train" / name / "images").iterdir())]
    rows = [line.split("\t") for line in annotations.read_text().splitlines() if line]
    test = [(folder / "val" / "images" / row[0], number[row[1]]) for row in rows]
    return Dataset("tiny-imagenet", _pictures(train), _pictures(test), len(names))


def _pictures(files: list[tuple[Path, int]]) -> Split:
    """Picture files as one tensor, grey ones as three equal channels."""
    import numpy as np

    with needed("a folder of pictures", "pillow", DatasetMissingError):
        from PIL import Image

    pixels = torch.empty((len(files), 3, 64, 64), dtype=torch.uint8)
    for i, (path, _) in enumerate(files):
        with Image.open(path) as image:
            pixels[i] = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    return Split(pixels, torch.tensor([label for _, label in files], dtype=torch.int64))


def ham10000(root: Path) -> Dataset:
    """A random 85 % to 15 % split (section 4.1), the same each time."""
    folder = next(
        (f for f in (root, root / "ham10000", root / "HAM10000") if (f / "HAM10000_metadata.csv").is_file()), None
    )
    if folder is None:
        raise DatasetMissingError(
            f"ham10000 is not on disk: looked for HAM10000_metadata.csv in {root} and {root / 'ham10000'}; get it from "
            f"https://doi.org/10.7910/DVN/DBW86T, or name another folder (--data-root)"
        )
    import numpy as np

    with needed("ham10000", "pillow", DatasetMissingError):
        from PIL import Image

    with (folder / "HAM10000_metadata.csv").open(newline="") as file:
        rows = [(row["image_id"], row["dx"]) for row in csv.DictReader(file)]
    files = {path.stem: path for path in folder.rglob("*.jpg")}
    missing = [image for image, _ in rows if image not in files]
    if missing:
        raise DatasetMissingError(
            f"ham10000: {len(missing)} pictures of the table are missing in {folder}, as {missing[0]}.jpg"
        )
    names = sorted({kind for _, kind in rows})
    pixels = torch.empty((len(rows), 3, HAM_SIDE, HAM_SIDE), dtype=torch.uint8)
    for i, (image, _) in enumerate(rows):
        with Image.open(files[image]) as picture:
            small = picture.convert("RGB").resize((HAM_SIDE, HAM_SIDE))
            pixels[i] = torch.from_numpy(np.array(small)).permute(2, 0, 1)
    labels = torch.tensor([names.index(kind) for _, kind in rows])
    order = torch.randperm(len(rows), generator=generator(0, "ham10000"))
    cut = round(0.85 * len(rows))
    train, test = (Split(pixels[part], labels[part]) for part in (order[:cut], order[cut:]))
    return Dataset("ham10000", train, test, len(names))

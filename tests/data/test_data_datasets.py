"""Loaders: the bundled digits, a picture folder, torchvision's classes, and what is said when a data set is missing."""

from __future__ import annotations

import hashlib
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.datasets
from PIL import Image
from scipy.io import savemat

from sectorch.data import DataError, DatasetMissingError, load
from sectorch.data.datasets import DATASETS, IMAGES, ROOT_VARIABLE
from sectorch.data.seeds import derive, generator


def test_digits():
    data = load("digits")
    assert (len(data.train), len(data.test), data.classes, data.shape) == (1347, 450, 10, (1, 8, 8))
    images, labels = data.train.take(torch.tensor([3, 5]))
    assert images.dtype == torch.float32 and images.shape == (2, 1, 8, 8) and labels.shape == (2,)
    everything, _ = data.test.take()
    assert float(everything.min()) == 0 and float(everything.max()) == 1


@pytest.mark.parametrize(
    ("name", "looked", "way_out"),
    [
        ("cifar10", "cifar-10-batches-py", "CIFAR10.*download=True"),
        ("svhn", "", "SVHN.*download=True"),
        ("svhn-extra", "", "split='train'.*split='extra'.*split='test'.*download=True"),
        ("tiny-imagenet", "tiny-imagenet-200/wnids.txt", "tiny-imagenet-200.zip"),
    ],
)
def test_missing_says_where_it_looked_and_how_to_get_it(tmp_path: Path, name, looked, way_out):
    with pytest.raises(DatasetMissingError, match=way_out) as caught:
        load(name, tmp_path)
    assert str(tmp_path / looked) in str(caught.value) and ROOT_VARIABLE in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize(
    "name, package, extra",
    [("digits", "scikit-learn", "demo"), ("cifar10", "torchvision", "privhfl"), ("svhn", "torchvision", "privhfl")],
)
def test_a_missing_package_is_all_that_is_said(tmp_path: Path, monkeypatch, name, package, extra):
    for module in ("sklearn", "sklearn.datasets", "torchvision", "torchvision.datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DatasetMissingError) as caught:
        load(name, tmp_path)
    way = f"pip install 'sectorch[{extra}]'"
    assert str(caught.value) == f"{name} needs {package}, which is not installed: {way}"


def test_the_root_may_come_from_the_environment(tmp_path: Path, monkeypatch):
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    with pytest.raises(DatasetMissingError, match=str(tmp_path)):
        load("tiny-imagenet")


def test_unknown():
    with pytest.raises(DataError, match="there is no data set 'moon'; there are digits, mnist"):
        load("moon")


@pytest.mark.parametrize("inside", [True, False])
def test_tiny_imagenet_folder(tmp_path: Path, inside: bool):
    folder = tmp_path / "tiny-imagenet-200" if inside else tmp_path
    for name in ("n01", "n02"):
        (folder / "train" / name / "images").mkdir(parents=True)
        for i in range(3):
            grey = Image.fromarray(np.full((64, 64), 10 * i, dtype=np.uint8))
            grey.save(folder / "train" / name / "images" / f"{name}_{i}.png")
    (folder / "wnids.txt").write_text("n02\nn01\n")
    (folder / "val" / "images").mkdir(parents=True)
    red = np.zeros((64, 64, 3), dtype=np.uint8)
    red[..., 0] = 255
    Image.fromarray(red).save(folder / "val" / "images" / "val_0.png")
    (folder / "val" / "val_annotations.txt").write_text("val_0.png\tn01\t0\t0\t63\t63\n")
    data = load("tiny-imagenet", tmp_path)
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1] and data.classes == 2 and data.shape == (3, 64, 64)
    assert data.train.samples[2].unique().tolist() == [20]
    image, label = data.test.take()
    assert label.tolist() == [1] and image[0].amax((1, 2)).tolist() == [1, 0, 0]


def test_torchvision_layouts(tmp_path: Path, monkeypatch):
    """What torchvision's classes give is put in our layout: CIFAR10 has its channels last, SVHN first."""
    import torchvision.datasets as sets

    class Cifar:
        def __init__(self, root, train):
            self.data = np.zeros((4 if train else 2, 32, 32, 3), dtype=np.uint8)
            self.data[..., 2] = 255
            self.targets = [1] * len(self.data)

    class Svhn:
        def __init__(self, root, split):
            self.data, self.labels = np.zeros((3, 3, 32, 32), dtype=np.uint8), np.array([0, 9, 1])

    monkeypatch.setattr(sets, "CIFAR10", Cifar)
    monkeypatch.setattr(sets, "SVHN", Svhn)
    cifar, svhn = load("cifar10", tmp_path), load("svhn", tmp_path)
    assert cifar.shape == svhn.shape == (3, 32, 32) and (len(cifar.train), len(cifar.test)) == (4, 2)
    assert cifar.train.take()[0][0].amax((1, 2)).tolist() == [0, 0, 1]
    assert svhn.test.labels.tolist() == [0, 9, 1] and svhn.test.labels.dtype == torch.int64


def _mat(path: Path, first: int, count: int) -> str:
    """SVHN's own file: X [32, 32, 3, N] uint8 and y [N, 1], in which 10 is the digit 0."""
    pixels = np.zeros((32, 32, 3, count), dtype=np.uint8)
    pixels[0, 1, 2] = first + np.arange(count)
    labels = (first + np.arange(count)) % 10
    savemat(path, {"X": pixels, "y": np.where(labels == 0, 10, labels)[:, None].astype(np.uint8)})
    return hashlib.md5(path.read_bytes()).hexdigest()


def test_svhn_files_with_and_without_the_extra_set(tmp_path: Path, monkeypatch):
    import torchvision.datasets as sets

    sizes, known = {"train": (0, 12), "extra": (12, 30), "test": (42, 5)}, {}
    for split, (first, count) in sizes.items():
        url, name, _ = sets.SVHN.split_list[split]
        known[split] = [url, name, _mat(tmp_path / name, first, count)]
    monkeypatch.setattr(sets.SVHN, "split_list", known)
    small, whole = load("svhn", tmp_path), load("svhn-extra", tmp_path)
    assert (len(small.train), len(small.test), small.shape) == (12, 5, (3, 32, 32))
    assert (len(whole.train), len(whole.test), whole.name) == (42, 5, "svhn-extra")
    assert whole.train.labels.tolist() == [i % 10 for i in range(42)] and whole.test.labels.tolist() == [2, 3, 4, 5, 6]
    assert (
        whole.train.samples[:, 2, 0, 1].tolist() == list(range(42)) and int(whole.train.samples.sum()) == 41 * 42 // 2
    )
    (tmp_path / known["extra"][1]).unlink()
    assert len(load("svhn", tmp_path).train) == 12
    with pytest.raises(DatasetMissingError, match="svhn-extra is not on disk"):
        load("svhn-extra", tmp_path)


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_idx_files(tmp_path: Path, name, folder):
    """MNIST's own format: four bytes of magic, big-endian sizes, and the bytes."""
    raw = tmp_path / folder / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 7), ("t10k", 3)):
        pixels = np.arange(count, dtype=np.uint8).repeat(28 * 28)
        head = b"".join(size.to_bytes(4, "big") for size in (0x803, count, 28, 28))
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
        head = b"".join(size.to_bytes(4, "big") for size in (0x801, count))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(head + bytes(range(count)))
    data = load(name, tmp_path)
    assert (len(data.train), len(data.test), data.classes, data.shape) == (7, 3, 10, (1, 28, 28))
    assert data.train.labels.tolist() == list(range(7)) == data.train.samples[:, 0, 27, 27].tolist()


def cifar_files(sets, folder: Path, monkeypatch, per_batch: int = 4) -> None:
    """A CIFAR archive, unpacked: pickled batches of rows of 3072 bytes, red first; with the digests of these files."""
    folder.mkdir()
    fine = sets is torchvision.datasets.CIFAR100

    def write(name: str, found: dict) -> str:
        (folder / name).write_bytes(pickle.dumps(found, protocol=2))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    for part, names in (("train_list", [n for n, _ in sets.train_list]), ("test_list", [n for n, _ in sets.test_list])):
        digests = []
        for number, name in enumerate(names):
            rows = np.zeros((per_batch, 3072), dtype=np.uint8)
            rows[:, :1024], rows[:, 1024 + 33] = 200, number + 1  # all red, and one green pixel at row 1, column 1
            labels = list(range(per_batch))
            more = {"fine_labels": labels, "coarse_labels": [0] * per_batch} if fine else {"labels": labels}
            files = [f"{i}.png" for i in range(per_batch)]
            digests.append([name, write(name, {"batch_label": name, "data": rows, "filenames": files, **more})])
        monkeypatch.setattr(sets, part, digests)
    classes = {sets.meta["key"]: [f"class {i}" for i in range(100 if fine else 10)]}
    monkeypatch.setattr(sets, "meta", {**sets.meta, "md5": write(sets.meta["filename"], classes)})


@pytest.mark.parametrize(
    ("name", "kind", "folder", "batches", "classes"),
    [
        ("cifar10", torchvision.datasets.CIFAR10, "cifar-10-batches-py", 5, 10),
        ("cifar100", torchvision.datasets.CIFAR100, "cifar-100-python", 1, 100),
    ],
)
def test_cifar_archives(tmp_path: Path, monkeypatch, name, kind, folder, batches, classes):
    """Files of the archives' own layout pass torchvision's check, which here expects their digests, and no others."""
    cifar_files(kind, tmp_path / folder, monkeypatch)
    data = load(name, tmp_path)
    assert (len(data.train), len(data.test), data.classes, data.shape) == (4 * batches, 4, classes, (3, 32, 32))
    assert data.train.labels.tolist() == [0, 1, 2, 3] * batches and data.train.labels.dtype == torch.int64
    assert data.train.samples[:, 0].unique().tolist() == [200] and int(data.train.samples[:, 2].max()) == 0
    assert data.train.samples[::4, 1, 1, 1].tolist() == list(range(1, batches + 1))
    assert float(data.test.take()[0].max()) == pytest.approx(200 / 255)
    spoilt = next((tmp_path / folder).glob("*test*"))
    spoilt.write_bytes(spoilt.read_bytes()[:-1] + b" ")
    with pytest.raises(DatasetMissingError, match=f"{name} is not on disk.*not found or corrupted"):
        load(name, tmp_path)


def picture(path: Path, size: tuple[int, int], middle: int) -> None:
    """Black at the left and right ends, grey between them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.zeros((size[1], size[0]), dtype=np.uint8)
    edge = (size[0] - size[1]) // 2
    pixels[:, edge : size[0] - edge] = middle
    Image.fromarray(pixels).save(path, quality=100)


@pytest.mark.parametrize("name", ["ham10000", "ldc"])
def test_ham10000_as_the_archive_has_it(tmp_path: Path, name):
    """LDC is HAM10000: a table of seven columns, and pictures in two folders."""
    kinds = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
    lines = ["lesion_id,image_id,dx,dx_type,age,sex,localization"]
    for i in range(20):
        lines.append(f"HAM_{i // 2:07},ISIC_{i:07},{kinds[i % 7]},histo,50.0,female,back")
        picture(tmp_path / f"HAM10000/HAM10000_images_part_{1 + i % 2}/ISIC_{i:07}.jpg", (60, 45), 10 * i)
    (tmp_path / "HAM10000" / "HAM10000_metadata.csv").write_text("\n".join(lines) + "\n")
    data = load(name, tmp_path)
    assert (len(data.train), len(data.test), data.classes, data.shape) == (17, 3, 7, (3, 64, 64))
    for part in (data.train, data.test):
        shades = (part.samples[:, 0, 32, 32].float() / 10).round().int()
        assert (shades % 7).tolist() == part.labels.tolist()


def test_aptos_as_the_archive_has_it(tmp_path: Path):
    """The middle of each picture is what is left of it, and a diagnosis is its label though some do not occur."""
    folder = tmp_path / "aptos2019-blindness-detection"
    codes = {f"{i:012x}": (0, 2, 4)[i % 3] for i in range(20)}
    for i, code in enumerate(codes):
        picture(folder / "train_images" / f"{code}.png", (90, 50), 10 + i)
    (folder / "train.csv").write_text("id_code,diagnosis\n" + "".join(f"{c},{d}\n" for c, d in codes.items()))
    (folder / "test.csv").write_text("id_code\nffff\n")
    data = load("aptos", tmp_path)
    assert (len(data.train), len(data.test), data.classes, data.shape) == (17, 3, 5, (3, 64, 64))
    assert int(data.train.samples.min()) >= 10, "no black end is left"
    for part in (data.train, data.test):
        assert part.labels.tolist() == [(0, 2, 4)[(int(x) - 10) % 3] for x in part.samples[:, 0, 32, 32]]
    (folder / "train.csv").write_text("id_code,diagnosis\n" + "".join(f"{c},7\n" for c in codes))
    with pytest.raises(DataError, match="a diagnosis is 0 to 4, got 7"):
        load("aptos", tmp_path)


def test_ubmd_as_the_archive_has_it(tmp_path: Path):
    """Numbers are standardised by the training rows, words have a column each; a tenth is for validation, unread."""
    folder = tmp_path / "bank-additional"
    folder.mkdir()
    lines = ['"age";"job";"duration";"pdays";"y"']
    for i in range(50):
        lines.append(f'{20 + i};"{("admin.", "blue-collar", "unknown")[i % 3]}";{i};999;"{("no", "yes")[i % 2]}"')
    (folder / "bank-additional-full.csv").write_text("\n".join(lines) + "\n")
    data = load("ubmd", tmp_path)
    assert (len(data.train), len(data.test), data.classes, data.shape) == (40, 5, 2, (6,))
    x, _ = data.train.take()
    assert torch.allclose(x[:, 0].mean(), torch.zeros(()), atol=1e-5) and torch.allclose(x[:, 0].std(), torch.ones(()))
    assert x[:, 1:4].sum(1).tolist() == [1.0] * 40 and x[:, 5].unique().tolist() == [0.0], "pdays is the same in all"
    both = torch.cat([x, data.test.take()[0]])
    ages = (both[:, 0] - both[:, 0].min()) / (both[:, 0].max() - both[:, 0].min())
    assert len(ages.unique()) == 45 and torch.equal(both[:, 0], both[:, 4]), "no row is in both splits"
    (folder / "bank-additional-full.csv").write_text("\n".join(lines).replace(";", ",") + "\n")
    with pytest.raises(DataError, match=r"lines of age;job;\.\.\.;y"):
        load("ubmd", tmp_path)
    with pytest.raises(DatasetMissingError, match=r"ubmd is not on disk: looked for bank-additional-full\.csv"):
        load("ubmd", tmp_path / "elsewhere")


def test_tables_are_no_images():
    assert set(DATASETS) - set(IMAGES) == {"breast-cancer", "ubmd", "bank", "agnews", "mirna"}
    cancer = load("breast-cancer", test_fraction=0.5)
    assert cancer.shape == (48,) and (len(cancer.train), len(cancer.test)) == (284, 285)
    with pytest.raises(DataError, match="between 0 and 1"):
        load("digits", test_fraction=1.0)


def test_seeds_are_apart_and_repeatable():
    assert derive(0, "a", 1) == derive(0, "a", 1) and 0 <= derive(0, "a") < 2**63
    assert len({derive(s, *p) for s in range(3) for p in ((), ("a",), ("b",), ("a", 1), ("a", 2))}) == 15
    assert torch.equal(torch.rand(3, generator=generator(1, "x")), torch.rand(3, generator=generator(1, "x")))

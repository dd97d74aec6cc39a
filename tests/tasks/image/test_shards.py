"""Shards: `longseq prepare task=image`, and training, evaluation and prediction from what it writes."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from longseq.tasks import ImageDataKeys, ImageDataModule
from longseq.tasks.commands import PrepareImages
from longseq.tasks.image.device import read_encoded
from longseq.tasks.image.files import FileSource, ShardLayout
from longseq.tasks.image.prepare import describe, prepare


def draw(path: Path, number: int, size: tuple[int, int] = (12, 10), mode: str = "RGB") -> None:
    """An image of noise; its brightness is that of its class, `number` % 2."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    pixels = np.random.default_rng(number).integers(0, 128, shape, np.uint8) + 120 * (number % 2)
    Image.fromarray(pixels.astype(np.uint8)).save(path, **({"quality": 95} if path.suffix == ".jpg" else {}))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the splits train and val of two classes, JPEG and PNG files."""
    root = tmp_path_factory.mktemp("images")
    for split, count in (("train", 24), ("val", 8)):
        for number in range(count):
            name = f"{number}.{'png' if number % 5 == 0 else 'jpg'}"
            draw(root / split / ("dark", "light")[number % 2] / name, number, (12 + number, 10))
    return root


def pack(root: Path, output: Path, **keys: Any) -> dict[str, Any]:
    return prepare(PrepareImages(input=str(root), output=str(output), processes=1, **keys))


def open_shards(root: Path, multi_label: bool = False) -> FileSource:
    """The training images."""
    keys = ImageDataKeys(name="x", source="shards", img_size=8, root=str(root), multi_label=multi_label)
    return ShardLayout(keys).open("train")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


@pytest.mark.slow
def test_training_from_kept_files_is_that_from_the_folder(images: Path, tmp_path: Path, command_here: Any) -> None:
    made = command_here(
        tmp_path, "prepare", "task=image", f"input={images}", "output=shards", "format=keep", "shard_bytes=8000"
    )
    assert made.returncode == 0, made.stderr
    assert "train 24 images in" in made.stdout
    assert "longseq train data=image_shards data.root=shards" in made.stdout
    assert len(list((tmp_path / "shards").glob("train-*.tar"))) > 2
    small = ("data.img_size=8", "data.num_workers=0", "trainer=cpu", "logger=none", "callbacks.worst=null")
    small += ("mixer=linear_attention", "model.embed_dim=16", "model.depth=1", "recipe.epochs=1", "recipe.batch_size=8")
    for data, root, run in (("image_folder", images, "one"), ("image_shards", tmp_path / "shards", "two")):
        done = command_here(tmp_path, "train", f"data={data}", f"data.root={root}", *small, f"output={run}")
        assert done.returncode == 0, done.stderr
    first, second = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    one, two = (json.loads((tmp_path / run / "metrics.json").read_text()) for run in ("one", "two"))
    assert one["test/loss"] == two["test/loss"]
    words = ("checkpoint=one/checkpoints/best.ckpt", "data.source=shards", "data.root=shards", "output=m.json")
    done = command_here(tmp_path, "evaluate", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "m.json").read_text())["test/loss"] == pytest.approx(one["test/loss"], rel=1e-6)


def test_samples_of_shards_are_those_of_the_folder_in_any_order(images: Path, tmp_path: Path) -> None:
    pack(images, tmp_path, format="keep", shard_bytes=4000)
    options = {"name": "images", "img_size": 8, "num_workers": 0}
    folder, shards = (
        ImageDataModule(ImageDataKeys(source=source, root=str(root), **options), batch_size=4, seed=3)
        for source, root in (("folder", images), ("shards", tmp_path))
    )
    for module in (folder, shards):
        module.setup()
    for one, two in zip(folder.train_dataloader(), shards.train_dataloader(), strict=True):
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1], two[1])
    assert shards.splits is not None
    jpeg, target = read_encoded(shards.splits.train, 1)  # for a GPU to decode
    assert jpeg.is_jpeg
    assert jpeg.data == Path(folder.splits.train.source.path(1)).read_bytes()  # type: ignore[union-attr]
    assert target == int(folder.splits.train.source.targets()[1])  # type: ignore[union-attr, index]


def test_images_are_scaled_down_and_never_up(tmp_path: Path) -> None:
    for number, (name, size) in enumerate(
        {"a/wide.png": (40, 20), "b/small.jpg": (9, 7), "a/grey.png": (20, 30)}.items()
    ):
        draw(tmp_path / "images" / name, number, size, "L" if "grey" in name else "RGB")
    (tmp_path / "images/b/broken.jpg").write_bytes(b"no image")
    manifest = pack(tmp_path / "images", tmp_path / "shards", size=10)
    assert "left out: 1 unreadable" in describe(manifest)
    assert "broken.jpg" in manifest["unreadable"][0]
    with tarfile.open(tmp_path / "shards/train-000000.tar") as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert [*files] == [f"{number:09d}.{ending}" for number in range(3) for ending in ("jpg", "cls")]
    assert [files[f"{number:09d}.cls"] for number in range(3)] == [b"0", b"0", b"1"]
    opened = [Image.open(io.BytesIO(files[f"{number:09d}.jpg"])) for number in range(3)]
    assert [(image.size, image.mode) for image in opened] == [((10, 15), "L"), ((20, 10), "RGB"), ((9, 7), "RGB")]
    assert files["000000002.jpg"] == (tmp_path / "images/b/small.jpg").read_bytes()
    source = open_shards(tmp_path / "shards")
    assert source.class_names == ["a", "b"]
    assert source.path(1).endswith("train-000000.tar/images/a/wide.png.jpg")
    assert source.read(1)[0].size == (20, 10)


def test_labels_of_a_table_stay(tmp_path: Path) -> None:
    rows = ["file_name,label"]
    for number in range(6):
        draw(tmp_path / f"{number}.jpg", number)
        rows.append(f"{number}.jpg,{'|'.join(['even', 'odd'][number % 2 :: 2] + ['big'] * (number > 3))}")
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    pack(tmp_path / "table.csv", tmp_path / "shards", format="keep", multi_label=True, label_delimiter="|")
    source = open_shards(tmp_path / "shards", multi_label=True)
    assert source.class_names == ["big", "even", "odd"]
    assert source.targets().tolist() == [[n > 3, n % 2 == 0, n % 2 == 1] for n in range(6)]
    with tarfile.open(tmp_path / "shards/train-000000.tar") as archive:
        assert json.load(archive.extractfile("000000005.json")) == {"labels": ["big", "odd"]}  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="was prepared with multi_label=true"):
        open_shards(tmp_path / "shards")


def test_a_preparation_is_whole_or_not_there(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, kept = tmp_path / "shards", {"format": "keep", "shard_bytes": 4000}
    with monkeypatch.context() as patch:
        patch.setattr(
            "longseq.tasks.image.prepare.json.dumps", lambda *_, **__: 1 / 0
        )  # an interruption before the end
        with pytest.raises(ZeroDivisionError):
            pack(images, shards, **kept)
    assert not list(tmp_path.iterdir())
    pack(images, shards, **kept)
    with pytest.raises(FileExistsError):
        pack(images, shards, **kept)

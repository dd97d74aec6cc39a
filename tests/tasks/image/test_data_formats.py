"""Images of every mode, depth, ending and orientation: the same picture gives the same pixels, and nothing is lost."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from image_data import image_data
from PIL import Image

from longseq.tasks.image.config import Augmentation, DataInfo
from longseq.tasks.image.decoding import decode
from longseq.tasks.image.predict import ImageFiles
from longseq.tasks.image.transforms import evaluation_transform, training_transform

GREY = np.arange(0, 256, 2, dtype=np.uint8).reshape(8, 16)
ALPHA = np.full_like(GREY, 200)


def info(in_chans=3, img_size=8):
    return DataInfo(["a", "b"], 2, img_size, in_chans, [0.5] * in_chans, [0.5] * in_chans, "bicubic", 1.0)


def write(path, image, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def wide(values):
    """Grey of 8 bits stored in 16."""
    return Image.fromarray(values.astype(np.uint16) * 257)


def write_grey(folder):
    """One grey picture in every form that keeps it."""
    folder.mkdir()
    eight, floats = Image.fromarray(GREY), Image.fromarray((GREY / 255).astype(np.float32))
    for name in ("png", "PNG", "tif", "TIFF", "bmp", "gif", "pgm", "jp2", "tga", "qoi"):
        image = eight.convert("RGB") if name == "qoi" else eight
        write(folder / f"eight.{name}", image)
    write(folder / "eight.webp", eight, lossless=True)
    write(folder / "palette.png", eight.convert("P"))
    write(folder / "alpha.png", Image.merge("LA", [eight, Image.fromarray(ALPHA)]))
    write(folder / "rgba.png", Image.merge("RGBA", [eight] * 3 + [Image.fromarray(ALPHA)]))
    write(folder / "transparent.png", eight.convert("P"), transparency=bytes(range(256)))
    for name in ("png", "tif", "pgm", "jp2"):
        write(folder / f"sixteen.{name}", wide(GREY))
    write(folder / "floats.tif", floats)
    write(folder / "floats.pfm", floats)
    return folder


@pytest.mark.parametrize("in_chans", [1, 3])
def test_one_picture_has_the_same_pixels_in_every_file(in_chans, tmp_path):
    files = sorted(write_grey(tmp_path / "files").iterdir())
    assert len(files) == 21
    expected = torch.from_numpy(GREY).expand(in_chans, 8, 16)[:, :, 4:12]
    predicting = ImageFiles(str(tmp_path / "files"), info(in_chans))
    assert predicting.paths == list(map(str, files))
    for index, file in enumerate(files):
        for transform in (evaluation_transform(info(in_chans)), training_transform(info(in_chans), Augmentation())):
            torch.testing.assert_close(transform(decode(file)), expected, msg=file.name)
        torch.testing.assert_close(predicting.batches[[index]].inputs[0], expected, msg=file.name)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (Image.fromarray(GREY.astype(np.int32)), "32-bit integers of unknown range"),
        (Image.fromarray(GREY.astype(np.float32)), "0..254, and must be in 0..1"),
        (Image.fromarray(GREY.astype(np.float32) - 3), "-3..251"),
        (Image.fromarray(np.full((8, 8), np.nan, np.float32)), "nan"),
    ],
)
def test_numbers_without_a_range_are_refused_by_name_and_not_clipped(image, message, tmp_path):
    path = write(tmp_path / "picture.tif", image)
    with pytest.raises(ValueError, match=message):
        decode(path)
    assert message in ImageFiles(str(path), info()).batches[[0]].failures[0].reason


@pytest.mark.parametrize("name", ["photo.jpg", "photo.png", "photo.tif", "photo.webp"])
def test_orientation_is_honoured_everywhere(name, tmp_path):
    upright = Image.fromarray(np.repeat(np.repeat(GREY, 4, 0), 4, 1))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: the top of the scene is at the left of the file
    options = {"quality": 100} if name != "photo.webp" else {"lossless": True}
    write(tmp_path / "train" / "a" / name, upright.transpose(Image.Transpose.ROTATE_90), exif=exif, **options)
    expected = evaluation_transform(info(1, 16))(upright).int()
    path = tmp_path / "train" / "a" / name
    shutil.copytree(tmp_path / "train" / "a", tmp_path / "train" / "b")
    for source in ("folder", "torch/image_folder"):
        options = {"img_size": 16, "in_chans": 1, "batch_size": 1, "num_workers": 0, "val_fraction": 0.5}
        shutil.copytree(tmp_path / "train", tmp_path / "val", dirs_exist_ok=True)
        module = image_data(name="t", source=source, root=str(tmp_path), **options)
        module.setup()
        for loader in (module.val_dataloader(), module.train_dataloader()):
            assert (next(iter(loader))[0][0].int() - expected).abs().max() <= 3, source
    assert (ImageFiles(str(path), info(1, 16)).batches[[0]].inputs[0].int() - expected).abs().max() <= 3


def write_mixed(root, *, val=True):
    """Two classes of 16-bit TIFF, WebP and PNG files among others."""
    for split in ("train", "val") if val else ("train",):
        for label, shade in (("dark", 40), ("light", 200)):
            for index in range(2):
                values = np.full((16, 16), shade + index, dtype=np.uint8)
                write(root / split / label / f"{index}.tif", wide(values))
                write(root / split / label / f"{index}.WEBP", Image.fromarray(values), lossless=True)
                write(root / split / label / f"{index}.png", Image.fromarray(values))
    (root / "train" / "dark" / "notes.txt").write_text("no image")
    (root / "train" / "dark" / "._0.png").write_bytes(b"of macOS")
    (root / "train" / "dark" / "README").write_text("no image")
    write(root / "train" / ".ipynb_checkpoints" / "0.png", Image.fromarray(GREY))
    return root


def open_folder(root, source="folder", **options):
    options = {"img_size": 8, "in_chans": 1, "batch_size": 4, "num_workers": 0} | options
    module = image_data(name="mixed", source=source, root=str(root), **options)
    module.setup()
    return module


@pytest.mark.parametrize("kind", ["folder", "torch/image_folder"])
def test_every_ending_is_trained_on(kind, tmp_path):
    module = open_folder(write_mixed(tmp_path / "images"), source=kind)
    assert module.info.class_names == ["dark", "light"]
    images, targets = (torch.cat(parts) for parts in zip(*module.train_dataloader(), strict=True))
    assert module.info.sizes["train"] == 12
    assert torch.equal((images[:, 0, 4, 4] > 100).long(), targets)

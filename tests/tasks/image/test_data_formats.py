"""Images of every mode, depth, ending and orientation: the same picture gives the same pixels, and nothing is lost."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import struct
import sys
import tarfile
import zlib
from itertools import product

import numpy as np
import pytest
import torch
from image_data import image_data
from PIL import Image, UnidentifiedImageError

from longseq.tasks import predict, train
from longseq.tasks.image import data
from longseq.tasks.image.augmentation import Augmentation
from longseq.tasks.image.data import ImageDataModule
from longseq.tasks.image.datasets import ImageFiles
from longseq.tasks.image.decoding import decode, first_line, image_endings, in_eight_bits
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.transforms import evaluation_transform, training_transform

GREY = np.arange(0, 256, 2, dtype=np.uint8).reshape(8, 16)
COLOUR = np.stack([GREY, GREY[::-1], np.roll(GREY, 3, axis=1)], axis=-1)
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


def tiff(parts, bits, order="<", **tags):
    """A TIFF file of arrays as they stand in it, one strip each, in forms that Pillow does not write.

    `tags` has further ones by their numbers, such as `t262=0`.
    """
    strips = [part.astype(part.dtype.newbyteorder(order)).tobytes() for part in parts]
    height, width = parts[0].shape[:2]
    starts = np.cumsum([8, *map(len, strips)])
    channels = parts[0].shape[2] if parts[0].ndim == 3 else len(parts)
    entries = {256: [width], 257: [height], 258: [bits] * channels, 259: [1], 262: [1], 273: starts[:-1].tolist()}
    entries |= {277: [channels], 278: [height], 279: [len(strip) for strip in strips]}
    entries |= {int(name[1:]): list(value) if isinstance(value, tuple) else [value] for name, value in tags.items()}
    content = {"<": b"II", ">": b"MM"}[order] + struct.pack(f"{order}HI", 42, starts[-1]) + b"".join(strips)
    behind = int(starts[-1]) + 2 + 12 * len(entries) + 4
    listed, further = struct.pack(f"{order}H", len(entries)), b""
    for tag, values in sorted(entries.items()):
        value = struct.pack(f"{order}{len(values)}I", *values)
        if len(values) > 1:
            value, further = struct.pack(f"{order}I", behind + len(further)), further + value
        listed += struct.pack(f"{order}HHI", tag, 4, len(values)) + value
    return content + listed + bytes(4) + further


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
    (folder / "big.tif").write_bytes(tiff([GREY.astype(np.uint16) * 257], 16, ">"))
    write(folder / "floats.tif", floats)
    write(folder / "floats.pfm", floats)
    return folder


@pytest.mark.parametrize("in_chans", [1, 3])
def test_one_picture_has_the_same_pixels_in_every_file(in_chans, tmp_path):
    files = sorted(write_grey(tmp_path / "files").iterdir())
    assert len(files) == 22
    expected = torch.from_numpy(GREY).expand(in_chans, 8, 16)[:, :, 4:12]
    predicting = ImageFiles(str(tmp_path / "files"), info(in_chans))
    assert len(predicting) == len(files)
    for index, file in enumerate(files):
        for transform in (evaluation_transform(info(in_chans)), training_transform(info(in_chans), Augmentation())):
            torch.testing.assert_close(transform(decode(file)), expected, msg=file.name)
        pixels, path = predicting[index]
        assert path == str(file)
        torch.testing.assert_close(pixels, expected, msg=file.name)


@pytest.mark.parametrize("mode", ["1", "CMYK", "PA", "La", "RGBa", "YCbCr", "LAB", "HSV", "RGBX"])
def test_rare_modes_are_taken(mode, tmp_path, recwarn):
    image = Image.new(mode, (8, 8))
    image.format = "PNG"
    for in_chans in (1, 3):
        assert evaluation_transform(info(in_chans))(in_eight_bits(image)).shape == (in_chans, 8, 8)
    assert not recwarn.list


def test_sixteen_bits_in_which_white_is_zero(tmp_path):
    path = write(tmp_path / "inverted.tif", wide(GREY), tiffinfo={262: 0})
    assert np.array_equal(np.asarray(decode(path)), 255 - GREY)


def test_floats_in_which_white_is_zero(tmp_path):
    path = write(tmp_path / "inverted.tif", Image.fromarray((GREY / 255).astype(np.float32)), tiffinfo={262: 0})
    assert np.array_equal(np.asarray(decode(path)), 255 - GREY)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("rows", [8, 4])
@pytest.mark.parametrize("alpha", [False, True])
def test_planes_of_sixteen_bits_are_read_as_such(order, rows, alpha, tmp_path):
    channels = [*np.moveaxis(COLOUR, -1, 0), *([ALPHA] if alpha else [])]
    planes = [channel.astype(np.uint16) * 257 for channel in channels]
    parts = [plane[row : row + rows] for plane in planes for row in range(0, 8, rows)]
    bits = {"t258": (16,) * len(planes), "t277": len(planes), "t257": 8, "t278": rows}
    path = tmp_path / "planes.tif"
    path.write_bytes(tiff(parts, 16, order, t262=2, t284=2, **bits, **({"t338": 2} if alpha else {})))
    assert np.array_equal(np.asarray(decode(path).convert("RGB")), COLOUR)


def test_planes_of_sixteen_bits_that_pillow_cannot_read_are_refused(tmp_path):
    path = tmp_path / "inks.tif"
    path.write_bytes(tiff([GREY.astype(np.uint16)] * 4, 16, t262=5, t284=2))
    with pytest.raises(ValueError, match="16 bits of CMYK in planes that are not compressed: store them side by side"):
        decode(path)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("lowest", [-100, 0])
def test_integers_with_a_sign_are_refused(bits, lowest, tmp_path):
    path = tmp_path / "signed.tif"
    path.write_bytes(tiff([(GREY // 4 + float(lowest)).astype(f"i{bits // 8}")], bits, t339=2))
    with pytest.raises(ValueError, match="integers with a sign do not tell which one is black"):
        decode(path)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (Image.fromarray(GREY.astype(np.int32)), "32-bit integers do not tell"),
        (Image.fromarray(GREY.astype(np.float32)), "from 0 to 254, and must lie in 0..1"),
        (Image.fromarray(GREY.astype(np.float32) - 3), "from -3 to 251"),
        (Image.fromarray(np.full((8, 8), np.nan, np.float32)), "nan"),
    ],
)
def test_numbers_without_a_range_are_refused_by_name_and_not_clipped(image, message, tmp_path, caplog):
    path = write(tmp_path / "picture.tif", image)
    with pytest.raises(ValueError, match=message):
        decode(path)
    assert message in ImageFiles(str(path), info())[0].reason
    assert f"{path} (" in caplog.text
    assert message in caplog.text


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
    assert (ImageFiles(str(path), info(1, 16))[0][0].int() - expected).abs().max() <= 3


def test_damaged_exif_data_turns_nothing(tmp_path):
    path = write(tmp_path / "a.jpg", Image.fromarray(GREY), exif=b"Exif\x00\x00MM\x00\x2a\xff\xff\xff\xff\x00")
    assert decode(path).size == (16, 8)


def test_what_pillow_only_recognises_is_no_image():
    assert {".tif", ".webp", ".avif", ".bmp", ".jp2", ".mpo", ".jpg"} <= image_endings()
    assert not {".eps", ".ps", ".h5", ".mpg", ".pdf"} & image_endings()


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


def check_shades(module, count):
    images, targets = (torch.cat(parts) for parts in zip(*module.train_dataloader(), strict=True))
    assert module.info.sizes["train"] == count
    assert torch.equal((images[:, 0, 4, 4] > 100).long(), targets)


@pytest.mark.parametrize("kind", ["folder", "tar", "tars", "torch/image_folder"])
def test_every_ending_is_trained_on_and_the_rest_is_counted_and_named(kind, tmp_path, caplog):
    root = write_mixed(tmp_path / "images")
    if kind == "tar":
        for split in ("train", "val"):
            with tarfile.open(tmp_path / f"{split}.tar", "w") as archive:
                archive.add(root / split, arcname=".")
        module = open_folder(tmp_path)
    elif kind == "tars":
        (tmp_path / "tars").mkdir()
        for label in ("dark", "light"):
            with tarfile.open(tmp_path / "tars" / f"{label}.tar", "w") as archive:
                for file in (root / "train" / label).iterdir():
                    archive.add(file, arcname=file.name)
        module = open_folder(tmp_path / "tars", val_fraction=0.34)
        assert "3 passed over" in caplog.text
        return check_shades(module, 8)
    else:
        if kind != "folder":  # torchvision takes every folder for a class
            with pytest.raises(ValueError, match=r"class .ipynb_checkpoints is a hidden folder: remove it"):
                open_folder(root, source=kind)
            shutil.rmtree(root / "train" / ".ipynb_checkpoints")
            write(root / "train" / "light" / ".hidden.png", Image.fromarray(GREY))
            caplog.clear()
        module = open_folder(root, source=kind)
    assert module.info.class_names == ["dark", "light"]
    (line,) = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert "4 passed over" in line
    assert "2 hidden" in line
    assert "1 .txt" in line
    assert "1 without an ending" in line
    assert "dark/notes.txt" in line
    return check_shades(module, 12)


def test_links_to_above_and_empty_class_folders_are_told(tmp_path, caplog):
    root = write_mixed(tmp_path / "images") / "train"
    (root / "dark" / "again").symlink_to(root)
    (root / "grey").mkdir()
    (root / "shade").symlink_to(root / "light")  # beside it: a class like others
    module = open_folder(root, val_fraction=0.34)
    assert module.info.class_names == ["dark", "light", "shade"]
    (line,) = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert "1 link to above" in line
    assert "1 empty" in line
    source = module.splits.train.source
    assert not any("again" in source.path(index) for index in range(len(source)))


def test_tar_files_that_were_read_before_workers_start(tmp_path):
    root = write_mixed(tmp_path / "images")
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        archive.add(root / "train", arcname=".")
    source = open_folder(tmp_path / "all.tar", val_fraction=0.34)._splits.train.source
    source.read(0)
    file = source.reader.tar_state.tf.fileobj.fileno()
    position = os.lseek(file, 0, os.SEEK_CUR)
    child = os.fork()
    if child == 0:
        for index in range(len(source)):
            source.read(index)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.lseek(file, 0, os.SEEK_CUR) == position


def test_images_without_a_class_are_passed_over_by_name(tmp_path, caplog):
    root = write_mixed(tmp_path)
    open_folder(root, class_map={"dark": 0, "light": 1})
    write(root / "train" / "grey" / "0.png", Image.fromarray(GREY))
    caplog.clear()
    open_folder(root, class_map={"dark": 0, "light": 1})
    assert "1 of no class" in caplog.text
    assert "grey/0.png" in caplog.text


def test_a_class_without_training_images_is_told(tmp_path, caplog):
    root = write_mixed(tmp_path)
    open_folder(root, class_map={"dark": 0, "light": 1})
    assert "never learnt" not in caplog.text
    open_folder(root, class_map={"dark": 0, "light": 1, "grye": 2})
    assert "no training image has the class grye, which is never learnt" in caplog.messages


@pytest.mark.parametrize("numbers", [{"darq": 0, "lihgt": 1}, "classes.txt"])
def test_class_folders_of_other_names_are_told_beside_those_of_the_map(numbers, tmp_path):
    (tmp_path / "classes.txt").write_text("darq\nlihgt\n")
    class_map = numbers if isinstance(numbers, dict) else str(tmp_path / numbers)
    message = r"has no folder of the classes darq, lihgt, and has dark, light: give other images, or the number"
    with pytest.raises(ValueError, match=message):
        open_folder(write_mixed(tmp_path), class_map=class_map)


@pytest.mark.parametrize("source", ["folder", "csv"])
def test_an_evaluation_of_another_source_leaves_out_how_the_run_named_its_labels(source, tmp_path):
    root, table = write_mixed(tmp_path), tmp_path / "images.csv"
    paths = sorted((root / "train").glob("[dl]*/?.png"))
    table.write_text("".join(f"{line}\n" for line in ("image,label", *(f"{one},{one.parent.name}" for one in paths))))
    keys = {
        "folder": {"root": str(root), "class_map": {"dark": 0, "light": 1}},
        "csv": {"root": str(table), "file_column": "image"},
    }
    run = {"data": {"name": "mixed", "source": source, "img_size": 8, "num_workers": 0, **keys[source]}}
    other = "csv" if source == "folder" else "folder"
    changes = {"source": other, **keys[other], "class_map": None}
    trained = open_folder(source=source, **keys[source]).info
    again = ImageDataModule.for_evaluation(run, changes, split="test", trained=trained, batch_size=4)
    assert again.info.class_names == ["dark", "light"]


def test_images_beside_the_splits_are_named(tmp_path, caplog):
    root = write_mixed(tmp_path)
    open_folder(root)
    assert "in no split" not in caplog.text
    for place in ("extra/dark/0.png", "dev/light/0.png", "loose.png", ".hidden/0.png", "notes/read.txt"):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        if place.endswith("png"):
            write(root / place, Image.fromarray(GREY))
    module = open_folder(root)
    assert module.info.sizes == {"train": 12, "val": 12, "test": 12}
    (message,) = [record.getMessage() for record in caplog.records if "in no split" in record.getMessage()]
    assert "the images of dev/, extra/, loose.png are in no split, beside train, val: name a split by" in message


def test_names_of_splits_may_have_capitals(tmp_path):
    root = write_mixed(tmp_path)
    shutil.copytree(root / "val", root / "TEST")
    (root / "TEST" / "dark" / "0.png").unlink()
    (root / "train").rename(root / "Train")
    (root / "val").rename(root / "Validation")
    assert open_folder(root, test_split="test").info.sizes == {"train": 12, "val": 12, "test": 11}
    vehicles = tmp_path / "vehicles"
    for name in ("Car", "Train"):
        for index in range(4):
            write(vehicles / name / f"{index}.png", Image.fromarray(GREY + index))
    assert open_folder(vehicles, val_fraction=0.25).info.class_names == ["Car", "Train"]


def test_classes_that_look_alike_are_told(tmp_path, caplog):
    root = write_mixed(tmp_path)
    for split in ("train", "val"):
        for name in ("zu\u0308g", "z\u00fcg"):
            write(root / split / name / "0.png", Image.fromarray(GREY))
    assert open_folder(root).info.num_classes == 4
    assert "classes that look alike are trained as different ones" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("source", ["folder", "csv"])
def test_classes_that_differ_in_capitals_alone_are_told(source, tmp_path, caplog):
    names = ("Cat", "cat", "a", "A")
    for name in names:
        for index in range(2):
            write(tmp_path / "images" / name / f"{index}.png", Image.fromarray(GREY))
    rows = [f"{name}/{index}.png,{name}" for name in names for index in range(2)]
    (tmp_path / "images" / "train.csv").write_text("\n".join(["file_name,label", *rows]))
    assert open_folder(tmp_path / "images", source=source, val_fraction=0.5).info.num_classes == 4
    (told,) = (one for one in caplog.messages if "look alike" in one)
    assert "are trained as different ones: 'Cat' and 'cat' (blanks, capitals, " in told


@pytest.mark.slow
def test_a_link_to_nothing_is_told_as_one(tmp_path, caplog):
    root = write_mixed(tmp_path)
    (root / "train" / "grey").symlink_to(tmp_path / "gone")
    open_folder(root)
    assert "1 broken link, 1 without an ending" in caplog.text or "1 without an ending, 1 broken link" in caplog.text


@pytest.mark.slow
def test_a_model_measures_a_table_with_other_labels_by_their_numbers(tmp_path):
    root = write_mixed(tmp_path)
    trained = open_folder(root).info
    paths = sorted((root / "val").glob("[dl]*/?.png"))
    lines = [f"{one},{trained.class_names.index(one.parent.name)}" for one in paths]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["file_name,label", *lines]))
    run = {"data": {"name": "mixed", "source": "folder", "root": str(root), "img_size": 8, "num_workers": 0}}

    def measure(**changes):
        changes = {"source": "csv", "root": str(table)} | changes
        return ImageDataModule.for_evaluation(run, changes, split="test", trained=trained, batch_size=4)

    with pytest.raises(
        ValueError, match=r"label 0 is not among .* or give the number of each by data\.class_map, such"
    ):
        measure()
    for numbers in ({0: 0, 1: 1}, {"0": 0, "1": 1}):
        module = measure(class_map=numbers)
        assert module.info.class_names == trained.class_names
        assert module.splits.test.source.targets().tolist() == [
            trained.class_names.index(one.parent.name) for one in paths
        ]
    with pytest.raises(ValueError, match="label 1 is not among"):
        measure(class_map={0: 0})
    with pytest.raises(ValueError, match="gives two labels of a table one number"):
        measure(class_map={0: 0, 1: 0})
    with pytest.raises(ValueError, match="has the number 2, and the model's 2 classes have 0 to 1"):
        measure(class_map={0: 0, 1: 2})


def test_a_pipe_is_no_image(tmp_path):
    root = write_mixed(tmp_path)
    os.mkfifo(root / "train" / "dark" / "pipe.png")
    module = open_folder(root)
    assert sum(len(targets) for _, targets in module.train_dataloader()) == 12
    assert module.unreadable == [str(root / "train" / "dark" / "pipe.png")]
    jpeg = tmp_path / "pipe.jpg"
    os.mkfifo(jpeg)
    with pytest.raises(OSError, match="no regular file"):
        decode(jpeg)


def test_webdataset_keeps_sixteen_bits_and_takes_every_ending(tmp_path, monkeypatch):
    pytest.importorskip("webdataset", reason="wds/ sources need longseq[datasets]")
    for shard in range(2):
        with tarfile.open(tmp_path / f"data-{shard}.tar", "w") as archive:
            for index in range(4):
                stream = io.BytesIO()
                wide(np.full((8, 8), 40 + 160 * (index % 2), dtype=np.uint8)).save(stream, "TIFF")
                for ending, content in (("tif", stream.getvalue()), ("cls", str(index % 2).encode())):
                    member = tarfile.TarInfo(f"{shard}{index}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    names = {"train_split": "data-{0..1}.tar|8", "val_split": "data-1.tar|4", "num_classes": 2}
    module = open_folder(tmp_path, source="wds/data", **names)
    images, targets = next(iter(module.val_dataloader()))
    assert images[:, 0, 4, 4].tolist() == [40 + 160 * label for label in targets.tolist()]
    # A worker without a shard would leave its part of an epoch out.
    monkeypatch.setattr(data, "usable_cores", lambda: 3)
    module = open_folder(tmp_path, source="wds/data", num_workers=None, batch_size=2, **names)
    loader = module.train_dataloader()
    assert loader.num_workers == 2
    assert sum(len(targets) for _, targets in loader) == 8
    with pytest.raises(ValueError, match=r"^data\.num_workers=3: .* 2 file\(s\), .*: give data\.num_workers=2$"):
        open_folder(tmp_path, source="wds/data", num_workers=3, **names).train_dataloader()
    with pytest.raises(ValueError, match=r"'test' .* name of shards and the number of their images: .*\.tar\|9000'$"):
        open_folder(tmp_path, source="wds/data", test_split="test", **names)


@pytest.mark.slow
def test_a_stream_without_a_readable_image_measures_nothing(tmp_path, tiny):
    pytest.importorskip("webdataset", reason="wds/ sources need longseq[datasets]")
    stream = io.BytesIO()
    Image.fromarray(np.full((8, 8), 7, np.uint8)).save(stream, "PNG")
    for name, picture in (("train", stream.getvalue()), ("val", b"no image")):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
            for index in range(8):
                for ending, content in (("png", picture), ("cls", str(index % 2).encode())):
                    member = tarfile.TarInfo(f"{index}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    data = ["data=image_folder", "recipe=digits", "data.source=wds/data", f"data.root={tmp_path}", "data.img_size=8"]
    data += ["data.train_split='train.tar|8'", "data.val_split='val.tar|8'", "data.test_split=null"]
    data += ["data.num_classes=2", "data.num_workers=0", "recipe.batch_size=4", "recipe.epochs=1"]
    with pytest.raises(ValueError, match="not one validation image could be read"):
        train.run(tiny(*data, "recipe.batch_size=4"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: [path.write_bytes(b"") for path in (root / "val").rglob("*.*")], "none of the 12 validation"),
        (lambda root: [shutil.rmtree(root / split / "dark") for split in ("train", "val")], "one class alone, light"),
        (
            lambda root: (root / "train" / "dark" / "0.png").rename(root / "train" / "stray.png"),
            "outside class folders",
        ),
        (lambda root: write(root / "train" / "dark" / "more" / "0.png", Image.fromarray(GREY)), "dark/more lies below"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_in_one_line(spoil, message, tmp_path):
    root = write_mixed(tmp_path)
    spoil(root)
    with pytest.raises(ValueError, match=message) as caught:
        open_folder(root)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("class_map", [{"dark": -1, "light": 0}, {"dark": "first", "light": 1}, {}, "absent.txt"])
def test_class_maps_without_numbers_are_refused(class_map, tmp_path):
    with pytest.raises(ValueError, match=r"data\.class_map(\.dark)?=.*"):
        open_folder(write_mixed(tmp_path), class_map=class_map)


@pytest.mark.slow
def test_a_file_of_classes_may_have_a_mark_and_empty_lines_at_its_end(tmp_path):
    root, names = write_mixed(tmp_path), tmp_path / "names.txt"
    names.write_text("\ufefflight\ndark\n\n\n", encoding="utf-8")
    assert open_folder(root, class_map=str(names)).info.class_names == ["light", "dark"]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "fault"), [("a\n\nb\n", "an empty line"), ("a\nb\na\n", "'a' is there twice")])
def test_a_file_of_classes_that_numbers_them_otherwise_than_it_looks_is_refused(text, fault, tmp_path):
    (tmp_path / "names.txt").write_text(text)
    with pytest.raises(ValueError, match=rf"data\.class_map=.*{fault}"):
        open_folder(write_mixed(tmp_path), class_map=str(tmp_path / "names.txt"))


def test_one_class_by_a_class_map_is_refused(tmp_path):
    root = write_mixed(tmp_path)
    shutil.rmtree(root / "train" / "dark")
    with pytest.raises(ValueError, match="of one class alone, light"):
        open_folder(root, class_map={"dark": 0, "light": 1})


def test_folders_of_one_name_are_said_to_be_one_class(tmp_path, caplog):
    for part in ("one", "two"):
        for label in ("dark", "light"):
            for index in range(3):
                write(tmp_path / part / label / f"{index}.png", Image.fromarray(GREY))
    module = open_folder(tmp_path, val_fraction=0.3)
    assert module.info.class_names == ["dark", "light"]
    assert "one/dark and two/dark are one class" in caplog.text


@pytest.mark.slow
def test_eight_and_sixteen_bits_are_predicted_alike_and_the_rest_is_named(tmp_path, tiny, compose_config, capsys):
    root = write_mixed(tmp_path / "images")
    data = ("data=image_folder", "recipe=digits", f"data.root={root}", "data.img_size=8", "data.in_chans=1")
    train.run(tiny(*data, "data.num_workers=0", "recipe.batch_size=4", "recipe.epochs=1"))
    output, checkpoint = tmp_path / "p.csv", tmp_path / "run" / "checkpoints" / "best.ckpt"
    pictures = write_grey(tmp_path / "pictures")
    (pictures / "notes.txt").write_text("no image")
    capsys.readouterr()
    config = compose_config("predict", f"checkpoint={checkpoint}", f"input={pictures}", f"output={output}")
    assert predict.run(config) == {"classified": 22, "unreadable": 0, "passed_over": 1}
    assert "22 images classified, 0 unreadable, 1 passed over (1 .txt: notes.txt)" in capsys.readouterr().out
    rows = list(csv.DictReader(output.open()))
    assert len({(row["class_1"], row["probability_1"]) for row in rows if not row["error"]}) == 1
    assert [row["error"] for row in rows if row["error"]] == ["passed over: .txt"]


def test_a_message_names_no_file_of_python(tmp_path):
    (tmp_path / "a.png").write_bytes(b"none")
    with (tmp_path / "a.png").open("rb") as file:
        for opened in (file, io.BytesIO(b"none")):
            with pytest.raises(UnidentifiedImageError) as raised:
                Image.open(opened)
            assert "<_io." in str(raised.value)
            assert first_line(raised.value) == "cannot identify image file"


def png_of_colours(values):
    """A PNG file of 16 bits a channel, grey or colours, with or without alpha, which Pillow does not write."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    height, width, channels = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def write_bits(root, bits, colours=False):
    """Two classes of noise with so many bits in files of 16, and a black picture."""
    generator = np.random.default_rng(0)
    for label in ("a", "b"):
        for index in range(4):
            values = generator.integers(0, 2**bits, (8, 8, 3)).astype(np.uint16) * (index > 0 or label == "b")
            path = root / label / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            if colours:
                path.write_bytes(png_of_colours(values))
            else:
                Image.fromarray(values[..., 0].astype(np.uint16)).save(path)
    return root


@pytest.mark.parametrize("colours", [False, True])
@pytest.mark.parametrize("kind", ["folder", "tar", "csv"])
def test_twelve_bits_in_a_file_of_sixteen_are_told_once(kind, colours, tmp_path, caplog):
    root = write_bits(tmp_path / "images", 12, colours)
    options = {"root": root, "val_fraction": 0.25}
    if kind == "tar":
        with tarfile.open(tmp_path / "images.tar", "w") as archive:
            archive.add(root, arcname=".")
        options["root"] = tmp_path / "images.tar"
    elif kind == "csv":
        lines = [f"{path.relative_to(root)},{path.parent.name}" for path in sorted(root.rglob("*.png"))]
        (root / "all.csv").write_text("\n".join(["file_name,label", *lines]))
        options |= {"root": root / "all.csv", "source": "csv"}
    module = open_folder(**options)
    (told,) = [message for message in caplog.messages if "of their range" in message]
    found, count = re.match(r"(\d) of (\d) training images of 16 bits that were compared have no value", told).groups()
    trained = [str(module.splits.train.source.path(int(index))) for index in module.splits.train.indices]
    black = sum(path.endswith("a/0.png") for path in trained)
    assert (int(found), int(count)) == (6 - black, 6)
    assert re.search(rf" of {255 if colours else 65535}\): they are read nearly black; scale their values", told)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [*product(["png", "alpha", "ppm", "tif", "planes"], [8, 12]), ("grey_alpha", 12)],
)
def test_small_values_are_told_of_colours_in_every_file(kind, bits, tmp_path, caplog):
    values = np.full((8, 8, 3), 2**bits - 1, np.uint16)
    alpha = np.full((8, 8, 1), 65535, np.uint16)
    content = {
        "png": png_of_colours(values),
        "alpha": png_of_colours(np.concatenate([values, alpha], -1)),
        "grey_alpha": png_of_colours(np.concatenate([values[..., :1], alpha], -1)),
        "ppm": b"P6 8 8 65535\n" + values.astype(">u2").tobytes(),
        "tif": tiff([values], 16, t262=2),
        "planes": tiff([*np.moveaxis(values, -1, 0)], 16, t262=2, t284=2),
    }[kind]
    for label in ("a", "b"):
        for index in range(2):
            path = tmp_path / "images" / label / f"{index}.{kind if kind in ('png', 'ppm', 'tif') else 'png'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    open_folder(tmp_path / "images", val_fraction=0.5, in_chans=3)
    assert (
        "2 of 2 training images of 16 bits that were compared have no value above 12.5 % of their range" in caplog.text
    )


@pytest.mark.parametrize("bits", [14, 16])
def test_sixteen_bits_that_are_used_are_not_remarked(bits, tmp_path, caplog):
    open_folder(write_bits(tmp_path / "images", bits), val_fraction=0.25)
    assert "of their range" not in caplog.text


def test_shards_of_twelve_bits_are_told_when_they_are_made(tmp_path, command_here):
    write_bits(tmp_path / "images", 12)
    done = command_here(tmp_path, "prepare", "task=image", "input=images", "output=shards")
    assert done.returncode == 0, done.stderr
    assert (
        "7 of 8 training images of 16 bits that were compared have no value above 12.5 % of their range" in done.stderr
    )


def test_classes_have_one_order_in_every_process(tmp_path):
    """Handwritten letters have classes A and a, and a set of names another order in each process."""
    names = ["1", "01", "001", "2", "A", "a", "Ab", "aB", "AB", "5\u00b2"]
    wanted = ["001", "01", "1", "2", "5\u00b2", "A", "a", "AB", "Ab", "aB"]
    for split in ("train", "val"):
        for name in names:
            for index in range(2):
                write(tmp_path / split / name / f"{index}.png", Image.fromarray(GREY + index))
    shutil.rmtree(tmp_path / "val" / "5\u00b2")  # timm's reader of archives takes no such name
    with tarfile.open(tmp_path / "val.tar", "w") as archive:
        archive.add(tmp_path / "val", arcname=".")
    tars = tmp_path / "tars"
    tars.mkdir()
    for folder in sorted((tmp_path / "val").iterdir(), reverse=True):
        with tarfile.open(tars / f"{folder.name}.tar", "w") as archive:
            archive.add(folder, arcname=".")
    shutil.rmtree(tmp_path / "val")
    assert open_folder(tmp_path / "train", val_fraction=0.5).info.class_names == wanted
    wanted.remove("5\u00b2")
    assert open_folder(tmp_path / "val.tar", val_fraction=0.5).info.class_names == wanted
    source = open_folder(tars, val_fraction=0.5).splits.train.source
    assert source.class_names == wanted
    assert [archive for _, archive, _ in source.reader.samples] == 2 * sorted(f"{one}.tar" for one in wanted)
    assert [source.class_names[target] for target in source.targets()] == 2 * sorted(wanted)


def test_compressed_tiff_files_are_read_in_archives(tmp_path):
    for name in ("dark", "light"):
        for index in range(2):
            path = tmp_path / "images" / name / f"{index}.tiff"
            write(path, Image.fromarray(GREY + index), compression="tiff_lzw")
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        archive.add(tmp_path / "images", arcname=".")
    source = open_folder(tmp_path / "all.tar", val_fraction=0.5).splits.train.source
    assert [np.asarray(source.read(index)[0])[0, 0] for index in range(4)] == [0, 1, 0, 1]


def test_links_and_older_copies_in_archives_are_told(tmp_path, caplog):
    root = write_mixed(tmp_path / "images") / "train"
    (root / "dark" / "link.png").symlink_to("0.png")
    (root / "dark" / "hard.png").hardlink_to(root / "light" / "0.png")
    (root / "grey").symlink_to("light")
    path = tmp_path / "all.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(root, arcname=".")
    images = len(open_folder(path, val_fraction=0.34).splits.train.source)
    assert "3 link in an archive" in caplog.text
    caplog.clear()
    write(tmp_path / "new.png", Image.fromarray(GREY + 3))
    with tarfile.open(path, "a") as archive:
        archive.add(tmp_path / "new.png", arcname="./dark/0.png")
    source = open_folder(path, val_fraction=0.34).splits.train.source
    assert len(source) == images
    assert "1 replaced by a later file of its name" in caplog.text
    (place,) = [index for index in range(images) if source.path(index).endswith("dark/0.png")]
    assert np.array_equal(np.asarray(source.read(place)[0]), GREY + 3)


def test_images_of_an_archive_without_a_class_are_told(tmp_path, caplog):
    for name in ("dark", "grey", "light"):
        for index in range(3):
            write(tmp_path / "images" / name / f"{index}.png", Image.fromarray(GREY + index))
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        archive.add(tmp_path / "images", arcname=".")
    module = open_folder(tmp_path / "all.tar", val_fraction=0.34, class_map={"light": 0, "dark": 1})
    assert module.info.sizes["train"] == 4
    assert "3 passed over (3 of no class: grey/0.png, grey/1.png, grey/2.png)" in caplog.text


def test_a_column_of_splits_that_is_not_read_is_told(tmp_path, caplog):
    """All lines are training lines otherwise, also those that are called val and test."""
    for column, used in (("split", None), ("set", "set")):
        rows = [("file_name", "label", column)]
        for index in range(12):
            write(tmp_path / f"{index}.png", Image.fromarray(GREY + index))
            rows.append(
                (f"{index}.png", "ab"[index % 2], ("train", "train", "train", "val", "test", "train")[index // 2])
            )
        (tmp_path / "table.csv").write_text("\n".join(map(",".join, rows)), encoding="utf-8")
        caplog.clear()
        open_folder(tmp_path / "table.csv", source="csv", val_fraction=0.5, label_column=used)
        told = (
            "its column 'split' calls 2 lines val and 2 lines test, and all lines are read as training: write train.csv"
        )
        assert (told in caplog.text) == (used is None)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take names in Unicode alone")
@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_a_class_whose_folder_has_no_unicode_name_is_refused(kind, tmp_path):
    """No file of the run could name it: the run ended after its training."""
    root = tmp_path / "images"
    for name in ("plain", os.fsdecode(b"caf\xe9")):
        for index in range(2):
            write(root / name / f"{index}.png", Image.fromarray(GREY + index))
    if kind == "tar":
        with tarfile.open(tmp_path / "images.tar", "w") as archive:
            archive.add(root, arcname=".")
        root = tmp_path / "images.tar"
    with pytest.raises(ValueError, match=r"the class folder 'caf\\udce9' has a name that is no UTF-8: rename it$"):
        open_folder(root, val_fraction=0.5)

"""The data module with its sources, on artificial data: digits, folders, streams, damaged files, wrong input."""

import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from image_data import image_data
from PIL import Image

from longseq.tasks.data.loader import Place
from longseq.tasks.image.data import ImageDataModule
from longseq.tasks.image.files import require_same_numbers
from longseq.tasks.image.predict import ImageFiles
from longseq.tasks.image.sources import digits

CLASSES = ("cat", "dog", "emu")


def png(shade):
    pixels = np.full((20, 24, 3), shade, dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def write_folder(root, train=12, val=5):
    """Pictures of one shade each, which determines the class: 0-79 cat, 80-159 dog, 160-239 emu."""
    for split, count in (("train", train), ("val", val)):
        for label, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                (folder / f"{index}.png").write_bytes(png(80 * label + index))
    return root


def open_data(source, root=None, **options):
    options = {"img_size": 16, "batch_size": 4, "num_workers": 0, "mean": [0.0], "std": [1.0]} | options
    module = image_data(name="test", source=source, root=None if root is None else str(root), **options)
    module.prepare_data()
    module.setup()
    return module


def gather(loader):
    batches = list(loader)
    return torch.cat([images for images, _ in batches]), torch.cat([targets for _, targets in batches])


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "images")


def check_classes(module):
    """Each shade has its class, in all splits."""
    for loader in (module.train_dataloader(), module.val_dataloader(), module.test_dataloader()):
        images, targets = gather(loader)
        assert torch.equal(images[:, 0, 8, 8] // 80, targets)


def test_digits_split_is_fixed_disjoint_and_stratified():
    splits, again = digits(), digits()
    parts = [splits["train"], splits["val"], splits["test"]]
    assert sorted(np.concatenate([part.indices for part in parts])) == list(range(1797))
    assert np.array_equal(splits["test"].indices, again["test"].indices)
    targets = splits["test"].source.targets()
    assert all(30 <= count <= 40 for count in np.bincount(targets[splits["test"].indices]))


def test_folder_with_splits(folder):
    module = open_data("folder", folder)
    assert module.info.class_names == list(CLASSES)
    assert module.info.sizes == {"train": 36, "val": 15, "test": 15}
    check_classes(module)


def test_folder_without_splits_sets_some_images_apart(folder):
    module = open_data("folder", folder / "train", val_fraction=0.25)
    assert module.info.sizes == {"train": 27, "val": 9, "test": 9}
    other = open_data("folder", folder / "train", val_fraction=0.25, split_seed=1)
    check_classes(module)
    assert not torch.equal(gather(module.val_dataloader())[0], gather(other.val_dataloader())[0])


def test_a_validation_folder_may_lack_a_class_but_not_add_one(folder):
    for file in (folder / "val" / "cat").iterdir():
        file.unlink()
    check_classes(open_data("folder", folder))
    (folder / "val" / "fox").mkdir()
    (folder / "val" / "fox" / "0.png").write_bytes(png(0))
    with pytest.raises(ValueError, match="has not: 'fox'"):
        open_data("folder", folder)


def test_webdataset_stream_warns_once_and_covers_its_images_on_all_ranks(tmp_path, caplog, monkeypatch):
    pytest.importorskip("webdataset", reason="wds/ sources need longseq[datasets]")
    for shard in range(4):
        with tarfile.open(tmp_path / f"data-{shard}.tar", "w") as archive:
            for index in range(9):
                for ending, content in (("png", png(80 * (index % 3))), ("cls", str(index % 3).encode())):
                    member = tarfile.TarInfo(f"{shard}{index}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    options = {"train_split": "data-{0..2}.tar|27", "val_split": "data-3.tar|9", "num_classes": 3}
    module = open_data("wds/data", tmp_path, **options)
    assert sum("is a stream" in record.message for record in caplog.records) == 1
    assert module.info.sizes == {"train": 27, "val": 9, "test": 9}
    assert all(len(targets) == 4 for _, targets in module.train_dataloader())
    counts = []
    for rank in range(2):
        monkeypatch.setattr("longseq.tasks.image.data.find_place", lambda _, rank=rank: Place(rank, 2))
        counts.append(gather(module.val_dataloader())[1].bincount(minlength=3))
    assert torch.equal(counts[0] + counts[1], torch.tensor([3, 3, 3]))
    # A model is measured where the shards of its training are not.
    for shard in range(3):
        (tmp_path / f"data-{shard}.tar").unlink()
    caplog.clear()
    monkeypatch.undo()
    again = evaluated(module)
    assert again.info.sizes == {"test": 9}
    assert gather(again.test_dataloader())[1].bincount().tolist() == [3, 3, 3]
    assert "is a stream" not in caplog.text, "nothing is resumed"


def evaluated(module, split="test", **changes):
    """The data for evaluating a model that was trained on those of a module, with changes of their keys."""
    known = {"data": vars(module.keys)}
    return ImageDataModule.for_evaluation(known, changes, split=split, trained=module.info, batch_size=4)


def paths(split):
    return {split.source.path(index) for index in split.indices}


def write_listed(folder):
    """A table of images, with a second column of labels."""
    lines = [f"{path},{path.parent.name},{path.parent.name[::-1]}" for path in sorted(folder.glob("train/*/*"))]
    (folder / "all.csv").write_text("\n".join(["file_name,label,backwards", *lines]) + "\n")
    return folder / "all.csv"


@pytest.mark.parametrize(
    ("source", "changes", "count"),
    [
        ("folder", {"val_fraction": 0.5}, "9 of the 18"),
        ("folder", {"split_seed": 1}, "[5-9] of the 9"),
        ("folder", {"class_map": {"cat": 0, "emu": 2}}, "[1-6] of the 6"),
        ("csv", {"val_fraction": 0.5}, "9 of the 18"),
        ("csv", {"split_seed": 1}, "[5-9] of the 9"),
    ],
)
def test_images_of_the_training_are_not_measured_by_other_shares(source, changes, count, folder):
    root = folder / "train" if source == "folder" else write_listed(folder)
    module = open_data(source, root, val_fraction=0.25)
    for split in ("val", "test"):
        with pytest.raises(ValueError, match=rf"{count} images of split={split} were trained on"):
            evaluated(module, split, **changes)
    fewer = evaluated(module, val_fraction=0.1)
    assert paths(fewer.splits["test"]) < paths(module.splits["test"])
    with pytest.raises(ValueError, match="9 of the 18 images of split=test were trained on"):
        evaluated(module, root=f"{root.parent}/../{folder.name}/{root.name}", val_fraction=0.5)


def test_the_data_of_a_run_in_another_place_are_divided_as_before(folder, tmp_path):
    root = folder / "train"
    module = open_data("folder", root, val_fraction=0.25)
    known = {Path(path).relative_to(root) for path in paths(module.splits["test"])}
    moved = root.rename(tmp_path / "moved")
    again = evaluated(module, root=str(moved))
    assert {Path(path).relative_to(moved) for path in paths(again.splits["test"])} == known
    with pytest.raises(ValueError, match="9 of the 18 images of split=test were trained on"):
        evaluated(module, root=str(moved), val_fraction=0.5)
    # Others are measured as a whole.
    other = open_data("folder", folder / "val", val_fraction=0.25)
    assert evaluated(other, root=str(moved)).info.sizes == {"test": 36}


@pytest.mark.slow
def test_hugging_face_data_sets(folder, tmp_path):
    pytest.importorskip("datasets", reason="Hugging Face sources need longseq[datasets]")
    module = open_data(f"hfds/{folder}", tmp_path / "cache")
    assert module.info.class_names == list(CLASSES)
    assert module.info.sizes == {"train": 36, "val": 15, "test": 15}
    check_classes(module)
    keys = {"name": "test", "source": f"hfds/{folder}", "root": str(folder), "img_size": 16, "num_workers": 0}
    # A root beside it, as a checkpoint of a folder has one, does not make it timm's folder, which knows no splits.
    again = ImageDataModule.for_evaluation(
        {"data": {**keys, "source": "folder"}},
        {"source": keys["source"]},
        split="val",
        trained=module.info,
        batch_size=4,
    )
    assert again.info.sizes == {"val": 15}


def test_splits_that_number_a_class_otherwise_are_refused():
    require_same_numbers(CLASSES[:2], CLASSES, "hfds/NAME", "validation")  # the last class may be missing
    with pytest.raises(ValueError, match=f"validation has the classes {CLASSES[1]!r}, {CLASSES[2]!r}, and training"):
        require_same_numbers(CLASSES[1:], CLASSES, "hfds/NAME", "validation")


@pytest.mark.slow
def test_hugging_face_streams(folder, tmp_path):
    pytest.importorskip("datasets", reason="Hugging Face sources need longseq[datasets]")
    module = open_data(f"hfids/{folder}", tmp_path / "cache", train_samples=36, num_classes=3)
    assert module.info.sizes == {"train": 36, "val": None, "test": None}
    assert module.batches_per_epoch == 9
    check_classes(module)


def damage(folder, names=("cat/3.png", "dog/0.png"), split="train"):
    paths = [folder / split / name for name in names]
    paths[0].write_bytes(b"no image at all")
    for path in paths[1:]:
        path.write_bytes(path.read_bytes()[:60])
    return sorted(str(path) for path in paths)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_unreadable_training_images_are_replaced_counted_and_named(folder, num_workers, caplog):
    paths = damage(folder)
    module = open_data("folder", folder, num_workers=num_workers)
    loader = module.train_dataloader()
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        images, _ = gather(loader)
        assert len(images) == 36
    assert sorted(module.unreadable) == paths
    for path in paths:
        assert caplog.text.count(f"{path} (") == 1


def test_unreadable_images_are_left_out_of_evaluation(folder):
    paths = damage(folder, split="val")
    module = open_data("folder", folder, eval_batch_size=1)
    batches = list(module.val_dataloader())
    assert sum(len(targets) for _, targets in batches) == 13
    assert len(batches) == 15
    assert batches[0][0].shape[1:] == (3, 16, 16)
    assert sorted(module.unreadable) == paths


def test_a_folder_of_damaged_images_stops_training(folder):
    for path in (folder / "train").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="no sample of a training batch can be read"):
        list(open_data("folder", folder).train_dataloader())


def test_files_to_predict_report_the_unreadable_ones(folder):
    info = open_data("folder", folder).info
    bad = damage(folder, split="val")
    # A DDS file of an unknown kind, for which Pillow raises NotImplementedError.
    Path(bad[0]).write_bytes(b"DDS " + struct.pack("<7I44x2I4s5I20x", 124, 0, 8, 8, 0, 0, 0, 32, 4, b"ABCD", *[0] * 5))
    files = ImageFiles(str(folder / "val"), info)
    images, _, unreadable = files.batches[range(len(files.paths))]
    assert images.shape == (13, 3, 16, 16)
    assert sorted(one.path for one in unreadable) == bad
    assert ImageFiles(bad[0], info).paths == bad[:1]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["class_weights", "sampling", None])
def test_a_label_that_is_none_of_the_classes_is_told_with_its_sample(key, folder, tmp_path):
    datasets = pytest.importorskip("datasets", reason="Hugging Face sources need longseq[datasets]")
    pictures = [{"bytes": path.read_bytes(), "path": None} for path in sorted(folder.glob("train/*/*"))[:6]]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    for label in (-1, 2):
        rows = {"image": pictures, "label": [0, 1, 0, 1, label, 0]}
        root = tmp_path / str(label)
        for split in ("train", "validation"):
            datasets.Dataset.from_dict(rows, features=features).to_parquet(root / f"{split}.parquet")
        options = {"val_split": "validation", "test_split": None, "num_classes": 2}
        message = f"/4: the label {label} is not among the classes 0 to 1$"
        if key is not None:
            with pytest.raises(ValueError, match=message):
                open_data(f"hfds/{root}", tmp_path / "cache", **options, **{key: "balanced"})
            continue
        module = open_data(f"hfds/{root}", tmp_path / "cache", **options, batch_size=6)
        for loader in (module.train_dataloader(), module.val_dataloader()):
            with pytest.raises(ValueError, match=message):
                gather(loader)

"""The data module with its sources, on artificial data: digits, folders, tars, streams, damaged files, wrong input."""

import io
import logging
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from image_data import image_data, write_tar
from PIL import Image

from longseq.tasks.data.place import Place
from longseq.tasks.data.sampler import SampleIndex
from longseq.tasks.data.unreadable import LabelError
from longseq.tasks.image import sources
from longseq.tasks.image.data import ImageDataModule
from longseq.tasks.image.datasets import ImageFiles
from longseq.tasks.image.decoding import decode
from longseq.tasks.image.sources import ArraySource, Split, digits, split_off

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
    parts = [splits.train, splits.validation, splits.test]
    assert sorted(np.concatenate([part.indices for part in parts])) == list(range(1797))
    assert np.array_equal(splits.test.indices, again.test.indices)
    targets = splits.test.source.targets()
    assert all(30 <= count <= 40 for count in np.bincount(targets[splits.test.indices]))


def test_digits_batches_and_info():
    module = image_data(
        name="digits", source="digits", img_size=8, in_chans=1, batch_size=64, num_workers=0, mean=[0.3053], std=[0.376]
    )
    module.setup()
    info = module.info.to_dict()
    assert info["sizes"] == {"train": 1295, "val": 143, "test": 359}
    assert info["class_names"] == [str(digit) for digit in range(10)]
    assert module.batches_per_epoch == 1295 // 64
    images, targets = module.on_after_batch_transfer(next(iter(module.train_dataloader())), 0)
    assert images.shape == (64, 1, 8, 8)
    assert images.dtype == torch.float32
    assert targets.dtype == torch.int64
    everything = module.on_after_batch_transfer(gather(module.val_dataloader()), 0)[0]
    assert abs(everything.mean()) < 0.05
    assert abs(everything.std() - 1) < 0.05


def test_grey_images_for_a_colour_model():
    module = open_data("digits", img_size=32, in_chans=3, augment={"auto_augment": "rand-m9-mstd0.5-inc1"})
    assert next(iter(module.train_dataloader()))[0].shape == (4, 3, 32, 32)
    assert len(module.info.mean) == 3


def test_folder_with_splits(folder):
    module = open_data("folder", folder)
    assert module.info.class_names == list(CLASSES)
    assert module.info.sizes == {"train": 36, "val": 15, "test": 15}
    check_classes(module)


def test_validation_images_serve_as_the_test_and_it_is_said(folder, caplog):
    with caplog.at_level(logging.INFO, "longseq"):
        module = open_data("folder", folder)
    assert "the validation images are also the test images" in caplog.text
    assert torch.equal(gather(module.val_dataloader())[0], gather(module.test_dataloader())[0])


def test_folder_without_splits_sets_some_images_apart(folder):
    module = open_data("folder", folder / "train", val_fraction=0.25)
    assert module.info.sizes == {"train": 27, "val": 9, "test": 9}
    other = open_data("folder", folder / "train", val_fraction=0.25, split_seed=1)
    check_classes(module)
    assert not torch.equal(gather(module.val_dataloader())[0], gather(other.val_dataloader())[0])


def test_the_files_of_splits_are_named_unless_they_are_in_archives_or_too_many(folder, tmp_path, monkeypatch):
    module = open_data("folder", folder)
    assert {split: len(files) for split, files in module.files.items()} == {
        split: size for split, size in module.info.sizes.items() if split != "test"
    }, "the validation images are the test images"
    assert all(Path(file).is_file() for files in module.files.values() for file in files)
    monkeypatch.setattr(sources, "MOST_FILES", module.info.sizes["val"])
    assert list(module.files) == ["val"]
    assert open_data("folder", write_tar(tmp_path / "all.tar", folder / "train")).files == {}
    assert open_data("digits").files == {}


@pytest.mark.slow
def test_tar_files_with_workers(folder, tmp_path):
    (tmp_path / "tars").mkdir()
    for split in ("train", "val"):
        write_tar(tmp_path / "tars" / f"{split}.tar", folder / split)
    module = open_data("folder", tmp_path / "tars", num_workers=2)
    assert module.info.sizes == {"train": 36, "val": 15, "test": 15}
    check_classes(module)
    single = open_data("folder", write_tar(tmp_path / "all.tar", folder / "train"))
    assert single.info.sizes["train"] == 33
    check_classes(single)


def test_a_validation_folder_may_lack_a_class_but_not_add_one(folder):
    for file in (folder / "val" / "cat").iterdir():
        file.unlink()
    check_classes(open_data("folder", folder))
    (folder / "val" / "fox").mkdir()
    (folder / "val" / "fox" / "0.png").write_bytes(png(0))
    with pytest.raises(ValueError, match="has not: fox"):
        open_data("folder", folder)


def test_cifar10_as_folders_keeps_the_official_test_set_apart(folder):
    module = open_data("cifar10", folder, img_size=20, val_fraction=0.25)
    assert module.info.sizes == {"train": 27, "val": 9, "test": 15}
    check_classes(module)


def test_torchvision_source(folder):
    check_classes(open_data("torch/image_folder", folder))


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
    (key,) = changes
    for split in ("val", "test"):
        with pytest.raises(ValueError, match=rf"data\.{key}=.*: {count} of split={split} were trained on; leave"):
            evaluated(module, split, **changes)
    fewer = evaluated(module, val_fraction=0.1)
    assert paths(fewer.splits.test) < paths(module.splits.test)
    with pytest.raises(ValueError, match=r"data\.val_fraction=0\.5 .* 9 of the 18"):
        evaluated(module, root=f"{root.parent}/../{folder.name}/{root.name}", val_fraction=0.5)


def test_shares_have_no_part_in_images_of_their_own(folder):
    module = open_data("folder", folder)
    assert evaluated(module, val_fraction=0.5).info.sizes == {"test": 15}
    assert evaluated(open_data("folder", folder / "train"), root=str(folder), split_seed=1).info.sizes == {"test": 15}


@pytest.mark.parametrize("packed", [False, True])
def test_the_data_of_a_run_in_another_place_are_divided_as_before(packed, folder, tmp_path, caplog):
    root = write_tar(tmp_path / "train.tar", folder / "train") if packed else folder / "train"
    module = open_data("folder", root, val_fraction=0.25)
    known = {Path(path).relative_to(root) for path in paths(module.splits.test)}
    moved = root.rename(tmp_path / f"moved{root.suffix}")
    again = evaluated(module, root=str(moved))
    assert {Path(path).relative_to(moved) for path in paths(again.splits.test)} == known
    assert "holds the images of the training in another place: those that were set apart are measured" in caplog.text
    with pytest.raises(ValueError, match=r"data\.val_fraction=0\.5 .* 9 of the 18"):
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


@pytest.mark.slow
def test_splits_that_number_a_class_otherwise_are_refused(folder):
    shutil.rmtree(folder / "val" / CLASSES[2])
    check_classes(open_data("torch/image_folder", folder))  # the last class may be missing
    shutil.move(folder / "val" / CLASSES[0], folder / "val" / CLASSES[2])
    message = f"the validation images have the classes {CLASSES[1]}, {CLASSES[2]}, and the training images have"
    with pytest.raises(ValueError, match=message):
        open_data("torch/image_folder", folder)
    assert open_data("folder", folder).info.class_names == list(CLASSES)  # goes by names


@pytest.mark.slow
def test_labels_with_a_fraction_are_refused(folder, tmp_path):
    datasets = pytest.importorskip("datasets", reason="Hugging Face sources need longseq[datasets]")
    pictures = [{"bytes": path.read_bytes(), "path": None} for path in sorted(folder.glob("train/*/*"))[:12]]
    rows = datasets.Dataset.from_dict(
        {"image": pictures, "label": [number / 4 + 0.1 for number in range(12)]},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.Value("float64")}),
    )
    for split in ("train", "validation"):
        rows.to_parquet(tmp_path / "parquet" / f"{split}.parquet")
    whole = [sources.number_of_class(label, "") for label in (2, 2.0, np.float32(2), np.int64(2), torch.tensor(2))]
    assert whole == [2] * 5
    for label in (float("nan"), torch.tensor(2.5), "2", None):
        with pytest.raises(LabelError, match="must be the number of a class"):
            sources.number_of_class(label, "")
    with pytest.raises(ValueError, match=r"the label 0\.\d+ must be the number of a class"):
        open_data(f"hfds/{tmp_path / 'parquet'}", tmp_path / "cache", val_split="validation", num_classes=3)
    keys = {"val_split": "validation", "num_classes": 3, "train_samples": 12}
    stream = open_data(f"hfids/{tmp_path / 'parquet'}", tmp_path / "cache", **keys)
    with pytest.raises(ValueError, match=r"image 0: the stream: the label 0\.1 must be the number of a class"):
        gather(stream.val_dataloader())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "hfds", "hfids"])
def test_a_class_map_names_the_classes_by_their_numbers(kind, folder, tmp_path, caplog):
    if kind == "folder":
        source, options = "folder", {"root": folder}
    else:
        datasets = pytest.importorskip("datasets", reason="Hugging Face sources need longseq[datasets]")
        for split, rows in datasets.load_dataset(str(folder), cache_dir=tmp_path / "cache").items():
            rows.to_parquet(tmp_path / "parquet" / f"{split}.parquet")
        source, options = f"{kind}/{tmp_path / 'parquet'}", {"root": tmp_path / "cache"}
        options |= {"train_samples": 36} if kind == "hfids" else {}
    first, second, third = CLASSES
    assert open_data(source, **options, class_map={first: 3, second: 0, third: 1}).info.class_names == [
        second,
        third,
        "2",
        first,
    ]
    assert "one number" not in caplog.text
    joined = open_data(source, **options, class_map={first: 0, second: 0, third: 1})
    assert joined.info.class_names == [second, third]
    assert f"they are called as the last of them: {second} ({first}, {second})" in caplog.text
    assert gather(joined.val_dataloader())[1].bincount().tolist() == [10, 5]
    if kind != "folder":  # of which classes are picked
        with pytest.raises(
            ValueError, match=rf"gives no number to {third} of data\.source={kind}/.*: give each of its"
        ):
            open_data(source, **options, class_map={first: 0, second: 1})


@pytest.mark.slow
def test_hugging_face_streams(folder, tmp_path):
    pytest.importorskip("datasets", reason="Hugging Face sources need longseq[datasets]")
    with pytest.raises(ValueError, match=r"data\.train_samples=N"):
        open_data(f"hfids/{folder}", tmp_path / "cache")
    module = open_data(f"hfids/{folder}", tmp_path / "cache", train_samples=36, num_classes=3)
    assert module.info.sizes == {"train": 36, "val": None, "test": None}
    assert module.batches_per_epoch == 9
    check_classes(module)


@pytest.mark.slow
def test_what_a_stream_declares_is_known_before_its_first_batch(folder, tmp_path):
    """Its classes, their names and its files; what only its samples tell is one line, too."""
    datasets = pytest.importorskip("datasets", reason="Hugging Face sources need longseq[datasets]")
    rows = datasets.load_dataset(str(folder), cache_dir=tmp_path / "cache")["train"]
    numbers, names = (rows.cast_column("label", datasets.Value(kind)) for kind in ("int64", "string"))
    kinds = {"numbers": numbers, "names": names.map(lambda row: {"label": CLASSES[int(row["label"])]})}
    kinds |= {"declared": rows, "renamed": rows.rename_column("image", "picture")}
    stored = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    kinds["bytes"] = rows.cast(datasets.Features({"image": stored, "label": rows.features["label"]}))
    for name, found in kinds.items():
        for split in ("train", "validation"):
            found.to_parquet(tmp_path / name / f"{split}.parquet")

    def stream(name, **options):
        options = {"train_samples": 36, "test_split": None, "val_split": "validation"} | options
        return open_data(f"hfids/{tmp_path / name}", tmp_path / "streams", **options)

    assert stream("declared").info.class_names == list(CLASSES)
    assert stream("declared", num_classes=3).info.class_names == ["0", "1", "2"]
    mapped = {name: number for number, name in enumerate(CLASSES[::-1])}
    with pytest.raises(ValueError, match=r"has numbers of classes without names, to which data\.class_map="):
        stream("numbers", class_map=mapped)
    with pytest.raises(ValueError, match="has no column image, but picture, label: give a data set with"):
        stream("renamed")
    with pytest.raises(ValueError, match=r"has bytes or paths, and declares no images: .*data\.source=hfds/"):
        stream("bytes")
    with pytest.raises(ValueError, match="does not open with the split 'test'"):
        stream("declared", test_split="test")
    check_classes(stream("names", class_map={name: number for number, name in enumerate(CLASSES)}))
    short = stream("names", class_map={name: number for number, name in enumerate(CLASSES[:2])})
    with pytest.raises(ValueError, match=rf"data\.class_map gives no number to '{CLASSES[2]}', as this stream calls"):
        gather(short.val_dataloader())
    assert stream("declared", num_workers=None).train_dataloader().num_workers == 1
    with pytest.raises(ValueError, match=r"^data\.num_workers=2: .* has 1 file\(s\), .*: give data\.num_workers=1"):
        stream("declared", num_workers=2).train_dataloader()


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
    assert module.num_unreadable == 2
    for path in paths:
        assert caplog.text.count(f"{path} (") == 1


def test_replacements_do_not_depend_on_workers(folder):
    damage(folder)
    one, other = (gather(open_data("folder", folder, num_workers=count).train_dataloader()) for count in (0, 2))
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


def test_unreadable_images_are_left_out_of_evaluation(folder):
    paths = damage(folder, split="val")
    module = open_data("folder", folder, eval_batch_size=1)
    batches = list(module.val_dataloader())
    assert sum(len(targets) for _, targets in batches) == 13
    assert len(batches) == 15
    assert batches[0][0].shape[1:] == (3, 16, 16)
    assert sorted(module.unreadable) == paths


@pytest.mark.parametrize("num_workers", [0, 2])
def test_unreadable_images_are_fatal_by_option(folder, num_workers):
    path = damage(folder)[0]
    module = open_data("folder", folder, num_workers=num_workers, on_error="raise", batch_size=36)
    with pytest.raises(ValueError, match="is not readable") as error:
        list(module.train_dataloader())
    assert "\n" not in str(error.value)
    assert path.rpartition("/train/")[0] in str(error.value)


def test_a_folder_of_damaged_images_stops_training(folder):
    for path in (folder / "train").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="one sample after the other"):
        list(open_data("folder", folder).train_dataloader())


def test_files_to_predict_report_the_unreadable_ones(folder):
    info = open_data("folder", folder).info
    bad = damage(folder, split="val")
    files = ImageFiles(str(folder / "val"), info)
    images, paths, unreadable = files.collate([files[index] for index in range(len(files))])
    assert images.shape == (13, 3, 16, 16)
    assert len(paths) == 13
    assert sorted(one.path for one in unreadable) == bad
    assert len(ImageFiles(paths[0], info)) == 1


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("folder", {"root": "absent/folder"}, "data.root=absent/folder does not exist"),
        ("folder", {}, "give data.root=FOLDER"),
        ("imagenette", {}, "choose digits, fashion_mnist"),
        ("cifar10", {}, "data.root is missing"),
        ("cifar10", {"root": "absent/folder"}, "data.download=true"),
        ("fashion_mnist", {"root": "absent/folder"}, "data.download=true"),
        ("hfds/absent/name", {}, "data.download=true"),
        ("digits", {"in_chans": 2}, r"data\.in_chans=2 must be one of 1, 3"),
        ("digits", {"num_classes": 4}, "less than the 10 classes"),
        ("digits", {"on_error": "ignore"}, r"data\.on_error=ignore must be one of skip, raise"),
        ("digits", {"augment": {"crops": 1}}, "augment has no crops"),
        ("digits", {"batch_size": 7, "augment": {"mixing": {"mixup": 0.8}}}, "even batch size"),
    ],
)
def test_wrong_input_gives_one_line_with_the_remedy(source, options, message):
    with pytest.raises(ValueError, match=message) as error:
        open_data(source, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", ["digits", "cifar10", "torch/image_folder"])
def test_a_class_map_that_a_source_does_not_read_is_refused_unless_it_says_the_same(source, folder):
    names = [str(digit) for digit in range(10)] if source == "digits" else list(CLASSES)
    keys = {"source": source, "root": None if source == "digits" else folder, "img_size": 20}
    open_data(**keys, class_map={name: number for number, name in enumerate(names)})
    for other in ({"cat": 0, "owl": 1}, {name: len(names) - 1 - number for number, name in enumerate(names)}):
        with pytest.raises(ValueError, match=rf"data\.class_map=.* does not fit data\.source={source}") as error:
            open_data(**keys, class_map=other)
        assert str(error.value).endswith("in this order: leave it out")


def test_images_outside_class_folders_are_pointed_out(folder):
    (folder / "val" / "stray.png").write_bytes(png(0))
    with pytest.raises(ValueError, match="move each into the folder of its class"):
        open_data("folder", folder)


def test_predicting_nothing_says_so(tmp_path):
    info = open_data("digits").info
    with pytest.raises(ValueError, match="holds no images"):
        ImageFiles(str(tmp_path), info)
    with pytest.raises(ValueError, match="does not exist"):
        ImageFiles(str(tmp_path / "absent"), info)


def test_each_class_of_two_images_is_in_both_splits(caplog):
    classes = np.repeat([0, 1, 2, 3], [40, 5, 2, 1])
    source = ArraySource(np.zeros((48, 2, 2), np.uint8), classes, ["cat", "dog", "owl", "yak"], "few")
    for fraction, counts in ((0.1, [4, 1, 1]), (0.9, [36, 4, 1]), (0.001, [1, 1, 1])):
        rest, part = split_off(Split.whole(source), fraction, seed=0)
        assert np.bincount(classes[part.indices], minlength=4).tolist() == [*counts, 0]
        assert sorted([*rest.indices, *part.indices]) == list(range(48))
    assert caplog.messages == 3 * [
        "no image to set apart of yak: a class needs two images, and one of these stays in training"
    ]


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_a_split_must_leave_something(fraction):
    with pytest.raises(ValueError, match=f"val_fraction={fraction}"):
        split_off(Split.whole(digits().train.source), fraction, seed=0)


def test_the_repeats_of_an_image_share_its_decoding(folder, monkeypatch):
    augment = {"crop": "random_resized", "hflip": 0.5, "auto_augment": "rand-m9-mstd0.5-inc1", "repeats": 3}
    module = open_data("folder", folder, augment=augment, batch_size=9)
    batches = module.train_dataloader().dataset
    indices = [SampleIndex(position, repeat, 2) for position in (5, 30, 7) for repeat in range(3)]
    alone = [batches[[index]] for index in indices]
    read: list[str] = []
    monkeypatch.setattr(sources, "decode", lambda path: read.append(path) or decode(path))
    together = batches[indices]
    assert len(read) == 3
    assert torch.equal(together.inputs, torch.cat([batch.inputs for batch in alone]))
    assert together.targets.tolist() == [int(batch.targets) for batch in alone]


@pytest.mark.slow
def test_rows_without_an_image_are_skipped_and_named(folder, tmp_path):
    datasets = pytest.importorskip("datasets", reason="Hugging Face sources need longseq[datasets]")
    pictures = [{"bytes": path.read_bytes(), "path": None} for path in sorted(folder.glob("train/*/*"))[:24]]
    pictures[3] = None
    rows = datasets.Dataset.from_dict(
        {"image": pictures, "label": [0] * 12 + [1] * 12},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES[:2])}),
    )
    for split in ("train", "validation"):
        rows.to_parquet(tmp_path / "parquet" / f"{split}.parquet")
    options = {"root": tmp_path / "cache", "val_split": "validation", "test_split": None}
    for kind, name in (("hfds", "/3"), ("hfids", "image 3 of the stream")):
        source = f"{kind}/{tmp_path / 'parquet'}"
        options |= {"train_samples": 24} if kind == "hfids" else {}
        module = open_data(source, **options)
        assert len(gather(module.val_dataloader())[1]) == 23
        (found,) = module.unreadable
        assert found.endswith(name)
        assert len(gather(module.train_dataloader())[1]) == 24
        with pytest.raises(ValueError, match=rf"{name} is not readable \(its row has no image\)"):
            gather(open_data(source, **options, on_error="raise").val_dataloader())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"image": "img"}, "no column image, but img, label:"),
        ({"image": "png", "label": "cls"}, "no column image, but png, cls:"),
        ({"label": "fine_label"}, "no column label, but image, fine_label:"),
        ({"label": None}, "no column label, but image:"),
    ],
)
def test_columns_of_other_names_are_told(columns, told, folder, tmp_path):
    datasets = pytest.importorskip("datasets", reason="Hugging Face sources need longseq[datasets]")
    rows = datasets.load_dataset(str(folder), cache_dir=tmp_path / "cache")["train"]
    for one, other in columns.items():
        rows = rows.remove_columns(one) if other is None else rows.rename_column(one, other)
    for split in ("train", "validation"):
        rows.to_parquet(tmp_path / "parquet" / f"{split}.parquet")
    with pytest.raises(ValueError, match=f"has {told} give a data set with the columns image and label$"):
        open_data(f"hfds/{tmp_path / 'parquet'}", tmp_path / "again", val_split="validation", test_split=None)


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

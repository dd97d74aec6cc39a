"""Batches that a device decodes and transforms: the pixels of the CPU path, its order, its handling of bad files."""

from __future__ import annotations

import io
import itertools
import math
import os
import threading
import time

import numpy as np
import pytest
import torch
from cases import cases
from image_data import image_data, image_info
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from longseq.kernels.image_transforms.arithmetic import to_grey
from longseq.kernels.image_transforms.colour import image_steps_torch
from longseq.kernels.image_transforms.resizing import image_resize_torch
from longseq.tasks.data.batch import Batch, Failure
from longseq.tasks.data.prefetch import THREAD
from longseq.tasks.image import data as image_data_module
from longseq.tasks.image import encoded as encoded_module
from longseq.tasks.image.augmentation import Augmentation
from longseq.tasks.image.batched import erase, stack_draws
from longseq.tasks.image.datasets import seed_everything
from longseq.tasks.image.draws import EvaluationDraws, TrainingDraws
from longseq.tasks.image.encoded import DeviceTransform, EncodedTrainingBatches
from longseq.tasks.image.transforms import evaluation_transform, training_transform

DEIT = {"crop": "random_resized", "hflip": 0.5, "auto_augment": "rand-m9-mstd0.5-inc1"}
ERASED = {**DEIT, "erasing": {"prob": 0.5, "mode": "pixel", "count": 2}}
DEIT3 = {"crop": "padded", "padding_mode": "reflect", "hflip": 0.5, "color_jitter": 0.3, "auto_augment": "3a"}
STRONG = {"crop": "random_resized", "vflip": 0.5, "auto_augment": "rand-m10-n5-inc1-p1"}
JITTER = {"crop": "padded", "padding_mode": "constant", "color_jitter": 0.4}


def picture(number):
    """A picture of its own size: waves, and noise as a camera has it."""
    generator = np.random.default_rng(number)
    height, width = (int(side) for side in generator.integers(30, 120, 2))
    y, x = np.mgrid[:height, :width]
    waves = [128 + 90 * np.sin(x / 7 + shift) + 60 * np.cos(y / 5 - shift) for shift in range(3)]
    pixels = np.stack(waves, -1) + generator.normal(0, 10, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


PICTURES = [picture(number) for number in range(24)]


def batched(draws, about):
    stacked = stack_draws(draws, about.img_size)
    coloured = len(stacked.steps.kinds) > 0 or about.in_chans == 3
    images = image_resize_torch(
        [pil_to_tensor(image) for image in PICTURES],
        stacked.geometries,
        about.img_size,
        channels=3 if coloured else 1,
        interpolation=about.interpolation,
        most_values=1 << 18,
    )
    image_steps_torch(images, stacked.steps, [round(255 * value) for value in (about.mean * 3)[:3]])
    if coloured and about.in_chans == 1:
        images = to_grey(images)
    erase(images, stacked)
    return images


@cases(
    ("options", "about"),
    [
        (ERASED, image_info()),
        (ERASED, image_info(in_chans=1)),
        (DEIT, image_info(interpolation="bilinear")),
        (DEIT3, image_info(48)),
        (STRONG, image_info()),
        (JITTER, image_info()),
        (JITTER, image_info(in_chans=1)),
        ({"crop": "padded", "padding_mode": "edge", "hflip": 0.5}, image_info(in_chans=1, interpolation="lanczos")),
        ({"crop": "center", "auto_augment": "original"}, image_info(64, crop_pct=1.2, interpolation="bilinear")),
    ],
)
@pytest.mark.slow
def test_a_batch_has_the_pixels_of_the_single_images(options, about):
    transform, draw = (make(about, Augmentation(**options)) for make in (training_transform, TrainingDraws))
    single, draws = [], []
    for seed, image in enumerate(PICTURES):
        seed_everything(seed)
        single.append(transform(image))
        after = torch.rand(1)
        seed_everything(seed)
        draws.append(draw((image.height, image.width)))
        assert torch.rand(1) == after  # as many numbers were drawn
    difference = (batched(draws, about).int() - torch.stack(single).int()).abs()
    # Pillow resizes rows first in some shapes; histograms, as of equalize, magnify single levels.
    assert (difference > 0).float().mean() < 0.05
    assert (difference > 2).float().mean() < 3e-3


@cases("interpolation", ["box", "bilinear", "hamming", "bicubic", "lanczos"])
@cases("crop_pct", [0.5, 0.875, 1.2])
@pytest.mark.slow
def test_evaluation_has_the_pixels_of_the_single_images(crop_pct, interpolation):
    about = image_info(40, crop_pct=crop_pct, interpolation=interpolation)
    draw, transform = EvaluationDraws(about), evaluation_transform(about)
    images = batched([draw((image.height, image.width)) for image in PICTURES], about)
    difference = (images.int() - torch.stack([transform(image) for image in PICTURES]).int()).abs()
    assert (difference > 1).float().mean() < 2e-3
    assert (difference > 0).float().mean() < 0.05


def test_what_has_no_batched_form_is_refused():
    with pytest.raises(ValueError, match="AugMix"):
        TrainingDraws(image_info(), Augmentation(auto_augment="augmix-m5-w4-d2"))
    with pytest.raises(ValueError, match=r"Rotate with data.interpolation=lanczos"):
        TrainingDraws(image_info(interpolation="lanczos"), Augmentation(**DEIT))


def encode(image, kind="JPEG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


@pytest.fixture
def on_host(monkeypatch):
    """Lets the CPU take the place of the GPU: Pillow decodes there."""
    monkeypatch.setattr(image_data_module, "gpu_of", lambda device: torch.device("cpu"))


@pytest.fixture
def folder(tmp_path):
    """JPEG files in two classes, with a PNG, a grey one, a CMYK one, a turned one and one that ends too early."""
    turned = Image.Exif()
    turned[0x0112] = 6
    odd = [
        ("a.png", encode(PICTURES[0], "PNG")),
        ("b.jpg", encode(PICTURES[1].convert("L"))),
        ("c.jpg", encode(PICTURES[2].convert("CMYK"))),
        ("d.jpg", encode(PICTURES[3], exif=turned)),
        ("e.jpg", encode(PICTURES[4])[:-200]),
    ]
    for split, count in (("train", 12), ("val", 5)):
        for label in ("one", "two"):
            place = tmp_path / split / label
            place.mkdir(parents=True)
            for number in range(count):
                (place / f"{number}.jpg").write_bytes(encode(PICTURES[number + 12 * (label == "two")], quality=95))
            for name, content in odd:
                (place / name).write_bytes(content)
    return tmp_path


def open_data(root, decode, **options):
    options = {"img_size": 32, "batch_size": 6, "eval_batch_size": 4} | options
    module = image_data(name="test", source="folder", root=str(root), decode=decode, **options)
    module.setup()
    return module


REPEATED = {**ERASED, "repeats": 3}


def test_the_batches_of_both_paths_are_the_same(folder, on_host):
    both = [open_data(folder, decode, augment=REPEATED, seed=5) for decode in ("cpu", "gpu")]
    for loaders in (
        [module.train_dataloader() for module in both],
        [module.val_dataloader() for module in both],
    ):
        for (ones, targets), (others, other_targets) in zip(*loaders, strict=True):
            assert torch.equal(targets, other_targets)
            assert ones.shape == others.shape
            assert others.dtype == torch.uint8
            assert ((ones.int() - others.int()).abs() > 2).float().mean() < 2e-3
    assert both[0].unreadable == both[1].unreadable
    assert len(both[0].unreadable) == 3  # each of validation, and one that was drawn for training


@cases("augment", [{"crop": "center"}, {"crop": "padded", "padding": 4}])
@pytest.mark.slow
def test_an_image_that_is_too_long_for_a_device_has_the_same_pixels(augment, tmp_path, on_host):
    pixels = np.asarray(picture(0).resize((40_000, 16))).copy()
    pixels[:, :20_000] //= 2
    for split in ("train", "val"):
        for label in ("one", "two"):
            (tmp_path / split / label).mkdir(parents=True, exist_ok=True)
            (tmp_path / split / label / "0.jpg").write_bytes(encode(Image.fromarray(pixels), quality=95))
    both = [open_data(tmp_path, decode, augment=augment, batch_size=2) for decode in ("cpu", "gpu")]
    for kind in ("train", "val"):
        (ones, _), (others, _) = (next(iter(getattr(module, f"{kind}_dataloader")())) for module in both)
        assert torch.equal(ones, others)


@pytest.mark.slow
def test_an_interrupted_epoch_continues_bitwise_with_any_number_of_workers(folder, on_host):
    def loader(num_workers):
        found = open_data(folder, "gpu", augment=REPEATED, num_workers=num_workers).train_dataloader()
        found.sampler.set_epoch(2)
        return found

    whole = list(loader(0))
    first = loader(1)
    done = list(itertools.islice(first, 2))
    again = loader(0)
    again.load_state_dict(first.state_dict())
    rest = list(again)
    assert len(done + rest) == len(whole) == 5
    for one, other in zip(done + rest, whole, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def lose_pixels(path):
    content = bytearray(path.read_bytes())
    scan = content.index(b"\xff\xda")
    path.write_bytes(content[:scan] + b"\xff\xd9")  # head and end are sound


def test_batches_that_are_decoded_together_are_those_decoded_alone(folder, on_host):
    for label, number in (("one", 3), ("one", 4), ("two", 1)):
        lose_pixels(folder / "train" / label / f"{number}.jpg")
    lose_pixels(folder / "val" / "two" / "2.jpg")
    alone, together = (open_data(folder, "gpu", augment=REPEATED, num_workers=workers) for workers in (0, 1))
    for kind in ("train", "val"):
        loaders = (getattr(module, f"{kind}_dataloader")() for module in (alone, together))
        batches = list(zip(*loaders, strict=True))
        assert len(batches) == 5
        for (ones, targets), (others, other_targets) in batches:
            assert torch.equal(ones, others)
            assert torch.equal(targets, other_targets)
    assert sorted(alone.unreadable) == sorted(together.unreadable)
    assert len(alone.unreadable) > 4


def test_pixels_that_no_decoder_takes_are_replaced_in_training_and_left_out_of_evaluation(folder, on_host):
    for split in ("train", "val"):
        lose_pixels(folder / split / "one" / "3.jpg")
    module = open_data(folder, "gpu", augment=REPEATED, batch_size=34)
    (images, targets), *_ = module.train_dataloader()
    assert len(images) == len(targets) == 34
    reference = open_data(folder, "cpu", augment=REPEATED, batch_size=34)
    assert (next(iter(reference.train_dataloader()))[1] != targets).sum() <= 3
    evaluated = sum(len(targets) for _, targets in module.val_dataloader())
    assert evaluated == sum(len(targets) for _, targets in reference.val_dataloader()) == 17
    assert sorted(module.unreadable) == sorted(reference.unreadable)


@pytest.mark.slow
def test_an_error_in_the_thread_ends_the_loop_and_an_early_end_the_thread(folder, on_host):
    module = open_data(folder, "gpu", on_error="raise", num_workers=1)
    with pytest.raises(ValueError, match="is not readable"):
        list(module.val_dataloader())
    batches = iter(open_data(folder, "gpu", num_workers=1).val_dataloader())
    next(batches)
    assert THREAD in {thread.name for thread in threading.enumerate()}
    batches.close()
    assert THREAD not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def encoded(folder, on_host):
    """A transform with eleven batches for it: some with lost pixels, and one of which nothing could be read."""
    for label, number in (("one", 3), ("two", 1), ("two", 7)):
        lose_pixels(folder / "train" / label / f"{number}.jpg")
    module = open_data(folder, "gpu", augment=REPEATED, batch_size=12)
    split, draws = module.splits.train, TrainingDraws(module.info, module.augmentation)
    transform = DeviceTransform(split, module.info, torch.device("cpu"), fill=draws.fill, exact=False)
    data, sampler = EncodedTrainingBatches(split, draws, 0), module.train_dataloader().sampler
    batches = []
    for epoch in range(5):
        sampler.set_epoch(epoch)
        batches += [data[indices] for indices in sampler]
    batches.insert(4, Batch(torch.empty(0), torch.empty(0), [Failure("a.jpg", "not found")]))
    return transform, batches


def require_equal(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
        assert one.failures == other.failures


# Up to version 12, Pillow notices lost pixels in two more of the files only when it decodes them.
@cases(("most", "largest"), [(1, {1}), (15_000, {3}), (60_000, {7, 8}), (1 << 27, {13, 15})])
@pytest.mark.slow
def test_two_threads_give_the_batches_of_one_wherever_their_files_are_divided(monkeypatch, encoded, most, largest):
    transform, batches = encoded
    decode, decoded = transform._decode, []

    def record(files):
        decoded.append([math.prod(one.sizes[file]) for one, file in files])
        return decode(files)

    with monkeypatch.context() as patch:
        patch.setattr(encoded_module, "_MOST_PIXELS", most)
        whole = [transform([batch])[0] for batch in batches]
        patch.setattr(transform, "_decode", record)
        require_equal(image_data_module._finish_in_threads(transform)(iter(batches)), whole)
        assert all(len(pixels) == 1 or sum(pixels) <= most for pixels in decoded)
        assert max(len(pixels) for pixels in decoded) in largest
        require_equal(transform(batches), whole)
    assert whole[4] is batches[4]
    assert any(batch.failures for batch in whole[:4])


@cases(("half", "before"), [("_decode", 6), ("_end", 2)])
@pytest.mark.slow
def test_an_error_in_either_thread_is_raised_after_the_batches_before_it(monkeypatch, encoded, half, before):
    transform, batches = encoded
    work, calls, found = getattr(transform, half), itertools.count(1), []

    def fail(given):
        if next(calls) == 3:
            raise RuntimeError(f"{half} failed")
        return work(given)

    with monkeypatch.context() as patch:
        patch.setattr(transform, half, fail)
        with pytest.raises(RuntimeError, match=f"{half} failed"):
            found.extend(image_data_module._finish_in_threads(transform)(iter(batches)))
    assert len(found) == before
    assert THREAD not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
def test_one_group_is_decoded_while_the_one_before_it_is_cropped(monkeypatch, encoded):
    transform, batches = encoded
    decode, end, groups, seen, two = transform._decode, transform._end, [], [], threading.Event()

    def count_groups(files):
        groups.append(files)
        if len(groups) == 2:
            two.set()
        return decode(files)

    def end_late(batch):
        if not seen:
            assert two.wait(10)
            time.sleep(0.3)  # a third group would be begun meanwhile
        seen.append(len(groups))
        return end(batch)

    monkeypatch.setattr(transform, "_decode", count_groups)
    monkeypatch.setattr(transform, "_end", end_late)
    found = image_data_module._finish_in_threads(transform)(iter(batches))
    next(found)
    found.close()
    assert seen[0] == 2
    assert THREAD not in {thread.name for thread in threading.enumerate()}


@cases(
    ("decode", "before", "after"),
    [("cpu", None, None), ("auto", None, "32"), ("gpu", None, "32"), ("gpu", "4", "4")],
)
def test_streams_have_queues_of_their_own_where_a_gpu_decodes(monkeypatch, decode, before, after):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", before or "")
    if before is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    image_data_module.ImageDataModule.prepare_process({"data": {"decode": decode}})
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == after


def test_a_gpu_is_needed_to_decode_on_it(folder):
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"data.decode=gpu needs a CUDA device"):
            open_data(folder, "gpu")
    assert not next(iter(open_data(folder, "auto").train_dataloader()))[0].is_cuda


@pytest.mark.gpu
def test_nvjpeg_and_pillow_differ_by_a_few_levels(folder):
    both = [open_data(folder, decode, augment=REPEATED) for decode in ("cpu", "gpu")]
    for loaders in ([module.train_dataloader() for module in both], [module.val_dataloader() for module in both]):
        for (ones, targets), (others, other_targets) in zip(*loaders, strict=True):
            assert others.is_cuda
            assert torch.equal(targets, other_targets.cpu())
            difference = (ones.int() - others.cpu().int()).abs().float()
            assert difference.mean() < 3
    assert both[0].unreadable == both[1].unreadable


@pytest.mark.gpu
@cases("num_workers", [1, 3])
def test_files_in_pinned_memory_give_the_same_images(folder, num_workers):
    def epochs(pin_memory):
        loader = open_data(
            folder, "gpu", augment=REPEATED, num_workers=num_workers, pin_memory=pin_memory
        ).train_dataloader()
        for epoch in range(3):
            loader.sampler.set_epoch(epoch)
            yield from loader

    for (ones, targets), (others, other_targets) in zip(epochs(False), epochs(True), strict=True):
        assert torch.equal(ones, others)
        assert torch.equal(targets, other_targets)


@cases(("num_workers", "pinned"), [(0, False), (2, True)])
def test_files_that_a_device_decodes_are_pinned_if_workers_send_them(monkeypatch, folder, on_host, num_workers, pinned):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for pin_memory in (True, False):
        module = open_data(folder, "gpu", num_workers=num_workers, pin_memory=pin_memory)
        for loader in (module.train_dataloader(), module.val_dataloader()):
            assert loader.pin_memory is (pin_memory and pinned)

"""Training images that a device decodes and augments: the parameters of the CPU path, pixels up to rounding."""

from __future__ import annotations

import io
import threading
from functools import partial

import numpy as np
import pytest
import torch
from cases import cases
from image_data import image_data, image_info
from PIL import Image
from timm.data.auto_augment import AugmentOp
from torchvision.transforms.functional import pil_to_tensor

from longseq.tasks.data.loader import work_ahead
from longseq.tasks.data.sampler import SampleIndex
from longseq.tasks.image.config import Augmentation
from longseq.tasks.image.datasets import TrainingBatches, seed_everything
from longseq.tasks.image.decoding import decode
from longseq.tasks.image.device import KINDS, DeviceTransform, EncodedTrainingBatches, TrainingDraws, apply_steps, note
from longseq.tasks.image.sources import Split
from longseq.tasks.image.transforms import training_transform

CPU = torch.device("cpu")
DEIT = {"crop": "random_resized", "hflip": 0.5, "auto_augment": "rand-m9-mstd0.5-inc1"}
ERASED = {**DEIT, "erasing": {"prob": 0.5, "mode": "pixel", "count": 2}}
DEIT3 = {"crop": "padded", "padding_mode": "reflect", "hflip": 0.5, "color_jitter": 0.3, "auto_augment": "3a"}
JITTER = {"crop": "padded", "padding_mode": "constant", "color_jitter": 0.4}


def picture(number):
    """A picture of its own size: waves, and noise as a camera has it."""
    generator = np.random.default_rng(number)
    height, width = (int(side) for side in generator.integers(30, 120, 2))
    y, x = np.mgrid[:height, :width]
    waves = [128 + 90 * np.sin(x / 7 + shift) + 60 * np.cos(y / 5 - shift) for shift in range(3)]
    pixels = np.stack(waves, -1) + generator.normal(0, 10, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def encode(image, kind="JPEG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


class Files:
    """Files in memory as a source of images."""

    class_names = ("even", "odd")

    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def read_file(self, index):
        return self.files[index], index % 2

    def read(self, index):
        return decode(io.BytesIO(self.files[index])), index % 2

    def path(self, index):
        return f"{index}.jpg"


def both(files, options, about, indices, seed=0):
    """The batches of the CPU and of the device."""
    split, augmentation = Split.whole(Files(files)), Augmentation(**options)
    plain = TrainingBatches(split, training_transform(about, augmentation), seed)
    encoded = EncodedTrainingBatches(split, TrainingDraws(about, augmentation), seed)
    return plain[indices], DeviceTransform(split, about, augmentation, CPU, seed=seed)(encoded[indices])


def indices_of(count, repeats=1):
    return [SampleIndex(position, repeat, 3) for position in range(count) for repeat in range(repeats)]


@cases(
    ("options", "about"),
    [
        (ERASED, image_info()),
        (ERASED, image_info(in_chans=1)),
        (DEIT, image_info(interpolation="bilinear")),
        (DEIT3, image_info(48)),
        (JITTER, image_info(in_chans=1)),
        ({"crop": "padded", "padding_mode": "edge", "hflip": 0.5, "vflip": 0.5}, image_info(in_chans=1)),
        ({"crop": "padded", "padding_mode": "symmetric", "padding": 6}, image_info(interpolation="lanczos")),
        ({"crop": "random_resized"}, image_info(interpolation="nearest")),
        ({"crop": "random_resized", "hflip": 0.5}, image_info(interpolation="hamming")),
        ({"crop": "random_resized", "vflip": 0.5}, image_info(interpolation="box")),
        ({"crop": "center", "auto_augment": "original"}, image_info(64, crop_pct=1.2, interpolation="bilinear")),
    ],
)
@pytest.mark.slow
def test_a_batch_has_nearly_the_pixels_of_the_cpu(options, about):
    files = [encode(picture(number), "PNG") for number in range(48)]
    plain, finished = both(files, options, about, indices_of(48))
    assert finished.inputs.shape == plain.inputs.shape
    assert torch.equal(finished.targets, plain.targets)
    difference = (finished.inputs.int() - plain.inputs.int()).abs().float()
    # Resampling of warps, rounding, and histograms that magnify it.
    assert difference.median() <= 1
    assert difference.flatten(1).mean(1).median() < 2
    assert difference.mean() < 6


POLICIES = (
    *("Brightness", "Contrast", "Color", "Sharpness", "PosterizeIncreasing", "SolarizeIncreasing", "SolarizeAdd"),
    *("Invert", "AutoContrast", "Equalize", "Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel"),
)


@cases("policy", POLICIES)
def test_each_operation_is_that_of_pillow(policy):
    size, fill = 32, (128, 102, 76)
    images = [picture(number).resize((size, size)) for number in range(8)]
    options = {"img_mean": fill, "interpolation": Image.Resampling.BILINEAR}
    operation = AugmentOp(policy, prob=1.0, magnitude=7, hparams=options)
    seed_everything(0)
    expected = torch.stack([pil_to_tensor(operation(image)) for image in images])
    operation.aug_fn = partial(note, operation.aug_fn.__name__, size)
    seed_everything(0)
    steps = [operation([])[0] for _ in images]
    kinds = torch.tensor([[KINDS.index(kind) for kind, _ in steps]])
    numbers = torch.stack([torch.tensor([*values, *[0.0] * (6 - len(values))]) for _, values in steps])[None]
    pixels = torch.stack([pil_to_tensor(image) for image in images]).float()
    found = apply_steps(pixels, kinds, numbers, torch.tensor(fill).view(3, 1, 1))
    difference = (found - expected).abs()
    if kinds[0, 0] == KINDS.index("affine"):  # Pillow does not blend the border with what fills the corners
        assert (difference > 1).float().mean() < 0.06
    else:
        assert difference.max() <= 1


def test_files_that_a_decoder_may_misread_are_decoded_by_the_workers():
    turned = Image.Exif()
    turned[0x0112] = 6
    files = [
        encode(picture(0), "PNG"),
        encode(picture(1).convert("L")),
        encode(picture(2).convert("CMYK")),
        encode(picture(3), exif=turned),
        encode(picture(4), quality=95),
    ]
    plain, finished = both(files, {"crop": "random_resized"}, image_info(), indices_of(5, repeats=2))
    assert (finished.inputs.int() - plain.inputs.int()).abs().float().flatten(1).mean(1).max() < 1.5


def test_a_file_that_cannot_be_decoded_is_replaced_by_the_seed():
    files = [encode(picture(number), quality=95) for number in range(6)]
    broken = files[2][:-200] + files[2][-2:]  # its head and its end are whole
    files[2] = broken[:700] + b"\xff\xff\x00\xff" * 60 + broken[940:]
    files[4] = b"no image"
    indices = indices_of(6, repeats=2)
    _, finished = both(files, {}, image_info(), indices)
    _, again = both(files, {}, image_info(), indices)
    assert torch.equal(finished.inputs, again.inputs)
    assert finished.inputs.shape == (12, 3, 32, 32)
    assert {failure.path for failure in finished.failures} >= {"4.jpg"}


def test_augmix_needs_the_cpu():
    with pytest.raises(ValueError, match=r"needs data\.decode=cpu"):
        TrainingDraws(image_info(), Augmentation(auto_augment="augmix-m5-w4-d2"))


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_gpu_trains_on_the_batches_of_the_cpu(num_workers, tmp_path):
    for number in range(24):
        path = tmp_path / "train" / ("even", "odd")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(picture(number), quality=95))
    options = {"name": "t", "source": "folder", "root": str(tmp_path), "img_size": 32, "batch_size": 6}
    augment = {"crop": "random_resized", "hflip": 0.5, "repeats": 2}
    plain, device = (
        image_data(decode=decode, num_workers=num_workers, augment=augment, **options) for decode in ("cpu", "gpu")
    )
    for module in (plain, device):
        module.setup()
    for _ in range(2):
        batches = list(device.train_dataloader())
        for (one, targets), (other, same) in zip(plain.train_dataloader(), batches, strict=True):
            assert torch.equal(targets, same.cpu())
            assert (one.int() - other.cpu().int()).abs().float().mean() < 3
    for one, other in zip(plain.val_dataloader(), device.val_dataloader(), strict=True):
        assert torch.equal(one[0], other[0])


@pytest.mark.gpu
def test_work_ahead_ends_with_its_consumer_and_raises_its_errors():
    device = torch.device("cuda")
    given = iter(range(100))
    stream = torch.cuda.Stream(device)
    inner = work_ahead(given, lambda number: number + 0, stream, ahead=1)
    ahead = work_ahead(inner, lambda number: (torch.full((2,), number, device=device),), stream, ahead=2)
    assert [int(next(ahead)[0][0]) for _ in range(3)] == [0, 1, 2]
    ahead.close()
    assert next(given) < 10
    assert not [thread for thread in threading.enumerate() if thread.name == "work_ahead"]
    with pytest.raises(ZeroDivisionError):
        list(work_ahead(iter([1, 0]), lambda number: (1 / number,), stream, ahead=1))

"""`longseq benchmark files`: training from JPEG files, and the speed of each part of it alone."""

from __future__ import annotations

import io
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import timm
import torch
from omegaconf import DictConfig
from PIL import Image
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import longseq  # noqa: F401  registers the image models
from longseq import mixers
from longseq.mixers.pattern import options_by_name
from longseq.tasks.data.sampler import SampleIndex
from longseq.tasks.image.config import ImageAugmentKeys, ImageDataKeys
from longseq.tasks.image.data import ImageDataModule
from longseq.tasks.image.datasets import TrainingBatches
from longseq.tasks.image.device import DeviceTransform
from longseq.tasks.image.draws import EncodedTrainingBatches, TrainingDraws
from longseq.tasks.image.folder import find_split
from longseq.tasks.image.mixing import BatchMixing
from longseq.tasks.image.sources import Split, Splits
from longseq.tasks.image.transforms import normalize, training_transform
from longseq.tasks.training.command import CommandKeys, compile_modes, read_command
from longseq.tasks.training.options import Length, OneOf, Range
from longseq.tasks.training.processes import refuse_many, usable_cores
from longseq.tools.benchmark.measure import one_line, synchronize
from longseq.tools.benchmark.report import check_output, find_device, make_result, to_markdown, write_result

NOTES = (
    "Images a second. `whole` is a loop of loader and step, with bfloat16 autocast, mixing and fused AdamW; `step` is "
    "the same step on one batch of pixels that lies on the device. `of step` is the share of the step's speed that "
    "`whole` reaches; for it the step is measured right before and right after (`step per s`, the mean of both), "
    "because the speed of a host drifts. `wait ms` is how long a batch of `whole` waited for data.",
    "The parts: `read` is what data workers do with decode=gpu (read files, draw parameters); `decode` and `augment` "
    "of the CPU run in the data workers, those of the GPU in batches. `loader` is the input alone, without a step. The "
    "images of an epoch are the same files many times: the disk is not measured.",
)
COPIES = 100_000  # images of an epoch, at least: its end, where workers begin anew, hardly counts

Row = dict[str, Any]
Counts = Annotated[list[Annotated[int, Range(1)]], Length(1)]


@dataclass(frozen=True, kw_only=True)
class FilesKeys(CommandKeys):
    """The keys of `longseq benchmark files`; conf/benchmark_files.yaml documents them."""

    root: str | None
    pictures: Annotated[int, Range(20)]
    picture_size: tuple[Annotated[int, Range(8)], Annotated[int, Range(8)]]
    decodes: Annotated[list[Literal["cpu", "gpu"]], Length(1)]
    repeats: Counts
    models: list[str]
    mixers: Annotated[list[str], Length(1)]
    img_size: Annotated[int, Range(8)]
    batch: Annotated[int, Range(2)]
    num_workers: Annotated[int | None, Range(0)]
    augment: ImageAugmentKeys
    compile: Annotated[str | None, OneOf(compile_modes)]
    device: str
    seconds: Annotated[float, Range(above=0)]
    budget: Annotated[float, Range(above=0)]
    output: str

    def __post_init__(self) -> None:
        refuse_many(self.num_workers, "num_workers")


def run(cfg: DictConfig) -> Row:
    """Measure what `benchmark_files.yaml` selects; print the table and write it with its rows."""
    keys = read_command(FilesKeys, cfg)
    if "gpu" in keys.decodes:
        ImageDataModule.prepare_process({"data": {"decode": "gpu"}})
    device = find_device(keys.device)
    if "gpu" in keys.decodes and device.type != "cuda":
        raise ValueError("decodes has gpu, which needs a CUDA device: give decodes=[cpu]")
    check_models(keys)
    check_output(keys.output)
    end = time.perf_counter() + keys.budget
    rows: list[Row] = []
    result: Row = {}
    with tempfile.TemporaryDirectory() as made:
        root = keys.root
        if root is None:
            root = made
            make_pictures(Path(made), keys.pictures, keys.picture_size)
        bench = Bench(keys, root, device)
        for head, measure in bench.plan():
            rows.append(_guard(head, measure, end - time.perf_counter() > 2.5 * keys.seconds))
            result = make_result("Training from JPEG files", rows, device, (*NOTES, bench.describe()))
            write_result(result, keys.output)  # after every row: an interruption loses no other row
    Console().print(to_markdown(result), markup=False, highlight=False, soft_wrap=True)
    return result


def check_models(keys: FilesKeys) -> None:
    """Raise ValueError for a model or a mixer that does not exist."""
    for name in keys.models:
        if not timm.is_model(name):
            raise ValueError(f"models has {name!r}, which timm.create_model does not know: see timm.list_models()")
    for pattern in keys.mixers:
        for name in options_by_name(pattern, None):
            mixers.get(name)


def _guard(head: Row, measure: Callable[[], Row], has_time: bool) -> Row:
    if not has_time:
        return {**head, "failure": "no time left in the budget"}
    try:
        return {**head, **measure()}
    except (RuntimeError, ValueError) as error:
        return {**head, "failure": one_line(error)}


def make_pictures(folder: Path, count: int, size: tuple[int, int]) -> None:
    """Write JPEG files train/CLASS/*.jpg and val/CLASS/*.jpg: ten classes of shapes, light and noise."""
    for split, label in itertools.product(("train", "val"), range(10)):
        (folder / split / str(label)).mkdir(parents=True)
    work = [(folder / "train" / str(number % 10) / f"{number}.jpg", number, size) for number in range(count)]
    work += [(folder / "val" / str(number) / f"{number}.jpg", count + number, size) for number in range(10)]
    with ProcessPoolExecutor(usable_cores()) as pool:
        for _ in pool.map(_make_picture, work, chunksize=16):
            pass


def _make_picture(work: tuple[Path, int, tuple[int, int]]) -> None:
    path, seed, size = work
    path.write_bytes(draw_picture(seed, size))


def draw_picture(seed: int, size: tuple[int, int]) -> bytes:
    """A JPEG file like a photograph: smooth light, edges, textures of 1/f noise, and grain; about 0.2 bytes a pixel."""
    generator = np.random.default_rng(seed)
    height, width = size
    y, x = np.mgrid[:height, :width].astype(np.float32) / max(size)
    pixels = np.empty((height, width, 3), dtype=np.float32)
    for channel in range(3):
        light = generator.uniform(0.2, 0.8) + generator.uniform(-0.4, 0.4) * x + generator.uniform(-0.4, 0.4) * y
        pixels[..., channel] = light
    for _ in range(12):
        centre, radius = generator.uniform(0, 1, 2), generator.uniform(0.03, 0.3)
        inside = np.hypot(x - centre[0], (y - centre[1]) * generator.uniform(0.5, 2)) < radius
        pixels[inside] = 0.5 * pixels[inside] + 0.5 * generator.uniform(0, 1, 3)
    spectrum = np.fft.rfft2(generator.normal(size=size))
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    texture = np.fft.irfft2(spectrum / np.maximum(frequency, 1 / max(size)), s=size)
    pixels += (0.12 / texture.std() * texture[..., None]).astype(np.float32)
    pixels += generator.normal(0, 0.01, pixels.shape).astype(np.float32)
    stream = io.BytesIO()
    Image.fromarray((255 * pixels).clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=90)
    return stream.getvalue()


class _Repeated(ImageDataModule):
    """A data set of few files as a long epoch."""

    def _open_splits(self) -> Splits:
        splits = super()._open_splits()
        copies = -(-COPIES // len(splits.train))
        train = Split(splits.train.source, np.tile(splits.train.indices, copies))
        return Splits(train, splits.validation, splits.test)


@dataclass
class Bench:
    """The measurements of one folder of images."""

    keys: FilesKeys
    root: str
    device: torch.device

    def __post_init__(self) -> None:
        self.workers = min(16, usable_cores()) if self.keys.num_workers is None else self.keys.num_workers
        self.info = self.open("cpu", 1).info

    def open(self, decode: str, repeats: int) -> ImageDataModule:
        keys = ImageDataKeys(
            name="files",
            source="folder",
            root=self.root,
            test_split="val" if find_split(self.root, "test", "val") else None,
            img_size=self.keys.img_size,
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
            num_workers=self.workers,
            decode=decode,  # type: ignore[arg-type]
        )
        augment = {**vars(self.keys.augment), "mixing": vars(self.keys.augment.mixing), "repeats": repeats}
        module = _Repeated(keys, batch_size=self.keys.batch, augment=augment)
        module.setup()
        return module

    def describe(self) -> str:
        """The files in words."""
        split = _splits(self.open("cpu", 1)).train
        paths = [Path(split.source.path(int(index))) for index in split.indices[:50]]
        with Image.open(paths[0]) as image:
            size = f"{image.width} x {image.height}"
        mean = sum(path.stat().st_size for path in paths) / len(paths) / 1000
        made = " made by the benchmark" if self.keys.root is None else ""
        return (
            f"The files{made}: {size} pixels (the first), {mean:.0f} kB on average; {self.workers} data workers, "
            f"{self.keys.img_size} pixels, batches of {self.keys.batch}."
        )

    def plan(self) -> Iterator[tuple[Row, Callable[[], Row]]]:
        """The heads of all rows with what measures the rest, the most telling first."""
        for model in self.models():
            yield {"part": "step", **model}, partial(self.step, model)
        most = max(self.keys.repeats)
        for decode in self.keys.decodes:
            for part in ("read", "decode", "augment") if decode == "gpu" else ("decode", "augment"):
                yield {"part": part, "decode": decode, "repeats": 1}, partial(self.part, part, decode)
            for repeats in self.keys.repeats:
                head: Row = {"part": "loader", "decode": decode, "repeats": repeats}
                yield head, partial(self.loader, decode, repeats)
        for repeats in sorted(self.keys.repeats, key=lambda number: number != most):
            for model, decode in itertools.product(self.models(), reversed(self.keys.decodes)):
                head = {"part": "whole", **model, "decode": decode, "repeats": repeats}
                yield head, partial(self.whole, model, decode, repeats)

    def models(self) -> list[dict[str, str]]:
        """The name of each model, with its mixer if it is ours."""
        found: list[dict[str, str]] = []
        for name in self.keys.models:
            ours = name.startswith("longseq_")
            found += [{"model": name, "mixer": mixer} for mixer in self.keys.mixers] if ours else [{"model": name}]
        return found

    def make_step(self, head: Mapping[str, str]) -> Callable[[Tensor, Tensor], None]:
        """A training step on pixels uint8 [B, 3, S, S] and targets of the device."""
        options: Row = {"mixer": head["mixer"]} if "mixer" in head else {}
        torch.manual_seed(0)
        model: nn.Module = timm.create_model(
            head["model"], num_classes=1000, img_size=self.keys.img_size, **options
        ).to(self.device)
        called: Any = model if self.keys.compile is None else torch.compile(model, mode=self.keys.compile)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.device.type == "cuda")
        mixing = BatchMixing(1000, seed=0, label_smoothing=0.1, **vars(self.keys.augment.mixing))
        count = itertools.count()

        def step(images: Tensor, targets: Tensor) -> None:
            mixed, soft, _ = mixing(normalize(images, self.info), targets, update=next(count))
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = nn.functional.cross_entropy(called(mixed), soft)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    def step(self, model: Mapping[str, str]) -> Row:
        return {"images_per_s": round(self._rate_bare(self.make_step(model), self.keys.seconds))}

    def _rate_bare(self, step: Callable[[Tensor, Tensor], None], seconds: float) -> float:
        """Images a second of a training step on one batch that lies on the device."""
        shape = (self.keys.batch, 3, self.keys.img_size, self.keys.img_size)
        images = torch.randint(256, shape, dtype=torch.uint8, device=self.device)
        targets = torch.randint(10, shape[:1], device=self.device)
        return self._rate(itertools.repeat(None), lambda _: step(images, targets), warm=3, seconds=seconds)[0]

    def part(self, part: str, decode: str) -> Row:
        split = _splits(self.open("cpu", 1)).train
        if decode == "cpu" or part == "read":
            batches: Any = self._worker_part(part, decode, split)
            orders = _Orders(len(split), self.keys.batch)
            loader = DataLoader(batches, batch_size=None, sampler=orders, num_workers=self.workers, collate_fn=_as_is)
            return {"images_per_s": round(self._rate(loader, lambda _: None, warm=2 * self.workers)[0])}
        augmentation = self._augmentation()
        transform = DeviceTransform(split, self.info, augmentation, self.device, seed=0)
        batches = EncodedTrainingBatches(split, TrainingDraws(self.info, augmentation), 0)
        batch = batches[next(iter(_Orders(len(split), self.keys.batch)))]
        files = range(len(batch.inputs.files))
        if part == "decode":
            return self._rate_alone(lambda: transform.decode(batch.inputs, files))
        decoded = transform.decode(batch.inputs, files)
        transform.decode = lambda *_: dict(decoded)  # type: ignore[method-assign]
        return self._rate_alone(lambda: transform(batch))

    def loader(self, decode: str, repeats: int) -> Row:
        loader = self.open(decode, repeats).train_dataloader()
        return {"images_per_s": round(self._rate(loader, self._to_device, warm=2 * self.workers)[0])}

    def whole(self, model: Mapping[str, str], decode: str, repeats: int) -> Row:
        step = self.make_step(model)
        loader = self.open(decode, repeats).train_dataloader()
        before = self._rate_bare(step, self.keys.seconds / 2)
        speed, waited = self._rate(loader, lambda batch: step(*self._to_device(batch)), warm=2 * self.workers)
        bare = (before + self._rate_bare(step, self.keys.seconds / 2)) / 2
        return {
            "images_per_s": round(speed),
            "step_per_s": round(bare),
            "wait_ms": round(1e3 * waited, 1),
            "of_step": round(speed / bare, 3),
        }

    def _augmentation(self) -> Any:
        return self.open("cpu", 1).augmentation

    def _worker_part(self, part: str, decode: str, split: Split) -> Dataset[Any]:
        if part == "read":
            return EncodedTrainingBatches(split, TrainingDraws(self.info, self._augmentation()), 0)
        transform = training_transform(self.info, self._augmentation())
        return _Decoding(split, _no_pixels, 0) if part == "decode" else _Augmenting(split, transform, 0)

    def _to_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, targets = batch
        return images.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def _rate_alone(self, work: Callable[[], Any]) -> Row:
        """Images a second of work on one batch, a third of the time of a row."""
        speed, _ = self._rate(itertools.repeat(None), lambda _: work(), warm=2, seconds=self.keys.seconds / 3)
        return {"images_per_s": round(speed)}

    def _rate(
        self, batches: Iterable[Any], work: Callable[[Any], Any], *, warm: int, seconds: float | None = None
    ) -> tuple[float, float]:
        """Images a second, and the seconds that a batch waited for the iterator.

        Batches that were ready when the clock begins do not count: `warm` batches, or as many as a quarter of the
        time gives.
        """
        seconds = seconds or self.keys.seconds
        waited, count, began, start = 0.0, 0, time.perf_counter(), None
        asked = began
        with _closing(iter(batches)) as iterator:
            for batch in iterator:
                now = time.perf_counter()
                if start is not None:
                    waited += now - asked
                work(batch)
                count += 1
                if start is None and (count >= max(warm, 2) or now - began > seconds / 4):
                    synchronize(self.device)
                    start, count = time.perf_counter(), 0
                elif start is not None and time.perf_counter() - start > seconds:
                    break
                asked = time.perf_counter()
        synchronize(self.device)
        if start is None or not count:
            raise RuntimeError("the data ended before a batch was timed")
        return self.keys.batch * count / (time.perf_counter() - start), waited / count


def _splits(module: ImageDataModule) -> Splits:
    splits = module.splits
    assert splits is not None
    return splits


class _closing:
    """Closes a generator at the end, so that its thread ends; other iterators have nothing to close."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator

    def __enter__(self) -> Iterator[Any]:
        return self.iterator

    def __exit__(self, *_: object) -> None:
        if hasattr(self.iterator, "close"):
            self.iterator.close()


class _Orders:
    """The indices of batches in the order of the files."""

    def __init__(self, count: int, batch: int) -> None:
        self.count, self.batch = count, batch

    def __iter__(self) -> Iterator[list[SampleIndex]]:
        for first in range(0, self.count - self.batch + 1, self.batch):
            yield [SampleIndex(position, 0, 0) for position in range(first, first + self.batch)]

    def __len__(self) -> int:
        return self.count // self.batch


class _Decoding(TrainingBatches):
    """Decodes a batch and gives nothing."""

    def __getitem__(self, indices: list[SampleIndex]) -> Any:
        return len(list(self.samples(indices, [])))


class _Augmenting(TrainingBatches):
    """Augments one batch of decoded images again and again."""

    decoded: list[Any] | None = None

    def __getitem__(self, indices: list[SampleIndex]) -> Any:
        if self.decoded is None:
            self.decoded = list(self.samples(indices, []))
        return torch.stack([self.transform(image) for image, _ in self.decoded])


def _no_pixels(image: Any) -> None:
    return None


def _as_is(batch: Any) -> Any:
    return batch

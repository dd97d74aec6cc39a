"""Batches of image files that a device decodes and transforms: workers read the bytes and draw the parameters."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.functional import pil_to_tensor

from longseq.kernels.image_transforms import image_resize, image_steps
from longseq.kernels.image_transforms.arithmetic import to_grey
from longseq.tasks.data.batch import Batch, Failure
from longseq.tasks.data.sampler import SampleIndex
from longseq.tasks.data.unreadable import UNREADABLE
from longseq.tasks.image.batched import Draws, erase, stack_draws
from longseq.tasks.image.datasets import (
    REPLACEMENTS,
    EvaluationBatches,
    TrainingBatches,
    as_targets,
    preserved_random_state,
    read_or_failure,
    replace_position,
)
from longseq.tasks.image.decoding import decode, find_jpeg_size, first_line
from longseq.tasks.image.draws import Draw, EvaluationDraws, TrainingDraws
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.sources import Split

# Pixels that are decoded at a time: 2**27 of three bytes each are 384 MiB. Twice as many are in memory while one thread
# decodes and another one crops.
_MOST_PIXELS = 1 << 27


class Jpeg(NamedTuple):
    """A JPEG file as it stands on the disk, for a device to decode."""

    data: bytes
    size: tuple[int, int]  # height, width
    position: int  # in the split


class EncodedImages(NamedTuple):
    """A batch before decoding: each file once, whatever the number of its repeats.

    `data` uint8 [N] holds the files, each from its `starts` to the next one's. `file_of` has the file of each sample of
    `draws.resized`; the other samples, which the worker decoded, are `cropped` uint8 [P, C, S, S], in their order.
    `indices` are what the sampler gave for the samples (none in an evaluation).
    """

    data: Tensor
    starts: list[int]
    sizes: list[tuple[int, int]]
    positions: list[int]
    file_of: list[int]
    cropped: Tensor
    draws: Draws
    indices: list[SampleIndex]


def read_encoded(
    split: Split, position: int, takes: Callable[[tuple[int, int]], bool] = lambda size: True
) -> tuple[Jpeg | Image.Image, Any] | Failure:
    """A JPEG file of a size that a device takes with its class, or another image, decoded; or why it cannot be read."""
    read_file = getattr(split.source, "read_file", None)
    if read_file is None:
        return read_or_failure(split, position)
    index = int(split.indices[position])
    try:
        data, target = read_file(index)
        size = find_jpeg_size(data)
        if size is not None and takes(size):
            return Jpeg(data, size, position), target
        return decode(io.BytesIO(data)), target
    except UNREADABLE as error:
        return Failure(split.source.path(index), first_line(error))


class EncodedTrainingBatches(TrainingBatches):
    """`TrainingBatches` that a `DeviceTransform` finishes."""

    def __init__(self, split: Split, draws: TrainingDraws, seed: int) -> None:
        super().__init__(split, draws.crop, seed)
        self.draws = draws
        self.read = partial(read_encoded, takes=draws.takes)

    def __getitem__(self, indices: list[SampleIndex]) -> Batch:
        failures: list[Failure] = []
        with preserved_random_state():
            images, draws, targets = _draw(self.samples(indices, failures), self.draws)
        if len(images) < len(indices):
            return Batch(torch.empty(0), torch.empty(0), failures)
        encoded = _pack(images, draws, self.draws.size, self.draws.inner_channels, indices)
        return Batch(encoded, as_targets(targets), failures)


class EncodedEvaluationBatches(EvaluationBatches):
    """`EvaluationBatches` that a `DeviceTransform` finishes."""

    def __init__(self, split: Split, draws: EvaluationDraws, info: DataInfo) -> None:
        super().__init__(split, draws.crop, info)
        self.draws = draws
        self.read = partial(read_encoded, takes=draws.takes)

    def __getitem__(self, positions: list[int]) -> Batch:
        failures: list[Failure] = []
        images, draws, targets = _draw(self.samples(positions, failures), self.draws)
        encoded = _pack(images, draws, self.draws.size, self.draws.inner_channels, [])
        return Batch(encoded, as_targets(targets, self.num_labels), failures)


def _draw(
    samples: Iterable[tuple[Jpeg | Image.Image, Any]], draws: TrainingDraws | EvaluationDraws
) -> tuple[list[Jpeg | Image.Image], list[Draw], list[Any]]:
    """The images, those that the CPU has decoded cropped, with the parameters of their transforms and their targets."""
    images: list[Jpeg | Image.Image] = []
    drawn: list[Draw] = []
    targets: list[Any] = []
    for image, target in samples:
        kept, parameters = (image, draws(image.size)) if isinstance(image, Jpeg) else draws.crop(image)
        images.append(kept)
        drawn.append(parameters)
        targets.append(target)
    return images, drawn, targets


def _pack(
    images: Sequence[Jpeg | Image.Image],
    draws: Sequence[Draw],
    size: int,
    channels: int,
    indices: list[SampleIndex],
) -> EncodedImages:
    files: dict[int, Jpeg] = {image.position: image for image in images if isinstance(image, Jpeg)}
    numbers = {position: number for number, position in enumerate(files)}
    cropped = [pil_to_tensor(image) for image in images if not isinstance(image, Jpeg)]
    lengths = [len(file.data) for file in files.values()]
    return EncodedImages(
        data=torch.from_numpy(np.frombuffer(bytearray().join(file.data for file in files.values()), dtype=np.uint8)),
        starts=[0, *np.cumsum(lengths).tolist()],
        sizes=[file.size for file in files.values()],
        positions=list(files),
        file_of=[numbers[image.position] for image in images if isinstance(image, Jpeg)],
        cropped=torch.stack(cropped) if cropped else torch.empty(0, channels, size, size, dtype=torch.uint8),
        draws=stack_draws(draws, size),
        indices=indices,
    )


class Decoded(NamedTuple):
    """Files of a batch, by number, with their images uint8 [3, H, W]; None for a file that no decoder takes.

    `is_last` is true where no files of the batch follow. Batches without files have one of these too.
    """

    batch: Batch
    images: dict[int, Tensor | None]
    is_last: bool


def decoded_tensors(group: Iterable[Decoded]) -> list[Tensor]:
    """All images of a group."""
    return [image for decoded in group for image in decoded.images.values() if image is not None]


class _Unfinished(NamedTuple):
    """A batch whose files are being cropped, with its images [B, C, S, S], and the samples that are lost."""

    encoded: EncodedImages
    images: Tensor
    targets: Tensor
    failures: list[Failure]
    lost: list[int]


def _has_images(batch: Batch) -> bool:
    """False for a batch of which nothing could be read."""
    return isinstance(batch.inputs, EncodedImages)


class DeviceTransform:
    """Decodes and transforms batches on a device: inputs `EncodedImages` -> uint8 [B, C, S, S] there.

    CUDA devices decode by nvJPEG; what it refuses, and everything on a CPU, Pillow decodes. A file that neither can
    decode is replaced in training by the image that its index determines, in the size of the file, and is left out of
    an evaluation. `fill` is the colour of corners in warps. With `exact`, images are resized in full precision.
    """

    def __init__(
        self,
        split: Split,
        info: DataInfo,
        device: torch.device,
        *,
        seed: int = 0,
        fill: Sequence[int] = (0, 0, 0),
        exact: bool = True,
    ) -> None:
        self.split, self.info, self.device = split, info, device
        self.seed, self.fill, self.exact = seed, tuple(fill), exact

    def __call__(self, batches: Sequence[Batch]) -> list[Batch]:
        """The finished batches. Their files are decoded together: nvJPEG waits for the device in each call."""
        return list(self.finish(self.decode_groups(batches, together=len(batches))))

    def decode_groups(self, batches: Iterable[Batch], *, together: int) -> Iterator[list[Decoded]]:
        """The first half of the work: groups of files that are decoded in one call, of `together` batches at most."""
        for group in _groups(batches, together):
            images = iter(self._decode([(batch.inputs, file) for batch, files, _ in group for file in files]))
            yield [Decoded(batch, {file: next(images) for file in files}, is_last) for batch, files, is_last in group]

    def finish(self, groups: Iterable[Sequence[Decoded]]) -> Iterator[Batch]:
        """The second half: the finished batches, each as soon as its last file is there."""
        begun: _Unfinished | None = None
        for batch, images, is_last in chain.from_iterable(groups):
            if not _has_images(batch):
                yield batch
                continue
            begun = begun or self._begin(batch)
            if images:
                self._take(begun, images)
            if is_last:
                yield self._end(begun)
                begun = None

    def _begin(self, batch: Batch) -> _Unfinished:
        encoded, targets, failures = batch
        images = self._empty(encoded.draws.samples, encoded)
        return _Unfinished(encoded, images, targets.clone(), list(failures), [])

    def _take(self, batch: _Unfinished, decoded: dict[int, Tensor | None]) -> None:
        """Crop these files' samples into the images of their batch. A file that was not decoded is replaced."""
        encoded = batch.encoded
        for file in (file for file, image in decoded.items() if image is None):
            resized = encoded.draws.resized
            samples = [number for number, of in zip(resized, encoded.file_of, strict=True) if of == file]
            decoded[file] = self._replace(encoded, file, samples, batch.targets, batch.failures)
            batch.lost.extend([] if encoded.indices else samples)
        self._crop(encoded, decoded, batch.images)

    def _end(self, batch: _Unfinished) -> Batch:
        encoded, images, targets, failures, lost = batch
        draws = encoded.draws
        self._place_cropped(encoded, images)
        images = image_steps(images, draws.steps, self.fill)
        if self.info.in_chans < images.shape[1]:
            images = to_grey(images)
        erase(images, draws)
        if lost:
            kept = torch.tensor([number for number in range(len(images)) if number not in lost], dtype=torch.int64)
            images, targets = images[kept.to(self.device)], targets[kept]
        return Batch(images, targets.to(self.device), failures)

    def crop(self, encoded: EncodedImages, decoded: Mapping[int, Tensor | None]) -> Tensor:
        """The images uint8 [B, C, S, S] of a batch after crop and flips, from all of its decoded files."""
        images = self._empty(encoded.draws.samples, encoded)
        self._crop(encoded, decoded, images)
        self._place_cropped(encoded, images)
        return images

    def _empty(self, count: int, encoded: EncodedImages) -> Tensor:
        size = self.info.side
        return torch.empty(count, encoded.cropped.shape[1], size, size, dtype=torch.uint8, device=self.device)

    def _crop(self, encoded: EncodedImages, decoded: Mapping[int, Tensor | None], images: Tensor) -> None:
        """Crop the samples of these files into their places among the images of the batch."""
        geometries = encoded.draws.geometries
        places = [place for place, file in enumerate(encoded.file_of) if file in decoded]
        images[[encoded.draws.resized[place] for place in places]] = image_resize(
            [decoded[encoded.file_of[place]] for place in places],  # type: ignore[misc]
            type(geometries)(*(values[places] for values in geometries)),
            self.info.side,
            channels=images.shape[1],
            interpolation=self.info.interpolation,
            exact=self.exact,
        )

    def _place_cropped(self, encoded: EncodedImages, images: Tensor) -> None:
        """Put the images that the worker cropped into their places."""
        if len(encoded.cropped):
            given = sorted(set(range(len(images))) - set(encoded.draws.resized))
            images[given] = encoded.cropped.to(self.device)

    def decode(self, encoded: EncodedImages, files: Sequence[int]) -> dict[int, Tensor | None]:
        """The images uint8 [3, H, W] of files of a batch; None for a file that is no image of the size in its head."""
        return dict(zip(files, self._decode([(encoded, file) for file in files]), strict=True))

    def _decode(self, files: Sequence[tuple[EncodedImages, int]]) -> list[Tensor | None]:
        data = [encoded.data[encoded.starts[file] : encoded.starts[file + 1]] for encoded, file in files]
        images = decode_on_gpu(data, self.device) if data and self.device.type == "cuda" else [None] * len(data)
        for index, (encoded, file) in enumerate(files):
            image, size = images[index], encoded.sizes[file]
            if image is None or tuple(image.shape) != (3, *size):
                images[index] = self._decode_on_host(data[index], size)
        return images

    def _decode_on_host(self, data: Tensor, size: tuple[int, int]) -> Tensor | None:
        try:
            image = decode(io.BytesIO(data.numpy().tobytes())).convert("RGB")
        except UNREADABLE:
            return None
        return pil_to_tensor(image).to(self.device) if (image.height, image.width) == size else None

    def _replace(
        self, encoded: EncodedImages, file: int, samples: Sequence[int], targets: Tensor, failures: list[Failure]
    ) -> Tensor:
        """An image in place of a file that cannot be decoded; its samples get its class."""
        height, width = encoded.sizes[file]
        path = self.split.source.path(int(self.split.indices[encoded.positions[file]]))
        failures.append(Failure(path, "its pixels cannot be decoded"))
        for attempt in range(1, REPLACEMENTS) if encoded.indices else ():
            position = replace_position(self.seed, encoded.indices[samples[0]], attempt, len(self.split))
            sample = read_or_failure(self.split, position)
            if isinstance(sample, Failure):
                failures.append(sample)
                continue
            targets[list(samples)] = as_targets([sample[1]])[0]
            # Its parameters were drawn for the size of the file.
            return pil_to_tensor(sample[0].convert("RGB").resize((width, height))).to(self.device)
        return torch.zeros(3, height, width, dtype=torch.uint8, device=self.device)


class _Files(NamedTuple):
    """Files of a batch, by number, and whether they are its last."""

    batch: Batch
    numbers: list[int]
    is_last: bool


def _groups(batches: Iterable[Batch], together: int) -> Iterator[list[_Files]]:
    """What is decoded together: at most `together` batches, and `_MOST_PIXELS` unless a single file has more.

    A batch is divided only if it has more by itself, and its parts do not depend on the batches beside it: the
    numbers of torch's crop may depend on the images that it crops together.
    """
    group: list[_Files] = []
    pixels = 0
    for batch in batches:
        sizes = batch.inputs.sizes if _has_images(batch) else []
        parts = _parts(sizes) or [[]]
        for number, files in enumerate(parts, 1):
            own = sum(height * width for height, width in (sizes[file] for file in files))
            if group and pixels + own > _MOST_PIXELS:
                yield group
                group, pixels = [], 0
            group.append(_Files(batch, files, number == len(parts)))
            pixels += own
        if len(group) >= together:
            yield group
            group, pixels = [], 0
    if group:
        yield group


def _parts(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The numbers of the files of a batch, in parts that are not divided further."""
    parts: list[list[int]] = []
    pixels = 0
    for file, (height, width) in enumerate(sizes):
        pixels += height * width
        if not parts or pixels > _MOST_PIXELS:
            parts.append([])
            pixels = height * width
        parts[-1].append(file)
    return parts


def decode_on_gpu(data: Sequence[Tensor], device: torch.device) -> list[Any]:
    """Decode JPEG files uint8 [N] by nvJPEG to images uint8 [3, H, W]; None for a file that nvJPEG refuses."""
    # nvJPEG works on a stream of its own, which does not wait until this stream has read the memory that it gets. The
    # allocator itself waits for the other streams that an image was recorded for, before it gives the memory again.
    stream = torch.cuda.current_stream(device)
    stream.synchronize()
    try:
        images = list(decode_jpeg(list(data), mode=ImageReadMode.RGB, device=device))
        # This stream waits for nvJPEG's. Once it is through, nothing reads the files any more: whoever owns their
        # memory may fill it again. Of pinned memory, a copy to the device goes on after the call that began it.
        stream.synchronize()
        return images
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return [None] if len(data) == 1 else [one for file in data for one in decode_on_gpu([file], device)]


def has_nvjpeg(device: torch.device) -> bool:
    """True if torchvision decodes JPEG files on this device."""
    stream = io.BytesIO()
    Image.new("RGB", (16, 16), (200, 100, 50)).save(stream, "JPEG")
    data = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
    return device.type == "cuda" and decode_on_gpu([data], device)[0] is not None

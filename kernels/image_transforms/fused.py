"""When the fused transforms may run: on GPUs that Triton knows, after they have changed images rightly there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longseq.kernels import first_use
from longseq.kernels.devices import is_emulated, triton_reasons
from longseq.kernels.dispatch import Call
from longseq.kernels.image_transforms.colour import image_steps_torch
from longseq.kernels.image_transforms.parameters import KINDS, NUMBERS, Geometries, ImageSteps
from longseq.kernels.image_transforms.resizing import FILTERS, image_resize_torch

STEPS = "steps"  # in place of a filter: the kernels of `image_steps`
SIZE = 72  # of images in the check; its square is no multiple of the pixels of a program
FILL = (124, 116, 104)
# Sums are rounded in another order. After two passes, a pixel whose sum is at a half may differ by so many levels, and
# so large a share of pixels may.
LEVELS, SHARE = 2, 0.01

# By GPU and kind: why the kernels are refused, or None.
_VERDICTS: dict[tuple[int, str], str | None] = {}


def resize_reasons(call: Call) -> list[str]:
    """The reasons against the fused form of `image_resize`."""
    found = []
    if call.sizes.get("channels", 3) != 3:
        found.append(f"it resizes images of three channels, not of {call.sizes['channels']}")
    return [*found, *step_reasons(call)]


def step_reasons(call: Call) -> list[str]:
    """The reasons against the kernels of `call.kind`: a filter, or the steps."""
    found = triton_reasons(call)
    if found or is_emulated() or not torch.cuda.is_available() or not call.kind:
        return found
    index = torch.cuda.current_device() if call.device.index is None else call.device.index
    key = index, call.kind
    if key not in _VERDICTS:
        _VERDICTS[key] = find_error(*key)
    error = _VERDICTS[key]
    return [] if error is None else [error]


def find_error(index: int, kind: str) -> str | None:
    """Transform random images on a GPU, and compare them with the form of torch on the CPU: what is wrong, or None."""
    what = f"transform images ({kind})"
    return first_use.find_error(
        index, partial(compare, kind=kind), what=what, operation="image transforms", instead="does them"
    )


def compare(device: torch.device, kind: str, size: int = SIZE) -> str | None:
    """Transform random images by the fused form on a device, and by torch on the CPU."""
    from longseq.kernels.image_transforms.triton_resizing import image_resize_triton
    from longseq.kernels.image_transforms.triton_steps import image_steps_triton

    if kind == STEPS:
        images, steps = make_steps(size)
        found = image_steps_triton(images.to(device), steps, FILL).cpu()
        wanted = image_steps_torch(images, steps, FILL)
        names = [KINDS[code] for code in steps.kinds[0].tolist()]
    else:
        photographs, geometries = make_photographs(size)
        found = image_resize_triton([one.to(device) for one in photographs], geometries, size, 3, kind, True).cpu()
        wanted = image_resize_torch(photographs, geometries, size, 3, kind)
        names = [" x ".join(map(str, one.shape[1:])) for one in photographs]
    difference = (found.int() - wanted.int()).abs().flatten(1)
    wrong = (difference.amax(1) > LEVELS) | ((difference > 0).float().mean(1) > SHARE)
    if wrong.any():
        of = ", ".join(name for name, is_wrong in zip(names, wrong.tolist(), strict=True) if is_wrong)
        return f"{int((difference > LEVELS).sum())} values are wrong ({of})"
    return None


def make_photographs(size: int) -> tuple[list[Tensor], Geometries]:
    """Images of several sizes, and boxes of them, some of which become larger, turned or black at a border."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((size + 9, 3 * size), (5 * size // 2, size // 2), (17, 23), (size, size))
    images = [_random_image(height, width, generator) for height, width in shapes]
    boxes, resized, rows, columns = [], [], [], []
    for number, (height, width) in enumerate(shapes):
        boxes.append([height // 5, width // 7, height - height // 5 - 1, width - width // 7 - 2])
        resized.append([size, size + 5 * number])
        picked = torch.arange(size, dtype=torch.int16)
        rows.append(picked if number % 2 else picked.flip(0))
        columns.append(torch.where(picked < 3 * number, -1, picked))
    return images, Geometries(
        torch.tensor(boxes, dtype=torch.int32), torch.tensor(resized, dtype=torch.int32), torch.stack(rows),
        torch.stack(columns).to(torch.int16),
    )  # fmt: skip


def make_steps(size: int) -> tuple[Tensor, ImageSteps]:
    """An image for each kind of step that is not blurred by torch, which then does the next kind as well."""
    generator = torch.Generator().manual_seed(1)
    kinds = torch.tensor([code for code, kind in enumerate(KINDS) if kind != "blur"], dtype=torch.int32)
    images = torch.stack([_random_image(size, size, generator) for _ in kinds])
    kinds = torch.stack([kinds, kinds.roll(5)])
    values = torch.zeros(*kinds.shape, NUMBERS, dtype=torch.float64)
    values[..., 0] = 1.4
    for turn, of_turn in enumerate(kinds.tolist()):
        for number, code in enumerate(of_turn):
            if KINDS[code].endswith("in_rows"):
                values[turn, number] = torch.tensor([1, 0.2, -3.3, 0, 1, 0])
            elif KINDS[code].endswith("in_columns"):
                values[turn, number] = torch.tensor([1, 0, 0, 0, 1, 7.7])
            elif KINDS[code].startswith("bi"):
                values[turn, number] = torch.tensor([0.96, -0.28, 12.3, 0.28, 0.96, -9.1])
    tables = torch.randint(256, (*kinds.shape, 256), generator=generator, dtype=torch.uint8)
    return images, ImageSteps(kinds, values, tables)


def _random_image(height: int, width: int, generator: torch.Generator) -> Tensor:
    """Smooth light with grain, from dark to bright."""
    y, x = torch.arange(height)[:, None] / 11, torch.arange(width) / 7
    light = torch.stack([110 + 80 * torch.sin(x + channel) + 50 * torch.cos(y - channel) for channel in range(3)])
    return (light + 12 * torch.randn(3, height, width, generator=generator)).clamp(3, 251).to(torch.uint8)


def list_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The calls of the checks on tensors without values, by name."""
    from longseq.kernels.image_transforms.triton_resizing import image_resize_triton
    from longseq.kernels.image_transforms.triton_steps import image_steps_triton

    photographs, geometries = make_photographs(SIZE)
    photographs = [image.to("meta") for image in photographs]
    for kind in FILTERS:
        yield kind, partial(image_resize_triton, photographs, geometries, SIZE, 3, kind, True)
    images, steps = make_steps(SIZE)
    yield STEPS, partial(image_steps_triton, images.to("meta"), steps, FILL)

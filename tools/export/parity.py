"""Comparison of an exported file with the model that it was written from."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Comparison:
    """How far the file is from the model on one batch, the limit, and the share of equal best classes, or tokens.

    `rounding` is the distance of the model from its double precision.
    """

    shape: tuple[int, ...]
    difference: float
    limit: float
    rounding: float
    top1: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit  # False for NaN


def probe_images(batch: int, channels: int, height: int, width: int, *, pixels: bool) -> Tensor:
    """Images [B, C, H, W] for the comparison: noise, smooth and constant in turn; uint8 if `pixels`, else normalised.

    Smooth and constant images give correlated and equal tokens, for which a delta rule's triangular systems are
    hardest.
    """
    generator = torch.Generator().manual_seed(1000 * batch + height + width)
    noise = torch.randn(batch, channels, height, width, generator=generator)
    coarse = torch.randn(batch, channels, 3, 3, generator=generator)
    smooth = F.interpolate(coarse, (height, width), mode="bilinear", align_corners=True)
    plain = coarse[..., :1, :1].expand_as(noise)
    images = torch.stack([(noise, smooth, plain)[i % 3][i] for i in range(batch)])
    return (images * 64 + 128).round().clamp(0, 255).to(torch.uint8) if pixels else images.contiguous()


def probe_tokens(batch: int, length: int, vocab_size: int) -> Tensor:
    """Tokens [B, T] for the comparison: random ones, a short pattern and one repeated token, in turn.

    Equal tokens have equal keys, for which a delta rule's triangular systems are hardest.
    """
    generator = torch.Generator().manual_seed(1000 * batch + length)
    random = torch.randint(vocab_size, (batch, length), generator=generator)
    place = torch.arange(length)
    kinds = (random, random[:, place % 3], random[:, place * 0])
    return torch.stack([kinds[row % 3][row] for row in range(batch)])


@dataclass(frozen=True)
class Expected:
    """The model's output for a batch, and its error from rounding to float32."""

    batch: Tensor
    output: Tensor
    rounding: float


@torch.no_grad()
def expect(
    model: nn.Module,
    batches: Sequence[Tensor],
    read: Callable[[Any, Tensor], Tensor] = lambda model, batch: model(batch),
) -> list[Expected]:
    """Let a float32 model `read` each batch, and a double precision copy for the rounding error.

    Raises:
        ValueError: an output is NaN or infinite.
    """
    exact = copy.deepcopy(model).double()
    expected = []
    for batch in batches:
        output = read(model, batch)
        if not output.isfinite().all():
            raise ValueError("the outputs of the model are not finite")
        wide = batch.double() if batch.is_floating_point() else batch
        expected.append(Expected(batch, output, (output - read(exact, wide)).abs().max().item()))
    return expected


def compare(call: Callable[[Tensor], Tensor], expected: Expected, tolerance: float) -> Comparison:
    """Run the file on the batch of `expected`.

    The limit is `tolerance` times the largest output, or times 1 if that is larger; or three times the model's rounding
    error if that is larger, which is the distance that a file with twice the model's error can have.
    """
    batch, output = expected.batch, expected.output
    actual = call(batch)
    if actual.shape != output.shape:
        raise ValueError(f"the file gives {list(actual.shape)} for {list(batch.shape)}, not {list(output.shape)}")
    wanted = tolerance * max(1.0, output.abs().max().item())
    return Comparison(
        shape=tuple(batch.shape),
        difference=(actual - output).abs().max().item(),
        limit=max(wanted, 3 * expected.rounding),
        rounding=expected.rounding,
        top1=(actual.argmax(-1) == output.argmax(-1)).float().mean().item(),
    )


@torch.no_grad()
def latency_ms(call: Callable[..., Any], *arguments: Any, seconds: float = 1.0) -> float:
    """Median time of one call in milliseconds, over at least 5 calls and about `seconds`."""
    for _ in range(3):  # TorchScript compiles in its first calls
        call(*arguments)
    times: list[float] = []
    while len(times) < 5 or sum(times) < seconds:
        start = time.perf_counter()
        call(*arguments)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)

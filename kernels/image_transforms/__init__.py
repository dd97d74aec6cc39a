"""Transforms of whole batches of images, with parameters of their own for each image: Pillow's numbers, on a device.

The host draws the parameters; `image_resize` crops and resizes, `image_steps` changes colours and warps.
"""

from collections.abc import Sequence

from torch import Tensor

from longseq.kernels.dispatch import Backend, Call, is_exporting, register_torch, select
from longseq.kernels.image_transforms.colour import image_steps_torch
from longseq.kernels.image_transforms.fused import resize_reasons, step_reasons
from longseq.kernels.image_transforms.parameters import Geometries, ImageSteps
from longseq.kernels.image_transforms.resizing import image_resize_torch
from longseq.kernels.operation import Later

__all__ = ["Geometries", "ImageSteps", "image_resize", "image_steps"]


def image_resize(
    images: Sequence[Tensor],
    geometries: Geometries,
    size: int,
    *,
    channels: int = 3,
    interpolation: str = "bicubic",
    exact: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Crop and resize images uint8 [3, H, W] of any sizes, each by its geometry -> uint8 [B, channels, size, size].

    The numbers are those of Pillow's antialiased filters (Resample.c), which rounds to 8 bits after the rows and after
    the columns, up to single levels. Pillow 13 takes the columns first where an image loses height and gains width:
    then bicubic and lanczos, which overshoot at sharp edges and are cut off there, differ by more at such edges.

    Args:
        channels: 1 makes images grey first.
        interpolation: nearest, box, bilinear, hamming, bicubic or lanczos.
        exact: False lets a GPU multiply in float16, in the form of torch, which is faster.
        backend: fused, three Triton kernels for images of three channels; torch, matrix products; auto takes the first
            that can run. The fused form is checked at its first use in a process.

    Raises:
        ValueError: the backend that is named cannot run this call, with every reason.
    """
    call = Call(
        images[0].device, images[0].dtype, exporting=is_exporting(), sizes={"channels": channels}, kind=interpolation
    )
    run = select("image_resize", backend, call)
    return run(images, geometries, size, channels, interpolation, exact)


def image_steps(images: Tensor, steps: ImageSteps, fill: Sequence[float], *, backend: str = "auto") -> Tensor:
    """Change colours and warp, uint8 [B, 3, S, S]: the steps of each image, in their order. May write into `images`.

    The numbers are those of Pillow's enhancements, warps and Gaussian blur, which round to 8 bits after each step.

    Args:
        fill: the colour of corners that a warp has no pixels for, from 0 to 255.
        backend: fused, Triton kernels that take all kinds of steps together (torch blurs); torch, kind by kind; auto
            takes the first that can run. The fused form is checked at its first use in a process.

    Raises:
        ValueError: the backend that is named cannot run this call, with every reason.
    """
    call = Call(images.device, images.dtype, exporting=is_exporting(), kind="steps")
    return select("image_steps", backend, call)(images, steps, fill)


register_torch(
    "image_resize",
    Backend("fused", Later(f"{__name__}.triton_resizing", "image_resize_triton"), resize_reasons),
    Backend("torch", image_resize_torch),
)
register_torch(
    "image_steps",
    Backend("fused", Later(f"{__name__}.triton_steps", "image_steps_triton"), step_reasons),
    Backend("torch", image_steps_torch),
)

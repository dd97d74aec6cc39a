"""Cut an image into patches and project each to a token."""

from __future__ import annotations

from collections.abc import Sequence

from timm import layers
from torch import Tensor, nn
from torch.nn import functional

from longseq.blocks.linear import needs_alignment
from longseq.blocks.precision import product_dtype
from longseq.blocks.traces import makes_trace, whole_in_traces


class PatchProjection(nn.Conv2d):
    """A convolution over patches, computed as one matrix product where patches do not overlap.

    The product is only used on a GPU in half precision, where cuDNN takes twenty times as long for the weight's
    gradient.
    """

    @classmethod
    def of(cls, other: nn.Conv2d) -> PatchProjection:
        """Make a projection with the parameters of another convolution."""
        (height, width), (down, right) = other.kernel_size, other.stride
        projection = cls(
            other.in_channels, other.out_channels, (height, width), (down, right), bias=False, device="meta"
        )
        projection.weight, projection.bias = other.weight, other.bias
        return projection.train(other.training)

    @whole_in_traces
    def forward(self, x: Tensor) -> Tensor:
        height, width = self.kernel_size
        side_by_side = self.stride == self.kernel_size and self.padding == (0, 0) and self.dilation == (1, 1)
        fits = x.ndim == 4 and self.groups == 1 and x.shape[2] >= height and x.shape[3] >= width
        if not (side_by_side and fits and needs_alignment(self.weight)):
            return super().forward(x)
        dtype = product_dtype(self.weight)
        if dtype != self.weight.dtype:
            x = x.to(dtype)  # before the patches are taken out: autocast would cast later and move twice the bytes
        rows, columns = x.shape[2] // height, x.shape[3] // width
        patches = x[..., : rows * height, : columns * width]
        patches = patches.unflatten(3, (columns, width)).unflatten(2, (rows, height)).permute(0, 2, 4, 1, 3, 5)
        return functional.linear(patches.flatten(3), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class PatchDropout(layers.PatchDropout):
    """timm's patch dropout that keeps the order of the patches, which recurrent mixers read."""

    def __init__(self, prob: float) -> None:
        super().__init__(prob, num_prefix_tokens=0, ordered=True)

    @whole_in_traces
    def forward(self, x: Tensor) -> Tensor:
        """Drop random patches of each image of `x [B, N, D]` in training: `[B, max(1, int((1 - prob) N)), D]`."""
        return super().forward(x)


class PatchEmbed(layers.PatchEmbed):
    """timm's patch embedding with a separate stride; overlapping patches give more tokens at the same image size.

    Images `[B, C, H, W]` become a grid of tokens `[B, h, w, D]`, h = (H - patch) // stride + 1. Pixels at the lower and
    the right border that fill no patch are left out, or completed by zeros with `dynamic_img_pad`, which rounds up.
    timm refuses such images in models of any size; here they are accepted.
    """

    img_size: tuple[int, int]
    grid_size: tuple[int, int]
    num_patches: int

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int],
        patch_size: int | tuple[int, int],
        stride: int | tuple[int, int] | None,
        in_chans: int,
        embed_dim: int,
        strict_img_size: bool,
        dynamic_img_pad: bool = False,
    ) -> None:
        super().__init__(
            img_size=None,
            patch_size=patch_size,  # type: ignore[arg-type]
            in_chans=in_chans,
            embed_dim=embed_dim,
            output_fmt="NHWC",
            strict_img_size=strict_img_size,
            dynamic_img_pad=dynamic_img_pad,
        )
        self.stride = self.patch_size if stride is None else layers.to_2tuple(stride)
        self.proj.stride = self.stride
        self.proj = PatchProjection.of(self.proj)
        self.img_size, self.grid_size, self.num_patches = self._init_img_size(img_size)

    def _init_img_size(self, img_size):
        if img_size is None:
            return None, None, None
        img_size = layers.to_2tuple(img_size)
        grid_size = self.dynamic_feat_size(img_size)
        return img_size, grid_size, grid_size[0] * grid_size[1]

    def set_input_size(self, img_size=None, patch_size=None) -> None:
        """Change the image size, and the patch size where patches do not overlap (its weights are resampled)."""
        overlapping = self.stride != self.patch_size
        if patch_size is not None and layers.to_2tuple(patch_size) != self.patch_size:
            if overlapping:
                raise ValueError(f"patches of {self.patch_size} with stride {self.stride} keep their size")
            self.stride = layers.to_2tuple(patch_size)
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        if type(self.proj) is nn.Conv2d:  # timm makes one for another patch size
            self.proj = PatchProjection.of(self.proj)

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        """Return the stride of the token grid in pixels."""
        return max(self.stride) if as_scalar else self.stride

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Return the token grid (h, w) of an image size (H, W)."""
        return grid_of(img_size, self.patch_size, self.stride, padded=self.dynamic_img_pad)

    def _pad(self, x: Tensor) -> Tensor:
        """Add zeros at the lower and the right border until patches cover the image."""
        (height, width), (patch_height, patch_width), (down, right) = x.shape[-2:], self.patch_size, self.stride
        below = _steps(height, patch_height, down) * down + patch_height - height
        aside = _steps(width, patch_width, right) * right + patch_width - width
        return functional.pad(x, (0, aside, 0, below))

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if self.strict_img_size:
            expected = f"the model expects {self.img_size}, or needs dynamic_img_size=True"
            layers._assert(height == self.img_size[0], f"image height {height}: {expected}")
            layers._assert(width == self.img_size[1], f"image width {width}: {expected}")
            if makes_trace():
                # A trace leaves those checks out, and an image of another shape with as many patches would get wrong
                # positions. This operation is part of the trace, and fails for another size.
                x = x.unflatten(3, (self.img_size[1],)).unflatten(2, (self.img_size[0],))
        if self.dynamic_img_pad:
            x = self._pad(x)
        return self.norm(self.proj(x).permute(0, 2, 3, 1))  # [B, h, w, D]


def grid_of(
    img_size: int | Sequence[int],
    patch_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    *,
    padded: bool = False,
) -> tuple[int, int]:
    """The token grid (h, w) of an image size; `padded` completes the last row and column of patches."""
    height, width = layers.to_2tuple(img_size)
    patch_height, patch_width = layers.to_2tuple(patch_size)
    down, right = layers.to_2tuple(patch_size if stride is None else stride)
    if padded:
        return _steps(height, patch_height, down) + 1, _steps(width, patch_width, right) + 1
    return (height - patch_height) // down + 1, (width - patch_width) // right + 1


def _steps(size: int, patch: int, stride: int) -> int:
    """Count the steps from the first patch to the one that ends at the border of `size` pixels, or behind it."""
    # Exported files divide towards zero, and Python towards less: the numbers here are not negative.
    return (size - patch + stride - 1) // stride

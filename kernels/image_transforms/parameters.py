"""How the images of a batch are cut, resized and changed, as numbers on the host."""

from typing import NamedTuple

from torch import Tensor

# Pillow's operations. A table gives each value of a pixel another one; auto_contrast, equalize and contrast find such a
# table from the values of the image. Warps have a matrix from the pixels of the result to those of the image. Those
# that move pixels along rows alone, or along columns alone, are told apart: the form of torch saves work there.
KINDS = (
    *("nothing", "table", "auto_contrast", "equalize", "contrast", "color", "sharpness", "blur"),
    *("bilinear", "bilinear_in_rows", "bilinear_in_columns", "bicubic", "bicubic_in_rows", "bicubic_in_columns"),
)
NUMBERS = 6  # of a step, at most: those of a matrix


class Geometries(NamedTuple):
    """How B images of any sizes become `[S, S]`: a box is resized, and rows and columns of the result are picked.

    Attributes:
        box: int32 `[B, 4]`: top, left, height and width in the image.
        resized: int32 `[B, 2]`: height and width to which the box is resized.
        rows, columns: int16 `[B, S]`: the picked rows and columns of the resized box, -1 for black ones.
    """

    box: Tensor
    resized: Tensor
    rows: Tensor
    columns: Tensor


class ImageSteps(NamedTuple):
    """The steps of a batch of B images, on the host: of each image its first one, then its second one, and so on.

    Attributes:
        kinds: int32 `[N, B]`, places in KINDS. An image with fewer than N steps does nothing in the last ones.
        values: float64 `[N, B, 6]`: the factor of contrast, color and sharpness (0 is grey or smooth, 1 the image), the
            standard deviation of blur in pixels, the matrix (a, b, c, d, e, f) of a warp, which takes the pixel (x, y)
            of the result from (ax + by + c, dx + ey + f).
        tables: uint8 `[N, B, 256]`, of the kind "table".
    """

    kinds: Tensor
    values: Tensor
    tables: Tensor

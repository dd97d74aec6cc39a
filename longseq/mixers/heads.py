"""How a width is cut into heads, and the elementwise feature maps of queries and keys."""

from torch import Tensor
from torch.nn import functional

FEATURE_MAPS = {  # of queries and keys
    "silu": functional.silu,
    "relu": functional.relu,
    "relu_squared": lambda x: functional.relu(x).square(),
    "identity": lambda x: x,
}


def choose_heads(width: int, num_heads: int | None, head_dim: int | None, *, preferred: int) -> tuple[int, int]:
    """Return `(num_heads, head_dim)`, whose product is `width`, from whichever of the two is given.

    With neither given, a head has `preferred` channels if that divides the width, else half of that, a quarter, and so
    on.

    Raises ValueError if the given numbers do not multiply to the width.
    """
    if num_heads is None and head_dim is None:
        head_dim = preferred
        while width % head_dim:
            head_dim //= 2
    if num_heads is None:
        num_heads = width // int(head_dim or 1)
    if head_dim is None:
        head_dim = width // num_heads
    if num_heads * head_dim != width:
        raise ValueError(f"num_heads={num_heads} times head_dim={head_dim} is not the width {width}")
    return num_heads, head_dim


def largest_heads(width: int, limit: int) -> int:
    """Return the largest head dimension of at most `limit` that divides the width."""
    return next(dim for dim in range(min(width, limit), 0, -1) if width % dim == 0)


def check_groups(num_heads: int, num_kv_heads: int | None) -> int:
    """Return the number of heads of keys and values, by default `num_heads`; ValueError if it is no divisor."""
    groups = num_heads if num_kv_heads is None else num_kv_heads
    if groups < 1 or num_heads % groups:
        raise ValueError(f"num_kv_heads={groups} does not divide the {num_heads} query heads")
    return groups


def repeat_groups(x: Tensor, num_heads: int) -> Tensor:
    """Repeat heads of keys or values `[..., G, D]` for the query heads that share them: `[..., H, D]`."""
    groups = x.shape[-2]
    return x if groups == num_heads else x.repeat_interleave(num_heads // groups, dim=-2)

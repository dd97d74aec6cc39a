"""How a width is cut into heads."""

from __future__ import annotations

from torch import Tensor


def choose_heads(width: int, num_heads: int | None, head_dim: int | None, *, preferred: int) -> tuple[int, int]:
    """Return `(num_heads, head_dim)` with `num_heads · head_dim == width`, from whichever of the two is given.

    With neither given, the head has `preferred` channels if that divides the width, else half of that, a quarter, and
    so on, so that every width works without an option.

    Raises:
        ValueError: the given numbers do not multiply to the width.
    """
    if num_heads is None and head_dim is None:
        head_dim = preferred
        while width % head_dim:
            head_dim //= 2
    if head_dim is None:
        assert num_heads is not None
        if num_heads < 1 or width % num_heads:
            raise ValueError(f"num_heads={num_heads} does not divide the width {width}; choose a divisor of {width}")
        head_dim = width // num_heads
    if num_heads is None:
        if head_dim < 1 or width % head_dim:
            raise ValueError(f"head_dim={head_dim} does not divide the width {width}; choose a divisor of {width}")
        num_heads = width // head_dim
    if min(num_heads, head_dim) < 1:
        raise ValueError(f"num_heads={num_heads}, head_dim={head_dim}: a layer has at least one head of one channel")
    if num_heads * head_dim != width:
        raise ValueError(f"num_heads={num_heads} times head_dim={head_dim} is not the width {width}; give one of them")
    return num_heads, head_dim


def largest_heads(width: int, limit: int) -> int:
    """Return the largest head dimension of at most `limit` that divides the width."""
    return next(dim for dim in range(min(width, limit), 0, -1) if width % dim == 0)


def expand_width(width: int, factor: float, name: str) -> int:
    """Return `factor · width`, where `name` is the option that gives the factor.

    Raises:
        ValueError: the product is no whole number of at least 1.
    """
    expanded = round(factor * width)
    if expanded < 1 or abs(expanded - factor * width) > 1e-6:
        raise ValueError(f"{name}={factor} of {width} channels is no whole number of at least 1; choose another factor")
    return expanded


def check_groups(num_heads: int, num_kv_heads: int | None) -> int:
    """Return the number of heads of keys and values: by default as many as of queries.

    Raises:
        ValueError: it does not divide the number of heads of queries.
    """
    groups = num_heads if num_kv_heads is None else num_kv_heads
    if groups < 1 or num_heads % groups:
        raise ValueError(f"num_kv_heads={groups} does not divide the {num_heads} query heads; choose a divisor")
    return groups


def repeat_groups(x: Tensor, num_heads: int) -> Tensor:
    """Repeat heads of keys or values `[..., G, D]` for the heads of queries that share them: `[..., H, D]`."""
    groups = x.shape[-2]
    return x if groups == num_heads else x.repeat_interleave(num_heads // groups, dim=-2)

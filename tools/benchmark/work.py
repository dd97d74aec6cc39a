"""The calls that are measured: operations with their shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch

from longseq.kernels import list_ops
from longseq.kernels.testing import Inputs, list_variants, make_inputs
from longseq.tasks.training.options import Length, OneOf


class Work(NamedTuple):
    """One call of an operation: the kind of its inputs, its sizes by dimension name, its options."""

    op: str
    sizes: Mapping[str, int]  # B, T and the operation's own dimensions
    variant: str
    options: Mapping[str, Any] = {}

    @property
    def shape(self) -> str:
        """The sizes and options in words."""
        named = {**self.sizes, **self.options}
        return " ".join(f"{name}={value}" for name, value in named.items())

    def make(self, dtype: torch.dtype, device: torch.device) -> Inputs:
        """Random inputs of this size."""
        own = {name: size for name, size in self.sizes.items() if name not in "BT"}
        return make_inputs(
            self.op, self.variant, batch=self.sizes["B"], tokens=self.sizes["T"], dtype=dtype, sizes=own, device=device
        )


def _heads(op: str, variant: str, B: int, T: int, H: int, K: int, V: int | None = None, **options: Any) -> Work:
    return Work(op, {"B": B, "T": T, "H": H, "K": K, "V": K if V is None else V}, variant, options)


def _slots(B: int, T: int, H: int, K: int, M: int) -> Work:
    return Work("slot_attention", {"B": B, "T": T, "H": H, "K": K, "V": K, "M": M}, "plain")


def _scan(op: str, B: int, T: int, D: int, N: int) -> Work:
    return Work(op, {"B": B, "T": T, "D": D, "N": N}, "plain")


def _pair(B: int, T: int, D: int, N: int, R: int) -> Work:
    return Work("longhorn_pair", {"B": B, "T": T, "D": D, "N": N, "R": R, "W": 4}, "plain")


def _orthogonal(chunk_size: int) -> Work:
    sizes = {"B": 8, "T": 2048, "H": 16, "M": 64, "D": 64}
    return Work("orthogonal_recurrence", sizes, "plain", {"chunk_size": chunk_size})


# Calls of published language and image models.
TABLE = (
    _heads("delta_rule", "plain", 8, 2048, 16, 128),
    _heads("delta_rule", "plain", 1, 16384, 16, 128),
    _heads("delta_rule", "plain", 1, 65536, 16, 128),
    _heads("delta_rule", "plain", 8, 2048, 32, 64),
    _heads("delta_rule", "plain", 8, 2048, 8, 256),
    _heads("delta_rule", "plain", 128, 197, 6, 64),
    _heads("linear_attention", "channel_gated", 8, 2048, 16, 128),
    _slots(8, 2048, 4, 512, 64),
    _scan("longhorn_scan", 8, 2048, 4096, 16),
    _scan("longhorn_scan", 1, 16384, 4096, 16),
    _scan("longhorn_scan", 128, 197, 384, 16),
    _heads("variational_linear_attention", "paper", 8, 2048, 16, 64),
    _heads("variational_linear_attention", "paper", 2, 4096, 16, 64),
    _heads("variational_linear_attention", "paper", 1, 16384, 16, 64),
    _orthogonal(1),
    _orthogonal(16),
    _orthogonal(64),
)
# Further calls: gates, the delta rule with the heads of orthogonal_recurrence above, Mamba's scan, a pair of Longhorn
# layers (R counts its ranks and the bias), memory-bound operations, and a weak case of recurrences: one sequence with
# few heads, which leaves most of a GPU idle, while attention runs over all tokens in parallel.
OWN = (
    _heads("delta_rule", "gated", 8, 2048, 16, 128),
    _heads("delta_rule", "gated", 128, 197, 6, 64),
    _heads("delta_rule", "plain", 8, 2048, 16, 64),
    _scan("selective_scan", 8, 2048, 4096, 16),
    _pair(128, 197, 384, 16, 13),
    Work("short_convolution", {"B": 8, "T": 2048, "D": 4096, "W": 4}, "silu"),
    Work("convolved_features", {"B": 16, "T": 2048, "H": 8, "K": 128, "V": 128, "W": 4}, "plain"),
    _heads("delta_rule", "plain", 1, 2048, 4, 128),
)
TINY = (
    _heads("delta_rule", "plain", 1, 40, 2, 16),
    _heads("linear_attention", "channel_gated", 1, 40, 2, 16),
    Work("slot_attention", {"B": 1, "T": 40, "H": 2, "K": 16, "V": 16, "M": 8}, "plain"),
    _scan("longhorn_scan", 1, 40, 8, 4),
    _scan("selective_scan", 1, 40, 8, 4),
    _pair(1, 40, 8, 4, 4),
    Work("short_convolution", {"B": 1, "T": 40, "D": 8, "W": 4}, "silu"),
    Work("convolved_features", {"B": 1, "T": 40, "H": 2, "K": 4, "V": 4, "W": 4}, "plain"),
    _heads("variational_linear_attention", "plain", 1, 40, 2, 16),
    Work("recursive_least_squares", {"B": 1, "T": 40, "H": 2, "K": 16}, "plain"),
    Work("orthogonal_recurrence", {"B": 1, "T": 40, "H": 2, "M": 8, "D": 8}, "plain"),
)


def list_measured() -> tuple[str, ...]:
    """The names of the operations that can be measured: those on whole sequences."""
    return tuple(sorted((*list_ops(), "longhorn_pair")))


# The types of the keys `ops` and `shapes` of a benchmark.
Operations = Annotated[list[Annotated[str, OneOf(list_measured)]], Length(1)]
Shapes = Annotated[list[dict[str, Any]], Length(1)]


def choose_work(
    shapes: Sequence[Mapping[str, Any]] | None, ops: Sequence[str] | None, device: torch.device
) -> list[Work]:
    """The calls of a configuration: its own shapes, or the table's on a GPU and tiny ones elsewhere."""
    if shapes is not None:
        work = [_read_work(shape) for shape in shapes]
    else:
        work = list((*TABLE, *OWN) if device.type == "cuda" else TINY)
    chosen = [item for item in work if not ops or item.op in ops]
    if not chosen:
        raise ValueError(f"no shape of ops={list(ops or ())}: name some in shapes=[...]")
    return chosen


def _read_work(shape: Mapping[str, Any]) -> Work:
    """A call from `{op: delta_rule, variant: gated, B: 8, T: 2048, H: 16, K: 128, V: 128, options: {}}`."""
    op = shape.get("op")
    if op not in list_measured():
        raise ValueError(f"shapes has op={op!r}, which is no operation: choose from {', '.join(list_measured())}")
    variants = list_variants(op)
    variant = shape.get("variant", variants[0])
    if variant not in variants:
        raise ValueError(f"shapes has variant={variant!r}: {op} takes one of {', '.join(variants)}")
    sizes = {name: value for name, value in shape.items() if name not in ("op", "variant", "options")}
    own = list_sizes(op, variant)
    for name, size in sizes.items():
        if name not in own:
            raise ValueError(f"shapes has {name}={size!r}, which {op} does not have: its sizes are {', '.join(own)}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"shapes has {name}={size!r}: sizes are whole numbers above 0 of {', '.join(own)}")
    if missing := [name for name in own if name not in sizes]:
        raise ValueError(f"shapes has a call of {op} without {', '.join(missing)}: give its sizes {', '.join(own)}")
    return Work(op, sizes, variant, dict(shape.get("options", {})))


class _Asked(dict[str, int]):
    """Sizes that note the names for which they are asked, and know none of them."""

    def __init__(self) -> None:
        super().__init__(T=1)  # an empty dictionary would be replaced
        self.names: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        self.names.append(name)
        return default


def list_sizes(op: str, variant: str) -> tuple[str, ...]:
    """The names of the sizes that a call of an operation takes: those for which the maker of its inputs asks."""
    asked = _Asked()
    make_inputs(op, variant, batch=1, tokens=8, sizes=asked, device="meta")
    return ("B", "T", *dict.fromkeys(asked.names))

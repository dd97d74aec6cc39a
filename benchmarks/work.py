"""The calls that are measured: operations with their shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from longseq.kernels.self_test_inputs import Inputs, make_inputs


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
    return Work("orthogonal_recurrence", sizes, "plain" if chunk_size == 1 else "ttt", {"chunk_size": chunk_size})


# Calls of published language and image models.
TABLE = (
    _heads("delta_rule", "plain", 8, 2048, 16, 128),
    _heads("delta_rule", "plain", 1, 16384, 16, 128),
    _heads("delta_rule", "plain", 1, 65536, 16, 128),
    _heads("delta_rule", "plain", 8, 2048, 32, 64),
    _heads("delta_rule", "plain", 8, 2048, 8, 256),
    _heads("delta_rule", "plain", 128, 197, 6, 64),
    _heads("delta_rule", "channel", 8, 2048, 16, 128),
    _heads("delta_rule", "channel", 1, 65536, 16, 128),
    _heads("delta_rule", "channel_added_before", 8, 2048, 32, 64),
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
    _heads("delta_rule", "channel", 1, 40, 2, 16),
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


def choose_work(calls: Sequence[str], ops: Sequence[str], device: torch.device) -> list[Work]:
    """The given calls, or those of these tables: published shapes on a GPU, tiny ones elsewhere."""
    work = [read_call(call) for call in calls] or list((*TABLE, *OWN) if device.type == "cuda" else TINY)
    return [item for item in work if not ops or item.op in ops]


def read_call(call: str) -> Work:
    """A call from "delta_rule gated B=8 T=2048 H=16 K=128 V=128"; names in lower case are options."""
    op, variant, *words = call.split()
    values = {name: int(value) for name, value in (word.split("=") for word in words)}
    sizes = {name: value for name, value in values.items() if name.isupper()}
    return Work(op, sizes, variant, {name: value for name, value in values.items() if name not in sizes})

"""Calls that together reach every kind of launch of each operation with Triton kernels, for `compile.py`.

The self-test in the package runs small calls. The sizes here decide how an operation launches its kernels: one chunk
and several, few and many rows, long sequences that are cut, packed sequences of which one is empty.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from longseq.kernels.delta_rule import TRITON_CHANNELS
from longseq.kernels.self_test_cases import TRIALS, Case, stateless

# Heads that fill a GPU without segments of time, and as many tokens. Triton compiles kernels of their own for numbers
# that 16 divides, as those of models are.
MANY = 80
# The widest states whose walks weigh queries and write keys, and the bytes of keys that are then not kept.
HALF_WIDTH, KEY_BYTES = 128, 1 << 24
# Rows of a scan, and its channels: with the fewest, more warps than run at once with all registers; then more than half
# as many again, and more than twice as many.
CROWD, SEVERAL_CHANNELS = 260, (128, 192, 256)
# Without gradients: heads of a sequence with fewer programs than a GPU runs side by side; heads with more, and those of
# four packed sequences.
READ_HEADS, FILLING_HEADS, PACKED_HEADS = 64, 208, 64


def list_cases(op: str, widths: Mapping[str, int], dtype: torch.dtype) -> list[Case]:
    """The cases of an operation at these widths: those here, or the self-test's. None for a one-token form."""
    if op.endswith("_step"):
        return []
    if op == "delta_rule":
        return _delta_rule(widths, dtype)
    return list(CASES.get(op, TRIALS[op].cases))


def _delta_rule(widths: Mapping[str, int], dtype: torch.dtype) -> list[Case]:
    cases = [case for kind in ("", "gated") for case in _delta_rule_of(kind, widths, dtype)]
    if widths["K"] <= TRITON_CHANNELS:
        channels = [Case(variant, 130, kind="channels") for variant in ("channel", "channel_added_before")]
        cases += [*channels, *(case.packed() for case in channels)]
    return cases


def _delta_rule_of(kind: str, widths: Mapping[str, int], dtype: torch.dtype) -> list[Case]:
    """Calls with many heads, with long sequences, and with sequences that are cut into segments of time; then packed.

    One launch reads sequences whole where there are no gradients and many heads.
    """
    case = stateless(kind or "plain", 0, kind=kind)
    given = case._replace(variant="gated_write_key" if kind else "write_key", tokens=130, has_state=True)
    # Cut into segments of time, where the state passes much from one segment to the next.
    passing = case._replace(variant=kind or "correlated_keys", tokens=2100, has_state=True)
    many, long = case._replace(tokens=MANY, heads=MANY), case._replace(tokens=1100)
    read = many._replace(has_gradient=False, heads=READ_HEADS)
    filled = read._replace(heads=FILLING_HEADS)
    # Just long enough to be cut; `filling` has so many heads that all of its segments fill a GPU.
    cut, filling = case._replace(tokens=2000), case._replace(tokens=2000, heads=10)
    large = []
    if not kind and dtype.itemsize == 2 and max(widths.values()) <= HALF_WIDTH:
        # So large that queries and write keys are weighed again in the backward pass. With gates they never are.
        large = [case._replace(tokens=KEY_BYTES // (widths["K"] * 20 * dtype.itemsize) + 1, heads=20)]
    whole = [case._replace(tokens=tokens, has_gradient=False, has_state=True) for tokens in (130, 1100)]
    packed = [many, read._replace(heads=READ_HEADS // 4), filled._replace(heads=PACKED_HEADS)]
    packed += [long._replace(has_state=True), cut, filling, *large]
    cases = [given, given._replace(has_gradient=False), passing, many, read, filled, long, cut, filling, *large, *whole]
    return [*cases, *(case.packed() for case in packed)]


def _scan() -> tuple[Case, ...]:
    """Calls whose time is split into parts, and calls with more warps than run side by side, up to twice as many."""
    crowded = stateless("plain", 18, batch=CROWD)
    bounds = tuple(range(0, 18 * CROWD + 1, 18))
    return (
        Case("plain", 70),
        stateless("plain", 80, channels=128),
        Case("plain", 70, has_gradient=False),
        stateless("plain", 530),
        *(crowded._replace(channels=width) for width in SEVERAL_CHANNELS),
        Case("plain", 70).packed(),
        stateless("plain", 2100).packed(),
        *(stateless("plain", 18 * CROWD, channels=width, bounds=bounds) for width in SEVERAL_CHANNELS),
    )


CASES: dict[str, tuple[Case, ...]] = {
    "convolved_features": (
        *TRIALS["convolved_features"].cases,
        stateless("plain", 70).packed(),
        Case("plain", 70, kind="composed").packed(),
    ),
    "linear_attention": (
        *(Case("plain", 130, has_state=has_state) for has_state in (False, True)),
        *(Case("head_gated", 130, has_state=has_state, kind="head") for has_state in (False, True)),
        *(stateless("channel_gated", 130, kind="channel"), stateless("value_gated", 130, kind="value")),
        *(Case(f"extreme_{kind}_decay", 130, kind=kind) for kind in ("channel", "value")),
        Case("channel_gated", 130, has_gradient=False, kind="channel"),
        Case("plain", 130).packed(),
        *(Case(f"{kind}_gated", 130, kind=kind).packed() for kind in ("head", "channel", "value")),
        # Cut into segments of time, which begin from a state or not.
        *(Case(kind, 130, kind=kind) for kind in ("grouped", "grouped_plain")),
        *(Case(kind, 4100, kind=kind).packed() for kind in ("grouped", "grouped_plain")),
        *(stateless("plain", 4100), Case("plain", 4100).packed()),
        *(stateless(f"{kind}_gated", 4100, kind=kind) for kind in ("head", "channel", "value")),
        *(Case(f"{kind}_gated", 4100, kind=kind).packed() for kind in ("head", "channel", "value")),
        Case("channel_gated", 4100, has_gradient=False, kind="channel"),
    ),
    "longhorn_pair": (
        *(Case("plain", 70), Case("plain", 80, channels=128)),
        # Sizes at which the scan inside it has other kernels. The scan reads every row in both directions.
        Case("plain", 530),
        *(Case("plain", 18, batch=CROWD // 2, channels=width) for width in SEVERAL_CHANNELS),
    ),
    "longhorn_scan": _scan(),
    "orthogonal_recurrence": (
        *TRIALS["orthogonal_recurrence"].cases,
        *(case._replace(tokens=70).packed() for case in TRIALS["orthogonal_recurrence"].cases),
    ),
    "recursive_least_squares": (
        *(Case("plain", 130, has_state=has_state) for has_state in (False, True)),
        # Cut into segments of time, which begin from a state or not.
        *(stateless("plain", 600), Case("no_refresh", 600)),
        Case("plain", 130).packed(),
        stateless("no_refresh", 130).packed(),
    ),
    "selective_scan": _scan(),
    "short_convolution": (
        Case("silu", 70),
        *(stateless(variant, 70, channels=128) for variant in ("silu", "no_bias")),
        Case("silu", 70).packed(),
        stateless("no_bias", 70, channels=128).packed(),
    ),
    "slot_attention": (
        *(Case("plain", 130, has_state=has_state) for has_state in (False, True)),
        Case("write", 130, kind="write"),
        Case("plain", 130, has_gradient=False),
        Case("write", 130, has_gradient=False, kind="write"),
        *(Case(variant, 130, kind=kind).packed() for variant, kind in (("plain", ""), ("write", "write"))),
        *(Case("plain", 4100), Case("plain", 4100).packed()),
    ),
    "variational_linear_attention": (
        *(Case("plain", tokens) for tokens in (130, 600)),
        # Many heads, which are not cut into segments of time, and sequences that one or both of the parts cut.
        stateless("plain", MANY, heads=MANY),
        *(stateless("plain", tokens) for tokens in (1100, 2100)),
        Case("plain", 130).packed(),
        stateless("plain", 2100).packed(),
    ),
}

"""The cases of the self-test of Triton kernels: for each operation, calls that together launch all of its kernels.

The cases cover each gate and its absence, one chunk and several, short and long sequences, few and many rows, and
packed sequences of which one is empty. The sizes of a call decide how an operation launches its kernels: there are
cases for every kind of launch, and a test checks which launches they reach. A call's kernels are tested with the cases
that read in its direction, packed if the call is packed. One-token kernels are tested with all variants. Models in
training have no state and use mixed precisions. Cases like theirs test the kernels that they will run, which are then
compiled already.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class Case(NamedTuple):
    """A call: its variant of longseq.kernels.self_test_inputs.make_inputs, its tokens and its options."""

    variant: str
    tokens: int
    options: Mapping[str, Any] = {}
    own_parameters: bool = False  # see longseq.kernels.self_test_inputs.Inputs.with_own_parameters
    has_state: bool = True  # begins from a state, and the loss includes the final state
    has_gradient: bool = True
    batch: int | None = None  # instead of one row, or of one for each direction
    heads: int | None = None  # instead of the trial's, or the maker's
    channels: int | None = None  # instead of the trial's
    bounds: tuple[int, ...] = ()  # of packed sequences, as cu_seqlens
    kind: str = ""  # of the calls that launch these kernels, as the operation names it; one-token forms have all kinds
    key_bytes: int = 0  # if not 0, the tokens are as many as give keys of more bytes (see `fit`)

    @property
    def rows(self) -> int:
        return self.batch or (2 if self.options == BOTH_WAYS else 1)

    @property
    def name(self) -> str:
        named = [self.variant, f"of {self.tokens} tokens", *self.options]
        named += [] if self.batch is None else [f"{self.batch} rows"]
        named += [] if self.heads is None else [f"{self.heads} heads"]
        named += ["packed"] if self.bounds else []
        named += [] if self.has_state else ["without a state"]
        return " ".join(named if self.has_gradient else [*named, "without a gradient"])

    def fit(self, widths: Mapping[str, int], dtype: torch.dtype) -> "Case | None":
        """The case for a call of these widths, K among them; None where such calls do not launch its kernels.

        With `key_bytes` these are calls in half precision, of up to HALF_WIDTH columns.
        """
        if not self.key_bytes:
            return self
        if dtype.itemsize != 2 or max(widths.values()) > HALF_WIDTH:
            return None
        token = widths["K"] * (self.heads or 1) * self.rows * dtype.itemsize
        sized = self._replace(tokens=self.key_bytes // token + 1)
        return _pack(sized) if self.bounds else sized


class Trial(NamedTuple):
    """What an operation's kernels are tried with."""

    widths: dict[str, int]  # the dimensions that kernels are compiled for, with sizes for calls that do not state them
    cases: tuple[Case, ...]
    channels: int | None = None  # D, where it is not a width: more than one program's block
    mixed: tuple[str, ...] = ()  # arguments that are float32 in a mixed call, while the others are in half precision
    narrow: tuple[str, ...] = ()  # arguments that are bfloat16 in a narrow call, while the others are float32
    steps: tuple[str, ...] = ()  # variants that have a kernel for one token, and none for sequences


REVERSED = {"reverse": True}
BOTH_WAYS = {"reverse": "second_half"}
ONE_WAY: tuple[dict[str, Any], ...] = ({}, REVERSED)  # the directions in which packed sequences are read
WAYS = (REVERSED, BOTH_WAYS)
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


def _pack(case: Case) -> Case:
    """Four packed sequences in place of one: one is empty, one has a single token."""
    first = 3 * case.tokens // 7
    return case._replace(bounds=(0, first, first, case.tokens - 1, case.tokens))


def _delta_rule(variant: str, way: dict[str, Any]) -> tuple[Case, ...]:
    """Calls with many heads, with long sequences, and with sequences that are cut into segments of time.

    One launch reads sequences whole where there are no gradients and many heads.
    """
    kind = "gated" if variant == "gated" else ""
    case = Case(variant, 0, way, has_state=False, kind=kind)
    many, long = case._replace(tokens=MANY, heads=MANY), case._replace(tokens=1100)
    read = many._replace(has_gradient=False, heads=READ_HEADS // case.rows)
    filled = read._replace(heads=FILLING_HEADS)
    # Just long enough to be cut; `filling` has so many heads that all of its segments fill a GPU.
    cut, filling = case._replace(tokens=2000), case._replace(tokens=2000, heads=10 // case.rows)
    # So large that queries and write keys are weighed again in the backward pass. With gates they never are.
    large = [] if kind else [case._replace(tokens=6600, heads=20 // case.rows, key_bytes=KEY_BYTES)]
    cases = [many, read, filled, long, cut, filling, *large]
    packed = [many, read._replace(heads=READ_HEADS // 4), filled._replace(heads=PACKED_HEADS)]
    packed += [long._replace(has_state=True), cut, filling, *large]
    return tuple(cases if way == BOTH_WAYS else [*cases, *map(_pack, packed)])


def _scan(way: dict[str, Any]) -> tuple[Case, ...]:
    """Calls whose time is split into parts, and calls with more warps than run side by side, up to twice as many."""
    parts = Case("plain", 530, way, has_state=False)
    crowded = Case("plain", 18, way, has_state=False, batch=CROWD)
    several = tuple(crowded._replace(channels=width) for width in SEVERAL_CHANNELS)
    if way == BOTH_WAYS:
        return parts, *several
    bounds = tuple(range(0, 18 * CROWD + 1, 18))
    packed = (
        _pack(Case("plain", 70, way)),
        _pack(Case("plain", 2100, way, has_state=False)),
        *(Case("plain", 18 * CROWD, way, has_state=False, channels=width, bounds=bounds) for width in SEVERAL_CHANNELS),
    )
    return parts, *several, *packed


TRIALS: dict[str, Trial] = {
    "add_norm": Trial(
        {"D": 64},
        (
            *(Case(variant, 70) for variant in ("plain", "branch", "centred_branch", "pair")),
            # The residual in float32, the rest in half precision.
            *(
                Case(variant, 70, {"dtype": torch.bfloat16}, kind="narrow")
                for variant in ("plain", "branch", "centred_branch", "pair")
            ),
        ),
        mixed=("weight", "bias"),
        narrow=("branch",),
    ),
    "convolved_features": Trial(
        {"H": 2, "K": 64, "V": 64, "W": 4},
        (
            *(Case(variant, 70, has_state=False) for variant in ("plain", "elu_plus_one", "l1", "relu")),
            *(Case("plain", 70, way, has_state=False) for way in WAYS),
            Case("plain", 70, BOTH_WAYS, own_parameters=True, has_state=False),
            *(Case("plain", 70, way, kind="composed") for way in ({}, *WAYS)),
            *(_pack(Case("plain", 70, way, has_state=False)) for way in ONE_WAY),
            *(_pack(Case("plain", 70, way, kind="composed")) for way in ONE_WAY),
        ),
        mixed=("weight",),
    ),
    "cumulative_softmax": Trial({"M": 64}, (Case("plain", 70),)),
    "delta_rule": Trial(
        {"K": 64, "V": 64},
        (
            *(Case("write_key", 130, has_gradient=gradient) for gradient in (True, False)),
            *(Case("gated_write_key", 130, has_gradient=gradient, kind="gated") for gradient in (True, False)),
            # Cut into segments of time, where the state passes much from one segment to the next.
            *(Case("correlated_keys", 2100), Case("gated", 2100, kind="gated")),
            *(case for way in ({}, *WAYS) for variant in ("plain", "gated") for case in _delta_rule(variant, way)),
            # Without gradients, as in evaluation.
            *(Case("plain", tokens, has_gradient=False) for tokens in (130, 1100)),
            *(Case("gated", tokens, has_gradient=False, kind="gated") for tokens in (130, 1100)),
        ),
        mixed=("beta", "g"),
        steps=("channel", "added", "channel_added_before"),
    ),
    "head_features": Trial(
        {"H": 2, "K": 64, "V": 64},
        (
            *(Case(variant, 70) for variant in ("silu", "relu", "elu_plus_one", "l1")),
            *(Case(variant, 70, kind="logits") for variant in ("logits", "logits_pair")),
        ),
        mixed=("logits",),
    ),
    "linear_attention": Trial(
        {"K": 64, "V": 64},
        (
            *(Case("plain", 130, has_state=has_state) for has_state in (False, True)),
            *(Case("head_gated", 130, has_state=has_state, kind="head") for has_state in (False, True)),
            *(
                Case("channel_gated", 130, has_state=False, kind="channel"),
                Case("value_gated", 130, has_state=False, kind="value"),
            ),
            # Strong decays have kernels of their own.
            *(Case("extreme_channel_decay", 130, kind="channel"), Case("extreme_value_decay", 130, kind="value")),
            *(Case("plain", 130, way, has_state=False) for way in WAYS),
            *(
                Case(f"{kind}_gated", 130, way, has_state=False, kind=kind)
                for way in WAYS
                for kind in ("head", "channel", "value")
            ),
            Case("channel_gated", 130, has_gradient=False, kind="channel"),
            *(_pack(Case("plain", 130, way)) for way in ONE_WAY),
            *(
                _pack(Case(f"{kind}_gated", 130, way, kind=kind))
                for way in ONE_WAY
                for kind in ("head", "channel", "value")
            ),
        ),
        mixed=("g", "g_value"),
    ),
    "longhorn_pair": Trial(
        {"N": 16, "R": 16, "W": 4},
        (
            *(Case("plain", 70), Case("plain", 80, channels=128)),
            # Sizes at which the scan inside it has other kernels. The scan reads every row in both directions.
            Case("plain", 530),
            *(Case("plain", 18, batch=CROWD // 2, channels=width) for width in SEVERAL_CHANNELS),
        ),
        channels=70,
        mixed=("taps", "offset", "selection", "rate", "rate_offset", "skip"),
    ),
    "longhorn_scan": Trial(
        {"N": 16},
        (
            *(Case("plain", 70, way) for way in ({}, REVERSED)),
            *(Case("plain", 80, way, has_state=False, channels=128) for way in ({}, BOTH_WAYS)),
            Case("plain", 70, has_gradient=False),
            *(case for way in ({}, *WAYS) for case in _scan(way)),
        ),
        channels=70,
    ),
    "map_features": Trial(
        {"H": 2, "K": 64}, tuple(Case(variant, 70) for variant in ("silu", "relu", "elu_plus_one", "l1", "l2"))
    ),
    "orthogonal_recurrence": Trial(
        {"D": 64, "M": 64, "C": 1},
        (
            *(Case("plain", 130), Case("gated", 70), Case("encode", 70), Case("similarity", 70), Case("ttt", 70)),
            *(Case(variant, 70, way) for way in WAYS for variant in ("plain", "gated", "encode", "similarity", "ttt")),
            *(
                _pack(Case(variant, 70, way))
                for way in ONE_WAY
                for variant in ("plain", "gated", "encode", "similarity", "ttt")
            ),
        ),
        mixed=("gamma", "g"),
    ),
    "recursive_least_squares": Trial(
        {"K": 64},
        (
            *(Case("plain", 130, way, has_state=has_state) for way in ({}, *WAYS) for has_state in (False, True)),
            # Cut into segments of time, which begin from a state or not.
            *(Case("plain", 600, way, has_state=False) for way in ({}, *WAYS)),
            *(Case("no_refresh", 600, way) for way in ({}, *WAYS)),
            *(_pack(Case("plain", 130, way)) for way in ONE_WAY),
            *(_pack(Case("no_refresh", 130, way, has_state=False)) for way in ONE_WAY),
        ),
        mixed=("u",),
    ),
    "selective_scan": Trial(
        {"N": 16},
        (
            *(Case("plain", 70), Case("plain", 70, REVERSED)),
            Case("plain", 80, has_state=False, channels=128),
            Case("plain", 80, BOTH_WAYS, own_parameters=True, has_state=False, channels=128),
            Case("plain", 70, has_gradient=False),
            *(case for way in ({}, *WAYS) for case in _scan(way)),
        ),
        channels=70,
        mixed=("delta", "A"),
    ),
    "short_convolution": Trial(
        {"W": 4},
        (
            *(Case("silu", 70), Case("plain", 70, REVERSED), Case("silu", 70, BOTH_WAYS)),
            *(Case(variant, 70, has_state=False, channels=128) for variant in ("silu", "no_bias")),
            *(
                Case(variant, 70, BOTH_WAYS, own_parameters=True, has_state=False, channels=128)
                for variant in ("silu", "no_bias")
            ),
            *(_pack(Case("silu", 70, way)) for way in ONE_WAY),
            *(_pack(Case("no_bias", 70, way, has_state=False, channels=128)) for way in ONE_WAY),
        ),
        channels=70,
        mixed=("weight", "bias"),
    ),
    "silu_product": Trial({}, tuple(Case(variant, 70) for variant in ("plain", "skip", "pair")), channels=70),
    "slot_attention": Trial(
        {"K": 64, "V": 64, "M": 64},
        (
            *(Case("plain", 130, has_state=has_state) for has_state in (False, True)),
            Case("write", 130, kind="write"),
            *(Case("plain", 130, way, has_state=False) for way in WAYS),
            *(Case("write", 130, way, has_state=False, kind="write") for way in WAYS),
            *(Case("plain", 130, has_gradient=False), Case("write", 130, has_gradient=False, kind="write")),
            *(_pack(Case("plain", 130, way)) for way in ONE_WAY),
            *(_pack(Case("write", 130, way, kind="write")) for way in ONE_WAY),
        ),
        mixed=("g",),
    ),
    "token_loss": Trial({}, (Case("plain", 70),), channels=5008),
    "variational_linear_attention": Trial(
        {"K": 64, "V": 64},
        (
            *(Case("plain", tokens, way) for way in ({}, *WAYS) for tokens in (130, 600)),
            # Many heads, which are not cut into segments of time, and sequences that one or both of the parts cut.
            *(Case("plain", MANY, way, heads=MANY, has_state=False) for way in ({}, *WAYS)),
            *(Case("plain", tokens, way, has_state=False) for way in ({}, *WAYS) for tokens in (1100, 2100)),
            *(_pack(Case("plain", 130, way)) for way in ONE_WAY),
            *(_pack(Case("plain", 2100, way, has_state=False)) for way in ONE_WAY),
        ),
        mixed=("u",),
    ),
}

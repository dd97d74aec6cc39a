"""The cases of the self-test of Triton kernels: for each operation, a small call of each form of its inputs.

A case is read in the direction of the call that asks for the test, and packed if that call is packed. Cases are like
calls of models, so that they mostly test kernels that a model compiles anyway: sizes are multiples of 16, for which
Triton compiles kernels of their own, and there is no state in training. Where kernels cut long sequences into parts, or
have another form without gradients, there is a case for it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

FEATURE_MAPS = ("elu_plus_one", "l1", "relu")
OBJECTIVES = ("gated", "encode", "similarity", "ttt")


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

    @property
    def rows(self) -> int:
        return self.batch or (2 if self.options.get("reverse") == "second_half" else 1)

    @property
    def name(self) -> str:
        named = [self.variant, f"of {self.tokens} tokens", *self.options]
        named += [] if self.batch is None else [f"{self.batch} rows"]
        named += [] if self.heads is None else [f"{self.heads} heads"]
        named += ["packed"] if self.bounds else []
        named += [] if self.has_state else ["without a state"]
        return " ".join(named if self.has_gradient else [*named, "without a gradient"])

    def packed(self) -> "Case":
        """The same tokens as four packed sequences: one is empty, one has a single token."""
        first = 3 * self.tokens // 7
        return self._replace(bounds=(0, first, first, self.tokens - 1, self.tokens))

    def without_gradient(self) -> "Case":
        """As a model reads a prompt: from a state, whose end is wanted."""
        return self._replace(has_gradient=False, has_state=True)


class Trial(NamedTuple):
    """What an operation's kernels are tried with."""

    widths: dict[str, int]  # the dimensions that kernels are compiled for, with sizes for calls that do not state them
    cases: tuple[Case, ...]
    channels: int | None = None  # D, where it is not a width: more than one program's block
    mixed: tuple[str, ...] = ()  # arguments that are float32 in a mixed call, while the others are in half precision
    narrow: tuple[str, ...] = ()  # arguments that are bfloat16 in a narrow call, while the others are float32
    steps: tuple[str, ...] = ()  # variants for the one-token form, beside those of the cases
    own_parameters: bool = False  # models that read in two directions have parameters for each


def stateless(variant: str, tokens: int, **fields: Any) -> Case:
    """A call of a model in training, which has no state."""
    return Case(variant, tokens, has_state=False, **fields)


def _delta_rule(kind: str, prefix: str) -> tuple[Case, ...]:
    """Calls with many heads, and one that is cut into segments of time."""
    plain = stateless(kind or "plain", 80, heads=80, kind=kind)
    others = plain._replace(variant=f"{prefix}write_key"), plain._replace(tokens=2000, heads=None)
    return plain, *others, plain.without_gradient()


def _linear_attention() -> tuple[Case, ...]:
    kinds = ("", "head", "channel", "value")
    plain = [stateless(f"{kind}_gated" if kind else "plain", 130, kind=kind) for kind in kinds]
    # Strong decays have kernels of their own.
    strong = [stateless(f"extreme_{kind}_decay", 130, kind=kind) for kind in kinds[2:]]
    # Cut into segments of time.
    cut = [case._replace(tokens=4100) for case in plain]
    grouped = [stateless(kind, 130, kind=kind) for kind in ("grouped", "grouped_plain")]
    return *plain, *strong, *cut, *grouped, *(case.without_gradient() for case in (*plain, *grouped))


def _scan() -> tuple[Case, ...]:
    """A call that is read whole, and one whose time is split into parts."""
    whole = stateless("plain", 80, channels=128)
    return whole, stateless("plain", 530), whole.without_gradient()


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
        (*(stateless(variant, 70) for variant in ("plain", *FEATURE_MAPS)), Case("plain", 70, kind="composed")),
        mixed=("weight",),
        own_parameters=True,
    ),
    "cumulative_softmax": Trial({"M": 64}, (Case("plain", 70),)),
    "delta_rule": Trial(
        {"K": 64, "V": 64},
        (
            *_delta_rule("", ""),
            *_delta_rule("gated", "gated_"),
            *(stateless(variant, 80, heads=80, kind="channels") for variant in ("channel", "channel_added_before")),
            *(stateless(variant, 130, kind="channels") for variant in ("extreme_channel_decay", "before", "added")),
            stateless("channel", 130, kind="channels").without_gradient(),
        ),
        mixed=("beta", "g"),
    ),
    "head_features": Trial(
        {"H": 2, "K": 64, "V": 64},
        (
            *(Case(variant, 70) for variant in ("silu", *FEATURE_MAPS)),
            *(Case(variant, 70, kind="logits") for variant in ("logits", "logits_pair")),
        ),
        mixed=("logits",),
    ),
    "linear_attention": Trial({"K": 64, "V": 64}, _linear_attention(), mixed=("g", "g_value")),
    "log_decay": Trial(
        {"H": 2, "K": 64},
        (*(Case(variant, 70) for variant in ("plain", "channel", "pair")), Case("bound", 70, kind="bound")),
        mixed=("A_log", "dt_bias"),
    ),
    "longhorn_pair": Trial(
        {"N": 16, "R": 16, "W": 4},
        (Case("plain", 80, channels=128),),
        channels=70,
        mixed=("taps", "offset", "selection", "rate", "rate_offset", "skip"),
    ),
    "longhorn_scan": Trial({"N": 16}, _scan(), channels=70),
    "map_features": Trial({"H": 2, "K": 64}, tuple(Case(variant, 70) for variant in ("silu", "l2", *FEATURE_MAPS))),
    "orthogonal_recurrence": Trial(
        {"D": 64, "M": 64, "C": 1},
        (Case("plain", 130), *(Case(objective, 70) for objective in OBJECTIVES), Case("ttt", 70, kind="chunks")),
        mixed=("gamma", "g"),
    ),
    "recursive_least_squares": Trial(
        {"K": 64},
        # Whole, and cut into segments of time.
        (stateless("plain", 130), stateless("plain", 600), Case("plain", 130).without_gradient()),
        mixed=("u",),
        steps=("no_refresh",),
    ),
    "selective_scan": Trial({"N": 16}, _scan(), channels=70, mixed=("delta", "A"), own_parameters=True),
    "short_convolution": Trial(
        {"W": 4},
        (*(stateless(variant, 70, channels=128) for variant in ("silu", "no_bias")), Case("silu", 70)),
        channels=70,
        mixed=("weight", "bias"),
        steps=("plain",),
        own_parameters=True,
    ),
    "silu_product": Trial({}, tuple(Case(variant, 70) for variant in ("plain", "skip", "pair")), channels=70),
    "slot_attention": Trial(
        {"K": 64, "V": 64, "M": 64},
        (
            *(stateless("plain", 130), stateless("write", 130, kind="write"), stateless("plain", 4100)),
            *(stateless("plain", 130).without_gradient(), stateless("write", 130, kind="write").without_gradient()),
        ),
        mixed=("g",),
    ),
    "token_loss": Trial({}, (Case("plain", 70),), channels=5008),
    "variational_linear_attention": Trial(
        {"K": 64, "V": 64},
        # Few heads, and many, which are not cut into segments of time.
        (
            *(Case("plain", 130), stateless("plain", 80, heads=80), stateless("plain", 2100)),
            Case("plain", 130).without_gradient(),
        ),
        mixed=("u",),
    ),
}

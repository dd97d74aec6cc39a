"""Every registered mixer keeps the contract (`longseq.mixers.contract`), and what only mixers of longseq must keep."""

from __future__ import annotations

import copy
import itertools
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cases import cases
from loop_mixers import Leaking, Mean, MeanState
from representatives import cover_operations
from torch import Tensor, nn
from torch.nn.utils import prune

from longseq import mixers
from longseq.blocks.convolution import ShortConvolution
from longseq.kernels import dispatch, longhorn_scan, selective_scan
from longseq.kernels.packing import Packing
from longseq.mixers import contract
from longseq.mixers.contract import TOKENS, assert_same, assert_same_state, make
from longseq.mixers.gla import GatedLinearAttention
from longseq.state import state_tensors

NAMES = mixers.mixer_names()
D_MODEL = 32


def make_tokens(batch: int, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, tokens, D_MODEL, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
@cases("law", contract.LAWS)
def test_every_mixer_keeps_every_law(name: str, law: str) -> None:
    assert contract.check(name, laws=[law]) == ()


def test_a_part_of_the_state_may_be_empty() -> None:
    """A convolution of one tap, and a window of one token, keep no earlier inputs."""
    laws = ["every_parameter_and_the_state_get_gradients", "gradients_are_the_derivatives"]
    assert mixers.check("mamba", laws=laws, convolution_width=1) == ()
    assert mixers.check("window_attention", laws=laws, window=1) == ()


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_token_changes_every_later_output(name: str) -> None:
    """So it is with the options that a layer has by default, none of which forgets within a sequence so short."""
    mixer, x = make(name), make_tokens(1)
    changed = x.clone()
    changed[:, 20] += 1.0
    with torch.no_grad():
        difference = (mixer(changed)[0] - mixer(x)[0])[:, 20:]
    assert difference.abs().amax(-1).min() > 1e-12


def test_a_layer_may_forget_and_leave_options_out() -> None:
    """A window of a few tokens ends the effect of a token, fast decays do, and a gate that is left out has no bias."""
    law = "outputs_depend_on_the_past_only"
    assert mixers.check("window_attention", laws=[law], window=5) == ()
    assert mixers.check("baseconv", laws=[law], filter="short") == ()
    assert mixers.check("mamba2", laws=[law], dt_min=1.0, dt_max=1.0) == ()
    assert mixers.check("lattice", laws=["parameters_without_weight_decay_exist"], forget_gate=False) == ()


class Deaf(Mean):
    def scan(self, projected, state=None, **options):
        return super().scan(torch.ones_like(projected), state, **options)


class Detached(Mean):
    def scan_step(self, projected, state):
        mean = self.rate.sigmoid().detach() * state.mean + self.rate.neg().sigmoid() * projected
        return mean.to(projected.dtype), MeanState(mean)


class Forgetful(Mean):
    def scan(self, projected, state=None, **options):
        return super().scan(projected, None if projected.shape[1] < 100 else state, **options)


class Truncated(Mean):
    """Its gradient ends after 64 tokens."""

    def scan(self, projected, state=None, **options):
        parts = []
        for part in projected.split(64, dim=1) if options.get("cu_seqlens") is None else [projected]:
            y, state = super().scan(part, state, **options)
            state = MeanState(state.mean.detach()) if part.shape[1] == 64 else state
            parts.append(y)
        return torch.cat(parts, 1), state


class Overwriting(Mean):
    def scan_step(self, projected, state):
        keep = self.rate.sigmoid()
        with torch.no_grad():
            mean = state.mean.mul_(keep).add_((1 - keep) * projected)
        return mean.to(projected.dtype, copy=True), MeanState(mean)


class Padded(Mean):
    def scan(self, projected, state=None, *, mask=None, **options):
        return super().scan(projected, state, **options)


class Peeking(Mean):
    def scan(self, projected, state=None, **options):
        return super().scan(projected + 0.1 * projected.roll(-1, 1), state, **options)


class Narrow(Mean):
    def initial_state(self, batch, device=None, dtype=None):
        return MeanState(torch.zeros(batch, self.d_model, device=device, dtype=dtype))


class Started(Mean):
    def initial_state(self, batch, device=None, dtype=None):
        return MeanState(super().initial_state(batch, device, dtype).mean + 1)

    def scan(self, projected, state=None, **options):
        state = MeanState(torch.zeros_like(projected[:, 0])) if state is None else state
        return super().scan(projected, state, **options)


class Halved(Mean):
    def scan_flops(self, tokens):
        return tokens * self.d_model


class Idle(Mean):
    def __init__(self, d_model, *, backend="auto"):
        super().__init__(d_model, backend=backend)
        self.unused = nn.Parameter(torch.zeros(3))


class Misnamed(Mean):
    no_weight_decay_names = ("rates",)


class Silent(Mean):
    def scan(self, projected, state=None, **options):
        y, last = super().scan(projected, state, **options)
        return y, last and MemoryState(last.mean)

    def initial_state(self, batch, device=None, dtype=None):
        return MemoryState(super().initial_state(batch, device, dtype).mean)


class MemoryState(NamedTuple):
    memory: Tensor

    @property
    def mean(self):
        return self.memory


class Reporting(Silent):
    """Its memory [B, D] has a norm for each sequence."""

    def scan(self, projected, state=None, **options):
        y, last = super().scan(projected, state, **options)
        self.observe("state_norm", lambda: last.memory.norm(dim=-1).mean())
        return y, last

    def scan_step(self, projected, state):
        y, last = super().scan_step(projected, state)
        return y, MemoryState(last.mean)


class Alone(Mean):
    def scan(self, projected, state=None, **options):
        return super().scan(projected, state, **options)[0]


class Stepless(Mean):
    scan_step = mixers.Mixer.scan_step


class Counting(Mean):
    def __init__(self, d_model, *, backend="auto"):
        super().__init__(d_model, backend=backend)
        self.largest = float(self.out_proj.weight.max())


class OverwritingUnrecorded(Mean):
    """Its steps write over the given state where no gradient is recorded."""

    def scan_step(self, projected, state):
        y, last = super().scan_step(projected, state)
        return y, last if torch.is_grad_enabled() else MeanState(state.mean.copy_(last.mean))


class Refusing(Mean):
    def scan(self, projected, state=None, *, cu_seqlens=None, mask=None, **options):
        if cu_seqlens is not None or mask is not None:
            raise ValueError("no packed or padded sequences")
        return super().scan(projected, state, **options)


class PairForward(GatedLinearAttention):
    """Both mixers of its pairs read from the first token on."""

    def scan_pair(self, backward, projected, mask=None):
        return self.scan(projected, mask=mask)[0] + backward.scan(projected, mask=mask)[0]


class PairAlone(GatedLinearAttention):
    """Its pairs use the parameters of one mixer only."""

    def scan_pair(self, backward, projected, mask=None):
        return super().scan_pair(self, projected, mask)


class PairPadded(GatedLinearAttention):
    def scan_pair(self, backward, projected, mask=None):
        return super().scan_pair(backward, projected)


class PairDoubled(GatedLinearAttention):
    """A pair with itself is twice one reading."""

    def scan_pair(self, backward, projected, mask=None):
        both = 2 * self.scan(projected, mask=mask)[0]
        return both if backward is self else super().scan_pair(backward, projected, mask)


class PackedForward(GatedLinearAttention):
    def scan(self, projected, state=None, *, cu_seqlens=None, reverse=False, **options):
        reverse = reverse if cu_seqlens is None else False
        return super().scan(projected, state, cu_seqlens=cu_seqlens, reverse=reverse, **options)


class PaddedForward(GatedLinearAttention):
    """With padding it reads no half of the rows backward."""

    def scan(self, projected, state=None, *, mask=None, reverse=False, **options):
        reverse = reverse if mask is None or reverse is True else False
        return super().scan(projected, state, mask=mask, reverse=reverse, **options)


class PeekingInTraining(Mean):
    def scan(self, projected, state=None, **options):
        return super().scan(projected + 0.1 * projected.roll(-1, 1) if self.training else projected, state, **options)


class Dropping(Mean):
    """It draws, in training mode alone, what it leaves out."""

    def scan(self, projected, state=None, **options):
        return super().scan(nn.functional.dropout(projected, 0.5, self.training), state, **options)


class Stateful(Mean):
    def scan(self, projected, state=None, *, output_final_state=True, **options):
        y, last = super().scan(projected, state, **options)
        return y if output_final_state else y.flip(1), last if output_final_state else None


class Talkative(Mean):
    def scan(self, projected, state=None, *, output_final_state=True, **options):
        return super().scan(projected, state, **options)


class Mixing(Refusing):
    """The rows of a batch see each other, and packed and padded sequences, where this would show, are refused."""

    def scan_step(self, projected, state):
        y, last = super().scan_step(projected, state)
        return y - 0.5 * y.mean(0, keepdim=True), last


class Crowded(Mean):
    """Four rows and more are read otherwise than a few."""

    def scan(self, projected, state=None, **options):
        y, last = super().scan(projected, state, **options)
        return y if projected.shape[0] < 4 else 2 * y, last


class Shuffled(Mean):
    """Its order of channels is drawn, and not saved."""

    def __init__(self, d_model, *, backend="auto"):
        super().__init__(d_model, backend=backend)
        self.register_buffer("order", torch.randperm(d_model), persistent=False)

    def project_in(self, x):
        return super().project_in(x[..., self.order])


class RefusingBackwards(GatedLinearAttention):
    def scan(self, projected, state=None, *, cu_seqlens=None, mask=None, **options):
        if cu_seqlens is not None or mask is not None:
            raise ValueError("no packed or padded sequences")
        return super().scan(projected, state, **options)

    def scan_pair(self, backward, projected, mask=None):
        if mask is not None:
            raise ValueError("no padded sequences")
        return super().scan_pair(backward, projected)


BROKEN = [
    (Detached, "gradients_are_the_derivatives", "the gradient of rate along a direction"),
    (Forgetful, "any_split_is_the_whole", r"in parts of \[1, 36\] tokens"),
    (Truncated, "a_long_sequence_is_its_parts", "the gradient of the input differs by"),
    (Overwriting, "given_states_stay_as_they_are", "after a step: mean of the state"),
    (OverwritingUnrecorded, "given_states_stay_as_they_are", "after a step without gradients: mean of the state"),
    (Leaking, "packed_sequences_are_separate", "tokens 5 to 5 of a packed row are not as if alone"),
    (Padded, "padding_leaves_no_trace", "with padding on the left"),
    (Peeking, "outputs_depend_on_the_past_only", "before a changed token"),
    (Deaf, "outputs_depend_on_the_past_only", "no output shows the change"),
    (Narrow, "states_are_float32_in_half_precision", "mean of the state is torch.bfloat16"),
    (Started, "no_state_is_the_initial_state", "not close"),
    (Halved, "flops_are_those_of_the_steps", "tells 32 operations a token, and a step computes"),
    (Idle, "every_parameter_and_the_state_get_gradients", "unused gets no gradient"),
    (Counting, "it_is_built_without_numbers", "cannot be called on meta tensors"),
    (Alone, "outputs_and_states_have_their_form", r"scan returns other things than \(y, state\)"),
    (Stepless, "steps_are_the_whole", "Stepless does not define scan_step"),
    (Misnamed, "parameters_without_weight_decay_exist", "rates, which is no parameter"),
    (Silent, "watched_scans_report_numbers", "does not report its norm as state_norm"),
    (PeekingInTraining, "training_depends_on_the_past_only", "before a changed token, in training mode"),
    (Stateful, "outputs_do_not_depend_on_the_wish_for_a_state", "with output_final_state=False"),
    (Talkative, "outputs_do_not_depend_on_the_wish_for_a_state", "the state is MeanState, not None"),
    (Mixing, "rows_are_separate", "a row of a batch is not as if alone"),
    (Crowded, "rows_are_separate", "a row of a batch is not as if alone"),
    (Shuffled, "a_state_dict_holds_all_that_was_drawn", "a layer of the same arguments and state_dict"),
    (PairForward, "a_pair_is_the_sum_of_its_scans", "a pair with another mixer: "),
    (PairAlone, "a_pair_is_the_sum_of_its_scans", "a pair with another mixer: "),
    (PairPadded, "a_pair_is_the_sum_of_its_scans", "a pair with another mixer with padding: "),
    (PairDoubled, "a_pair_is_the_sum_of_its_scans", "a pair with itself: "),
    (PackedForward, "packed_sequences_are_read_backwards", "packed sequences backwards: "),
    (PaddedForward, "reading_backwards_is_reading_turned_tokens", "half of the rows backwards with padding: "),
]


@pytest.mark.usefixtures("own_mixers")
@pytest.mark.parametrize(("broken", "law", "message"), BROKEN)
def test_a_mixer_that_breaks_a_law_is_told_which(broken: type[mixers.Mixer], law: str, message: str) -> None:
    mixers.register("broken")(broken)
    with pytest.raises(mixers.ContractError, match=f"the mixer broken breaks the law {law}: (?s:.*){message}"):
        mixers.check("broken", laws=[law])
    with pytest.raises(mixers.ContractError):
        mixers.check("broken")


class HalfOfTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient / 2


def halve_gradient(where, base: type[mixers.Mixer] = Mean) -> type[mixers.Mixer]:
    """A mixer whose gradient is wrong where `where(mixer, state, options of the scan)` is true."""

    class Wrong(base):
        def scan(self, projected, state=None, **options):
            wrong = where(self, state, options)
            return super().scan(HalfOfTheGradient.apply(projected) if wrong else projected, state, **options)

    return Wrong


class PairHalved(GatedLinearAttention):
    """The gradient of its pairs is wrong with padding."""

    def scan_pair(self, backward, projected, mask=None):
        return super().scan_pair(backward, projected if mask is None else HalfOfTheGradient.apply(projected), mask)


class LoudInTraining(Mean):
    def scan(self, projected, state=None, **options):
        y, last = super().scan(projected, state, **options)
        return 2 * y if self.training else y, last


class LoudBehindDropout(Mean):
    def __init__(self, d_model, *, backend="auto"):
        super().__init__(d_model, backend=backend)
        self.dropout = nn.Dropout(0.5)

    def scan(self, projected, state=None, **options):
        return super().scan(self.dropout(projected) * (2 if self.training else 1), state, **options)


class MixingInTraining(Mean):
    def scan(self, projected, state=None, **options):
        mixed = projected - 0.5 * projected.mean(0, keepdim=True) if self.training else projected
        return super().scan(mixed, state, **options)


class Filling(Mean):
    """It reads all tokens from the first real one to the last."""

    def scan(self, projected, state=None, *, mask=None, **options):
        if mask is not None:
            mask = mask.cumsum(1).bool() & mask.flip(1).cumsum(1).flip(1).bool()
        return super().scan(projected, state, mask=mask, **options)


class Emptying(Mean):
    """The state of a packed sequence without tokens is lost."""

    def scan(self, projected, state=None, *, cu_seqlens=None, **options):
        y, last = super().scan(projected, state, cu_seqlens=cu_seqlens, **options)
        if cu_seqlens is not None and last is not None:
            last = MeanState(last.mean.masked_fill(cu_seqlens.lengths[:, None] == 0, 7.0))
        return y, last


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return round_float32(gradient)


def round_float32(x):
    return x.bfloat16().float() if x.dtype == torch.float32 else x


class Rounding(Mean):
    def scan(self, projected, state=None, **options):
        return super().scan(round_float32(projected), state, **options)


class RoundingSteps(Mean):
    def step(self, x, state):
        return super().step(round_float32(x), state)


class RoundingGradients(Mean):
    def scan(self, projected, state=None, **options):
        return super().scan(Rounded.apply(projected), state, **options)


BACKWARDS = "reading_backwards_is_reading_turned_tokens"
TRAINING = "training_reads_as_evaluation_does"
WRONG_CALLS = [
    (
        halve_gradient(lambda mixer, state, options: not options.get("output_final_state", True)),
        "outputs_do_not_depend_on_the_wish_for_a_state",
        "with output_final_state=False: the gradient of the input differs by",
    ),
    (
        halve_gradient(lambda mixer, state, options: options.get("cu_seqlens") is not None),
        "packed_sequences_are_separate",
        "with packed sequences: the gradient of the input differs by",
    ),
    (
        halve_gradient(lambda mixer, state, options: options.get("mask") is not None),
        "padding_leaves_no_trace",
        "with padding on the left: the gradient of the input differs by",
    ),
    (
        halve_gradient(lambda mixer, state, options: options.get("reverse") is True, GatedLinearAttention),
        BACKWARDS,
        "all rows backwards: the gradient of the input differs by",
    ),
    (
        halve_gradient(lambda mixer, state, options: options.get("reverse") == "second_half", GatedLinearAttention),
        BACKWARDS,
        "half of the rows backwards: the gradient of the input differs by",
    ),
    (
        halve_gradient(
            lambda mixer, state, options: options.get("reverse") and options.get("cu_seqlens") is not None,
            GatedLinearAttention,
        ),
        "packed_sequences_are_read_backwards",
        "packed sequences backwards: the gradient of the input differs by",
    ),
    (PairHalved, "a_pair_is_the_sum_of_its_scans", "a pair with another mixer with padding: the gradient of the input"),
    (
        halve_gradient(lambda mixer, state, options: mixer.training),
        TRAINING,
        "in training mode: the gradient of the input differs by",
    ),
    (
        halve_gradient(lambda mixer, state, options: mixer.training and state is not None),
        TRAINING,
        "in training mode from a given state: the gradient of the input differs by",
    ),
    (
        halve_gradient(lambda mixer, state, options: mixer.training and options.get("cu_seqlens") is not None),
        TRAINING,
        "in training mode with packed sequences: the gradient of the input differs by",
    ),
    (
        halve_gradient(lambda mixer, state, options: mixer.training and options.get("mask") is not None),
        TRAINING,
        "in training mode with padding: the gradient of the input differs by",
    ),
    (
        halve_gradient(lambda mixer, state, options: mixer.training and options.get("reverse"), GatedLinearAttention),
        TRAINING,
        "in training mode backwards: the gradient of the input differs by",
    ),
    (LoudInTraining, TRAINING, "in training mode: Tensor-likes are not close"),
    (LoudBehindDropout, TRAINING, "in training mode: Tensor-likes are not close"),
    (MixingInTraining, "rows_are_separate", "beside a changed row of the batch, in training mode"),
    (Filling, "padding_leaves_no_trace", "with padding between tokens: "),
    (Emptying, "packed_sequences_are_separate", "mean of the state of packed sequence 1, which is empty, is not as"),
    (Emptying, "packed_sequences_go_on", "going on after no tokens"),
    (Rounding, "float32_is_close_to_float64", "the outputs of a scan in float32 and in float64 differ by 0.00"),
    (RoundingSteps, "float32_is_close_to_float64", "the outputs of a step in float32 and in float64 differ by 0.00"),
    (RoundingGradients, "float32_is_close_to_float64", "the gradients of the input in float32 and in float64 differ"),
]


@pytest.mark.slow
@pytest.mark.usefixtures("own_mixers")
@pytest.mark.parametrize(("wrong", "law", "message"), WRONG_CALLS)
def test_a_mixer_that_is_wrong_in_some_calls_is_told_in_which(wrong, law: str, message: str) -> None:
    mixers.register("wrong")(wrong)
    with pytest.raises(mixers.ContractError, match=f"^the mixer wrong breaks the law {law}: {message}") as raised:
        mixers.check("wrong", laws=[law])
    assert "\n" not in str(raised.value)


class WithDropout(LoudBehindDropout):
    def scan(self, projected, state=None, **options):
        return Mean.scan(self, self.dropout(projected), state, **options)


class Noisy(Mean):
    """What it draws in training mode comes from a generator of its own."""

    def __init__(self, d_model, *, backend="auto"):
        super().__init__(d_model, backend=backend)
        self.random = np.random.default_rng(0)

    def scan(self, projected, state=None, **options):
        return super().scan(projected * (self.random.uniform(1, 2) if self.training else 1), state, **options)


class RefusingHoles(Mean):
    def scan(self, projected, state=None, *, mask=None, **options):
        if mask is not None and (mask.diff(dim=1).sum(1) > 1).any():
            raise ValueError("no padding between tokens")
        return super().scan(projected, state, mask=mask, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("own_mixers")
def test_a_mixer_may_draw_in_training_and_refuse_holes() -> None:
    mixers.register("with_dropout")(WithDropout)
    assert mixers.check("with_dropout") == ()
    mixers.register("noisy")(Noisy)
    assert mixers.check("noisy", laws=[TRAINING]) == ()
    mixers.register("refusing")(RefusingHoles)
    assert mixers.check("refusing") == ("padding_leaves_no_trace",)


@pytest.mark.slow
@pytest.mark.usefixtures("own_mixers")
def test_a_mixer_may_refuse_packed_and_padded_sequences() -> None:
    mixers.register("refusing")(Refusing)
    mixers.register("refusing_backwards")(RefusingBackwards)
    mixers.register("mean")(Mean)
    mixers.register("reporting")(Reporting)
    mixers.register("idle")(Idle)
    mixers.register("dropping")(Dropping)
    refused = ("packed_sequences_are_separate", "packed_sequences_go_on", "padding_leaves_no_trace")
    assert mixers.check("refusing") == refused
    backwards = ("reading_backwards_is_reading_turned_tokens", "packed_sequences_are_read_backwards")
    assert mixers.check("refusing_backwards") == (*refused, *backwards, "a_pair_is_the_sum_of_its_scans")
    assert mixers.check("mean") == mixers.check("reporting") == mixers.check("dropping") == ()
    assert mixers.check("idle", laws=["a_long_sequence_is_its_parts"]) == ()  # another law tells of its parameter
    with pytest.raises(ValueError, match="no law is named unknown; the laws are outputs_"):
        mixers.check("mean", laws=["unknown"])


@cases("packed", [True, False])
def test_a_layer_as_it_stands_keeps_sequences_apart(packed: bool) -> None:
    for kind in (Mean, Refusing):
        contract.check_sequences_apart(kind(8), packed=packed)
    found = "tokens 5 to 5 of a packed row" if packed else "tokens padded on the left"
    with pytest.raises(mixers.ContractError, match=f"{found} are not as if alone: they differ by"):
        contract.check_sequences_apart((Leaking if packed else Padded)(8), packed=packed)


def test_a_mixer_without_operations_refuses_other_backends() -> None:
    with pytest.raises(ValueError, match="Mean has no kernels and no backend 'triton': choose one of auto, torch"):
        Mean(8, backend="triton")


ON_UNIT_KEYS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"key_norm": norm}) for name in ("deltanet", "gated_deltanet") for norm in ("l1", "l2")),
    ("lattice", {"normalize_key": True}),
]


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in NAMES), *ON_UNIT_KEYS], ids=str)
def test_tokens_of_zero_have_bounded_gradients(name: str, options: dict[str, Any]) -> None:
    """Zero keys have no direction: the gradient through their normalisation was 6e13, and inf below a second layer."""
    mixer = make(name, **options)
    x = make_tokens(1)
    x[:, 2:6] = 0
    y, _ = mixer(x.requires_grad_())
    y.sum().backward()
    for gradient in (x.grad, *(parameter.grad for parameter in mixer.parameters() if parameter.grad is not None)):
        assert gradient.isfinite().all()
        assert gradient.abs().max() < 1e7


@pytest.mark.parametrize("name", NAMES)
def test_a_packing_stands_for_its_borders(name: str) -> None:
    mixer, x = make(name), make_tokens(1)
    borders = torch.tensor([0, 5, 5, 6, TOKENS])
    (expected, expected_state), (y, state) = mixer(x, cu_seqlens=borders), mixer(x, cu_seqlens=Packing(borders))
    assert torch.equal(y, expected)
    assert_same_state(state, expected_state)
    with pytest.raises(ValueError, match="must end with T = 36"):
        mixer(x[:, 1:], cu_seqlens=Packing(borders))


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_state_is_loaded_as_tensors_are(name: str, tmp_path) -> None:
    mixer, x = make(name), make_tokens(2)
    _, state = mixer(x)
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert type(loaded) is type(state)
    assert_same_state(loaded, state)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_nobody_reads_is_not_computed(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = []

    def record(run: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            wanted.append(kwargs.get("output_final_state"))
            return run(*args, **kwargs)

        return call

    for op in mixers.get(name).operations:
        forms = tuple(dispatch.Backend(b.name, record(b.function), b.reasons) for b in dispatch.backends(op))
        monkeypatch.setitem(dispatch._BACKENDS, op, forms)
    mixer, x = make(name), make_tokens(1)
    options = {"cu_seqlens": torch.tensor([0, 5, 5, 6, TOKENS])} if packed else {}
    expected, _ = mixer(x, **options)
    assert any(wanted) or not mixer.operations
    wanted.clear()
    y, state = mixer(x, output_final_state=False, **options)
    assert torch.equal(y, expected)
    assert state is None
    assert not any(wanted)


@pytest.mark.parametrize("name", NAMES)
@cases(
    ("rows", "borders", "message"),
    [
        (2, [0, 5, TOKENS], "cu_seqlens needs a batch of 1"),
        (1, [1, TOKENS], "cu_seqlens starts with 1"),
        (1, [0, 5], "cu_seqlens ends with 5"),
        (1, [0, TOKENS + 1], "cu_seqlens ends with 38"),
        (1, [0, 8, 5, TOKENS], "cu_seqlens falls from 8 to 5"),
    ],
)
def test_borders_that_do_not_fit_are_refused(name: str, rows: int, borders: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name)(make_tokens(rows), cu_seqlens=torch.tensor(borders))


@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_with_padding_are_refused(name: str) -> None:
    real = torch.arange(TOKENS)[None] != 3
    with pytest.raises(ValueError, match="mask and cu_seqlens are both given"):
        make(name)(make_tokens(1), cu_seqlens=torch.tensor([0, 5, TOKENS]), mask=real)


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_that_does_not_fit_is_refused(name: str) -> None:
    mixer, x = make(name), make_tokens(2)
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    for mask, message in ((real.long(), r"use mask.bool\(\)"), (real[:1], r"must be \[B, T\] = \(2, 37\)")):
        with pytest.raises(ValueError, match=message):
            mixer(x, mask=mask)


@pytest.mark.parametrize("name", NAMES)
def test_reference_backend_gives_the_same(name: str) -> None:
    if not mixers.get(name).operations:
        with pytest.raises(ValueError, match="reference"):
            mixers.create(name, D_MODEL, backend="reference")(make_tokens(1).float())
        return
    mixer = make(name)
    slow = copy.deepcopy(mixer)
    slow.backend = "reference"
    x = make_tokens(2)
    assert_same(mixer(x)[0], slow(x)[0])


def test_noncausal_attention_sees_everything_once() -> None:
    mixer = make("attention", causal=False)
    x = make_tokens(2)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    assert_same(mixer(x[:, order])[0], mixer(x)[0][:, order])
    real = torch.arange(TOKENS) < torch.tensor([[TOKENS], [11]])
    assert_same(mixer(x, mask=real)[0][1:, :11], mixer(x[1:, :11])[0])
    packed = mixer(x.flatten(0, 1)[None], cu_seqlens=torch.tensor([0, TOKENS, 2 * TOKENS]))[0]
    assert_same(packed.unflatten(1, (2, TOKENS))[0], mixer(x)[0])
    with pytest.raises(ValueError, match="causal=True"):
        mixer.step(x[:, 0], None)


def test_longhorn_forms_agree_with_one_key_channel() -> None:
    """With N = 1 the transition is a number, its diagonal is itself, and both forms are the same recurrence."""
    diagonal, exact = make("longhorn", state_size=1), make("longhorn_exact", state_size=1, head_dim=1)
    exact.load_state_dict(diagonal.state_dict())
    x = make_tokens(2)
    assert_same(exact(x)[0], diagonal(x)[0])


@pytest.mark.parametrize("option", [{"feature_map": "relu"}, {"feature_map": "elu_plus_one"}, {"key_norm": "l1"},
                                    {"convolution_width": 0}, {"negative_eigenvalues": True}])  # fmt: skip
def test_deltanet_ablations_keep_the_contract(option: dict[str, Any]) -> None:
    mixer = make("deltanet", **option)
    x = make_tokens(2)
    expected, _ = mixer(x)
    assert (expected - make("deltanet")(x)[0]).abs().max() > 1e-3, "the option changes the layer"
    state, parts = mixer.initial_state(2, dtype=x.dtype), []
    for token in x.unbind(1):
        y, state = mixer.step(token, state)
        parts.append(y)
    assert_same(torch.stack(parts, dim=1), expected)


NO_LAYERS: list[tuple[str, dict[str, Any], str]] = [
    *(
        (name, {"convolution_width": -1}, "convolution_width=-1: at least")
        for name in ("deltanet", "gated_deltanet", "vla")
    ),
    *((name, {"convolution_width": 0}, "convolution_width=0: at least 1") for name in ("mamba", "hyena", "ttt")),
    *(
        (name, {"num_heads": 4, "head_dim": 0}, "num_heads=4, head_dim=0: ")
        for name in ("attention", "window_attention", "gsa", "retnet", "supra")
    ),
    ("attention", {"num_heads": 0, "head_dim": 8}, "num_heads=0, head_dim=8: "),
    ("linear_attention", {"num_heads": -4, "head_dim": -8}, "num_heads=-4, head_dim=-8: "),
    ("rg_lru", {"width": 0}, "width=0: "),
    ("rg_lru", {"width": -16}, "width=-16: "),
    *(
        (name, {"rotary_base": 0.0}, "rotary_base=0.0 must be above 0")
        for name in ("window_attention", "retnet", "supra")
    ),
    *((name, {"norm_eps": -1.0}, "norm_eps=-1.0 must") for name in ("deltanet", "abc", "mamba2", "rwkv6", "supra")),
    *((name, {"head_dim": 1}, "head_dim=1: ") for name in ("rwkv6", "lattice", "ttt")),
    ("lattice", {"num_heads": 32}, "head_dim=1: "),
]


def test_sizes_that_make_no_layer_are_refused() -> None:
    for option in ({"expand": 1.5}, {"state_size": 0}, {"rate_rank": 0}):
        with pytest.raises(ValueError, match="must be a whole number of at least 1"):
            mixers.create("longhorn", 32, **option)
    for name, option, message in NO_LAYERS:
        with pytest.raises(ValueError, match=message):
            mixers.create(name, 32, **option)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Records which operations, and which of their one-token forms, are called: their name and that of the backend."""
    requests: set[tuple[str, str]] = set()

    def watch(op: str, name: str, call: dispatch.Call) -> Any:
        requests.add((op, name))
        return select(op, name, call)

    select = dispatch.select
    for module in [module for name, module in sys.modules.items() if name.startswith("longseq.kernels")]:
        if getattr(module, "select", None) is select:
            monkeypatch.setattr(module, "select", watch)
    return requests


# With a convolution or without one, unlike by default: other forms make the features of heads.
OTHER_WIDTHS = [("vla", 4), ("deltanet", 0), ("gated_deltanet", 0)]


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in NAMES), *((n, {"convolution_width": w}) for n, w in OTHER_WIDTHS)]
)
def test_the_backend_that_is_named_runs(name: str, options: dict[str, Any], asked: set[tuple[str, str]]) -> None:
    mixer, x = make(name, backend="torch", **options), make_tokens(2)
    _, state = mixer(x)
    mixer.step(x[:, 0], state)
    mixer(x[:1], cu_seqlens=torch.tensor([0, 5, TOKENS]))
    mask = torch.arange(TOKENS) < torch.tensor([[TOKENS], [11]])
    mixer(x, mask=mask)
    if mixer.reads_backwards:
        mixer.scan(mixer.project_in(x), reverse=True)
    if mixer.reads_pairs:
        for padding in (None, mask):
            mixer.scan_pair(mixer, mixer.project_in(x), padding)
    assert {backend for _, backend in asked} <= {"torch"}, asked
    assert {op for op, _ in asked} & set(mixer.operations) or not mixer.operations


@pytest.mark.slow
@pytest.mark.parametrize("name", cover_operations())
def test_compiled_training_in_autocast_equals_eager(name: str) -> None:
    """Compiled code is traced before autocast is set for the backward pass, which must not affect the recurrences."""
    torch._dynamo.reset()
    # Few tokens: the graph of a chunk has parts for each of its halves. At two, a chunk of the scans is one token.
    mixer, x = make(name).float(), make_tokens(2, 2).float().requires_grad_()
    gradients = []
    for call in (mixer, torch.compile(mixer, backend="aot_eager", fullgraph=True)):
        x.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            y, _ = call(x)
        y.float().square().mean().backward()
        gradients.append(x.grad.clone())
    assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[0].norm(), name


def assert_equal_states(state: Any, expected: Any) -> None:
    for (name, part), (_, wanted) in zip(state_tensors(state), state_tensors(expected), strict=True):
        assert torch.equal(part, wanted), name


@cases(
    ("name", "rates"),
    [
        ("mamba", "A_log"),
        ("mamba2", "A_log"),
        ("gated_deltanet", "A_log"),
        ("rg_lru", "decay"),
        ("rwkv4", "decay"),
        ("rwkv6", "decay_base"),
    ],
)
def test_decay_rates_are_computed_in_float32(name: str, rates: str) -> None:
    """bfloat16 would round the exponential of a parameter as well as the parameter."""
    mixer = mixers.create(name, 64)
    torch.nn.init.uniform_(getattr(mixer, rates), 0, 3)
    mixer = mixer.bfloat16()
    wide = copy.deepcopy(mixer)
    setattr(wide, rates, torch.nn.Parameter(getattr(mixer, rates).float()))
    x = torch.randn(1, 20, 64, dtype=torch.bfloat16)
    (y, state), (expected, expected_state) = mixer(x), wide(x)
    assert torch.equal(y, expected)
    assert_equal_states(state, expected_state)
    y, state = mixer.step(x[:, 0], state)
    expected, expected_state = wide.step(x[:, 0], expected_state)
    assert torch.equal(y, expected)
    assert_equal_states(state, expected_state)


@pytest.mark.parametrize("lanes", ["several", "one"])
def test_gradients_of_scans_have_no_gaps(lanes: str) -> None:
    """torch.compile traces operations behind gradients with gaps with other strides than these have when they run."""
    tokens, width = (2, 32) if lanes == "several" else (5, 1024)  # on a CPU, one lane has 2**14 numbers and more
    x, step = (torch.rand(2, tokens, width).requires_grad_() for _ in range(2))
    key, query = (torch.rand(2, tokens, 16).requires_grad_() for _ in range(2))
    rates = -torch.rand(width, 16)
    for y, _ in (
        selective_scan(x, step, rates, key, query, backend="torch"),
        longhorn_scan(x, query, key, step, backend="torch"),
    ):
        gradients = torch.autograd.grad(y.square().sum(), (x, step, key, query))
        assert all(each.is_contiguous() for each in (y, *gradients))


def test_mamba_step_sizes_start_in_their_range() -> None:
    torch.manual_seed(0)
    mixer = mixers.create("mamba", 64, dt_min=0.01, dt_max=0.05)
    steps = torch.nn.functional.softplus(mixer.rate_bias)
    assert steps.min() >= 0.0099
    assert steps.max() <= 0.0501
    torch.testing.assert_close(-mixer.A_log.exp()[0], -torch.arange(1.0, 17.0))


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, False) for name in NAMES if mixers.get(name).recomputable),
        ("vla", True),  # test_directions.py compiles others that recompute
    ],
)
def test_recomputing_keeps_less_and_changes_nothing(name: str, compiled: bool) -> None:
    x, results, kept = make_tokens(2, 3 if compiled else TOKENS).requires_grad_(), [], []
    for recompute in (False, True):
        torch._dynamo.reset()
        mixer = make(name)
        mixer.recompute = recompute
        call = torch.compile(mixer, fullgraph=True, backend="aot_eager") if compiled and recompute else mixer
        held: dict[int, Tensor] = {}

        def keep(tensor: Tensor, held: dict[int, Tensor] = held) -> Tensor:
            held[tensor.data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y, state = call(x)
        loss = y.square().sum() + sum(tensor.square().sum() for _, tensor in state_tensors(state))
        results.append([y, *torch.autograd.grad(loss, [x, *mixer.parameters()])])
        kept.append(sum(tensor.numel() for tensor in held.values()))
    assert_same(results[1], results[0])
    assert compiled or kept[1] < 0.7 * kept[0]


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])
@pytest.mark.parametrize("change", ["hook", "prune", "weight_norm", "wrapper", "forward"])
def test_a_convolution_that_others_hook_onto_is_called(name, change):
    mixer, x = mixers.create(name, d_model=16, num_heads=2), torch.randn(2, 5, 16)
    expected, calls = mixer(x)[0], []
    convolution = mixer.convolution
    if change == "hook":
        convolution.register_forward_hook(lambda *_: calls.append(1))
    elif change == "prune":
        prune.identity(convolution, "weight")
    elif change == "weight_norm":
        torch.nn.utils.parametrizations.weight_norm(convolution)
    elif change == "wrapper":
        mixer.convolution = Wrapper(convolution, calls)
    else:
        forward = convolution.forward
        convolution.forward = lambda *args, **kwargs: (calls.append(1), forward(*args, **kwargs))[1]
    for _ in range(2):  # what is computed before a call must be computed again in the second step
        y = mixer(x)[0]
        y.sum().backward()
        torch.testing.assert_close(y, expected)
    assert len(calls) == (2 if change in ("hook", "wrapper", "forward") else 0)


def double(module: nn.Module, arguments: Any, result: Any) -> Any:
    return (2 * result[0], *result[1:])


def prune_and_load(module: nn.Module) -> None:
    for name in [name for name, _ in module.named_parameters(recurse=False)]:
        prune.random_unstructured(module, name, 0.5)
        with torch.no_grad():  # as other weights are loaded: the hook of the next call multiplies them by the mask
            module.get_parameter(f"{name}_orig").mul_(2)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@cases("change", [lambda module: module.register_forward_hook(double), prune_and_load])
def test_steps_call_the_hooks_of_a_mixer_and_of_its_convolutions(name: str, change: Any) -> None:
    torch.manual_seed(0)
    plain = mixers.create(name, D_MODEL).double()
    convolutions = [part for part, module in plain.named_modules() if isinstance(module, ShortConvolution)]
    x = make_tokens(2, 3)
    for part in ["", *convolutions]:
        changed = []
        for _ in range(2):  # a call of the whole sequence would compute pruned weights for the steps
            torch.manual_seed(1)
            mixer = copy.deepcopy(plain)
            change(mixer.get_submodule(part))
            changed.append(mixer)
        state, results = changed[0].initial_state(2, dtype=x.dtype), []
        for token in x.unbind(1):
            y, state = changed[0].step(token, state)
            results.append(y)
        assert_same(torch.stack(results, 1), changed[1](x)[0])


class Wrapper(torch.nn.Module):
    def __init__(self, module, calls):
        super().__init__()
        self.module = module
        self.calls = calls

    def forward(self, *args, **kwargs):
        self.calls.append(1)
        return self.module(*args, **kwargs)


# Values beside the defaults, of the options that a rule names.
OTHERS = {
    "rotary_base": 3.0,
    "rotary_scaling": {"rope_type": "linear", "factor": 2.0},
    "norm_eps": 0.5,
    "convolution_width": 2,
    "max_length": 5,
    "filter_width": 3,
    "eps": 1e6,
    "refresh_period": 2,
    "refresh": 0.5,
    "scale_penalty": False,
    "lambda0": 0.4,  # the default times a power of two, so that a sum divided by its norm is the same to the bit
}
DECIDING = {name: (False, True) for name in ("rotary", "normalizer", "update_penalty", "normalize_alpha")}
DECIDING |= {"qk_norm": ("none", "head", "all"), "filter": ("implicit", "explicit", "short")}
DECIDING |= {"refresh_period": (0, None, 2)}


@pytest.mark.parametrize("name", [name for name in NAMES if mixers.get(name).inert_with and name != "based"])
def test_an_option_is_inert_in_those_cases_alone_that_its_class_names(name: str) -> None:
    for option, rules in mixers.get(name).inert_with.items():
        others = list(dict.fromkeys(other for case in rules for other in case))
        for values in itertools.product(*(DECIDING[other] for other in others)):
            chosen = dict(zip(others, values, strict=True))
            results = []
            for options in ({}, {option: OTHERS[option]}):
                torch.manual_seed(0)
                mixer = mixers.create(name, D_MODEL, **chosen, **options).double()
                results.append([*mixer.state_dict().values(), mixer(make_tokens(1))[0]])
            same = all(map(torch.equal, *results)) if len(results[0]) == len(results[1]) else False
            assert same == any(all(chosen[other] in case[other] for other in case) for case in rules), (option, chosen)

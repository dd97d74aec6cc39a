"""Inputs of every operation, in more variants than the self-test has, and comparisons, for tests of the registry."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longseq import kernels
from longseq.kernels import self_test_inputs
from longseq.kernels.recurrence import each
from longseq.kernels.self_test_inputs import CONVOLUTIONS, InputSampler, convolved_features, gradients, results

__all__ = ["convolved_features", "gradients", "results"]

# Operations over time whose torch form torch differentiates; the others have a backward pass of their own.
DIFFERENTIATED_BY_TORCH = (
    "convolved_features",
    "delta_rule",
    "linear_attention",
    "short_convolution",
    "slot_attention",
)
# Variants of the tests: each is a variant of the self-test with other values, tensors or options.
VARIANTS: dict[str, tuple[str, ...]] = {
    "add_norm": ("bias", "centred"),
    "convolved_features": ("one_tap",),
    "cumulative_softmax": ("extreme_logits",),
    "delta_rule": ("beta_0", "beta_1", "beta_2", "repeated_keys", "extreme_decay"),
    "head_features": ("identity",),
    "linear_attention": ("extreme_head_decay",),
    "longhorn_scan": ("beta_0", "beta_1", "repeated_keys", "extreme_decay"),
    "orthogonal_recurrence": ("unnormalized", "gamma_0", "repeated_tokens", "extreme_decay", "extreme_values"),
    "recursive_least_squares": ("repeated_directions", "extreme_directions"),
    "selective_scan": ("extreme_decay",),
    "short_convolution": ("one_tap",),
    "slot_attention": ("identity", "relu_squared", "no_write", "extreme_decay"),
    "token_loss": ("ignored",),
    "variational_linear_attention": (
        "no_refresh",
        "fixed",
        "repeated_keys",
        "unnormalized_key",
        "unnormalized_alpha",
        "no_normalizer",
    ),
}
# The variant that others are derived from, where it is not the operation's first one.
BASES = {
    ("add_norm", "bias"): "bias",
    ("add_norm", "centred"): "centred",
    ("head_features", "identity"): "identity",
    ("linear_attention", "extreme_head_decay"): "head_gated",
    ("orthogonal_recurrence", "unnormalized"): "gated",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "identity": {"activation": "identity"},
    "no_normalizer": {"normalizer": False},
    "no_refresh": {"refresh_period": None},
    "relu_squared": {"activation": "relu_squared"},
    "unnormalized": {"normalize": False},
    "unnormalized_alpha": {"normalize_alpha": False},
    "unnormalized_key": {"normalize_key": False},
}


class Inputs(self_test_inputs.Inputs):
    """One call of an operation, with other ways to run it."""

    def to(self, device: torch.device | str) -> Inputs:
        """The same call on another device."""
        return self.replace({name: x.to(device) for name, x in self.arguments.items()})

    def cut(self, start: int, stop: int, initial_state: Any = None) -> Inputs:
        """The call on tokens start to stop, from `initial_state` if given."""
        state = self.initial_state if initial_state is None else initial_state
        return replace(self, sequences={k: x[:, start:stop] for k, x in self.sequences.items()}, initial_state=state)

    def run_checkpointed(self, **options: Any) -> tuple[Tensor, Any]:
        """`run` under activation checkpointing: it runs again in the backward pass."""
        return checkpoint(self.run, use_reentrant=False, **options)

    def run_reversed(self, cu_seqlens: Tensor | None = None, **options: Any) -> tuple[Tensor, Any]:
        """The definition of `reverse=True`: time is reversed, and with it the order of packed segments."""
        turned = replace(self, sequences={name: x.flip(1) for name, x in self.sequences.items()})
        if cu_seqlens is None:
            output, state = turned.run(**options)
            return output.flip(1), state
        turned = replace(turned, initial_state=each(lambda x: x.flip(0), self.initial_state))
        output, state = turned.run(cu_seqlens=self.tokens - cu_seqlens.flip(0), **options)
        return output.flip(1), each(lambda x: x.flip(0), state)

    def run_both_ways(self, **options: Any) -> tuple[Tensor, Any]:
        """The definition of `reverse="second_half"`: half of the rows is read forward, the other half backward."""
        reads_all_rows = self.own_parameters and self.op in CONVOLUTIONS
        results = []
        for i, run in enumerate((Inputs.run, Inputs.run_reversed)):
            part = replace(
                self,
                sequences={name: x if reads_all_rows else x.chunk(2)[i] for name, x in self.sequences.items()},
                parameters={name: x[i] if self.own_parameters else x for name, x in self.parameters.items()},
                initial_state=each(lambda x, i=i: x.chunk(2)[i], self.initial_state),
            )
            results.append(run(part, **options))
        (forward, ahead), (backward, behind) = results
        return torch.cat((forward, backward)), each(lambda *x: torch.cat(x), ahead, behind)


def list_variants(op: str) -> tuple[str, ...]:
    """The kinds of input that `make_inputs` knows for an operation; the first one is the plainest."""
    return (*self_test_inputs.list_variants(op), *VARIANTS.get(op, ()))


def make_inputs(
    op: str, variant: str | None = None, *, seed: int = 0, sizes: Mapping[str, int] | None = None, **options: Any
) -> Inputs:
    """Random inputs of an operation, as of `self_test_inputs.make_inputs`, in any variant of `list_variants`."""
    own = self_test_inputs.list_variants(op)
    variant = variant or own[0]
    base = variant if variant in own else BASES.get((op, variant), own[0])
    sizes = {"W": 1, **(sizes or {})} if variant == "one_tap" else sizes
    made = Inputs(**vars(self_test_inputs.make_inputs(op, base, seed=seed, sizes=sizes, **options)))
    if variant in own:
        return made
    first = next(iter(made.sequences.values()))
    generator = None if first.is_meta else torch.Generator(first.device).manual_seed(seed + 1)
    with torch.device(first.device):
        return change(made, op, variant, InputSampler(1, 1, 1, first.dtype, generator))


def change(inputs: Inputs, op: str, variant: str, sampler: InputSampler) -> Inputs:
    """The variant of an operation's inputs."""
    named = {**inputs.sequences}
    options = dict(inputs.options)
    if variant in OPTIONS and op not in ("head_features",):
        options |= OPTIONS[variant]
    if variant.startswith("beta_"):
        named["beta"] = torch.full_like(named["beta"], float(variant[-1]))
    elif variant.startswith("repeated_"):
        for name in {"repeated_directions": "u", "repeated_tokens": "kv"}.get(variant, "k"):
            named[name] = named[name][:, :1].expand_as(named[name]).clone()
    elif variant in ("extreme_values", "extreme_directions"):
        name = "v" if variant == "extreme_values" else "u"
        sizes = torch.tensor([0.0, 1e-3, 1.0, 1e3], dtype=sampler.dtype)
        drawn = torch.randint(len(sizes), named[name].shape[:3], generator=sampler.generator)
        named[name] = named[name] * sizes[drawn][..., None]
    elif variant == "extreme_logits":
        x = named["x"]
        named["x"] = x - sampler.decays(*x.shape) + sampler.decays(*x.shape)
    elif variant == "extreme_decay" and op == "longhorn_scan":
        named["k"][..., 1:] = 0  # so that 1 - epsilon k² comes as near to 0 as beta is large
        named["beta"] = 1e6 * named["beta"]
    elif variant == "extreme_decay" and op == "selective_scan":
        named["delta"] = -sampler.decays(*named["delta"].shape)
    elif variant == "extreme_decay" and op == "slot_attention":
        named["g"] = sampler.decays(*named["g"].shape)
    elif variant in ("extreme_decay", "extreme_head_decay"):
        named["g"] = sampler.decays(*named["q"].shape[:3])
    elif variant == "gamma_0":
        named["gamma"] = torch.zeros_like(named["gamma"])
    elif variant == "no_write":
        named["g"] = torch.zeros_like(named["g"])
    elif variant == "fixed":
        del named["u"]
    elif variant == "ignored":
        named["target"] = torch.where(named["target"] % 2 == 0, named["target"], -100)
    elif variant == "unnormalized_key":
        named["k"] = 0.3 * named["k"]
    elif variant == "unnormalized_alpha":
        memory, inverse, sums, steps = inputs.initial_state
        inputs = replace(inputs, initial_state=(memory, 0.2 * inverse, sums, steps))
    return replace(inputs, sequences=named, options=options)


def list_forms(op: str, device: str = "cpu", dtype: torch.dtype = torch.float64) -> tuple[str, ...]:
    """The backends of an operation, but for the reference, that run there."""
    return tuple(name for name, reasons in kernels.explain(op, device=device, dtype=dtype).items() if not reasons)[:-1]


# chunk_size is part of the definition of these operations; their contract is about the exact form, chunk_size=1.
_DEFINED_BY_CHUNKS = ("orthogonal_recurrence",)


def takes_chunk_size(op: str) -> bool:
    """Whether an operation has the option chunk_size, which must not change results."""
    return op not in _DEFINED_BY_CHUNKS and takes(op, "chunk_size")


def takes(op: str, option: str) -> bool:
    """Whether an operation has an option of that name."""
    return option in inspect.signature(getattr(kernels, op)).parameters


# The largest difference that counts as equal, relative to 1 + the largest magnitude of what is expected.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 1e-2}


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference relative to 1 + the largest magnitude of `expected`; infinite where one is not finite."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else float("inf")
    if expected.numel() == 0:
        return 0.0
    actual, expected = actual.detach().double(), expected.detach().double()
    largest = ((actual - expected).abs().max() / (1 + expected.abs().max())).item()
    return largest if largest == largest else float("inf")


def assert_equal_up_to_rounding(actual: Tensor, expected: Tensor, name: str) -> None:
    """Fail unless two ways of computing one thing agree to the precision of `actual`."""
    difference, limit = error(actual, expected), _TOLERANCE.get(actual.dtype, 0.0)
    assert difference <= limit, f"{name} is off by {difference:.1e}, allowed {limit:.0e}"


def assert_accurate(actual: Tensor, peer: Tensor, exact: Tensor, name: str) -> None:
    """Fail if `actual` is over eight times as far from the exact result as `peer`, a plain form in the same precision.

    Chunks of reflections (beta = 2) add up in another order than the recurrence does, which costs a factor of four.
    """
    rounding = torch.finfo(actual.dtype).eps if actual.is_floating_point() else 0.0
    difference, limit = error(actual, exact), 8 * (error(peer, exact) + rounding)
    assert difference <= limit, (
        f"{name} is off by {difference:.1e}, allowed {limit:.1e} from the plain form's own error"
    )


def step_results(inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """Output and final state of the one-token form at one token after another, without gradients."""
    with torch.no_grad():
        return results(*inputs.take_steps(**options))

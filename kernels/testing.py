"""Inputs of every registered operation, and comparisons, for contract tests that enumerate the registry.

A new operation takes part in every contract test once it has a maker here: a function from an `InputSampler` and the
name of a variant to `Inputs`.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import longseq.kernels as kernels
from longseq.kernels.recurrence import each


@dataclass(frozen=True)
class Inputs:
    """One call of an operation: its float tensors by argument name, those with time in dimension 1 apart.

    An operation on each token alone has the empty state ().
    """

    op: str
    sequences: dict[str, Tensor]
    initial_state: Any  # a tensor or a tuple of tensors
    parameters: dict[str, Tensor] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    absent_state: Any = None  # the state at the start of a call without an initial state, where that is not zero
    needs_state: bool = False  # the operation has no default state: a call must give one
    own_parameters: bool = False  # see `with_own_parameters`

    @property
    def tokens(self) -> int:
        return next(iter(self.sequences.values())).shape[1]

    @property
    def arguments(self) -> dict[str, Tensor]:
        """Every tensor of the call by argument name; the parts of a tuple are initial_state[0], ..."""
        return {**self.sequences, **self.parameters, **_named("initial_state", self.initial_state)}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The arguments that have gradients: all but counters."""
        return {name: x for name, x in self.arguments.items() if x.is_floating_point()}

    def replace(self, tensors: Mapping[str, Tensor]) -> "Inputs":
        """The same call with other tensors, named as in `arguments`."""
        names = iter(_named("initial_state", self.initial_state))
        return replace(
            self,
            sequences={name: tensors.get(name, x) for name, x in self.sequences.items()},
            parameters={name: tensors.get(name, x) for name, x in self.parameters.items()},
            initial_state=each(lambda x: tensors.get(next(names), x), self.initial_state),
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        """The same call with `function` applied to each float tensor."""
        return self.replace({name: function(x) for name, x in self.tensors.items()})

    def to(self, device: torch.device | str) -> "Inputs":
        """The same call on another device."""
        return self.replace({name: x.to(device) for name, x in self.arguments.items()})

    def cut(self, start: int, stop: int, initial_state: Any = None) -> "Inputs":
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

    def with_own_parameters(self) -> "Inputs":
        """The call for both directions, with separate parameters for reading backward.

        A convolution then reads all of its rows in both directions, the other operations half of them in each.
        """
        state = self.initial_state
        if self.op in _CONVOLUTIONS:
            state = each(lambda x: torch.cat((x, 2 * x)), state)
        parameters = {name: torch.stack((x, 0.5 * x)) for name, x in self.parameters.items()}
        return replace(self, parameters=parameters, initial_state=state, own_parameters=True)

    def run_both_ways(self, **options: Any) -> tuple[Tensor, Any]:
        """The definition of `reverse="second_half"`: half of the rows is read forward, the other half backward."""
        reads_all_rows = self.own_parameters and self.op in _CONVOLUTIONS
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

    def run(self, **options: Any) -> tuple[Tensor, Any]:
        """Output and final state of the operation; without a state, the first output and a tuple of the others."""
        call = {**self.sequences, **self.parameters, **self.options, **options}
        function = as_recurrence(self.op)
        if isinstance(self.initial_state, tuple) and not self.initial_state:
            output = function(**call)
            return (output, ()) if isinstance(output, Tensor) else (output[0], tuple(output[1:]))
        return function(**{"initial_state": self.initial_state, "output_final_state": True, **call})

    def step(self, t: int, state: Any, **options: Any) -> tuple[Tensor, Any]:
        """Output and next state of the operation's one-token form at token t."""
        token = {name: x[:, t] for name, x in self.sequences.items()}
        return getattr(kernels, f"{self.op}_step")(**token, **self.parameters, state=state, **self.options, **options)

    def take_steps(self, **options: Any) -> tuple[Tensor, Any]:
        """Output and final state of the one-token form at one token after another."""
        outputs, state = [], self.initial_state
        for t in range(self.tokens):
            output, state = self.step(t, state, **options)
            outputs.append(output)
        return torch.stack(outputs, 1), state


# Convolutions, which with parameters for each direction read all rows in both.
_CONVOLUTIONS = ("convolved_features", "short_convolution")


def as_recurrence(op: str) -> Callable[..., Any]:
    """An operation with one output beside its final state."""
    return convolved_features if op == "convolved_features" else getattr(kernels, op)


def convolved_features(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """q, k, v and beta of each token side by side, [B, T, 2 H K + H V + H], and the final state."""
    *features, beta, state = kernels.convolved_features(*args, **kwargs)
    return torch.cat([*(x.flatten(2) for x in features), beta.to(features[0].dtype)], -1), state


def _named(name: str, state: Any) -> dict[str, Tensor]:
    """The tensors of a state by name."""
    return {name: state} if isinstance(state, Tensor) else {f"{name}[{i}]": x for i, x in enumerate(state)}


@dataclass(frozen=True)
class InputSampler:
    """Random tensors of one call. `rows` is the leading dimension of its state."""

    batch: int
    tokens: int
    rows: int
    dtype: torch.dtype
    generator: torch.Generator | None  # None where tensors have no values
    sizes: Mapping[str, int] = field(default_factory=dict)  # by dimension name, instead of the maker's own small ones

    def size(self, **own: int) -> tuple[int, ...]:
        """The sizes of dimensions, given by name with the maker's own."""
        return tuple(self.sizes.get(name, size) for name, size in own.items())

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def unit(self, *shape: int) -> Tensor:
        return F.normalize(self.normal(*shape), dim=-1)

    def decays(self, *shape: int) -> Tensor:
        """Log decays of every size: none, mild, and so strong that nothing is left."""
        sizes = torch.tensor([0.0, 1e-3, 1.0, 30.0, 1e4], dtype=self.dtype)
        return -self.uniform(*shape) * sizes[torch.randint(len(sizes), shape, generator=self.generator)]


Maker = Callable[[InputSampler, str], Inputs]
_MAKERS: dict[str, tuple[Maker, tuple[str, ...]]] = {}


def _maker(op: str, *variants: str) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        _MAKERS[op] = maker, variants
        return maker

    return register


def list_variants(op: str) -> tuple[str, ...]:
    """The kinds of input that `make_inputs` knows for an operation; the first one is the plainest."""
    return _MAKERS[op][1]


def make_inputs(
    op: str,
    variant: str | None = None,
    *,
    batch: int = 2,
    tokens: int = 37,
    segments: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    device: torch.device | str = "cpu",
) -> Inputs:
    """Random inputs of an operation, small ones unless `sizes` names dimensions (heads "H", keys "K", ...).

    With `segments` the state has one row for each and the batch is 1. On torch's meta device they have no values.
    """
    maker, variants = _MAKERS[op]
    batch = batch if segments is None else 1
    sampler = InputSampler(batch, tokens, segments or batch, dtype, _generator(device, seed), sizes or {})
    with torch.device(device):
        return maker(sampler, variant or variants[0])


def _generator(device: torch.device | str, seed: int) -> torch.Generator | None:
    return None if torch.device(device).type == "meta" else torch.Generator(device).manual_seed(seed)


@_maker(
    "delta_rule",
    "plain",
    "gated",
    "write_key",
    "gated_write_key",
    "beta_0",
    "beta_1",
    "beta_2",
    "repeated_keys",
    "correlated_keys",
    "extreme_decay",
)
def _delta_rule(sampler: InputSampler, variant: str) -> Inputs:
    heads, key_dim, value_dim = sampler.size(H=2, K=4, V=3)
    shape = (sampler.batch, sampler.tokens, heads)
    k = sampler.unit(*shape, key_dim)
    if variant == "repeated_keys":
        k = k[:, :1].expand_as(k).clone()
    elif variant == "correlated_keys":
        k = F.normalize(k[:, :1] + 0.3 * k, dim=-1)
    beta = 2 * sampler.uniform(*shape)
    if variant.startswith("beta_"):
        beta = torch.full_like(beta, float(variant[-1]))
    sequences = {"q": sampler.normal(*shape, key_dim), "k": k, "v": sampler.normal(*shape, value_dim), "beta": beta}
    if "write_key" in variant:
        sequences["write_key"] = F.normalize(k + 0.3 * sampler.unit(*shape, key_dim), dim=-1)
    if "gated" in variant:
        sequences["g"] = -sampler.uniform(*shape)
    elif variant == "extreme_decay":
        sequences["g"] = sampler.decays(*shape)
    state = sampler.normal(sampler.rows, heads, key_dim, value_dim)
    return Inputs("delta_rule", sequences, state, options={"scale": 0.5})


@_maker(
    "linear_attention",
    "plain",
    "head_gated",
    "channel_gated",
    "value_gated",
    "extreme_head_decay",
    "extreme_channel_decay",
    "extreme_value_decay",
)
def _linear_attention(sampler: InputSampler, variant: str) -> Inputs:
    heads, key_dim, value_dim = sampler.size(H=2, K=4, V=3)
    shape = (sampler.batch, sampler.tokens, heads)
    sequences = {
        "q": sampler.normal(*shape, key_dim),
        "k": sampler.normal(*shape, key_dim),
        "v": sampler.normal(*shape, value_dim),
    }
    if variant != "plain":
        width = {"channel": (key_dim,), "value": (value_dim,)}.get(variant.replace("extreme_", "").split("_")[0], ())
        gate = sampler.decays(*shape, *width) if "extreme" in variant else -sampler.uniform(*shape, *width)
        sequences["g_value" if "value" in variant else "g"] = gate
    state = sampler.normal(sampler.rows, heads, key_dim, value_dim)
    return Inputs("linear_attention", sequences, state, options={"scale": 0.5})


@_maker("longhorn_scan", "plain", "beta_0", "beta_1", "repeated_keys", "extreme_decay")
def _longhorn_scan(sampler: InputSampler, variant: str) -> Inputs:
    channels, width = sampler.size(D=5, N=3)
    shape = (sampler.batch, sampler.tokens)
    k, beta = sampler.normal(*shape, width), sampler.uniform(*shape, channels)
    if variant == "repeated_keys":
        k = k[:, :1].expand_as(k).clone()
    elif variant == "extreme_decay":
        k[..., 1:] = 0  # so that 1 - epsilon k² comes as near to 0 as beta is large
        beta = 1e6 * beta
    elif variant.startswith("beta_"):
        beta = torch.full_like(beta, float(variant[-1]))
    sequences = {"x": sampler.normal(*shape, channels), "q": sampler.normal(*shape, width), "k": k, "beta": beta}
    return Inputs("longhorn_scan", sequences, sampler.normal(sampler.rows, channels, width))


@_maker("selective_scan", "plain", "extreme_decay")
def _selective_scan(sampler: InputSampler, variant: str) -> Inputs:
    channels, width = sampler.size(D=5, N=3)
    shape = (sampler.batch, sampler.tokens)
    delta = -sampler.decays(*shape, channels) if variant == "extreme_decay" else sampler.uniform(*shape, channels)
    sequences = {
        "x": sampler.normal(*shape, channels),
        "delta": delta,
        "B": sampler.normal(*shape, width),
        "C": sampler.normal(*shape, width),
    }
    rate = -sampler.uniform(channels, width).exp()
    return Inputs("selective_scan", sequences, sampler.normal(sampler.rows, channels, width), parameters={"A": rate})


@_maker("cumulative_softmax", "plain", "extreme_logits")
def _cumulative_softmax(sampler: InputSampler, variant: str) -> Inputs:
    shape = (sampler.batch, sampler.tokens, *sampler.size(H=2, M=5))
    x, state = sampler.normal(*shape), sampler.normal(sampler.rows, *shape[2:])
    if variant == "extreme_logits":
        x = x - sampler.decays(*shape) + sampler.decays(*shape)
    empty = torch.full_like(state, -1e30)
    return Inputs("cumulative_softmax", {"x": x}, state, absent_state=empty)


@_maker("slot_attention", "plain", "write", "identity", "relu_squared", "no_write", "extreme_decay")
def _slot_attention(sampler: InputSampler, variant: str) -> Inputs:
    heads, key_dim, value_dim, slots = sampler.size(H=2, K=4, V=3, M=5)
    shape = (sampler.batch, sampler.tokens, heads)
    g = sampler.decays(*shape, slots) if variant == "extreme_decay" else -sampler.uniform(*shape, slots)
    sequences = {
        "q": sampler.normal(*shape, key_dim),
        "k": sampler.normal(*shape, key_dim),
        "v": sampler.normal(*shape, value_dim),
        "g": torch.zeros_like(g) if variant == "no_write" else g,
    }
    if variant == "write":
        sequences["write"] = sampler.uniform(*shape, slots)
    state = tuple(sampler.normal(sampler.rows, heads, slots, width) for width in (key_dim, value_dim))
    activation = variant if variant in ("identity", "relu_squared") else "softmax"
    return Inputs("slot_attention", sequences, state, options={"scale": 0.5, "activation": activation})


@_maker("short_convolution", "plain", "silu", "one_tap", "no_bias")
def _short_convolution(sampler: InputSampler, variant: str) -> Inputs:
    channels, width = sampler.size(D=5, W=1 if variant == "one_tap" else 4)
    bias = {} if variant == "no_bias" else {"bias": sampler.normal(channels)}
    return Inputs(
        "short_convolution",
        {"x": sampler.normal(sampler.batch, sampler.tokens, channels)},
        sampler.normal(sampler.rows, channels, width - 1),
        parameters={"weight": sampler.normal(channels, width)} | bias,
        options={"activation": "silu" if variant == "silu" else None},
    )


@_maker("convolved_features", "plain", "elu_plus_one", "l1", "one_tap", "relu")
def _convolved_features(sampler: InputSampler, variant: str) -> Inputs:
    heads, key_dim, value_dim, width = sampler.size(H=2, K=5, V=4, W=1 if variant == "one_tap" else 4)
    channels = heads * (2 * key_dim + value_dim)
    features = {"feature_map": "identity", "key_norm": "l1"} if variant == "l1" else {}
    if variant in ("elu_plus_one", "relu"):
        features["feature_map"] = variant
    # Heads in which relu leaves almost nothing would magnify rounding errors.
    shift = 0.5 if variant == "relu" else 0.0
    return Inputs(
        "convolved_features",
        # The last two channels are ignored.
        {"x": sampler.normal(sampler.batch, sampler.tokens, channels + heads + 2) + shift},
        sampler.normal(sampler.rows, channels, width - 1) + shift,
        parameters={"weight": sampler.normal(channels, width) + shift},
        options={"num_heads": heads, "key_dim": key_dim, **features},
    )


@_maker(
    "orthogonal_recurrence",
    "plain",
    "encode",
    "similarity",
    "ttt",
    "gated",
    "unnormalized",
    "l1",
    "gamma_0",
    "repeated_tokens",
    "extreme_decay",
    "extreme_values",
)
def _orthogonal_recurrence(sampler: InputSampler, variant: str) -> Inputs:
    heads, slots, width = sampler.size(H=2, M=3, D=4)
    shape = (sampler.batch, sampler.tokens, heads)
    k, v, gamma = sampler.normal(*shape, slots), sampler.normal(*shape, width), sampler.uniform(*shape)
    if variant == "repeated_tokens":
        k, v = (x[:, :1].expand_as(x).clone() for x in (k, v))
    elif variant == "extreme_values":
        sizes = torch.tensor([0.0, 1e-3, 1.0, 1e3], dtype=v.dtype)
        v = v * sizes[torch.randint(len(sizes), shape, generator=sampler.generator)][..., None]
    elif variant == "gamma_0":
        gamma = torch.zeros_like(gamma)
    sequences = {"q": sampler.normal(*shape, slots), "k": k, "v": v, "gamma": gamma}
    options: dict[str, Any] = {"scale": 0.5}
    if variant in ("encode", "similarity", "ttt"):
        options["objective"] = variant
    elif variant == "unnormalized":
        options["normalize"] = False
    elif variant == "l1":
        sequences["threshold"] = 0.5 * sampler.uniform(*shape)
    if variant in ("gated", "unnormalized"):
        sequences["g"] = -sampler.uniform(*shape)
    elif variant == "extreme_decay":
        sequences["g"] = sampler.decays(*shape)
    columns = sampler.normal(sampler.rows, heads, width, slots).double()
    state = F.normalize(columns, dim=-2) if slots > width else torch.linalg.qr(columns)[0]
    state = state.to(sampler.dtype)
    return Inputs("orthogonal_recurrence", sequences, state, options=options, needs_state=True)


def _inverse_state(sampler: InputSampler, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """A positive definite matrix, and counters at different places in the period of a refresh."""
    root = sampler.normal(sampler.rows, heads, width, width)
    steps = torch.randint(50, (sampler.rows,), generator=sampler.generator)
    return root @ root.mT / width + 0.5 * torch.eye(width, dtype=sampler.dtype), steps


def _directions(sampler: InputSampler, variant: str, *shape: int) -> Tensor:
    """Penalty directions u of the given kind."""
    u = sampler.normal(*shape)
    if variant == "repeated_directions":
        return u[:, :1].expand_as(u).clone()
    if variant == "extreme_directions":
        sizes = torch.tensor([0.0, 1e-3, 1.0, 1e3], dtype=u.dtype)
        return u * sizes[torch.randint(len(sizes), shape[:3], generator=sampler.generator)][..., None]
    return u


@_maker("recursive_least_squares", "plain", "no_refresh", "repeated_directions", "extreme_directions")
def _recursive_least_squares(sampler: InputSampler, variant: str) -> Inputs:
    heads, width = sampler.size(H=2, K=4)
    shape = (sampler.batch, sampler.tokens, heads, width)
    first = torch.eye(width, dtype=sampler.dtype).expand(sampler.rows, heads, width, width) / 0.1
    return Inputs(
        "recursive_least_squares",
        {"x": sampler.normal(*shape), "u": _directions(sampler, variant, *shape)},
        _inverse_state(sampler, heads, width),
        options={"refresh_period": None if variant == "no_refresh" else 7, "refresh": 0.05},
        absent_state=(first, torch.zeros(sampler.rows, dtype=torch.int64)),
    )


@_maker(
    "variational_linear_attention",
    "plain",
    "no_refresh",
    "fixed",
    "paper",
    "repeated_keys",
    "unnormalized_key",
    "unnormalized_alpha",
    "no_normalizer",
)
def _variational_linear_attention(sampler: InputSampler, variant: str) -> Inputs:
    heads, key_dim, value_dim = sampler.size(H=2, K=8, V=5)
    shape = (sampler.batch, sampler.tokens, heads)
    k = sampler.uniform(*shape, key_dim)
    if variant == "repeated_keys":
        k = k[:, :1].expand_as(k).clone()
    elif variant == "unnormalized_key":
        k = 0.3 * k
    sequences = {"q": sampler.uniform(*shape, key_dim), "k": k, "v": sampler.normal(*shape, value_dim)}
    if variant != "fixed":
        sequences["u"] = sampler.unit(*shape, key_dim) / (math.sqrt(key_dim) if variant == "paper" else 1)
    inverse, steps = _inverse_state(sampler, heads, key_dim)
    if variant == "unnormalized_alpha":
        inverse = 0.2 * inverse
    memory = sampler.normal(sampler.rows, heads, key_dim, value_dim)
    sums = sampler.uniform(sampler.rows, heads, key_dim)
    options: dict[str, Any] = {"refresh_period": None if variant == "no_refresh" else 7, "refresh": 0.05}
    if variant == "paper":
        options = {}  # the defaults, whose refresh is too small to matter in a few tokens
    if variant in ("unnormalized_key", "unnormalized_alpha"):
        options[variant.replace("unnormalized", "normalize")] = False
    elif variant == "no_normalizer":
        options["normalizer"] = False
    first = torch.eye(key_dim, dtype=sampler.dtype).expand_as(inverse) / 0.1
    return Inputs(
        "variational_linear_attention",
        sequences,
        (memory, inverse, sums, steps),
        options=options,
        absent_state=(torch.zeros_like(memory), first, torch.zeros_like(sums), torch.zeros_like(steps)),
    )


@_maker("head_features", "silu", "relu", "elu_plus_one", "identity", "l1", "logits", "logits_pair")
def _head_features(sampler: InputSampler, variant: str) -> Inputs:
    heads, key_dim, value_dim = sampler.size(H=2, K=5, V=3)
    rows = 2 * sampler.batch if variant == "logits_pair" else sampler.batch
    sequences = {"x": sampler.normal(rows, sampler.tokens, heads * (2 * key_dim + value_dim))}
    features = {"feature_map": "identity", "key_norm": "l1"} if variant == "l1" else {"feature_map": variant}
    if variant.startswith("logits"):
        sequences["logits"], features = 3 * sampler.normal(sampler.batch, sampler.tokens, heads), {}
    return Inputs("head_features", sequences, (), options={"num_heads": heads, "key_dim": key_dim, **features})


@_maker("map_features", "silu", "relu", "elu_plus_one", "l1", "l2")
def _map_features(sampler: InputSampler, variant: str) -> Inputs:
    x = sampler.normal(sampler.batch, sampler.tokens, *sampler.size(H=2, K=5))
    options = {"norm": variant} if variant in ("l1", "l2") else {"feature_map": variant}
    return Inputs("map_features", {"x": x}, (), options={"scale": 0.5, **options})


@_maker("add_norm", "plain", "branch", "bias", "centred", "centred_branch", "pair")
def _add_norm(sampler: InputSampler, variant: str) -> Inputs:
    shape = (sampler.batch, sampler.tokens, *sampler.size(D=6))
    if variant == "pair":
        x, weight = sampler.normal(2 * shape[0], *shape[1:]), sampler.normal(2, shape[2])
        return Inputs("add_norm", {"x": x}, (), {"weight": weight})
    sequences = {"x": sampler.normal(*shape)} | ({"branch": sampler.normal(*shape)} if "branch" in variant else {})
    bias = {} if variant in ("plain", "branch") else {"bias": sampler.normal(shape[2])}
    parameters = {"weight": sampler.normal(shape[2])} | bias
    return Inputs("add_norm", sequences, (), parameters, options={"centred": "centred" in variant})


@_maker("silu_product", "plain", "skip", "pair")
def _silu_product(sampler: InputSampler, variant: str) -> Inputs:
    shape = (sampler.batch, sampler.tokens, *sampler.size(D=6))
    if variant == "pair":
        x, skip = (sampler.normal(2 * shape[0], *shape[1:]) for _ in range(2))
        sequences = {"x": x, "gate": 3 * sampler.normal(*shape), "skip": skip}
        return Inputs("silu_product", sequences, (), {"skip_weight": sampler.normal(2, shape[2])})
    sequences, parameters = {"x": sampler.normal(*shape), "gate": 3 * sampler.normal(*shape)}, {}
    if variant == "skip":
        sequences["skip"], parameters["skip_weight"] = sampler.normal(*shape), sampler.normal(shape[2])
    return Inputs("silu_product", sequences, (), parameters)


@_maker("longhorn_pair", "plain")
def _longhorn_pair(sampler: InputSampler, variant: str) -> Inputs:
    channels, entries, columns, width = sampler.size(D=6, N=4, R=4, W=3)
    ranks = columns - 1  # the last one is the bias's
    parameters = {
        "taps": sampler.normal(2, channels, width),
        "offset": sampler.normal(2, channels),
        "selection": sampler.normal(2, ranks + 2 * entries, channels) / math.sqrt(channels),
        "rate": sampler.normal(2, channels, ranks),
        "rate_offset": sampler.normal(2, channels),
        "skip": sampler.normal(2, channels),
    }
    projected = sampler.normal(sampler.batch, sampler.tokens, 2 * channels)
    return Inputs("longhorn_pair", {"projected": projected}, (), parameters)


@_maker("token_loss", "plain", "ignored")
def _token_loss(sampler: InputSampler, variant: str) -> Inputs:
    shape = (sampler.batch, sampler.tokens, *sampler.size(D=6))
    target = torch.randint(shape[2], shape[:2], generator=sampler.generator)
    if variant == "ignored":
        target = torch.where(target % 2 == 0, target, -100)
    return Inputs("token_loss", {"logits": 3 * sampler.normal(*shape), "target": target}, ())


def list_forms(op: str, device: str = "cpu", dtype: torch.dtype = torch.float64) -> tuple[str, ...]:
    """The backends of an operation, but for the reference, that run there."""
    return tuple(name for name, reasons in kernels.explain(op, device=device, dtype=dtype).items() if not reasons)[:-1]


# Operations that chunk_size is part of the definition of; their contract is that of the exact form, chunk_size=1.
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


def results(output: Tensor, final_state: Any) -> dict[str, Tensor]:
    """What an operation returned, by name; the parts of a tuple are final_state[0], ..."""
    return {"output": output, **_named("final_state", final_state)}


def step_results(inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """Output and final state of the one-token form at one token after another, without gradients."""
    with torch.no_grad():
        return results(*inputs.take_steps(**options))


def gradients(inputs: Inputs, run: Callable[..., tuple[Tensor, Any]] = Inputs.run, **options: Any) -> dict[str, Tensor]:
    """Output, final state and the gradient of every tensor, for a fixed random loss over both of what `run` returns."""
    inputs = inputs.map(lambda x: x.detach().requires_grad_())
    returned = results(*run(inputs, **options))
    differentiable = [x for x in returned.values() if x.is_floating_point()]
    device = "meta" if any(x.is_meta for x in differentiable) else "cpu"
    sampler = InputSampler(1, 1, 1, torch.float64, _generator(device, 1))
    with torch.device(device):
        weights = [sampler.normal(*x.shape) for x in differentiable]
    pairs = zip(differentiable, weights, strict=True)
    loss = torch.stack([(x.double() * weight.to(x.device)).sum() for x, weight in pairs]).sum()
    grads = torch.autograd.grad(loss, list(inputs.tensors.values()), materialize_grads=True)
    return {**returned, **{f"gradient of {name}": grad for name, grad in zip(inputs.tensors, grads, strict=True)}}

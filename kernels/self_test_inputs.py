"""Random inputs of every operation, for the self-test, tests and benchmarks.

Each operation has a maker here: a function from an `InputSampler` and the name of a variant to `Inputs`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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

    def with_own_parameters(self) -> "Inputs":
        """The call for both directions, with separate parameters for reading backward.

        A convolution then reads all of its rows in both directions, the other operations half of them in each.
        """
        state = self.initial_state
        if self.op in CONVOLUTIONS:
            state = each(lambda x: torch.cat((x, 2 * x)), state)
        parameters = {name: torch.stack((x, 0.5 * x)) for name, x in self.parameters.items()}
        return replace(self, parameters=parameters, initial_state=state, own_parameters=True)

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
CONVOLUTIONS = ("convolved_features", "short_convolution")


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
    *("plain", "gated", "write_key", "gated_write_key", "correlated_keys", "channel", "channel_write_key"),
    *("added", "before", "channel_added_before", "extreme_channel_decay"),
)
def _delta_rule(sampler: InputSampler, variant: str) -> Inputs:
    heads, key_dim, value_dim = sampler.size(H=2, K=4, V=3)
    shape = (sampler.batch, sampler.tokens, heads)
    k = sampler.unit(*shape, key_dim)
    if variant == "correlated_keys":
        k = F.normalize(k[:, :1] + 0.3 * k, dim=-1)
    beta = 2 * sampler.uniform(*shape)
    sequences = {"q": sampler.normal(*shape, key_dim), "k": k, "v": sampler.normal(*shape, value_dim), "beta": beta}
    if "write_key" in variant:
        sequences["write_key"] = F.normalize(k + 0.3 * sampler.unit(*shape, key_dim), dim=-1)
    if "gated" in variant or variant == "before":
        sequences["g"] = -sampler.uniform(*shape)
    if "channel" in variant:
        wide = *shape, key_dim
        sequences["g"] = sampler.decays(*wide) if variant.startswith("extreme") else -sampler.uniform(*wide)
    if "added" in variant:
        sequences["value_key"] = sampler.unit(*shape, key_dim)
    if "added_before" in variant:  # as in RWKV-7: a write key in place of beta
        sequences["write_key"] = sequences.pop("beta")[..., None] * k / 2
    state = sampler.normal(sampler.rows, heads, key_dim, value_dim)
    options = {"scale": 0.5} | ({"read_before_decay": True} if "before" in variant else {})
    return Inputs("delta_rule", sequences, state, options=options)


@_maker(
    "linear_attention",
    *("plain", "head_gated", "channel_gated", "value_gated", "extreme_channel_decay", "extreme_value_decay"),
    *("grouped", "grouped_plain"),
)
def _linear_attention(sampler: InputSampler, variant: str) -> Inputs:
    grouped = variant.startswith("grouped")
    heads, key_dim, value_dim = sampler.size(H=4 if grouped else 2, K=4, V=3)
    shape = (sampler.batch, sampler.tokens, heads)
    of_keys = (*shape[:2], *(sampler.size(G=max(heads // 2, 1)) if grouped else (heads,)), key_dim)
    sequences = {"q": sampler.normal(*of_keys), "k": sampler.normal(*of_keys), "v": sampler.normal(*shape, value_dim)}
    if "plain" not in variant:
        width = {"channel": (key_dim,), "value": (value_dim,)}.get(variant.replace("extreme_", "").split("_")[0], ())
        gate = sampler.decays(*shape, *width) if "extreme" in variant else -sampler.uniform(*shape, *width)
        sequences["g_value" if "value" in variant else "g"] = gate
    state = sampler.normal(sampler.rows, heads, key_dim, value_dim)
    return Inputs("linear_attention", sequences, state, options={"scale": 0.5})


@_maker("longhorn_scan", "plain")
def _longhorn_scan(sampler: InputSampler, variant: str) -> Inputs:
    channels, width = sampler.size(D=5, N=3)
    shape = (sampler.batch, sampler.tokens)
    k, beta = sampler.normal(*shape, width), sampler.uniform(*shape, channels)
    sequences = {"x": sampler.normal(*shape, channels), "q": sampler.normal(*shape, width), "k": k, "beta": beta}
    return Inputs("longhorn_scan", sequences, sampler.normal(sampler.rows, channels, width))


@_maker("selective_scan", "plain")
def _selective_scan(sampler: InputSampler, variant: str) -> Inputs:
    channels, width = sampler.size(D=5, N=3)
    shape = (sampler.batch, sampler.tokens)
    sequences = {
        "x": sampler.normal(*shape, channels),
        "delta": sampler.uniform(*shape, channels),
        "B": sampler.normal(*shape, width),
        "C": sampler.normal(*shape, width),
    }
    rate = -sampler.uniform(channels, width).exp()
    return Inputs("selective_scan", sequences, sampler.normal(sampler.rows, channels, width), parameters={"A": rate})


@_maker("cumulative_softmax", "plain")
def _cumulative_softmax(sampler: InputSampler, variant: str) -> Inputs:
    shape = (sampler.batch, sampler.tokens, *sampler.size(H=2, M=5))
    x, state = sampler.normal(*shape), sampler.normal(sampler.rows, *shape[2:])
    empty = torch.full_like(state, -1e30)
    return Inputs("cumulative_softmax", {"x": x}, state, absent_state=empty)


@_maker("slot_attention", "plain", "write")
def _slot_attention(sampler: InputSampler, variant: str) -> Inputs:
    heads, key_dim, value_dim, slots = sampler.size(H=2, K=4, V=3, M=5)
    shape = (sampler.batch, sampler.tokens, heads)
    g = -sampler.uniform(*shape, slots)
    sequences = {
        "q": sampler.normal(*shape, key_dim),
        "k": sampler.normal(*shape, key_dim),
        "v": sampler.normal(*shape, value_dim),
        "g": g,
    }
    if variant == "write":
        sequences["write"] = sampler.uniform(*shape, slots)
    state = tuple(sampler.normal(sampler.rows, heads, slots, width) for width in (key_dim, value_dim))
    return Inputs("slot_attention", sequences, state, options={"scale": 0.5, "activation": "softmax"})


@_maker("short_convolution", "plain", "silu", "no_bias")
def _short_convolution(sampler: InputSampler, variant: str) -> Inputs:
    channels, width = sampler.size(D=5, W=4)
    bias = {} if variant == "no_bias" else {"bias": sampler.normal(channels)}
    return Inputs(
        "short_convolution",
        {"x": sampler.normal(sampler.batch, sampler.tokens, channels)},
        sampler.normal(sampler.rows, channels, width - 1),
        parameters={"weight": sampler.normal(channels, width)} | bias,
        options={"activation": "silu" if variant == "silu" else None},
    )


@_maker("convolved_features", "plain", "elu_plus_one", "l1", "relu")
def _convolved_features(sampler: InputSampler, variant: str) -> Inputs:
    heads, key_dim, value_dim, width = sampler.size(H=2, K=5, V=4, W=4)
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


@_maker("orthogonal_recurrence", "plain", "encode", "similarity", "ttt", "gated")
def _orthogonal_recurrence(sampler: InputSampler, variant: str) -> Inputs:
    heads, slots, width = sampler.size(H=2, M=3, D=4)
    shape = (sampler.batch, sampler.tokens, heads)
    k, v, gamma = sampler.normal(*shape, slots), sampler.normal(*shape, width), sampler.uniform(*shape)
    sequences = {"q": sampler.normal(*shape, slots), "k": k, "v": v, "gamma": gamma}
    options: dict[str, Any] = {"scale": 0.5}
    if variant in ("encode", "similarity", "ttt"):
        options["objective"] = variant
    elif variant == "gated":
        sequences["g"] = -sampler.uniform(*shape)
    columns = sampler.normal(sampler.rows, heads, width, slots).double()
    state = F.normalize(columns, dim=-2) if slots > width else torch.linalg.qr(columns)[0]
    state = state.to(sampler.dtype)
    return Inputs("orthogonal_recurrence", sequences, state, options=options, needs_state=True)


def _inverse_state(sampler: InputSampler, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """A positive definite matrix, and counters at different places in the period of a refresh."""
    root = sampler.normal(sampler.rows, heads, width, width)
    steps = torch.randint(50, (sampler.rows,), generator=sampler.generator)
    return root @ root.mT / width + 0.5 * torch.eye(width, dtype=sampler.dtype), steps


@_maker("recursive_least_squares", "plain", "no_refresh")
def _recursive_least_squares(sampler: InputSampler, variant: str) -> Inputs:
    heads, width = sampler.size(H=2, K=4)
    shape = (sampler.batch, sampler.tokens, heads, width)
    first = torch.eye(width, dtype=sampler.dtype).expand(sampler.rows, heads, width, width) / 0.1
    return Inputs(
        "recursive_least_squares",
        {"x": sampler.normal(*shape), "u": sampler.normal(*shape)},
        _inverse_state(sampler, heads, width),
        options={"refresh_period": None if variant == "no_refresh" else 7, "refresh": 0.05},
        absent_state=(first, torch.zeros(sampler.rows, dtype=torch.int64)),
    )


@_maker("variational_linear_attention", "plain", "paper")
def _variational_linear_attention(sampler: InputSampler, variant: str) -> Inputs:
    heads, key_dim, value_dim = sampler.size(H=2, K=8, V=5)
    shape = (sampler.batch, sampler.tokens, heads)
    k = sampler.uniform(*shape, key_dim)
    sequences = {"q": sampler.uniform(*shape, key_dim), "k": k, "v": sampler.normal(*shape, value_dim)}
    sequences["u"] = sampler.unit(*shape, key_dim) / (math.sqrt(key_dim) if variant == "paper" else 1)
    inverse, steps = _inverse_state(sampler, heads, key_dim)
    memory = sampler.normal(sampler.rows, heads, key_dim, value_dim)
    sums = sampler.uniform(sampler.rows, heads, key_dim)
    first = torch.eye(key_dim, dtype=sampler.dtype).expand_as(inverse) / 0.1
    return Inputs(
        "variational_linear_attention",
        sequences,
        (memory, inverse, sums, steps),
        # The paper's refresh is the default, which is too small to matter in a few tokens.
        options={} if variant == "paper" else {"refresh_period": 7, "refresh": 0.05},
        absent_state=(torch.zeros_like(memory), first, torch.zeros_like(sums), torch.zeros_like(steps)),
    )


@_maker("head_features", "silu", "relu", "elu_plus_one", "l1", "logits", "logits_pair")
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


@_maker("log_decay", "plain", "channel", "bound", "pair")
def _log_decay(sampler: InputSampler, variant: str) -> Inputs:
    heads, channels = sampler.size(H=2, K=5)
    own, width = (2,) if variant == "pair" else (), () if variant == "plain" else (channels,)
    rows = 2 * sampler.batch if own else sampler.batch
    z = 4 * sampler.normal(rows, sampler.tokens, heads, *width)
    parameters = {"A_log": sampler.normal(*own, heads), "dt_bias": sampler.normal(*own, heads, *width)}
    return Inputs("log_decay", {"z": z}, (), parameters, options={"bound": -5.0} if variant == "bound" else {})


@_maker("add_norm", "plain", "branch", "centred_branch", "pair")
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


@_maker("token_loss", "plain")
def _token_loss(sampler: InputSampler, variant: str) -> Inputs:
    shape = (sampler.batch, sampler.tokens, *sampler.size(D=6))
    target = torch.randint(shape[2], shape[:2], generator=sampler.generator)
    return Inputs("token_loss", {"logits": 3 * sampler.normal(*shape), "target": target}, ())


def results(output: Tensor, final_state: Any) -> dict[str, Tensor]:
    """What an operation returned, by name; the parts of a tuple are final_state[0], ..."""
    return {"output": output, **_named("final_state", final_state)}


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

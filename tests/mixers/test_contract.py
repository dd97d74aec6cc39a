"""Every registered mixer keeps the contract (`longseq.mixers.contract`), and what only mixers of longseq must keep."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from cases import cases
from loop_mixers import Leaking, Mean, MeanState
from torch import Tensor, nn

from longseq import mixers
from longseq.blocks.convolution import ShortConvolution
from longseq.kernels import dispatch
from longseq.mixers import contract
from longseq.mixers.base import ALL_TOKENS, ScanOptions
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


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_token_changes_every_later_output(name: str) -> None:
    """So it is with the options that a layer has by default, none of which forgets within a sequence so short."""
    mixer, x = make(name), make_tokens(1)
    changed = x.clone()
    changed[:, 20] += 1.0
    with torch.no_grad():
        difference = (mixer(changed)[0] - mixer(x)[0])[:, 20:]
    assert difference.abs().amax(-1).min() > 1e-12


class Detached(Mean):
    def scan_step(self, projected, state):
        mean = self.rate.sigmoid().detach() * state.mean + self.rate.neg().sigmoid() * projected
        return mean.to(projected.dtype), MeanState(mean)


class Truncated(Mean):
    """Its gradient ends after 64 tokens."""

    def scan(self, projected, state=None, options=ALL_TOKENS):
        parts = []
        for part in projected.split(64, dim=1) if options.cu_seqlens is None else [projected]:
            y, state = super().scan(part, state, options)
            state = MeanState(state.mean.detach()) if part.shape[1] == 64 else state
            parts.append(y)
        return torch.cat(parts, 1), state


class Padded(Mean):
    def scan(self, projected, state=None, options=ALL_TOKENS):
        return super().scan(projected, state, options._replace(mask=None))


class Peeking(Mean):
    def scan(self, projected, state=None, options=ALL_TOKENS):
        return super().scan(projected + 0.1 * projected.roll(-1, 1), state, options)


class Refusing(Mean):
    def scan(self, projected, state=None, options=ALL_TOKENS):
        if options.cu_seqlens is not None or options.mask is not None:
            raise ValueError("no packed or padded sequences")
        return super().scan(projected, state, options)


class PairAlone(GatedLinearAttention):
    """Its pairs use the parameters of one mixer only."""

    def scan_pair(self, backward, projected, mask=None):
        return super().scan_pair(self, projected, mask)


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
        def scan(self, projected, state=None, options=ALL_TOKENS):
            wrong = where(self, state, options)
            return super().scan(HalfOfTheGradient.apply(projected) if wrong else projected, state, options)

    return Wrong


def round_float32(x):
    return x.bfloat16().float() if x.dtype == torch.float32 else x


class Rounding(Mean):
    def scan(self, projected, state=None, options=ALL_TOKENS):
        return super().scan(round_float32(projected), state, options)


BROKEN = [
    (Detached, "gradients_are_the_derivatives"),
    (Truncated, "a_long_sequence_is_its_parts"),
    (Leaking, "packed_sequences_are_separate"),
    (Padded, "padding_leaves_no_trace"),
    (Peeking, "outputs_depend_on_the_past_only"),
    (PairAlone, "a_pair_is_the_sum_of_its_scans"),
    (Rounding, "float32_is_close_to_float64"),
    (halve_gradient(lambda mixer, state, options: options.mask is not None), "padding_leaves_no_trace"),
    (halve_gradient(lambda mixer, state, options: mixer.training), "training_reads_as_evaluation_does"),
]


@pytest.mark.usefixtures("own_mixers")
@pytest.mark.parametrize(("broken", "law"), BROKEN)
def test_a_mixer_that_breaks_a_law_is_reported(broken: type[mixers.Mixer], law: str) -> None:
    mixers.register("broken")(broken)
    with pytest.raises(mixers.ContractError, match=f"the mixer broken breaks the law {law}"):
        mixers.check("broken", laws=[law])


@pytest.mark.slow
@pytest.mark.usefixtures("own_mixers")
def test_a_mixer_may_refuse_packed_and_padded_sequences() -> None:
    mixers.register("refusing")(Refusing)
    mixers.register("mean")(Mean)
    refused = ("packed_sequences_are_separate", "padding_leaves_no_trace")
    assert mixers.check("refusing") == refused
    assert mixers.check("mean") == ()


@pytest.mark.parametrize("name", NAMES)
def test_packings_and_masks_that_do_not_fit_are_refused(name: str) -> None:
    mixer, x = make(name), make_tokens(1)
    real = torch.ones(1, TOKENS, dtype=torch.bool)
    for borders in ([1, TOKENS], [0, 5], [0, TOKENS + 1], [0, 8, 5, TOKENS]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            mixer(x, cu_seqlens=torch.tensor(borders))
    with pytest.raises(ValueError, match="mask and cu_seqlens"):
        mixer(x, cu_seqlens=torch.tensor([0, 5, TOKENS]), mask=real)
    for mask in (real.long(), real[:, 1:]):
        with pytest.raises(ValueError, match="mask"):
            mixer(x, mask=mask)


@cases("packed", [True, False])
def test_a_layer_as_it_stands_keeps_sequences_apart(packed: bool) -> None:
    for kind in (Mean, Refusing):
        contract.check_sequences_apart(kind(8), packed=packed)
    with pytest.raises(mixers.ContractError, match="are not as if alone"):
        contract.check_sequences_apart((Leaking if packed else Padded)(8), packed=packed)


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
        mixer.scan(mixer.project_in(x), options=ScanOptions(reverse=True))
    if mixer.reads_pairs:
        for padding in (None, mask):
            mixer.scan_pair(mixer, mixer.project_in(x), padding)
    assert {backend for _, backend in asked} <= {"torch"}, asked
    assert {op for op, _ in asked} & set(mixer.operations) or not mixer.operations


# kernels/test_contracts.py compiles every other operation, and test_directions.py some pairs.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "vla"])
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
    same = {"rtol": 0, "atol": 0}
    results, expected = mixer(x), wide(x)
    torch.testing.assert_close(results, expected, **same)
    torch.testing.assert_close(mixer.step(x[:, 0], results[1]), wide.step(x[:, 0], expected[1]), **same)


# test_directions.py compiles some that recompute.
@pytest.mark.parametrize("name", [name for name in NAMES if mixers.get(name).recomputable])
def test_recomputing_keeps_less_and_changes_nothing(name: str) -> None:
    x, results, kept = make_tokens(2).requires_grad_(), [], []
    for recompute in (False, True):
        mixer = make(name)
        mixer.recompute = recompute
        held: dict[int, Tensor] = {}

        def keep(tensor: Tensor, held: dict[int, Tensor] = held) -> Tensor:
            held[tensor.data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y, state = mixer(x)
        loss = y.square().sum() + sum(tensor.square().sum() for _, tensor in state_tensors(state))
        results.append([y, *torch.autograd.grad(loss, [x, *mixer.parameters()])])
        kept.append(sum(tensor.numel() for tensor in held.values()))
    assert_same(results[1], results[0])
    assert kept[1] < 0.7 * kept[0]


def double(module: nn.Module, arguments: Any, result: Any) -> Any:
    return (2 * result[0], *result[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_steps_call_the_hooks_of_a_mixer_and_of_its_convolutions(name: str) -> None:
    torch.manual_seed(0)
    plain = mixers.create(name, D_MODEL).double()
    convolutions = [part for part, module in plain.named_modules() if isinstance(module, ShortConvolution)]
    x = make_tokens(2, 3)
    for part in ["", *convolutions]:
        changed = []
        for _ in range(2):  # a call of the whole sequence would compute pruned weights for the steps
            torch.manual_seed(1)
            mixer = copy.deepcopy(plain)
            mixer.get_submodule(part).register_forward_hook(double)
            changed.append(mixer)
        state, results = changed[0].initial_state(2, dtype=x.dtype), []
        for token in x.unbind(1):
            y, state = changed[0].step(token, state)
            results.append(y)
        assert_same(torch.stack(results, 1), changed[1](x)[0])

"""Every registered mixer: whole sequence = any split with the state carried = token by token = packed = padded."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from cases import cases
from representatives import cover_operations
from torch import Tensor
from torch.nn.utils import prune

from longseq import mixers
from longseq.kernels import dispatch, longhorn_scan, selective_scan
from longseq.kernels.packing import Packing
from longseq.parameters import no_weight_decay
from longseq.state import map_state, select_state, state_tensors

NAMES = mixers.mixer_names()
GROWING = [name for name in NAMES if mixers.get(name).growing_state]
D_MODEL = 32
TOKENS = 37


def make(name: str, **options: Any) -> mixers.Mixer:
    torch.manual_seed(0)
    mixer = mixers.create(name, D_MODEL, **options).double().eval()
    # Larger weights than the initial ones, so that gates and states affect the output, and mistakes in them show.
    with torch.no_grad():
        for parameter in mixer.parameters():
            if parameter.ndim > 1 and parameter is not getattr(mixer, "A_log", None):
                parameter.mul_(2)
    return mixer


def make_tokens(batch: int, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, tokens, D_MODEL, generator=generator, dtype=torch.float64)


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def assert_same_state(actual: Any, expected: Any) -> None:
    actual, expected = dict(state_tensors(actual)), dict(state_tensors(expected))
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_same(actual[name], expected[name])


@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_state_type(name: str) -> None:
    mixer = make(name)
    x = make_tokens(3)
    y, state = mixer(x)
    assert y.shape == x.shape
    initial = mixer.initial_state(3, dtype=torch.float64)
    assert type(initial) is type(state)
    assert hasattr(state, "_fields")
    for (label, before), (_, after) in zip(state_tensors(initial), state_tensors(state), strict=True):
        assert before.dtype == after.dtype, label
        if not mixer.growing_state:
            assert before.shape == after.shape, f"{label}: the state must not grow with the sequence"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in GROWING])
def test_state_is_float32_in_half_precision(name: str) -> None:
    mixer = make(name).bfloat16()
    x = make_tokens(1).bfloat16()
    _, state = mixer(x)
    for given in (state, mixer.initial_state(1, dtype=torch.bfloat16), mixer.step(x[:, 0], state)[1]):
        numbers = [tensor for _, tensor in state_tensors(given) if tensor.is_floating_point()]
        assert {tensor.dtype for tensor in numbers} == {torch.float32}


@pytest.mark.parametrize("name", NAMES)
def test_none_is_the_initial_state(name: str) -> None:
    mixer = make(name)
    x = make_tokens(2)
    from_none, from_initial = mixer(x), mixer(x, mixer.initial_state(2, dtype=x.dtype))
    assert_same(from_none[0], from_initial[0])
    assert_same_state(from_none[1], from_initial[1])


@pytest.mark.parametrize("name", NAMES)
@cases("split", [[1, 36], [16, 21], [3, 0, 30, 4], [36, 1]])
def test_any_split_is_the_whole(name: str, split: list[int]) -> None:
    mixer = make(name)
    x = make_tokens(2)
    expected, expected_state = mixer(x)
    state, parts = None, []
    for part in x.split(split, dim=1):
        if part.shape[1] == 0:
            continue
        y, state = mixer(part, state)
        parts.append(y)
    assert_same(torch.cat(parts, dim=1), expected)
    assert_same_state(state, expected_state)


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_the_whole(name: str) -> None:
    mixer = make(name)
    x = make_tokens(2)
    expected, expected_state = mixer(x)
    state, parts = mixer.initial_state(2, dtype=x.dtype), []
    for token in x.unbind(1):
        y, state = mixer.step(token, state)
        parts.append(y)
    assert_same(torch.stack(parts, dim=1), expected)
    assert_same_state(state, expected_state)


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
def test_output_depends_on_the_past_only(name: str) -> None:
    mixer = make(name)
    x = make_tokens(1)
    changed = x.clone()
    changed[:, 20] += 1.0
    y, y_changed = mixer(x)[0], mixer(changed)[0]
    assert_same(y_changed[:, :20], y[:, :20])
    assert (y_changed[:, 20:] - y[:, 20:]).abs().amax(-1).min() > 1e-12, "every later output sees the change"


@pytest.mark.parametrize("name", NAMES)
@cases("carried", [False, True])
def test_packed_sequences_are_separate(name: str, carried: bool) -> None:
    mixer = make(name)
    lengths = [5, 0, 1, 31]
    x = make_tokens(1, sum(lengths))
    borders = torch.tensor([0, 5, 5, 6, 37])
    state = mixer(make_tokens(4, 7))[1] if carried else None
    packed, packed_state = mixer(x, state, cu_seqlens=borders)
    for row, (start, end) in enumerate(zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)):
        if start == end:
            continue
        own = None if state is None else select_state(state, torch.tensor([row]))
        alone, alone_state = mixer(x[:, start:end], own)
        assert_same(packed[:, start:end], alone)
        if mixer.growing_state:
            continue  # it has room for the longest sequence; `test_packed_sequences_go_on` compares outputs
        assert_same_state(select_state(packed_state, torch.tensor([row])), alone_state)


@pytest.mark.parametrize("name", NAMES)
def test_a_packing_stands_for_its_borders(name: str) -> None:
    mixer, x = make(name), make_tokens(1)
    borders = torch.tensor([0, 5, 5, 6, TOKENS])
    (expected, expected_state), (y, state) = mixer(x, cu_seqlens=borders), mixer(x, cu_seqlens=Packing(borders))
    assert torch.equal(y, expected)
    assert_same_state(state, expected_state)
    with pytest.raises(ValueError, match="must end with T = 36"):
        mixer(x[:, 1:], cu_seqlens=Packing(borders))


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
@cases("side", ["left", "right"])
def test_padding_leaves_no_trace(name: str, side: str) -> None:
    mixer = make(name)
    lengths = [37, 20, 1]
    x = make_tokens(3)
    position = torch.arange(TOKENS)
    real = torch.stack([position < n if side == "right" else position >= TOKENS - n for n in lengths])
    state = mixer(make_tokens(3, 4))[1]
    padded, padded_state = mixer(x, state, mask=real)
    following = make_tokens(3, 2)
    continued, _ = mixer(following, padded_state)
    assert padded.isfinite().all()
    for row, length in enumerate(lengths):
        own = select_state(state, torch.tensor([row]))
        alone, alone_state = mixer(x[row : row + 1, real[row]], own)
        assert alone.shape[1] == length
        assert_same(padded[row : row + 1, real[row]], alone)
        alone_continued, _ = mixer(following[row : row + 1], alone_state)
        assert_same(continued[row : row + 1], alone_continued)


@pytest.mark.parametrize("name", [name for name in NAMES if mixers.get(name).reads_backwards])
def test_reading_backwards_is_reading_turned_tokens(name: str) -> None:
    mixer = make(name)
    projected = mixer.project_in(make_tokens(2))
    state = mixer(make_tokens(2, 4))[1]
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    real[1, :5] = False
    for mask in (None, real):
        y, last = mixer.scan(projected, state, mask=mask, reverse=True)
        expected, expected_last = mixer.scan(projected.flip(1), state, mask=None if mask is None else mask.flip(1))
        for row in range(2):
            own = slice(None) if mask is None else mask[row]
            assert_same(y[row, own], expected.flip(1)[row, own])
        assert_same_state(last, expected_last)


@pytest.mark.parametrize("name", [name for name in NAMES if mixers.get(name).reads_backwards])
@pytest.mark.slow
def test_packed_sequences_are_read_backwards(name: str) -> None:
    mixer = make(name)
    projected = mixer.project_in(make_tokens(1))
    borders, last_first = torch.tensor([0, 0, 5, 5, 6, TOKENS]), torch.arange(4, -1, -1)
    for state in (None, mixer(make_tokens(5, 4))[1]):
        y, last = mixer.scan(projected, state, cu_seqlens=borders, reverse=True)
        turned = None if state is None else select_state(state, last_first)
        expected, expected_last = mixer.scan(projected.flip(1), turned, cu_seqlens=TOKENS - borders.flip(0))
        assert_same(y, expected.flip(1))
        assert_same_state(last, select_state(expected_last, last_first))


@pytest.mark.parametrize("name", [name for name in NAMES if mixers.get(name).reads_backwards])
def test_half_of_the_rows_may_be_read_backwards(name: str) -> None:
    mixer = make(name)
    projected = mixer.project_in(make_tokens(4))
    state = mixer(make_tokens(4, 4))[1]
    y, last = mixer.scan(projected, state, reverse="second_half")
    for rows, reverse in ((torch.arange(2), False), (torch.arange(2, 4), True)):
        expected, expected_last = mixer.scan(projected[rows], select_state(state, rows), reverse=reverse)
        assert_same(y[rows], expected)
        assert_same_state(select_state(last, rows), expected_last)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_and_the_state_get_gradients(name: str) -> None:
    mixer = make(name)
    x = make_tokens(2).requires_grad_()
    state = map_state(
        lambda t: t.detach().requires_grad_() if t.is_floating_point() else t, mixer(make_tokens(2, 5))[1]
    )
    y, final = mixer(x, state)
    loss = y.square().mean() + sum(t.square().mean() for _, t in state_tensors(final) if t.is_floating_point())
    loss.backward()
    leaves = [(n, t) for n, t in state_tensors(state) if t.is_floating_point()]
    for label, tensor in [("x", x), *mixer.named_parameters(), *leaves]:
        assert tensor.grad is not None, label
        assert tensor.grad.isfinite().all(), label
        assert tensor.grad.abs().max() > 0, label


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


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_autocast_stays_close(name: str) -> None:
    mixer = make(name).float()
    x = make_tokens(2).float()
    exact, _ = mixer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = mixer(x)
    assert (y - exact).norm() < 0.05 * exact.norm()
    if not mixer.growing_state:
        assert all(tensor.dtype == torch.float32 for _, tensor in state_tensors(state) if tensor.is_floating_point())


@pytest.mark.parametrize("name", NAMES)
def test_a_watched_scan_reports_on_its_memory(name: str) -> None:
    mixer, x = make(name), make_tokens(2)
    mixer.observed = {}
    _, state = mixer(x)
    if hasattr(state, "memory"):
        assert_same(mixer.observed["state_norm"], state.memory.flatten(-2).norm(dim=-1).mean().float())
    assert all(value.dim() == 0 and not value.requires_grad for value in mixer.observed.values())
    assert 0 <= mixer.observed.get("gate_saturation", 0) <= 1


@pytest.mark.parametrize("name", NAMES)
def test_parameters_without_weight_decay_exist(name: str) -> None:
    mixer = make(name)
    names = no_weight_decay(mixer)
    parameters = dict(mixer.named_parameters())
    assert names <= parameters.keys()
    assert set(mixer.no_weight_decay_names) <= names


@pytest.mark.parametrize("name", NAMES)
def test_flops_grow_with_the_sequence(name: str) -> None:
    mixer = make(name)
    weights = [p.weight for p in (mixer.in_proj, mixer.out_proj) if p is not None]
    projections = 2 * sum(weight.numel() for weight in weights)
    one, two, three = (mixer.flops(length) for length in (2000, 4000, 6000))  # beyond any window
    assert one > 2000 * projections
    if mixer.growing_state:
        assert three - two > two - one
    else:
        assert three - two == two - one


@pytest.mark.parametrize("name", GROWING)
def test_packed_sequences_go_on(name: str) -> None:
    mixer = make(name)
    x, following = make_tokens(1, 9), make_tokens(2, 3)
    _, packed_state = mixer(x, cu_seqlens=torch.tensor([0, 2, 9]))
    continued, _ = mixer(following, packed_state)
    for row, part in enumerate((x[:, :2], x[:, 2:])):
        alone, _ = mixer(torch.cat([part, following[row : row + 1]], dim=1))
        assert_same(continued[row : row + 1], alone[:, -3:])


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


def test_sizes_that_make_no_layer_are_refused() -> None:
    for option in ({"expand": 1.5}, {"state_size": 0}, {"rate_rank": 0}):
        with pytest.raises(ValueError, match="must be a whole number of at least 1"):
            mixers.create("longhorn", 32, **option)


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


def test_mamba_computes_its_rates_in_float32() -> None:
    """bfloat16 would round exp(A_log) as well as A_log."""
    mixer = mixers.create("mamba", 64)
    torch.nn.init.uniform_(mixer.A_log, 0, 3)
    mixer = mixer.bfloat16()
    wide = copy.deepcopy(mixer)
    wide.A_log = torch.nn.Parameter(mixer.A_log.float())
    x = torch.randn(1, 20, 64, dtype=torch.bfloat16)
    (y, state), (expected, expected_state) = mixer(x), wide(x)
    assert torch.equal(y, expected)
    assert torch.equal(state.memory, expected_state.memory)
    y, state = mixer.step(x[:, 0], state)
    expected, expected_state = wide.step(x[:, 0], expected_state)
    assert torch.equal(y, expected)
    assert torch.equal(state.memory, expected_state.memory)


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


class Wrapper(torch.nn.Module):
    def __init__(self, module, calls):
        super().__init__()
        self.module = module
        self.calls = calls

    def forward(self, *args, **kwargs):
        self.calls.append(1)
        return self.module(*args, **kwargs)

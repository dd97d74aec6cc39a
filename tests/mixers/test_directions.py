import copy
from functools import partial

import pytest
import torch
from cases import cases
from kernel_inputs import error
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from longseq import mixers
from longseq.blocks.positions import TOKEN_PLACES, Layout, layout_of
from longseq.blocks.reading import BACKWARD, reading_orders, reorder
from longseq.mixers import Directions
from longseq.mixers.directions import SHARING
from longseq.parameters import count_parameters

WIDTH = 16


def build(mixer="longhorn", direction="bidirectional", layer=0, share="projections", merge="sum", seed=0, **options):
    """A reading by causal mixers, including attention, where models would use one pass that sees all tokens."""
    torch.manual_seed(seed)
    create, orders = partial(mixers.create, mixer, WIDTH, **options), reading_orders(direction, layer)
    if len(orders) > 1:
        return Directions(create, orders, share=share, merge=merge).double()
    reading = create().double()
    reading.reverse = orders == (BACKWARD,)
    return reading


def tokens(layout, batch=2):
    torch.manual_seed(1)
    count = layout.height * layout.width + (layout.token is not None)
    return torch.randn(batch, count, WIDTH, dtype=torch.float64)


def equal_scans(layer):
    """Give every mixer of `layer` the weights of the first."""
    state = layer.mixers[0].state_dict()
    for mixer in layer.mixers[1:]:
        mixer.load_state_dict({name: state[name] for name in mixer.state_dict()})
    return layer


@pytest.mark.parametrize("mixer", mixers.mixer_names())
def test_shared_projections_equal_separate_mixers_with_tied_projections(mixer):
    shared, separate = build(mixer), build(mixer, share="none")
    first, second = separate.mixers
    first.load_state_dict(shared.mixers[0].state_dict())
    second.load_state_dict(first.state_dict() | shared.mixers[1].state_dict())
    if getattr(second.out_proj, "bias", None) is not None:
        torch.nn.init.zeros_(second.out_proj.bias)  # added once where the projection is shared
    x = tokens(Layout(3, 4, None))
    torch.testing.assert_close(shared(x)[0], separate(x)[0], rtol=1e-10, atol=1e-12)


def gradients_of(layer, x, layout, mask, monkeypatch=None):
    """Output and gradients of a layer; it reads one order at a time if `monkeypatch` is given."""
    if monkeypatch is not None:
        monkeypatch.setattr(Directions, "_is_plain", lambda self: False)
    x = x.clone().requires_grad_()
    y, _ = layer(x, layout=layout, mask=mask)
    real = torch.ones(y.shape[:2], dtype=torch.bool) if mask is None else mask
    weights = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(y)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    grads = torch.autograd.grad((y * weights)[real].sum(), [x, *parameters])
    return {"y": y[real], **dict(zip(["x", *names], grads, strict=True))}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("direction", ["bidirectional", "cross"])
@pytest.mark.parametrize("mixer", [name for name in mixers.mixer_names() if mixers.get(name).reads_pairs])
def test_pairs_equal_one_order_at_a_time(monkeypatch, mixer, direction, masked):
    layout = layout_of(3, 4, "middle" if direction == "cross" else "none")
    layer = build(mixer, direction)
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # initial norms of ones would be alike
    x = tokens(layout, batch=3)
    mask = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(3)) < 0.7 if masked else None
    paired = gradients_of(layer, x, layout, mask)
    for name, value in gradients_of(layer, x, layout, mask, monkeypatch).items():
        torch.testing.assert_close(paired[name], value, rtol=1e-9, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        *((name, {"convolution_width": 0}) for name in ("deltanet", "gated_deltanet")),
        *((name, {"backend": "reference"}) for name in ("deltanet", "gated_deltanet")),
        *(("vla", options) for options in ({"convolution_width": 4}, {"update_penalty": False})),
        ("lattice", {"forget_gate": False}),
        ("ttt", {"chunk_size": 4}),
        ("lattice", {"normalize_key": True}),
    ],
)
def test_options_of_mixers_hold_for_pairs(monkeypatch, mixer, options):
    torch.manual_seed(0)
    layer = build(mixer, "cross", **options)
    layout = layout_of(2, 3, "middle")
    x = tokens(layout)
    paired = gradients_of(layer, x, layout, None)
    for name, value in gradients_of(layer, x, layout, None, monkeypatch).items():
        torch.testing.assert_close(paired[name], value, rtol=1e-9, atol=1e-10)


class Calls(TorchDispatchMode):
    """Counts the calls of our operations."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.namespace == "longseq"
        return function(*args, **(kwargs or {}))


def count_calls(layer):
    """Calls in one pass forward and backward over tensors without values, for which no kernel is interpreted."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, Calls() as calls:
        y, _ = layer(mode.from_tensor(torch.zeros(1, 2, WIDTH)))
        torch.autograd.grad(y.sum(), list(layer.parameters()), allow_unused=True)
    return calls.count


# Mixers whose pairs call the same operations as others are left out.
@pytest.mark.slow
@cases(
    "mixer",
    [
        *("deltanet", "gated_deltanet", "longhorn", "mamba", "linear_attention"),
        *("gla", "hgrn2", "retnet", "vla", "lattice", "rwkv6"),
    ],
)
def test_a_pair_launches_no_operation_twice(monkeypatch, mixer):
    if torch.cuda.is_available():
        pytest.skip("the kernels are emulated only where there is no GPU")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    paired, forward = (count_calls(build(mixer, direction).float()) for direction in ("bidirectional", "forward"))
    assert 0 < paired <= forward  # one operation computes a whole pair of Longhorn layers


# One for each kind of pair: an operation that reads both ways; one operation for the whole pair; a pair of convolutions
# and of norms around them. test_contract.py compiles the operations of all mixers.
@pytest.mark.slow
@pytest.mark.parametrize(("mixer", "recompute"), [("deltanet", True), ("longhorn", True), ("lattice", False)])
def test_a_compiled_graph_reads_pairs(mixer, recompute):
    torch.manual_seed(0)
    # As wide as a model: narrow layers have another memory layout.
    layer = Directions(partial(mixers.create, mixer, 192), reading_orders("bidirectional"))
    x = torch.randn(2, 2, 192)  # few tokens, as the graph of a chunk has parts for each of its halves
    expected = gradients_of(layer, x, None, None)
    for part in layer.mixers:
        part.recompute = recompute
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    actual = gradients_of(compiled, x, None, None)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name.removeprefix("_orig_mod.")])


def test_hooks_and_substitutes_of_parts_are_called():
    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    layer, x = build("longhorn"), tokens(Layout(2, 3, None))
    (plain, _), called = layer(x), []
    handle = layer.mixers[1].x_proj.register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(layer(x)[0], plain)
    assert called
    handle.remove()
    part = layer.mixers[1].x_proj
    layer.mixers[1].x_proj = Adapted(part.in_features, part.out_features, bias=False).double()
    layer.mixers[1].x_proj.weight = part.weight
    assert not torch.allclose(layer(x)[0], plain)


@pytest.mark.parametrize("share", SHARING)
@cases("mixer", ["longhorn", "mamba", "linear_attention"])
def test_hooks_on_the_mixers_see_each_reading(mixer, share):
    layer, x = build(mixer, share=share), tokens(Layout(2, 3, None))
    plain, seen = layer(x)[0], []
    for part in layer.mixers:
        part.register_forward_hook(lambda _, __, found: seen.append(found[0]))
    torch.testing.assert_close(layer(x)[0], plain)
    assert len(seen) == len(layer.mixers)
    if share == "none":
        expected = sum(part.project_out(reading) for part, reading in zip(layer.mixers, seen, strict=True))
    else:
        expected = layer.mixers[0].project_out(sum(seen))
    torch.testing.assert_close(plain, expected)
    layer.mixers[-1].register_forward_hook(lambda _, __, found: (2 * found[0], *found[1:]))
    assert not torch.allclose(layer(x)[0], plain)


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", [name for name in mixers.mixer_names() if mixers.get(name).reads_pairs])
def test_pairs_on_the_gpu(monkeypatch, mixer):
    torch.manual_seed(0)
    layer = Directions(partial(mixers.create, mixer, 192), reading_orders("bidirectional"))
    x = torch.randn(6, 197, 192)
    exact = gradients_of(copy.deepcopy(layer).double(), x.double(), None, None)
    layer, x = layer.cuda(), x.cuda()
    with torch.autocast("cuda", torch.bfloat16):
        paired = gradients_of(layer, x, None, None)
        single = gradients_of(layer, x, None, None, monkeypatch)
    for name, value in exact.items():
        # Two sums of rounded numbers in different orders: neither is more accurate.
        allowed = 3 * error(single[name].cpu(), value) + 1e-3
        assert error(paired[name].cpu(), value) <= allowed, name


@pytest.mark.parametrize("share", SHARING)
def test_mean_is_the_sum_over_the_count(share):
    layout = layout_of(3, 4, "middle")
    x = tokens(layout)
    total, mean = (build(direction="cross", share=share, merge=merge)(x, layout=layout)[0] for merge in ("sum", "mean"))
    torch.testing.assert_close(total / 4, mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("share", SHARING)
@pytest.mark.parametrize("place", TOKEN_PLACES)
def test_cross_treats_rows_and_columns_alike(place, share):
    layer = equal_scans(build(direction="cross", share=share))
    layout, turned = layout_of(3, 5, place), layout_of(5, 3, place)
    x = tokens(layout)
    across = reorder(x, "columns", layout)  # the sequence of the transposed image
    y, _ = layer(x, layout=layout)
    torch.testing.assert_close(layer(across, layout=turned)[0], reorder(y, "columns", layout))


@pytest.mark.parametrize("mixer", ["attention", "deltanet", "hyena"])
def test_a_backward_reading_goes_on_from_its_state(mixer):
    forward, backward = build(mixer, "forward"), build(mixer, "alternating", layer=1)
    x = tokens(Layout(2, 5, None))
    y, state = backward(x[:, 4:])
    rest, last = backward(x[:, :4], state)
    torch.testing.assert_close(torch.cat((rest, y), dim=1), forward(x.flip(1))[0].flip(1))
    packed, found = backward(x.flatten(0, 1)[None], cu_seqlens=torch.tensor([0, 10, 20]))
    torch.testing.assert_close(packed.view_as(x), torch.cat((rest, y), dim=1))
    torch.testing.assert_close(found, last)


def test_several_directions_have_no_state():
    layer, x = build(), tokens(Layout(2, 2, None))
    _, state = layer(x)
    assert state is None
    for call in (lambda: layer(x, layer.readers[0].initial_state(2)), lambda: layer.step(x[:, 0], None)):
        with pytest.raises(ValueError, match="no state and no steps: use direction='forward'"):
            call()


@pytest.mark.parametrize("mixer", mixers.mixer_names())
@cases(("direction", "orders"), [("forward", 1), ("bidirectional", 2), ("cross", 4)])
def test_sharing_decides_the_parameter_count(mixer, direction, orders):
    one = mixers.create(mixer, WIDTH)
    projections = sum(count_parameters(part) for part in (one.in_proj, one.out_proj) if part is not None)
    scan = count_parameters(one) - projections
    counts = {share: count_parameters(build(mixer, direction, share=share)) for share in SHARING}
    assert counts == {"projections": projections + orders * scan, "none": orders * (projections + scan)}

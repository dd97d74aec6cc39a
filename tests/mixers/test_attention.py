"""Softmax attention: windows, grouped queries and rotary positions, compared with their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longseq import mixers
from longseq.blocks.rotary import rotary_angles, rotate_pairs
from longseq.mixers.attention import KeyValueCache, KeyValueState
from longseq.state import map_state, select_state

D_MODEL, TOKENS = 32, 37
LINEAR = {"rope_type": "linear", "factor": 3.0}
OPTIONS: list[dict[str, Any]] = [
    {"rotary": True},
    {"num_heads": 4, "num_kv_heads": 2},
    {"num_heads": 4, "num_kv_heads": 1, "rotary": True, "rotary_base": 100.0, "qkv_bias": False},
    {"num_heads": 3, "head_dim": 6, "num_kv_heads": 1, "rotary": True, "qk_norm": "head", "rotary_scaling": LINEAR},
    {"num_heads": 2, "head_dim": 4, "qk_norm": "all", "norm_eps": 0.1},
]
BOTH = [
    *(("attention", options) for options in OPTIONS),
    *(("window_attention", {"window": 6, **options}) for options in OPTIONS),
    ("window_attention", {"window": 1}),
    ("window_attention", {"window": 36, "rotary": False}),
    ("window_attention", {"window": 37, "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True}),
]


def make(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    mixer = mixers.create(name, D_MODEL, **options).double().eval()
    with torch.no_grad():
        mixer.in_proj.weight.mul_(2)
        for norm in (mixer.q_norm, mixer.k_norm):
            if norm is not None:
                norm.weight.uniform_(0.5, 2)
    return mixer


def make_tokens(batch: int, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, tokens, D_MODEL, generator=generator, dtype=torch.float64)


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def naive(mixer: Any, x: Tensor) -> Tensor:
    """The definition, one query at a time."""
    heads, groups, width = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    q, k, v = mixer.in_proj(x).split([heads * width, groups * width, groups * width], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, width)) for part in (q, k, v))
    if mixer.qk_norm != "none":
        span = -1 if mixer.qk_norm == "head" else (-2, -1)
        norms = (mixer.q_norm, mixer.k_norm)
        q, k = (
            part / (part.square().mean(span, keepdim=True) + norm.eps).sqrt() * norm.weight.view(-1, width)
            for part, norm in zip((q, k), norms, strict=True)
        )
    if mixer.rotary:
        positions = torch.arange(x.shape[1]).double() / mixer.rotary_scaling.get("factor", 1.0)
        q, k = (rotate_pairs(part, *rotary_angles(part, positions, mixer.rotary_base)) for part in (q, k))
    k, v = (part.repeat_interleave(heads // groups, dim=2) for part in (k, v))
    window = getattr(mixer, "window", x.shape[1])
    outputs = []
    for t in range(x.shape[1]):
        near = slice(max(0, t - window + 1), t + 1 if mixer.causal else t + window)
        scores = torch.einsum("bhd,bshd->bhs", q[:, t], k[:, near]) / width**0.5
        outputs.append(torch.einsum("bhs,bshd->bhd", scores.softmax(-1), v[:, near]).flatten(1))
    return mixer.out_proj(torch.stack(outputs, dim=1))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
@pytest.mark.parametrize(("name", "options"), BOTH)
def test_every_option_equals_the_definition(name: str, options: dict[str, Any], causal: bool) -> None:
    mixer = make(name, causal=causal, **options)
    x = make_tokens(2)
    assert_same(mixer(x)[0], naive(mixer, x))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
@pytest.mark.parametrize(("name", "options"), BOTH)
def test_padding_and_packing_hide_nothing_and_show_nothing(name: str, options: dict[str, Any], causal: bool) -> None:
    mixer = make(name, causal=causal, **options)
    x = make_tokens(3)
    # Real tokens in the middle, with a gap, and none at all.
    real = torch.zeros(3, TOKENS, dtype=torch.bool)
    real[0, 5:30] = real[1, :12] = real[1, 20:35] = True
    padded, _ = mixer(x, mask=real)
    assert padded.isfinite().all()
    rows = [x[row : row + 1, real[row]] for row in range(2)]
    for row, alone in enumerate(rows):
        assert_same(padded[row : row + 1, real[row]], mixer(alone)[0])
    packed, _ = mixer(torch.cat(rows, dim=1), cu_seqlens=torch.tensor([0, 25, 25, 52]))
    assert_same(packed, torch.cat([mixer(alone)[0] for alone in rows], dim=1))


@pytest.mark.parametrize(("name", "options"), BOTH)
def test_positions_go_on_after_padding_and_packing(name: str, options: dict[str, Any]) -> None:
    mixer = make(name, **options)
    x, following = make_tokens(2, 20), make_tokens(2, 9)
    real = torch.arange(20) >= torch.tensor([[4], [17]])
    _, state = mixer(x, mask=real)
    rows = [x[row : row + 1, real[row]] for row in range(2)]
    _, packed_state = mixer(torch.cat(rows, dim=1), cu_seqlens=torch.tensor([0, 16, 19]))
    for row, alone in enumerate(rows):
        whole, _ = mixer(torch.cat([alone, following[row : row + 1]], dim=1))
        for given in (state, packed_state):
            own = select_state(given, torch.tensor([row]))
            assert_same(mixer(following[row : row + 1], own)[0], whole[:, -9:])


@pytest.mark.parametrize("start", [0, 4, 20])
@pytest.mark.parametrize(("name", "options"), BOTH)
def test_a_preallocated_cache_takes_steps_and_parts_of_rows_of_any_length(
    name: str, options: dict[str, Any], start: int
) -> None:
    mixer, x = make(name, **options), make_tokens(3)
    lengths = torch.tensor([start, start // 2, 0])
    state = mixer(x[:, :20], mask=torch.arange(20) < lengths[:, None])[1]
    own = [torch.cat([x[row : row + 1, :length], x[row : row + 1, 20:]], dim=1) for row, length in enumerate(lengths)]
    expected = torch.cat([mixer(alone)[0][:, -17:] for alone in own])
    with torch.no_grad():
        cache = mixer.preallocate(state, start + 17)
        buffers = (cache.key.data_ptr(), cache.value.data_ptr())
        outputs = []
        for token in x[:, 20:29].unbind(1):
            y, cache = mixer.step(token, cache)
            outputs.append(y)
        assert (cache.key.data_ptr(), cache.value.data_ptr()) == buffers, "a step copies no keys"
        assert_same(torch.stack(outputs, dim=1), expected[:, :9])
        part, cache = mixer(x[:, 29:32], cache)
        assert isinstance(cache, KeyValueCache)
        last = torch.cat([part, mixer(x[:, 32:], mixer.preallocate(cache, 100))[0]], dim=1)
    assert_same(last, expected[:, 9:])
    trimmed, whole = mixer.trim(cache), mixer(x[:, 29:32], mixer(x[:, 20:29], state)[1])[1]
    assert isinstance(trimmed, KeyValueState)
    for row, length in enumerate((lengths + 12).tolist()):
        real = slice(length) if name == "attention" else slice(None)
        assert_same([part[row, real] for part in trimmed[:2]], [part[row, real] for part in whole[:2]])


@pytest.mark.parametrize(("name", "options"), BOTH)
def test_a_preallocated_cache_takes_packed_rows_and_padding(name: str, options: dict[str, Any]) -> None:
    mixer, x = make(name, **options), make_tokens(2)
    state = mixer(x[:, :9])[1]
    cache = mixer.preallocate(state, 30)
    borders = torch.tensor([0, 16, 19])
    packed, padded = x[:1, :19], {"mask": torch.arange(9) >= torch.tensor([[4], [7]])}
    for given, options_of_call in ((packed, {"cu_seqlens": borders}), (x[:, 9:18], padded)):
        expected, last = mixer(given, state, **options_of_call)
        y, after = mixer(given, cache, **options_of_call)
        assert_same(y, expected)
        assert_same(mixer(x[:, 30:33], after)[0], mixer(x[:, 30:33], last)[0])


def test_a_cache_holds_the_keys_of_its_heads_in_their_type_and_no_more() -> None:
    heads = {"num_heads": 4, "num_kv_heads": 2}
    for name, options, slots in (("attention", {}, 50), ("window_attention", {"window": 7}, 7)):
        mixer = mixers.create(name, D_MODEL, **heads, **options).bfloat16()
        cache = mixer.preallocate(mixer(make_tokens(3).bfloat16())[1], 50)
        assert cache.key.shape == cache.value.shape == (3, slots, 2, 8)
        assert cache.key.dtype == cache.value.dtype == torch.bfloat16


def test_a_token_beyond_the_room_is_one_error() -> None:
    mixer, x = make("attention"), make_tokens(2)
    with pytest.raises(ValueError, match="of 37 tokens does not fit into a cache that was preallocated for 36"):
        mixer.preallocate(mixer(x)[1], 36)
    cache = mixer.preallocate(mixer(x)[1], 38)
    assert mixer.room(cache) == 1
    with pytest.raises(ValueError, match="of 39 tokens does not fit"):
        mixer(x[:, :2], cache)
    _, cache = mixer.step(x[:, 0], cache)
    with pytest.raises(ValueError, match="of 39 tokens does not fit"):
        mixer.step(x[:, 0], cache)
    more = mixer.preallocate(cache, 2 * 38)
    assert mixer.room(more) == 38
    assert_same(mixer.step(x[:, 1], more)[0], mixer.step(x[:, 1], mixer.trim(cache))[0])


@pytest.mark.parametrize("name", ["attention", "window_attention"])
def test_a_cache_is_copied_to_go_on_in_two_ways_and_for_gradients(name: str) -> None:
    mixer, x = make(name), make_tokens(1)
    before = mixer(x[:, :5])[1]
    expected = [mixer(x[:, place : place + 2], before)[0][:, 1] for place in (5, 8)]
    cache = mixer.preallocate(before, 9)
    with torch.no_grad():
        branches = [mixer.step(x[:, place], map_state(torch.clone, cache))[1] for place in (5, 8)]
        for place, branch, wanted in zip((6, 9), branches, expected, strict=True):
            assert_same(mixer.step(x[:, place], branch)[0], wanted)
    leaf = map_state(lambda t: t.detach().requires_grad_() if t.is_floating_point() else t, cache)
    _, after = mixer.step(x[:, 5], leaf)
    mixer.step(x[:, 6], after)[0].sum().backward()
    assert leaf.key.grad[:, :5].abs().sum() > 0
    assert torch.equal(leaf.key, cache.key), "with gradients, the state that was given stays as it was"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_longer_than_a_window_may_be_read_as_packed_sequences(
    causal: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the fused kernel on a GPU reads them."""
    mixer: Any = mixers.create("window_attention", 256, window=100, num_heads=4, causal=causal).to(device)
    mixer = mixer if device == "cuda" else mixer.double()
    x = torch.randn(3, 350, 256, device=device, dtype=mixer.out_proj.weight.dtype, requires_grad=True)
    results = []
    for fused in (False, True):
        monkeypatch.setattr(mixer, "_reads_rows_packed", lambda q, fused=fused: fused)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            y, _ = mixer(x)
        results.append((y, *torch.autograd.grad(y.double().square().sum(), [x, *mixer.parameters()])))
    for one, other in zip(*results, strict=True):
        assert (one.double() - other.double()).norm() < (0.02 if device == "cuda" else 1e-9) * one.double().norm()

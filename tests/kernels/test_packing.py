"""Packings of sequences, and attention over them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from kernel_inputs import gradients, list_variants, make_inputs, takes
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention

from longseq.kernels import linear_attention
from longseq.kernels.dispatch import explain, list_ops
from longseq.kernels.packed_attention import packed_attention
from longseq.kernels.packing import Packing, pack_like

BORDERS = torch.tensor([0, 3, 3, 4, 11])


def test_a_packing_knows_where_tokens_stand() -> None:
    found = Packing(BORDERS)
    assert (found.count, found.tokens, found.max_seqlen) == (4, 11, 7)
    assert found.sequence.tolist() == [0, 0, 0, 2, 3, 3, 3, 3, 3, 3, 3]
    assert found.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 6]
    turned = found.turned()
    assert turned.bounds == [0, 7, 8, 8, 11]
    assert turned.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 2]
    assert turned.sequence.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 3, 3, 3]


@pytest.mark.parametrize(
    "copied", [None, copy.copy, copy.deepcopy, lambda borders: pickle.loads(pickle.dumps(borders))]
)
def test_borders_that_are_changed_are_read_again(copied) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, 1, 2) for _ in range(3))
    borders = Packing(torch.tensor([0, 4, 9])).cu_seqlens
    linear_attention(q, k, v, cu_seqlens=borders)
    borders = borders if copied is None else copied(borders)
    borders[1] = 6
    output, expected = (linear_attention(q, k, v, cu_seqlens=c)[0] for c in (borders, torch.tensor([0, 6, 9])))
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_nothing_waits_for_a_device() -> None:
    """The meta device has no values: reading one raises an error."""
    found = Packing(BORDERS.to("meta"), 11, max_seqlen=7)
    assert found.positions.shape == (11,)
    assert found.longest == 7
    assert found.borders.dtype == torch.int32
    assert found.turned().lengths.shape == (4,)
    assert pack_like(BORDERS.to("meta"), torch.empty(1, 11, device="meta")).max_seqlen == 11


def test_a_packing_of_other_tokens_is_refused() -> None:
    x = torch.zeros(1, 12, 2, 4)
    with pytest.raises(ValueError, match="cu_seqlens ends with 11, but must end with T = 12"):
        packed_attention(x, x, x, Packing(BORDERS))
    op = make_inputs("linear_attention", tokens=12, segments=4)
    with pytest.raises(ValueError, match="cu_seqlens ends with 11, but must end with T = 12"):
        op.run(cu_seqlens=Packing(BORDERS))


@pytest.mark.parametrize("op", list_ops())
def test_operations_take_a_packing(op: str) -> None:
    inputs = make_inputs(op, list_variants(op)[0], segments=4, tokens=11)
    for options in ({}, {"reverse": True}) if takes(op, "reverse") else ({},):
        expected = gradients(inputs, backend="torch", cu_seqlens=BORDERS, **options)
        actual = gradients(inputs, backend="torch", cu_seqlens=Packing(BORDERS), **options)
        assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_a_packing_passes_through_compilers() -> None:
    def shift(x: torch.Tensor, found: Packing) -> torch.Tensor:
        return x + found.positions + found.lengths[found.sequence] + found.turned().positions

    x, found = torch.zeros(11), Packing(BORDERS)
    expected = shift(x, found)
    compiled = torch.compile(shift, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, found), expected)
    made = torch.compile(lambda x, borders: shift(x, Packing(borders, 11)), fullgraph=True, backend="aot_eager")
    assert torch.equal(made(x, BORDERS), expected)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None) -> torch.Tensor:
    """Attention with a mask of all pairs."""
    found = Packing(BORDERS)
    distance = found.positions[:, None] - found.positions
    allowed = found.sequence[:, None] == found.sequence
    allowed &= (distance >= 0) | (not causal)
    if window is not None:
        allowed &= distance.abs() < window
    share = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)))
    return scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 3, 5, 20])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [1, 4])
def test_packed_attention_is_attention_within_each_sequence(causal: bool, window: int | None, groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 11, 4, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    k, v = (
        torch.randn(1, 11, groups, 8, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(2)
    )
    weights = torch.randn(1, 11, 4, 8, dtype=torch.float64, generator=generator)
    expected = dense(q, k, v, causal, window)
    actual = packed_attention(q, k, v, BORDERS, causal=causal, window=window)
    torch.testing.assert_close(actual, expected)
    wanted = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    given = torch.autograd.grad((actual * weights).sum(), (q, k, v))
    torch.testing.assert_close(given, wanted)


def test_what_one_sequence_holds_reaches_no_other() -> None:
    q, k, v = (torch.randn(1, 11, 2, 8) for _ in range(3))
    expected = packed_attention(q, k, v, BORDERS)
    spoiled = [x.clone() for x in (q, k, v)]
    for x in spoiled:
        x[:, 4:] = float("nan")
    assert torch.equal(packed_attention(*spoiled, BORDERS)[:, :4], expected[:, :4])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [2, 8])
def test_fused_packed_attention_on_a_gpu(causal: bool, window: int | None, groups: int) -> None:
    """As accurate as the padded form, without waiting for the GPU, and in the memory of its inputs."""
    torch.manual_seed(0)
    lengths = [4000, *[96] * 40, 0, 1, 255]
    borders = torch.tensor([0, *lengths]).cumsum(0).cuda()
    tokens = sum(lengths)
    inputs = [torch.randn(1, tokens, heads, 64, device="cuda") for heads in (8, groups, groups)]
    d_o = torch.randn(1, tokens, 8, 64, device="cuda")

    def run(dtype: torch.dtype, **options: str) -> list[torch.Tensor]:
        q, k, v = (x.to(dtype).requires_grad_() for x in inputs)
        o = packed_attention(q, k, v, found, causal=causal, window=window, **options)
        return [o, *torch.autograd.grad(o, (q, k, v), d_o.to(dtype))]

    found = Packing(borders, tokens)
    assert explain("packed_attention", device="cuda", dtype=torch.bfloat16, sizes={"D": 64})["varlen"] == []
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = run(torch.bfloat16, backend="varlen")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(torch.bfloat16)
        peak = torch.cuda.max_memory_allocated() - before
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert peak < 40 * inputs[0].numel() * 2
    exact, plain = run(torch.float32, backend="torch"), run(torch.bfloat16, backend="torch")
    for given, other, wanted in zip(actual, plain, exact, strict=True):
        assert (given - wanted).norm() <= 2 * (other - wanted).norm() + 1e-3 * wanted.norm()


@pytest.mark.slow
def test_compiled_code_reads_other_lengths_without_a_compilation() -> None:
    def run(x: torch.Tensor, borders: torch.Tensor) -> torch.Tensor:
        return linear_attention(x, x, x, cu_seqlens=borders, backend="torch")[0]

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled, counts = torch.compile(run, backend=counter), []
    x = torch.randn(1, 12, 2, 4)
    for end in (7, 1, 11, 6):
        borders = torch.tensor([0, end, 12])
        torch.testing.assert_close(compiled(x, borders), run(x, borders))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1, counts
    with pytest.raises(torch._dynamo.exc.Unsupported, match="needs the lengths of packed sequences on the host"):
        torch.compile(run, fullgraph=True, backend="eager")(x, borders)

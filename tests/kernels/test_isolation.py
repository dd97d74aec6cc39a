"""The content of one row, head or packed sequence changes no bit of the others, nor of an earlier chunk."""

from __future__ import annotations

import math
from itertools import cycle, pairwise

import pytest
import torch
from kernel_inputs import gradients, list_variants, make_inputs, results, takes, takes_chunk_size

from longseq.kernels import list_ops
from longseq.kernels.dispatch import backends

LOCAL = list_ops("local")
FORMS = [(op, backend.name) for op in (*list_ops(), *LOCAL) for backend in backends(op)]
# Each part is multiplied by its factor, or filled with it. The one between infinity and NaN must not change.
FACTORS = (math.inf, 1, math.nan, 1e-8, 1e8)
PARTS = len(FACTORS)
KEPT = FACTORS.index(1)
# Operations along channels, which share keys, queries and weights; features belong to all heads of a token.
WITHOUT_HEADS = ("longhorn_scan", "selective_scan", "short_convolution", "convolved_features")
HEADED = [op for op in list_ops() if op not in WITHOUT_HEADS]
PACKED = [form for form in FORMS if takes(form[0], "cu_seqlens")]
# Slot attention is two linear attentions, and vla least squares and a delta rule; a GPU has both.
IN_OTHERS = [(op, "triton") for op in ("slot_attention", "variational_linear_attention")]
# Interpreted kernels that read packed sequences are tested on these; a GPU has both.
ROWS = [form for form in FORMS if form[1] != "triton" or form not in PACKED]
DTYPES = (torch.float32, torch.bfloat16)


def in_each_dtype(forms):
    """Interpreted kernels are slow: they are tested in float16 only."""
    return [(*form, dtype) for form in forms for dtype in ((torch.float16,) if form[1] == "triton" else DTYPES)]


def shape_of(backend):
    """The numbers of parts and of tokens. Interpreted kernels read few; a GPU reads more, in a test of its own."""
    return (2, 2) if backend == "triton" else (PARTS, 20)


def variants(op, backend, dtype=torch.float32):
    """Every kind of input of the fast form, the plainest of others. Pairs have twice as many rows in some tensors."""
    found = [variant for variant in list_variants(op) if "pair" not in variant]
    return found if backend == "torch" and dtype == torch.float32 else found[:1]


def spoil(x, dim, parts):
    """x with each part but one of every five multiplied, or replaced by infinity or NaN."""
    x = x.clone()
    for part, factor in zip(parts, cycle(FACTORS), strict=False):
        piece = x.narrow(dim, part.start, part.stop - part.start)
        piece.copy_(piece * factor if math.isfinite(factor) else torch.full_like(piece, factor))
    return x


def assert_kept_part_is_same(inputs, dims, parts, **options):
    """Check that the kept part of all results stays the same when the other parts are spoiled: in the inputs,
    and in the gradients of the results.

    `dims` and `parts` give the dimensions and the parts, first for sequences, then for states.
    """
    of_sequence, of_state = zip(dims, parts, strict=True)
    place = {name: of_state if name.startswith("initial_state") else of_sequence for name in inputs.tensors}
    place = {name: where for name, where in place.items() if name not in inputs.parameters}
    of_final = of_sequence if inputs.initial_state == () else of_state

    def run_with_spoiled_gradients(inputs, **options):
        returned = inputs.run(**options)
        for name, x in results(*returned).items():
            dim, slices = of_sequence if name == "output" else of_final
            if x.requires_grad and x.dim() > dim:
                x.register_hook(lambda gradient, where=(dim, slices): spoil(gradient, *where))
        return returned

    spoiled = inputs.replace({name: spoil(inputs.tensors[name], *where) for name, where in place.items()})
    place = {f"gradient of {name}": where for name, where in place.items()}
    expected = gradients(inputs, **options)
    for actual in (gradients(spoiled, **options), gradients(inputs, run_with_spoiled_gradients, **options)):
        for name, x in expected.items():
            if not name.startswith("gradient of ") or name in place:
                dim, slices = place.get(name, of_final if name.startswith("final_state") else of_sequence)
                for part in slices[KEPT::PARTS] if x.dim() > dim else []:  # counters have no heads
                    assert torch.equal(actual[name].movedim(dim, 0)[part], x.movedim(dim, 0)[part]), name


def one_each(count):
    return [slice(n, n + 1) for n in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "backend", "dtype"), in_each_dtype(ROWS))
def test_rows_are_apart(interpreted, op, backend, dtype):
    count, tokens = shape_of(backend)
    rows = one_each(count)
    for variant in variants(op, backend, dtype):
        inputs = make_inputs(op, variant, batch=count, tokens=tokens, dtype=dtype, sizes={"H": 1})
        assert_kept_part_is_same(inputs, (0, 0), (rows, rows), backend=backend)


@pytest.mark.parametrize("sizes", [{"D": 33, "N": 15}, {"D": 50, "N": 21}], ids=["odd", "even"])
def test_rows_of_a_longhorn_pair_are_apart_in_any_width(sizes):
    # Processors with AMX read over the end of rows whose length 32 does not divide.
    rows = one_each(PARTS)
    inputs = make_inputs("longhorn_pair", "plain", batch=PARTS, tokens=20, dtype=torch.bfloat16, sizes=sizes)
    assert_kept_part_is_same(inputs, (0, 0), (rows, rows), backend="torch")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "backend"), [form for form in FORMS if form[1] != "triton" and takes(form[0], "reverse")]
)
def test_rows_read_in_two_directions_are_apart(op, backend):
    rows = one_each(2 * PARTS)
    for variant in variants(op, backend):
        inputs = make_inputs(op, variant, batch=len(rows), tokens=20, dtype=torch.float32, sizes={"H": 1})
        assert_kept_part_is_same(inputs, (0, 0), (rows, rows), backend=backend, reverse="second_half")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "backend"), [form for form in FORMS if form[1] != "triton" and form[0] in HEADED])
def test_heads_are_apart(op, backend, dtype):
    heads = one_each(PARTS)
    for variant in (name for name in variants(op, backend, dtype) if "grouped" not in name):  # these share keys
        inputs = make_inputs(op, variant, batch=1, tokens=20, dtype=dtype, sizes={"H": PARTS})
        assert_kept_part_is_same(inputs, (2, 1), (heads, heads), backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "backend", "dtype"), in_each_dtype(form for form in PACKED if form not in IN_OTHERS))
def test_packed_sequences_are_apart(interpreted, op, backend, dtype):
    count, _ = shape_of(backend)
    length = 2 if backend == "triton" else 6
    bounds = [length * n for n in range(count + 1)]
    tokens = [slice(*pair) for pair in pairwise(bounds)]
    for variant in variants(op, backend, dtype):
        inputs = make_inputs(op, variant, tokens=bounds[-1], segments=count, dtype=dtype, sizes={"H": 1})
        options = {"backend": backend, "cu_seqlens": torch.tensor(bounds)}
        assert_kept_part_is_same(inputs, (1, 0), (tokens, one_each(count)), **options)
        if backend == "torch":
            assert_kept_part_is_same(inputs, (1, 0), (tokens, one_each(count)), **options, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "gated_write_key"])
def test_rows_of_short_delta_rules_without_gradients_are_apart(interpreted, variant):
    # Half precision of so few tokens takes another kernel then.
    inputs = make_inputs("delta_rule", variant, batch=PARTS, tokens=5, dtype=torch.bfloat16, sizes={"H": 1})
    spoiled = inputs.map(lambda x: spoil(x, 0, one_each(PARTS)))
    with torch.no_grad():
        for expected, actual in zip(inputs.run(backend="triton"), spoiled.run(backend="triton"), strict=True):
            assert torch.equal(actual[KEPT], expected[KEPT])
            assert not torch.equal(actual[0], expected[0])


@pytest.mark.parametrize("op", [op for op in list_ops() if takes_chunk_size(op) or op.endswith("_scan")])
def test_no_token_reaches_an_earlier_chunk(op):
    inputs, chunk, token = make_inputs(op, batch=1, tokens=64, dtype=torch.float32), 16, 40
    options = {"backend": "torch", **({"chunk_size": chunk} if takes_chunk_size(op) else {})}
    expected, _ = inputs.run(**options)
    for size in (1e-8, 1e8, math.inf, math.nan):
        spoiled = {name: spoil_token(x, token, size) for name, x in inputs.sequences.items()}
        output, _ = inputs.replace(spoiled).run(**options)
        before = token if math.isfinite(size) else token // chunk * chunk
        assert torch.equal(output[:, :before], expected[:, :before]), size


def spoil_token(x, token, size):
    x = x.clone()
    x[:, token] = x[:, token] * size if math.isfinite(size) else size
    return x


WIDTHS = [(op, 64) for op, backend in PACKED if backend == "triton"]
WIDTHS += [("delta_rule", 128), ("delta_rule", 256)]  # whose segments of time have launches of their own


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [100, 2100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "width"), WIDTHS)
def test_parts_are_apart_on_a_gpu(op, width, dtype, tokens):
    sizes = {"H": 2, "K": width, "V": width, "M": 64, "N": 16}
    if op == "orthogonal_recurrence":
        sizes["D"] = 64
    options = {"dtype": dtype, "device": "cuda", "tokens": tokens}
    rows = one_each(PARTS)
    assert_kept_part_is_same(
        make_inputs(op, batch=PARTS, sizes=sizes, **options), (0, 0), (rows, rows), backend="triton"
    )
    turned = make_inputs(op, batch=2 * PARTS, sizes=sizes, **options)
    both = one_each(2 * PARTS)
    assert_kept_part_is_same(turned, (0, 0), (both, both), backend="triton", reverse="second_half")
    if op in HEADED:
        heads = make_inputs(op, batch=1, sizes={**sizes, "H": PARTS}, **options)
        assert_kept_part_is_same(heads, (2, 1), (rows, rows), backend="triton")
    bounds = [tokens * n // PARTS for n in range(PARTS + 1)]
    packed = make_inputs(op, segments=PARTS, sizes=sizes, **options)
    pieces = [slice(*pair) for pair in pairwise(bounds)]
    cu_seqlens = torch.tensor(bounds, device="cuda")
    for reverse in (False, True):
        options = {"backend": "triton", "cu_seqlens": cu_seqlens, "reverse": reverse}
        assert_kept_part_is_same(packed, (1, 0), (pieces, rows), **options)

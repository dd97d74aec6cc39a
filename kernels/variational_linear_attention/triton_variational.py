"""Variational linear attention in Triton: one operation, made of the kernels of its parts.

Values between the parts (α, and o before its division) and the gradients that several parts add are float32, rounded
once at the end. The precision of the matrix products follows from v's type. For bfloat16, the delta rule multiplies
float16 numbers if its keys k̂ and α̂ both have length 1, and least squares uses TF32 where 11 bits are enough. For
float16 this would lose more than the rounding of the result. If normalize_alpha, α = A k, with the key before its
normalisation: α̂ is the same for both.
"""

from typing import Any

import torch
from torch import Tensor

from longseq.kernels.custom_op import Gradients, custom_op, empty_like, records_gradient
from longseq.kernels.delta_rule.triton_delta import delta_rule, delta_rule_backward
from longseq.kernels.devices import channels_adjacent, contiguous
from longseq.kernels.precision import without_autocast
from longseq.kernels.reading import Reverse, number_of
from longseq.kernels.recursive_least_squares.triton_least_squares import (
    find_refreshes,
    recursive_least_squares,
    recursive_least_squares_backward,
)
from longseq.kernels.triton_launch import borders_on, count_sequences, sequence_of_slots
from longseq.kernels.variational_linear_attention.reference import VariationalState
from longseq.kernels.variational_linear_attention.triton_normalizer import (
    CHUNK,
    allocate_sums,
    differentiate_keys,
    differentiate_values,
    divide,
    find_launch_of_chunks,
    sum_keys,
)
from longseq.kernels.variational_linear_attention.triton_unit import unit, unit_backward


def _precision(v: Tensor) -> str:
    return "tf32" if v.dtype == torch.bfloat16 else "tf32x3"


def _allocate(
    q, k, v, u, added, S, A, z, cu_seqlens, lambda0, reverse, eps, normalize_key, normalize_alpha, normalizer, save
):
    half = _half(v, normalize_key, normalize_alpha)
    read = torch.empty_like(k, dtype=torch.float16 if half else torch.float32)
    strength, value = torch.empty_like(k[..., 0]), v.new_empty(v.shape, dtype=torch.float32)
    alpha, inverse, *found = recursive_least_squares(
        k, _directions(k, u), added, A, cu_seqlens, lambda0, reverse, _precision(v), torch.float32
    )
    o, memory, kept = delta_rule(q, read, value, strength, read, None, S, cu_seqlens, 1.0, reverse, half, save)
    units = [torch.empty_like(read) for normalized in (normalize_key, normalize_alpha) if normalized]
    products, key_sums = alpha.new_empty(alpha.shape[:3]), allocate_sums(k, cu_seqlens)
    kept = [*units, alpha, o, products, key_sums, *found, *kept] if save else []
    return v.new_empty(v.shape), memory, inverse, _sums(k, cu_seqlens), kept


@custom_op("variational_linear_attention", _allocate)
def variational_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor | None, added: Tensor | None, S: Tensor | None, A: Tensor | None,
    z: Tensor | None, cu_seqlens: Tensor | None, lambda0: float, reverse: int, eps: float, normalize_key: bool,
    normalize_alpha: bool, normalizer: bool, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Returns o in v's type, the final S, A and z in float32, and if `save` what the backward pass needs.

    `added` [B, T] in float32 is what a refresh adds to the diagonal of A after each token, in the order of reading.
    """
    q, k = channels_adjacent(q), channels_adjacent(k)
    z = contiguous(z)
    half = _half(v, normalize_key, normalize_alpha)
    unit_dtype = torch.float16 if half else torch.float32  # the type in which they are multiplied
    with torch.cuda.device_of(q):  # Triton launches on the current device
        read = unit(k, unit_dtype) if normalize_key else k
        alpha, inverse, *found = recursive_least_squares(
            k if normalize_alpha else read, _directions(k, u), added, A, cu_seqlens, lambda0, reverse, _precision(v),
            torch.float32,
        )  # fmt: skip
        write = unit(alpha, unit_dtype) if normalize_alpha else alpha
        strength = torch.ones_like(k[..., 0])
        o, memory, kept = delta_rule(q, read, v.float(), strength, write, None, S, cu_seqlens, 1.0, reverse, half, save)
        # The quotients, the last z, and what the backward pass needs: n and the sums of each chunk's keys. Without the
        # normaliser, this is needed for the last z only.
        values = o if normalizer else torch.zeros_like(o)
        products, key_sums, sums = o.new_empty(o.shape[:3]), allocate_sums(k, cu_seqlens), _sums(k, cu_seqlens)
        quotient = values.new_empty(values.shape, dtype=v.dtype)
        call, places = (k, key_sums, reverse), (cu_seqlens, _sequences(k, key_sums, cu_seqlens))
        find_launch_of_chunks(sum_keys, *call, k)(k, *places, key_sums)
        find_launch_of_chunks(divide, *call, values, q, k, eps=(eps,), value_dim=v.shape[3])(
            values, q, k, z, *places, key_sums, quotient, products, sums
        )
        o = quotient if normalizer else o.to(v.dtype, copy=True)
    units = [*([read] if normalize_key else []), *([write] if normalize_alpha else [])]
    return o, memory, inverse, sums, [*units, alpha, values, products, key_sums, *found, *kept] if save else []


def _directions(k: Tensor, u: Tensor | None) -> Tensor:
    return torch.zeros_like(k) if u is None else u


def _half(v: Tensor, normalize_key: bool, normalize_alpha: bool) -> bool:
    """True if the delta rule's products are of float16 numbers."""
    return v.dtype == torch.bfloat16 and normalize_key and normalize_alpha


def _allocate_gradients(
    q: Tensor, k: Tensor, u: Tensor | None, added: Tensor | None, z: Tensor | None, cu_seqlens: Tensor | None,
    kept: list[Tensor], d_output: Tensor, *_: Any,
) -> Gradients:  # fmt: skip
    """Empty tensors for the gradients, as `variational_linear_attention_backward` returns them."""
    d_z = _sums(k, cu_seqlens)
    d_S, d_A = (d_z.new_empty((*d_z.shape, x.shape[3])) for x in (d_output, k))
    return *[empty_like(x) for x in (q, k, d_output, u)], d_S, d_A, d_z


@variational_linear_attention.gradient("q k v u S A z", fake=_allocate_gradients)
def variational_linear_attention_backward(
    q: Tensor, k: Tensor, u: Tensor | None, added: Tensor | None, z: Tensor | None, cu_seqlens: Tensor | None,
    kept: list[Tensor], d_output: Tensor, d_memory: Tensor | None, d_inverse: Tensor | None, d_last: Tensor | None,
    reverse: int, eps: float, normalize_key: bool, normalize_alpha: bool, normalizer: bool, wanted: list[bool],
) -> Gradients:  # fmt: skip
    """The gradients of q, k, v, u and of the first S, A and z (these three in float32). An absent u is not wanted."""
    q, k, d_output = channels_adjacent(q), channels_adjacent(k), channels_adjacent(d_output)
    z, d_last = contiguous(z), contiguous(d_last)
    kept = list(kept)
    read = kept.pop(0) if normalize_key else k
    write = kept.pop(0) if normalize_alpha else kept[0]
    alpha, values, products, key_sums, *kept = kept
    found, kept = kept[:3], kept[3:]
    half = _half(d_output, normalize_key, normalize_alpha)
    with torch.cuda.device_of(q):
        call, places = (k, key_sums, reverse), (cu_seqlens, _sequences(k, key_sums, cu_seqlens))
        if normalizer:
            d_values, d_products, d_sums = (torch.empty_like(x) for x in (values, products, key_sums))
            find_launch_of_chunks(
                differentiate_values, *call, values, q, d_output, eps=(eps,), value_dim=values.shape[3]
            )(values, q, *places, products, d_output, d_values, d_products, d_sums)
        else:
            d_values, d_products, d_sums = d_output.float(), torch.zeros_like(products), torch.zeros_like(key_sums)
        strength = torch.ones_like(k[..., 0])
        d_query, d_read, d_v, _, d_write, _, d_S = delta_rule_backward(
            q, read, strength, write, None, cu_seqlens, kept, d_values, d_memory, 1.0, reverse, half
        )
        d_alpha = unit_backward(alpha, d_write) if normalize_alpha else d_write
        d_solved, d_u, d_A = recursive_least_squares_backward(
            k if normalize_alpha else read, _directions(k, u), added, cu_seqlens, *found, d_alpha, d_inverse, reverse,
            _precision(d_output), [True, True, wanted[5]],
        )  # fmt: skip
        # The complete gradients: from n, the query, and both uses of the keys.
        d_q, d_k, d_z = empty_like(q), empty_like(k), _sums(k, cu_seqlens)
        find_launch_of_chunks(differentiate_keys, *call, q, k, UNIT=normalize_key, OF_KEY=normalize_alpha)(
            q, k, z, *places, key_sums, d_products, d_sums, d_last, d_query, d_read, d_solved, d_q, d_k, d_z
        )
    return d_q, d_k, d_v.to(d_output.dtype, copy=True), d_u, d_S, d_A, d_z


def _sequences(k: Tensor, sums: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    return sequence_of_slots(sums.shape[0], CHUNK, k.shape[1], cu_seqlens)


def _sums(k: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return k.new_empty((count_sequences(k.shape[0], cu_seqlens), *k.shape[2:]), dtype=torch.float32)


def variational_linear_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor | None, *, count: Tensor, lambda0: float, refresh_period: int | None,
    refresh: float, eps: float, normalize_key: bool, normalize_alpha: bool, normalizer: bool,
    initial_state: VariationalState | None, output_final_state: bool, cu_seqlens: Tensor | None, chunk_size: int,
    reverse: Reverse,
) -> tuple[Tensor, VariationalState | None]:  # fmt: skip
    """`variational_linear_attention` in Triton kernels.

    `chunk_size` is ignored: the tables of launches determine the length of chunks.
    """
    S, A, z, steps = (None,) * 4 if initial_state is None else initial_state
    cu_seqlens = borders_on(k.device, cu_seqlens)
    period = None if u is None else refresh_period
    added, final_steps = find_refreshes(count, steps, cu_seqlens, reverse, period, refresh)
    save = records_gradient(q, k, v, u, S, A, z)
    with without_autocast(k):
        o, *states, _ = variational_linear_attention(
            q, k, v, u, added, S, A, z, cu_seqlens, float(lambda0), number_of(reverse), float(eps),
            normalize_key, normalize_alpha, normalizer, save,
        )  # fmt: skip
    return o, (*states, final_steps) if output_final_state else None

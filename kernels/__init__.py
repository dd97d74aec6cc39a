"""Operators of the recurrent mixers. Needs torch only; imports nothing above itself.

Every operation, and its form for one token `<op>_step`, takes `backend`: "auto" runs the first backend without a reason
against it, a name runs that backend or raises ValueError with the reasons. `explain(op, device=...)` returns the
reasons that auto would judge by. `add_norm`, `head_features`, `map_features`, `silu_product` and `token_loss` stand
around them: they read each token alone, and have no state. `longhorn_pair` is all of a layer between its projections.
`convolved_features` has no step: it is `short_convolution` and `head_features`, which one token takes.

A `Packing`, made once from `cu_seqlens`, is taken wherever that is: what operations and layers derive from it is then
found once for a batch. `packed_attention` is softmax attention over such rows.

Rows of a batch, heads and packed sequences are apart: whatever one holds, inf and NaN included, changes no bit of the
results of another, nor of its gradients, but for those of parameters. Along time inf and NaN reach all that follows,
and what came before them in their chunk of `chunk_size` tokens (64 or 32 in the Triton kernels): a chunk's products
multiply later tokens by zero, which leaves NaN of them. A finite token reaches no earlier one in the torch forms.
Gradients of a sequence that holds inf or NaN can be NaN at all of its tokens.

LONGSEQ_CHECK_CU_SEQLENS=1 checks the values of `cu_seqlens` in every call, for which it waits for the GPU. Without it
the Triton kernels take them as they are: what lies outside of all segments is then never written.
"""

from longseq.kernels.add_norm import add_norm
from longseq.kernels.convolved_features import convolved_features
from longseq.kernels.cumulative_softmax import cumulative_softmax, cumulative_softmax_step
from longseq.kernels.delta_rule import delta_rule, delta_rule_step
from longseq.kernels.diagonal_scan import longhorn_scan, longhorn_scan_step, selective_scan, selective_scan_step
from longseq.kernels.dispatch import explain, list_ops
from longseq.kernels.head_features import head_features
from longseq.kernels.linear_attention import linear_attention, linear_attention_step
from longseq.kernels.longhorn_pair import longhorn_pair
from longseq.kernels.map_features import map_features
from longseq.kernels.orthogonal_recurrence import orthogonal_recurrence, orthogonal_recurrence_step
from longseq.kernels.packed_attention import packed_attention
from longseq.kernels.packing import Packing
from longseq.kernels.recursive_least_squares import recursive_least_squares, recursive_least_squares_step
from longseq.kernels.short_convolution import short_convolution, short_convolution_step
from longseq.kernels.silu_product import silu_product
from longseq.kernels.slot_attention import slot_attention, slot_attention_step
from longseq.kernels.token_loss import token_loss
from longseq.kernels.variational_linear_attention import (
    variational_linear_attention,
    variational_linear_attention_step,
)

__all__ = [
    "Packing",
    "add_norm",
    "convolved_features",
    "cumulative_softmax",
    "cumulative_softmax_step",
    "delta_rule",
    "delta_rule_step",
    "explain",
    "head_features",
    "linear_attention",
    "linear_attention_step",
    "list_ops",
    "longhorn_pair",
    "longhorn_scan",
    "longhorn_scan_step",
    "map_features",
    "orthogonal_recurrence",
    "orthogonal_recurrence_step",
    "packed_attention",
    "recursive_least_squares",
    "recursive_least_squares_step",
    "selective_scan",
    "selective_scan_step",
    "short_convolution",
    "short_convolution_step",
    "silu_product",
    "slot_attention",
    "slot_attention_step",
    "token_loss",
    "variational_linear_attention",
    "variational_linear_attention_step",
]

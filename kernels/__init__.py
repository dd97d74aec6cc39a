"""Operations of the recurrent mixers. The package needs only torch and imports nothing else of longseq.

Every operation, and its form for one token `<op>_step`, takes `backend`. "auto" runs the first backend that has no
reason against the call. A backend's name runs that backend, or raises ValueError with its reasons. `explain(op,
device=...)` returns the reasons by which "auto" chooses. `add_norm`, `head_features`, `log_decay`, `map_features`,
`silu_product` and `token_loss` compute each token by itself and have no state. `longhorn_pair` is a whole Longhorn
layer between its projections, read in both directions. `convolved_features` has no step: for one token use
`short_convolution_step` and `head_features`.

A `Packing`, made once from `cu_seqlens`, can be given in place of `cu_seqlens`. Operations and layers then derive
positions and groups from the borders once per batch. `packed_attention` is softmax attention over such packed
sequences.

Operations over time share these arguments. `cu_seqlens` [N + 1] holds 0 and the end of each of N packed sequences: the
batch is then 1, and states have N rows. With `reverse` sequences are read from their last token to their first: the
initial state is the one behind the last token, and the final state the one at the first token. With
reverse="second_half" the second half of the rows of the batch is read backward, and the first half forward.
`chunk_size` changes speed and memory but not the result. Arithmetic and states are float32, or float64 where an input
is float64; the output has the type of the values (v, or x).

Tensors that do not fit raise ValueError. So does a backend that is named and cannot run the call: the triton form of a
step, for example, has no gradient.

Rows of a batch, heads and packed sequences do not mix. The values of one, inf and NaN included, change no bit of the
results of another, nor of its gradients; only gradients of parameters are sums over all. Along time inf and NaN reach
all later tokens, and also the earlier tokens of their chunk of `chunk_size` tokens (64 or 32 in the Triton kernels): a
chunk's matrix products multiply later tokens by zero, and zero times inf or NaN is NaN. A finite token reaches no
earlier one in the torch forms. Gradients of a sequence that holds inf or NaN can be NaN at all of its tokens.

LONGSEQ_CHECK_CU_SEQLENS=1 checks the values of `cu_seqlens` in every call, which waits for the GPU. Without it the
Triton kernels do not check them, and leave the outputs of tokens outside of all segments unwritten.
"""

from longseq.kernels.add_norm import add_norm
from longseq.kernels.convolved_features import convolved_features
from longseq.kernels.cumulative_softmax import cumulative_softmax, cumulative_softmax_step
from longseq.kernels.delta_rule import delta_rule, delta_rule_step
from longseq.kernels.diagonal_scan import longhorn_scan, longhorn_scan_step, selective_scan, selective_scan_step
from longseq.kernels.dispatch import explain, list_ops
from longseq.kernels.head_features import head_features
from longseq.kernels.linear_attention import linear_attention, linear_attention_step
from longseq.kernels.log_decay import log_decay
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
from longseq.kernels.variational_linear_attention import variational_linear_attention, variational_linear_attention_step

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
    "log_decay",
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

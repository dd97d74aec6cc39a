"""One token of the cumulative softmax in one elementwise Triton kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import custom_op, results_like
from longseq.kernels.triton_launch import cdiv, find_launch, launch_options

BLOCK = 256
WARPS = 2


@triton.jit
def _log_of_one_and(x):
    """log(1 + x) for x in [0, 1], precise for small x, too: the series of 2 artanh(x / (2 + x))."""
    s = x / (2.0 + x)
    t = s * s
    series = 1.0 / 11.0 + t * (1.0 / 13.0 + t * (1.0 / 15.0))
    series = 1.0 / 5.0 + t * (1.0 / 7.0 + t * (1.0 / 9.0 + t * series))
    return 2.0 * s * (1.0 + t * (1.0 / 3.0 + t * series))


@triton.jit(do_not_specialize=["count"])
def _step(x, state, output, after, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(x + i, mask=i < count, other=0.0).to(tl.float32)
    before = tl.load(state + i, mask=i < count, other=0.0)
    lead = before - logit
    rest = _log_of_one_and(tl.exp(-tl.abs(lead)))
    tl.store(output + i, tl.where(lead < 0.0, lead, 0.0) - rest, mask=i < count)
    tl.store(after + i, tl.where(lead < 0.0, logit, before) + rest, mask=i < count)


@custom_op("cumulative_softmax_step", results_like(0, 1))
def cumulative_softmax_step_triton(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Returns g [B, H, M] in x's dtype and the next state [B, H, M] in float32."""
    x, state = x.contiguous(), state.contiguous()
    output, after = torch.empty_like(x), torch.empty_like(state)
    find_launch(_step, x.device, cdiv(x.numel(), BLOCK), (x.numel(),), BLOCK=BLOCK, **launch_options(WARPS))(
        x, state, output, after
    )
    return output, after

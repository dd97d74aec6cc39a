"""Operators of the recurrent mixers. Needs torch only; imports nothing above itself.

Every operation takes `backend`: "auto" runs the first backend without a reason against it, a name runs that backend or
raises ValueError with the reasons. `explain(op, device=...)` returns the reasons that auto would judge by.
"""

from longseq.kernels.delta_rule import delta_rule, delta_rule_step
from longseq.kernels.diagonal_scan import longhorn_scan, longhorn_scan_step, selective_scan, selective_scan_step
from longseq.kernels.dispatch import explain, list_ops
from longseq.kernels.linear_attention import linear_attention, linear_attention_step
from longseq.kernels.short_convolution import short_convolution, short_convolution_step

__all__ = [
    "delta_rule",
    "delta_rule_step",
    "explain",
    "linear_attention",
    "linear_attention_step",
    "list_ops",
    "longhorn_scan",
    "longhorn_scan_step",
    "selective_scan",
    "selective_scan_step",
    "short_convolution",
    "short_convolution_step",
]

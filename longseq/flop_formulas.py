"""torch's formulas for counting floating-point operations, with the one that torch 2.14 and before leave out."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import flop_registry


def complete_flop_formulas() -> None:
    """Let torch count scaled dot product attention on a processor, as it does on GPUs and from torch 2.15 on."""
    aten = torch.ops.aten
    known = flop_registry[aten._scaled_dot_product_flash_attention]
    flop_registry.setdefault(aten._scaled_dot_product_flash_attention_for_cpu, known)

"""Numbers that seed the parts of a run."""

from __future__ import annotations

import torch

_WORD = (1 << 64) - 1


def derive_seed(*numbers: int) -> int:
    """A number in [0, 2**63) that mixes all of `numbers`, in their order.

    Each number is added to the state, which then passes through the finalizer of SplitMix64 (Steele, Lea, Flood 2014).
    """
    state = 0
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + number) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of `device`, as `torch.manual_seed` does for all devices.

    Without a GPU, torch.manual_seed records each of its callers for a later GPU, which takes half a millisecond per
    step.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    elif device.type == "cuda":
        torch.default_generator.manual_seed(seed)
        torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)

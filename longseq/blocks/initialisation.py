"""Random numbers of a constructor that draws its weights twice."""

from __future__ import annotations

from collections.abc import Callable

import torch


def save_rng_state() -> Callable[[], None]:
    """Return a function that takes random numbers back: those drawn since, for parameters on the default device.

    A constructor calls it before it draws all weights of its parts again, so that a model drawn in place and one that
    was built on the meta device, where nothing is drawn, are the same from one seed.
    """
    cpu = torch.random.get_rng_state()
    device = torch.get_default_device()
    if device.type != "cuda":
        return lambda: torch.random.set_rng_state(cpu)
    cuda = torch.cuda.get_rng_state(device)

    def restore() -> None:
        torch.random.set_rng_state(cpu)
        torch.cuda.set_rng_state(cuda, device)

    return restore

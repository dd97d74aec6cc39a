"""Random numbers of a constructor that initialises its weights twice."""

from collections.abc import Callable

import torch


def save_rng_state() -> Callable[[], None]:
    """Return a function that restores the random state of the default device.

    A constructor that initialises all weights of its parts again uses it: one seed then gives the same model when it is
    built in place and on the meta device, where nothing is drawn.
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

"""How far a layer's outputs differ when the same sequences are read in other ways: `python benchmarks/states.py`.

It prints one row for each mixer: the largest difference from whole sequences, relative to the largest output; 0 is
bitwise equal. `--device cuda --dtype bfloat16` reads on a GPU under autocast.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from longseq import mixers
from longseq.mixers import Mixer, contract

TOKENS, PIECE, CUT = 192, 64, 50


def in_pieces(mixer: Mixer, x: Tensor, size: int) -> Tensor:
    """Read pieces of `size` tokens one after the other."""
    state, outputs = None, []
    for piece in x.split(size, 1):
        y, state = mixer(piece, state)
        outputs.append(y)
    return torch.cat(outputs, 1)


def packed(mixer: Mixer, x: Tensor) -> Tensor:
    """Read all rows end to end."""
    borders = torch.arange(len(x) + 1, device=x.device) * x.shape[1]
    return mixer(x.flatten(0, 1)[None], cu_seqlens=borders)[0].view_as(x)


def padded(mixer: Mixer, x: Tensor) -> Tensor:
    """Read with padding on the right."""
    longer = torch.cat((x, torch.randn_like(x[:, :PIECE])), 1)
    mask = (torch.arange(longer.shape[1], device=x.device) < x.shape[1]).expand(len(x), -1)
    return mixer(longer, mask=mask)[0][:, : x.shape[1]]


def in_steps(mixer: Mixer, x: Tensor) -> Tensor:
    """Read token by token."""
    state, outputs = mixer.initial_state(len(x), x.device, x.dtype), []
    for token in x.unbind(1):
        y, state = mixer.step(token, state)
        outputs.append(y)
    return torch.stack(outputs, 1)


WAYS: dict[str, Callable[[Mixer, Tensor], Tensor]] = {
    "alone": lambda mixer, x: torch.cat([mixer(row)[0] for row in x.split(1)]),
    "packed": packed,
    "padded": padded,
    f"pieces of {PIECE}": lambda mixer, x: in_pieces(mixer, x, PIECE),
    f"pieces of {CUT}": lambda mixer, x: in_pieces(mixer, x, CUT),
    "steps": in_steps,
}


@torch.no_grad()
def measure(name: str, device: str, dtype: torch.dtype) -> dict[str, float]:
    """The differences of a mixer, by way of reading."""
    mixer = contract.make(name, 64).float().to(device)
    x = contract.draw(mixer, 3, TOKENS).float().to(device)
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        whole = mixer(x)[0]
        return {way: ((read(mixer, x) - whole).abs().max() / whole.abs().max()).item() for way, read in WAYS.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    chosen = parser.parse_args()
    print("| `mixer=` | " + " | ".join(WAYS) + " |\n" + "|---" * (len(WAYS) + 1) + "|")
    for name in mixers.mixer_names():
        found = measure(name, chosen.device, getattr(torch, chosen.dtype)).values()
        print(f"| `{name}` | " + " | ".join("0" if each == 0 else f"{each:.0e}" for each in found) + " |")


if __name__ == "__main__":
    main()

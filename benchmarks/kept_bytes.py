"""Count the bytes that a layer keeps for its gradient, for each token and channel, and print them as a table.

python benchmarks/kept_bytes.py [--mixers deltanet ...] [--recompute none ...]

Nothing runs on a GPU: the operations allocate what their kernels would write, and autograd says which tensors it keeps.
Layers have 1,024 channels and a gated MLP, in autocast to bfloat16. The count is the difference between two lengths and
between two depths, so that parameters, the embedding and the head are no part of it.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longseq.backbones.tokens import TokenBackbone
from longseq.blocks.recompute import RECOMPUTE

MIXERS = ("deltanet", "gsa", "longhorn", "vla", "attention")
WIDTH = 1024
LENGTHS = (9216, 10240)  # of shorter sequences, or of fewer heads, the delta rule keeps other parts


def pretend_to_launch() -> None:
    """Let operations take tensors of the CPU as those of a GPU, and launch nothing."""
    import absent_gpu
    from compile import import_kernels
    from triton import knobs

    absent_gpu.activate()
    import_kernels()
    os.environ |= {"TRITON_INTERPRET": "1", "LONGSEQ_SELF_TEST": "0"}
    knobs.runtime.jit_cache_hook = lambda **launch: True  # another program handles the launch


class WithoutProducts(TorchDispatchMode):
    """Allocate the results of matrix products and do not compute them: they are most of the time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            left, right = args
            return left.new_empty(left.shape[0], right.shape[1])
        return func(*args, **(kwargs or {}))


def count_kept(mixer: str, recompute: str, tokens: int, depth: int, width: int) -> int:
    """The bytes that a forward pass keeps, without parameters; views of one tensor count once."""
    model = TokenBackbone(vocab_size=16, d_model=width, depth=depth, mixer=mixer, recompute=recompute)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with hooks, torch.autocast("cpu", torch.bfloat16), WithoutProducts():
        model.forward_features(torch.zeros(1, tokens, dtype=torch.long), output_final_state=False)
    return sum(storage.nbytes() for storage in kept.values())


def count(mixer: str, recompute: str, width: int = WIDTH) -> float:
    """The bytes of one layer for each token and channel."""
    of_layer = [
        count_kept(mixer, recompute, tokens, 2, width) - count_kept(mixer, recompute, tokens, 1, width)
        for tokens in LENGTHS
    ]
    return (of_layer[1] - of_layer[0]) / (LENGTHS[1] - LENGTHS[0]) / width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", nargs="+", default=MIXERS)
    parser.add_argument("--recompute", nargs="+", default=RECOMPUTE, choices=RECOMPUTE)
    options = parser.parse_args()
    mixers, kinds = options.mixers, options.recompute
    pretend_to_launch()
    lines = [["recompute", *mixers], ["---"] * (len(mixers) + 1)]
    lines += [[f"`{kind}`", *(f"{count(mixer, kind):.0f}" for mixer in mixers)] for kind in kinds]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))


if __name__ == "__main__":
    main()

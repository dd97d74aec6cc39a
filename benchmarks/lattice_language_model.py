"""Train a small language model of bytes with Lattice in chunks of 1, 4, 16 and 64; write lattice_language_model.json.

python benchmarks/lattice_language_model.py FOLDER [UPDATES]

FOLDER holds text files; every tenth one, by name, is for validation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from byte_text import bits_per_byte, read_text, train
from command import run_script
from torch import Tensor

from longseq.backbones.tokens import TokenBackbone
from longseq.mixers.lattice import Lattice
from longseq.parameters import count_parameters
from longseq.tools.benchmark.report import add_circumstances

HERE = Path(__file__).parent
CHUNK_SIZES = (1, 4, 16, 64)
TOKENS, BATCH, UPDATES = 256, 32, 1000
LEARNING_RATE = 2e-3


def build(mixer: str, options: dict[str, Any], device: torch.device) -> TokenBackbone:
    torch.manual_seed(0)
    model = TokenBackbone(vocab_size=256, d_model=256, depth=2, mixer=mixer, mixer_options=options)
    return model.to(device)


def measure(training: Tensor, validation: Tensor, device: torch.device, updates: int) -> list[dict[str, Any]]:
    """One row for each chunk size, and one for DeltaNet for comparison."""
    rows = []
    for mixer, chunk_size in [("deltanet", None), *(("lattice", size) for size in CHUNK_SIZES)]:
        model = build(mixer, {} if chunk_size is None else {"chunk_size": chunk_size}, device)
        _, seconds = train(
            model, training, device, updates=updates, tokens=TOKENS, batch=BATCH, learning_rate=LEARNING_RATE
        )
        row: dict[str, Any] = {
            "mixer": mixer,
            "chunk_size": chunk_size,
            "parameters_millions": round(count_parameters(model) / 1e6, 2),
            "validation_bits_per_byte": round(bits_per_byte(model, validation, TOKENS, BATCH, device), 3),
            "milliseconds_per_update": round(1000 * seconds / updates, 1),
        }
        if chunk_size is not None:
            for layer in (module for module in model.modules() if isinstance(module, Lattice)):
                layer.chunk_size = 1
            row["the_same_weights_read_exactly"] = round(bits_per_byte(model, validation, TOKENS, BATCH, device), 3)
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    updates = int(sys.argv[2]) if len(sys.argv) > 2 else UPDATES
    training, validation, files = read_text(sys.argv[1])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {
        "what": "Lattice: a language model of bytes, by chunk size",
        "command": f"python benchmarks/lattice_language_model.py FOLDER {updates}",
        "kind": "accuracy",
        "rows": add_circumstances(measure(training, validation, device, updates), device),
        "notes": [
            f"Two layers of width 256 in heads of 64, SwiGLU; {updates} updates of {BATCH} windows of {TOKENS} bytes, "
            f"of {files} texts with {len(training) / 1e6:.1f} MB for training and {len(validation) / 1e6:.1f} MB "
            "for validation; AdamW, one seed, float32, not compiled.",
        ],
    }
    (HERE / "lattice_language_model.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run_script(main, __doc__)

"""Train a small language model of bytes with Lattice in chunks of 1, 4, 16 and 64; write lattice_language_model.json.

python benchmarks/lattice_language_model.py FOLDER [UPDATES]

FOLDER holds text files; every tenth one, by name, is for validation.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longseq.backbones.text import TextBackbone
from longseq.mixers.lattice import Lattice
from longseq.parameters import count_parameters

HERE = Path(__file__).parent
CHUNK_SIZES = (1, 4, 16, 64)
TOKENS, BATCH, UPDATES = 256, 32, 1000
LEARNING_RATE, WARMUP = 2e-3, 100


def read_bytes(files: list[Path]) -> Tensor:
    """The files end to end, one number a byte."""
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, device: torch.device) -> Tensor:
    """Windows `[B, TOKENS + 1]` of the text."""
    return text[starts[:, None] + torch.arange(TOKENS + 1)].to(device, torch.long)


def bits_per_byte(model: TextBackbone, text: Tensor, device: torch.device) -> float:
    """The mean loss over 256 windows spread evenly over the text, each read from an empty state."""
    starts = torch.linspace(0, len(text) - TOKENS - 1, 256).long()
    with torch.no_grad():
        losses = [loss_of(model, windows(text, part, device)).item() for part in starts.split(BATCH)]
    return sum(losses) / len(losses) / math.log(2)


def loss_of(model: TextBackbone, window: Tensor) -> Tensor:
    logits, _ = model(window[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())


def train(model: TextBackbone, text: Tensor, device: torch.device, updates: int) -> float:
    """Train on random windows; returns the seconds it took."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
    warmup = min(WARMUP, updates // 4)

    def rate(step: int) -> float:
        progress = (step - warmup) / max(1, updates - warmup)
        return (step + 1) / warmup if step < warmup else 0.5 + 0.5 * math.cos(math.pi * progress)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    generator = torch.Generator().manual_seed(0)
    start = time.perf_counter()
    for _ in range(updates):
        starts = torch.randint(len(text) - TOKENS, (BATCH,), generator=generator)
        loss_of(model, windows(text, starts, device)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def build(mixer: str, options: dict[str, Any], device: torch.device) -> TextBackbone:
    torch.manual_seed(0)
    model = TextBackbone(vocab_size=256, d_model=256, depth=2, mixer=mixer, mixer_options=options)
    return model.to(device)


def measure(training: Tensor, validation: Tensor, device: torch.device, updates: int) -> list[dict[str, Any]]:
    """One row for each chunk size, and one for DeltaNet beside them."""
    rows = []
    for mixer, chunk_size in [("deltanet", None), *(("lattice", size) for size in CHUNK_SIZES)]:
        model = build(mixer, {} if chunk_size is None else {"chunk_size": chunk_size}, device)
        seconds = train(model, training, device, updates)
        row: dict[str, Any] = {
            "mixer": mixer,
            "chunk_size": chunk_size,
            "parameters_millions": round(count_parameters(model) / 1e6, 2),
            "validation_bits_per_byte": round(bits_per_byte(model, validation, device), 3),
            "milliseconds_per_update": round(1000 * seconds / updates, 1),
        }
        if chunk_size is not None:
            for layer in (module for module in model.modules() if isinstance(module, Lattice)):
                layer.chunk_size = 1
            row["the_same_weights_read_exactly"] = round(bits_per_byte(model, validation, device), 3)
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    files = sorted(Path(sys.argv[1]).rglob("*.txt"))
    if len(files) < 10:
        sys.exit(f"{sys.argv[1]} holds {len(files)} .txt files, and at least 10 are needed")
    updates = int(sys.argv[2]) if len(sys.argv) > 2 else UPDATES
    training = read_bytes([path for index, path in enumerate(files) if index % 10])
    validation = read_bytes(files[::10])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {
        "what": "Lattice: a language model of bytes, by chunk size",
        "command": f"python benchmarks/lattice_language_model.py FOLDER {updates}",
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"processor, {platform.machine()}",
        "versions": {"torch": torch.__version__.split("+")[0]},
        "rows": measure(training, validation, device, updates),
        "notes": [
            f"Two layers of width 256 in heads of 64, SwiGLU; {updates} updates of {BATCH} windows of {TOKENS} bytes, "
            f"of {len(files)} texts with {len(training) / 1e6:.1f} MB for training and {len(validation) / 1e6:.1f} MB "
            "for validation; AdamW, one seed, float32, not compiled.",
        ],
    }
    (HERE / "lattice_language_model.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

"""Small language models of bytes: the text, its batches, the training."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

WARMUP = 100


def read_text(folder: str) -> Tensor:
    """The bytes of the .txt files below a folder; every tenth file, by name, is left out."""
    files = sorted(Path(folder).rglob("*.txt"))
    if len(files) < 10:
        sys.exit(f"{folder} holds {len(files)} .txt files, and at least 10 are needed")
    content = b"\n".join(path.read_bytes() for index, path in enumerate(files) if index % 10)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, tokens: int, device: torch.device) -> Tensor:
    """Windows `[B, tokens + 1]` of the text, which begin at `starts`."""
    return text[starts[:, None] + torch.arange(tokens + 1)].to(device, torch.long)


def loss_of(model: nn.Module, window: Tensor) -> Tensor:
    logits, _ = model(window[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())


def train(
    model: nn.Module,
    text: Tensor,
    device: torch.device,
    *,
    updates: int,
    tokens: int,
    batch: int,
    learning_rate: float,
    bfloat16: bool = False,
) -> list[float]:
    """Train on random windows, the same in every call; returns the loss of each update."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
    warmup = min(WARMUP, updates // 4)

    def rate(step: int) -> float:
        progress = (step - warmup) / max(1, updates - warmup)
        return (step + 1) / warmup if step < warmup else 0.5 + 0.5 * math.cos(math.pi * progress)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(updates):
        starts = torch.randint(len(text) - tokens, (batch,), generator=generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            loss = loss_of(model, windows(text, starts, tokens, device))
        loss.backward()
        losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return torch.stack(losses).tolist()

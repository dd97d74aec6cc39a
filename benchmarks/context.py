"""What language models make of their context:

python benchmarks/context.py TOKENS OUTPUT.json MODEL ... [--documents 100]

TOKENS is a folder of `longseq prepare` with the tokenizer of the models. MODEL is a checkpoint or a folder of `longseq
convert`. Models read the longest test documents, up to 32,768 tokens of each. To let attention that was trained on
2,048 tokens read more, stretch its angles or give it a window:

longseq convert source=CHECKPOINT output=FOLDER mixer=attention \\
    'mixer.options.rotary_scaling={rope_type: yarn, factor: 16.0, original_max_position_embeddings: 2048}'
longseq convert source=CHECKPOINT output=FOLDER mixer=window_attention mixer.options.window=2048

Loss in nats a token, with its standard error over the documents:

by position    of the tokens P/2 to P of a document
by context     of the tokens 2,048 to 8,192, read with all tokens before them, or only with the last N to 2 N - 1
by repetition  of tokens whose pair with the one before has occurred in the document, by the distance, and of others
in steps       of the first 256 tokens, read one by one; at once is the same read as a whole; no document is shorter

Figures of tokens that no document has are left out.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from report import find_device
from torch import Tensor
from torch.nn import functional

import longseq
from longseq.backbones.tokens import TokenBackbone
from longseq.tasks.circumstances import find_circumstances
from longseq.tasks.text.store import open_store

LONGEST = 32_768
FIRST, LAST = 2_048, 8_192  # the tokens that are read with less context
CONTEXTS = (64, 256, 1_024)
DISTANCES = (64, 256, 1_024, 4_096, LONGEST)
STEPS = 256
ROWS = 16_384  # tokens that are read at a time in short windows


def longest_documents(folder: str, count: int) -> list[Tensor]:
    """The tokens of the longest test documents, each with its separator in front."""
    corpus = open_store(folder).splits["test"]
    lengths = corpus.offsets[1:] - corpus.offsets[:-1]
    chosen = sorted(lengths.argsort()[::-1][:count])
    starts = [int(corpus.offsets[number]) for number in chosen]
    sizes = [min(int(lengths[number]), LONGEST + 1) for number in chosen]
    pieces = (corpus.tokens[start : start + size] for start, size in zip(starts, sizes, strict=True))
    return [torch.from_numpy(piece.astype("int64")) for piece in pieces]


def losses_of(model: TokenBackbone, tokens: Tensor) -> Tensor:
    """The loss `[B, T]` of each next token of `tokens [B, T + 1]`."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits, _ = model(tokens[:, :-1], output_final_state=False)
    return functional.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")


def losses_in_steps(model: TokenBackbone, tokens: Tensor) -> Tensor:
    """As `losses_of`, read token by token."""
    state, losses = model.initial_state(len(tokens), tokens.device, torch.float32), []
    for token, target in pairwise(tokens.unbind(1)):
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits, state = model.step(token, state)
        losses.append(functional.cross_entropy(logits.float(), target, reduction="none"))
    return torch.stack(losses, 1)


def with_context(model: TokenBackbone, tokens: Tensor, context: int) -> Tensor:
    """The losses of the tokens from FIRST on, read in windows that begin `context` to 2 `context` - 1 tokens before."""
    last = min(LAST, len(tokens) - 1) // context * context
    windows = tokens[FIRST - context : last + 1].unfold(0, 2 * context + 1, context)
    parts = [losses_of(model, part)[:, context:] for part in windows.split(max(1, ROWS // context))]
    return torch.cat(parts).flatten()


def distances(tokens: list[int]) -> Tensor:
    """For each token but the first, how far back its pair with the one before has occurred last; 0 if never."""
    seen: dict[tuple[int, int], int] = {}
    found = []
    for place, pair in enumerate(pairwise(tokens)):
        found.append(place - seen.get(pair, place))
        seen[pair] = place
    return torch.tensor(found)


def figures(model: TokenBackbone, tokens: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The losses of a document's tokens `[T + 1]` that belong to each figure."""
    whole = losses_of(model, tokens[None])[0]
    end = 64
    while end <= len(whole):
        yield f"position {end}", whole[end // 2 : end]
        end *= 2
    if len(whole) >= 2 * FIRST:
        last = min(LAST, len(whole)) // max(CONTEXTS) * max(CONTEXTS)
        yield "context all", whole[FIRST:last]
        for context in CONTEXTS:
            yield f"context {context}", with_context(model, tokens[: last + 1], context)
    far, nearest = distances(tokens.tolist()).to(whole.device), 0
    yield "pair is new", whole[far == 0]
    for distance in DISTANCES:
        yield f"pair within {distance}", whole[(far > nearest) & (far <= distance)]
        nearest = distance


@torch.no_grad()
def measure(checkpoint: str, documents: list[Tensor], device: torch.device) -> dict[str, Any]:
    """A row: each figure with its standard error."""
    model = longseq.from_pretrained(checkpoint, device=device)
    sums: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for document in documents:
        for name, losses in figures(model, document.to(device)):
            if losses.numel():
                sums[name].append((losses.sum().item(), losses.numel()))
    starts = torch.stack([document[: STEPS + 1] for document in documents]).to(device)
    for name, read in (("at once", losses_of), ("in steps", losses_in_steps)):
        sums[name] = [(losses.sum().item(), STEPS) for losses in read(model, starts)]
    row: dict[str, Any] = {"checkpoint": checkpoint}
    for name, parts in sums.items():
        count = sum(size for _, size in parts)
        mean = sum(total for total, _ in parts) / count
        error = sum((total - mean * size) ** 2 for total, size in parts) ** 0.5 / count
        row[name] = {"loss": round(mean, 5), "error": round(error, 5), "tokens": count}
    return {**row, "measured": find_circumstances(device)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", help="a folder of `longseq prepare`")
    parser.add_argument("output", type=Path)
    parser.add_argument("checkpoints", nargs="+", metavar="checkpoint")
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--device", type=find_device, default="auto")
    options = parser.parse_args()
    documents = longest_documents(options.tokens, options.documents)
    rows = []
    for checkpoint in options.checkpoints:
        rows.append(measure(checkpoint, documents, options.device))
        options.output.write_text(json.dumps({"rows": rows}, indent=2) + "\n", encoding="utf-8")
        print(checkpoint, {name: value["loss"] for name, value in rows[-1].items() if "loss" in value}, flush=True)


if __name__ == "__main__":
    main()

"""Measure the GPU memory of a language model that writes a long text, and write generation_memory.json.

python benchmarks/generation_memory.py OUTPUT.json MIXER ...

A model of 24 layers of width 1024 with random weights writes 100,000 tokens after a prompt of 512, one text, drawn with
top_p=0.95, with its step and its sampler in a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from report import add_circumstances

from longseq.backbones.generation import Continuation
from longseq.backbones.sampling import Sampling, TokenSampler
from longseq.backbones.tokens import TokenBackbone
from longseq.parameters import count_parameters
from longseq.tasks.lm.writer import draw_tokens

VOCABULARY = 32_000
PROMPT = 512
LENGTHS = (1_000, 10_000, 100_000)


@torch.inference_mode()
def measure(mixer: str) -> dict[str, Any]:
    device = torch.device("cuda")
    torch.manual_seed(0)
    with device:
        model = TokenBackbone(vocab_size=VOCABULARY, d_model=1024, depth=24, mixer=mixer)
    model.to(torch.bfloat16).eval()
    prompt = torch.randint(VOCABULARY, (1, PROMPT), device=device)
    features, state = model.forward_features(prompt)
    assert state is not None
    logits = model.forward_head(features[:, -1])
    seen = torch.zeros(1, VOCABULARY, dtype=torch.bool, device=device)
    sampler = TokenSampler(Sampling(top_p=0.95), torch.zeros(1, dtype=torch.long, device=device), seen=seen)
    writing = Continuation(model, state, logits, sampler, cuda_graph=True)
    row: dict[str, Any] = {"mixer": mixer, "parameters": count_parameters(model)}
    for _ in draw_tokens(writing, 10):  # records the graph
        pass
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    started, written = time.perf_counter(), 0
    for length in LENGTHS:
        for _ in draw_tokens(writing, length - written):
            pass
        torch.cuda.synchronize()
        written = length
        row[f"gib_after_{length}"] = round(torch.cuda.max_memory_allocated() / 2**30, 4)
        row[f"tokens_per_s_to_{length}"] = round(length / (time.perf_counter() - started), 1)
    sampler.check()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("mixers", nargs="+")
    options = parser.parse_args()
    rows = []
    for mixer in options.mixers:
        rows.append(measure(mixer))
        print(rows[-1], flush=True)
        torch.cuda.empty_cache()
        write(rows, options.output)  # after every row: a mixer that is cut off loses no other row


def write(rows: list[dict[str, Any]], file: Path) -> None:
    result = {
        "what": "Memory of a language model that writes 100,000 tokens",
        "command": f"python benchmarks/generation_memory.py OUTPUT.json {' '.join(row['mixer'] for row in rows)}",
        "kind": "speed",
        "rows": add_circumstances(rows, torch.device("cuda")),
        "notes": [
            "GiB: the most that tensors took since the graph was recorded, bfloat16 weights included, up to a token."
        ],
    }
    file.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

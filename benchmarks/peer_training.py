"""Train a language model of another library on the windows of ours, with a loop of its own:

python benchmarks/peer_training.py PEER OUTPUT.json [OVERRIDE ...]

PEER is llama or mamba2 (transformers), or deltanet (flash-linear-attention). The overrides are those of our run beside
it: data, window, width, depth, MLP and recipe are the same. No peer resets its state where a document begins, hence
data.reset_state=false. Of ours this uses the batches alone. The initial weights are saved in a folder beside
OUTPUT.json, so that our run begins with the same.

    python benchmarks/peer_training.py llama llama.json experiment=lm/text data.root=FOLDER data.reset_state=false
    longseq convert source=llama output=start
    longseq train init=start experiment=lm/text data.root=FOLDER data.reset_state=false
"""

from __future__ import annotations

import importlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from torch import Tensor, nn
from torch.nn import functional

from longseq.backbones.tokens import mlp_width
from longseq.tasks.circumstances import find_circumstances
from longseq.tasks.lm.data import LanguageModelData
from longseq.tasks.training.configuration import resolve
from longseq.tokenizer_files import TOKENIZER_FILE

LIBRARIES = {"llama": "transformers", "mamba2": "transformers", "deltanet": "fla.models"}


def make_peer(name: str, width: int, depth: int, mlp: int, vocabulary: int) -> nn.Module:
    """A model with our sizes of heads and tied embeddings; mamba2 has no MLPs."""
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "vocab_size": vocabulary, "tie_word_embeddings": True}
    own: dict[str, dict[str, Any]] = {
        "llama": {"intermediate_size": mlp, "num_attention_heads": width // 64, "max_position_embeddings": 32768},
        "mamba2": {"num_heads": width // 32, "head_dim": 64, "n_groups": 1},
        "deltanet": {"intermediate_size": mlp, "num_heads": width // 128, "fuse_cross_entropy": False},
    }
    kind = {"llama": "Llama", "mamba2": "Mamba2", "deltanet": "DeltaNet"}[name]
    library = importlib.import_module(LIBRARIES[name])
    return getattr(library, f"{kind}ForCausalLM")(getattr(library, f"{kind}Config")(**sizes, **own[name]))


def batches(data: LanguageModelData) -> Iterator[Any]:
    """The batches of training, epoch after epoch."""
    loader = data.train_dataloader()
    for epoch in count():
        loader.sampler.set_epoch(epoch)
        yield from loader


def learning_rate(update: int, recipe: Mapping[str, Any]) -> float:
    """A linear warm-up, and a cosine over the whole run."""
    schedule, highest = recipe["schedule"], recipe["learning_rate"]
    if update < schedule["warmup_updates"]:
        return highest * update / schedule["warmup_updates"]
    least = schedule["min_lr"]
    return least + (highest - least) * (1 + math.cos(math.pi * update / recipe["updates"])) / 2


def train(config: Mapping[str, Any], model: nn.Module, data: LanguageModelData, device: torch.device) -> None:
    recipe = config["recipe"]
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    decay, betas = recipe["optimizer"]["weight_decay"], recipe["optimizer"]["betas"]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=betas, fused=device.type == "cuda")
    for update, (inputs, targets) in enumerate(islice(batches(data), recipe["updates"])):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(update, recipe)
        loss = token_losses(model, inputs.tokens.to(device), targets.to(device)).sum() / inputs.units
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe["gradient_clip"])
        optimizer.step()
        optimizer.zero_grad()
        if update % 250 == 0:
            print(f"update {update}: loss {loss.item():.3f}", flush=True)


def token_losses(model: Callable[..., Any], tokens: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(input_ids=tokens, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")


@torch.no_grad()
def evaluate(model: nn.Module, data: LanguageModelData, device: torch.device) -> dict[str, float]:
    loss, units, size = 0.0, 0, 0.0
    for inputs, targets in data.test_dataloader():
        loss += token_losses(model.eval(), inputs.tokens.to(device), targets.to(device)).sum().item()
        units, size = units + inputs.units, size + inputs.byte_count
    return {"test_loss": loss / units, "test_bits_per_byte": loss / math.log(2) / size}


def main() -> None:
    name, output, *words = sys.argv[1:]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with initialize_config_module("longseq.conf", version_base="1.3"):
        config = resolve(compose("train", [*words, "output=unused"]))
    torch.manual_seed(config["seed"])
    data = LanguageModelData.from_config(config, config["recipe"]["batch_size"])
    sizes = config["model"]
    mlp = mlp_width(sizes["d_model"], sizes["mlp_ratio"])
    model = make_peer(name, sizes["d_model"], sizes["depth"], mlp, data.info.vocab_size).to(device)
    start = Path(output).with_suffix("")
    model.save_pretrained(start)
    shutil.copy(Path(config["data"]["root"], TOKENIZER_FILE), start)
    begin = time.perf_counter()
    train(config, model, data, device)
    row = {"peer": name, "parameters": sum(p.numel() for p in model.parameters()), **evaluate(model, data, device)}
    row |= {"seconds": round(time.perf_counter() - begin), "words": words, "measured": find_circumstances(device)}
    Path(output).write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(row))


if __name__ == "__main__":
    main()

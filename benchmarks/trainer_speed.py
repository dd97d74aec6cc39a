"""Compare the speed of `longseq train` with that of the same updates in a plain loop, a row of trainer_speed.json.

python benchmarks/trainer_speed.py OUTPUT.json NAME UPDATES key=value ...

The overrides are those of `longseq train`. It trains UPDATES updates, without a result that counts. Then it times a
loop over batches of the same run, which lie on the device: forward, backward and optimizer, and nothing else, in the
same process. The row NAME of OUTPUT.json is added or replaced. Needs a GPU.

Packed documents are also timed padded: in the plain loop, the documents of each batch stand in a row each, as long as
the longest of them. `padded_slowdown` is the time of such an update, divided by that of the packed one.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from command import run_script
from hydra import compose, initialize_config_module
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from longseq.parameters import count_parameters
from longseq.tasks import train
from longseq.tasks.data.units import count_tokens, count_units
from longseq.tasks.training.runs import METRICS_FILE
from longseq.tools.benchmark.report import add_circumstances

WINDOW = 25  # updates; the first window, with its compilations, is not counted
BATCHES = 16  # different ones in the plain loop
SHORT = ("+trainer.limit_val_batches=1", "+trainer.limit_test_batches=1", "logger=csv", "callbacks.samples=null")


def find_config(words: list[str], updates: int, folder: str) -> Any:
    length = [f"recipe.updates={updates}", f"trainer.log_every_n_steps={WINDOW}", f"output={folder}"]
    with initialize_config_module("longseq.conf", version_base="1.3"):
        return compose("train", [*words, *SHORT, *length])


def loss_of(module: Any, batch: Any) -> Tensor:
    """The mean loss of a batch of language or of documents, as the task computes it."""
    inputs, targets = batch
    if hasattr(module.backbone, "summed_loss"):
        return module.backbone.summed_loss(module(inputs), targets).objective / inputs.units
    real = inputs.numbers >= 0
    return functional.cross_entropy(module(inputs)[real].float(), targets[real])


def pad_to_longest(batch: Any) -> Any:
    """The documents of a packed batch, each in a row as long as the longest of them."""
    inputs, targets = batch
    real = inputs.numbers >= 0
    lengths, numbers = inputs.lengths[real], inputs.numbers[real]
    # Documents come first in the row, and padding after them.
    rows = pad_sequence(
        inputs.tokens[0].split([*lengths.tolist(), inputs.tokens.shape[1] - int(lengths.sum())])[:-1], True
    )
    mask = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
    padded = inputs._replace(
        tokens=rows,
        cu_seqlens=None,
        mask=mask,
        max_seqlen=rows.shape[1],
        lengths=lengths,
        whole_lengths=inputs.whole_lengths[real],
        numbers=numbers,
    )
    return padded, targets[real]


def time_loop(config: Any, updates: int, device: torch.device) -> dict[str, float]:
    """Parameters and GiB of the plain loop, units and tokens a second; of packed documents also padded ones."""
    parts = train.build(config)
    module = parts.module.to(device).train()
    recipe = module.recipe
    fused = {"fused": True} if "create_optimizer_v2" in str(getattr(recipe.optimizer, "func", "")) else {}
    optimizer = recipe.optimizer(module.backbone, lr=recipe.learning_rate, **fused)
    parts.datamodule.setup("fit")
    batches = [
        move_data_to_device(batch, device) for batch in itertools.islice(parts.datamodule.train_dataloader(), BATCHES)
    ]

    def update(batch: Any) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(module, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def time_updates(batches: list[Any]) -> tuple[float, float]:
        """Seconds of the updates, and the peak of memory in GiB."""
        for batch in batches[:WINDOW]:
            update(batch)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        for number in range(updates):
            update(batches[number % len(batches)])
        torch.cuda.synchronize()
        return time.perf_counter() - started, torch.cuda.max_memory_allocated() / 2**30

    seconds, gib = time_updates(batches)
    chosen = [batches[number % len(batches)] for number in range(updates)]
    figures = {
        "parameters": count_parameters(module.backbone),
        "loop_units_per_second": round(sum(map(count_units, chosen)) / seconds, 1),
        "loop_tokens_per_second": round(
            sum(count_tokens(batch) or count_units(batch) for batch in chosen) / seconds, 1
        ),
        "loop_gib": round(gib, 2),
    }
    if config.task.name == "document" and batches[0][0].cu_seqlens is not None:
        slow, gib = time_updates([pad_to_longest(batch) for batch in batches])
        figures |= {
            "padded_loop_tokens_per_second": round(sum(count_tokens(batch) or 0 for batch in chosen) / slow, 1),  # real
            "padded_loop_gib": round(gib, 2),
            "padded_slowdown": round(slow / seconds, 3),
        }
    return figures


def measure(words: list[str], updates: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        config = find_config(words, updates, f"{folder}/run")
        train.run(config)
        metrics = json.loads(Path(folder, "run", METRICS_FILE).read_text(encoding="utf-8"))
        gc.collect()
        torch.cuda.empty_cache()
        loop = time_loop(config, max(updates - WINDOW, WINDOW), torch.device("cuda"))
    row = {
        "unit": config.task.unit,
        "parameters": loop["parameters"],
        "trainer_tokens_per_second": metrics["tokens_per_second"],
        "loop_tokens_per_second": loop["loop_tokens_per_second"],
        "share": round(metrics["tokens_per_second"] / loop["loop_tokens_per_second"], 3),
        "data_wait_ms": metrics["data_wait_ms"],
        "trainer_gib": metrics["gpu_memory_gib"],
        "loop_gib": loop["loop_gib"],
        **{name: value for name, value in loop.items() if name.startswith("padded_")},
    }
    if config.task.unit != "tokens":
        row["trainer_units_per_second"] = metrics[f"{config.task.unit}_per_second"]
        row["loop_units_per_second"] = loop["loop_units_per_second"]
    return row


def main() -> None:
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    file, name, updates, words = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    row = {"run": name, **measure(words, updates), "overrides": " ".join(words)}
    print(row, flush=True)
    kept = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else []
    (measured,) = add_circumstances([row], torch.device("cuda"))
    result = {
        "what": "The trainer beside a plain loop",
        "command": "python benchmarks/trainer_speed.py OUTPUT.json NAME UPDATES OVERRIDES",
        "kind": "speed",
        "rows": [*(one for one in kept if one["run"] != name), measured],
        "notes": [
            "The loop: forward, backward and optimizer on batches of the same run that lie on the device, in the same "
            "process, after the training; no gradient clipping, no schedule, no logs, no loading. share: the trainer's "
            "tokens per second, divided by those of the loop. Tokens are real ones: padding does not count. "
            "padded_slowdown: the loop's time for the same documents, padded to the longest of each batch, divided by "
            "that of packed ones."
        ],
    }
    file.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_script(main, __doc__, gpu="times training")

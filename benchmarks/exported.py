"""Compare a checkpoint with its exported files: every format, and every set of operators and precision of ONNX.

python benchmarks/exported.py CHECKPOINT [EXPORT_KEY=VALUE ...]

Each row is measured in a process of its own on the CPU: the idle threads of onnxruntime slow down other programs. On a
busy machine, set OMP_NUM_THREADS=1. A language model is timed on one token, other models on whole samples.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from measure import one_line, time_in_turn
from report import add_common_arguments, make_result, to_markdown, write_result

from longseq.tasks import evaluate, registry
from longseq.tasks.training.checkpoint import Loaded, load
from longseq.tools import export
from longseq.tools.export.parity import probe_images, probe_tokens

VARIANTS = {
    "onnx": ("file.onnx",),
    "onnx, operators=onnxruntime": ("file.onnx", "operators=onnxruntime"),
    "onnx, operators=opset27": ("file.onnx", "operators=opset27"),
    "onnx, precision=float16": ("file.onnx", "precision=float16"),
    "onnx, precision=int8": ("file.onnx", "precision=int8"),
    "onnx, operators=onnxruntime precision=int8": ("file.onnx", "operators=onnxruntime", "precision=int8"),
    "torchscript": ("file.pt",),
    "pt2": ("file.pt2",),
}
BATCHES = (1, 32)
TOKENS = 64  # of a compared text; a document has as many as the training's window, or these
NOTES = (
    "`difference`: the largest one between the logits of the file and of the checkpoint, for noise, smooth and "
    "constant images, or random, repeated and equal tokens. `ms of 1`: the median time of a batch of one.",
)


def probe(loaded: Loaded, batch: int) -> torch.Tensor:
    """A batch that every model of the task reads: images, or tokens."""
    data = loaded.data
    if "img_size" in data:
        size = data["img_size"]
        height, width = (size, size) if isinstance(size, int) else size
        return probe_images(batch, data["in_chans"], height, width, pixels=False)
    return probe_tokens(batch, min(data["window"], TOKENS), data["vocab_size"])


def call(run: Callable[[Any], Any], verb: str, *words: str) -> Any:
    """Run a verb of `longseq` in this process."""
    with initialize_config_module("longseq.conf", version_base="1.3"):
        return run(compose(verb, list(words)))


def measure(keys: argparse.Namespace) -> dict[str, Any]:
    """The figures of a checkpoint or a file; its logits are saved."""
    start = time.perf_counter()
    loaded = load(keys.checkpoint, tasks=registry.names())
    row: dict[str, Any] = {"load_s": round(time.perf_counter() - start, 2)}
    model: Any = loaded.backbone
    steps = hasattr(model, "step")
    with torch.inference_mode():
        batch = probe(loaded, 3)
        torch.save(model.forward_head(model.forward_features(batch)[0]) if steps else model(batch), keys.outputs)
        for size in BATCHES:
            batch = probe(loaded, size)
            read = partial(model, batch)
            if steps:
                read = partial(model.step, batch[:, 0], model.preallocate(model.initial_state(size), 2))
            times = time_in_turn({"": read}, torch.device("cpu"), keys.seconds)[""].times
            row[f"ms_of_{size}"] = None if times is None else round(times.median, 3)
    if keys.metric is not None:
        output = f"output={keys.outputs}.json"
        metrics = call(evaluate.run, "evaluate", f"checkpoint={keys.checkpoint}", "trainer=cpu", output)
        row[keys.metric] = round(metrics[keys.metric], 6)
    return row


def measure_apart(file: Path, outputs: Path, keys: argparse.Namespace) -> dict[str, Any]:
    """`measure` in another process. RuntimeError with the last line of its errors."""
    words = [str(file), f"--outputs={outputs}", f"--seconds={keys.seconds}"]
    words += [] if keys.metric is None else [f"--metric={keys.metric}"]
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"mib": size_of(file), **row}


def size_of(path: Path) -> float:
    """MiB of a folder, or of a file and the weights next to it."""
    files = path.iterdir() if path.is_dir() else [path, path.with_name(f"{path.name}.data")]
    return round(sum(file.stat().st_size for file in files if file.is_file()) / 2**20, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("export", nargs="*", help="keys of `longseq export`, such as dynamic_length=true")
    parser.add_argument("--metric", help="such as test/top1, measured by `longseq evaluate`; left out: none")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--outputs", type=Path, help=argparse.SUPPRESS)
    add_common_arguments(parser, seconds=2, output="exported.json")
    keys = parser.parse_args()
    if keys.outputs is not None:
        print(json.dumps(measure(keys)))
        return
    with tempfile.TemporaryDirectory() as made:
        outputs = Path(made, "outputs")
        rows = [{"variant": "checkpoint", **measure_apart(keys.checkpoint, outputs, keys)}]
        wanted = torch.load(outputs)
        for name in keys.variants:
            file, *words = VARIANTS[name]
            path, row = Path(made, file), {"variant": name}
            words += [f"checkpoint={keys.checkpoint}", f"output={path}", "latency=false", *keys.export]
            try:
                call(export.run, "export", *words)
                row |= measure_apart(path, outputs, keys)
                row["difference"] = f"{(torch.load(outputs) - wanted).abs().max():.1e}"
            except Exception as error:
                row["failure"] = one_line(error)
            rows.append(row)
            result = make_result(f"Exported files of {keys.checkpoint.name}", rows, torch.device("cpu"), NOTES)
            write_result(result, keys.output)
    print(to_markdown(result))


if __name__ == "__main__":
    main()

"""Compare a checkpoint with its exported files: every format, and every set of operators and precision of ONNX.

python benchmarks/exported.py CHECKPOINT [EXPORT_KEY=VALUE ...]

Each row is measured in a process of its own on the CPU: the idle threads of onnxruntime slow down other programs. On a
busy machine, set OMP_NUM_THREADS=1. A language model is timed on one token, other models on whole samples. The plot
goes next to the rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from matplotlib.figure import Figure
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
    "executorch": ("file.pte",),
    "openvino": ("file.xml",),
}
ENGINES = ("onnxruntime", "executorch", "openvino")
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
    if keys.checkpoint.suffix == ".pte":  # onnxruntime has torch's number of threads, OpenVINO its own
        from executorch.extension.pybindings import portable_lib

        portable_lib._unsafe_reset_threadpool(torch.get_num_threads())
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
    return json.loads(done.stdout.splitlines()[-1])


def size_of(path: Path) -> int:
    """The bytes of a file, or of the files in a folder."""
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file())


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Bars of size, start and latency for each variant that was measured."""
    rows = [row for row in reversed(rows) if "failure" not in row]
    titles = {"mib": "MiB", "load_s": "seconds to load", **{f"ms_of_{size}": f"ms of {size}" for size in BATCHES}}
    figure = Figure(figsize=(11, 1 + 0.28 * len(rows)), layout="constrained")
    for axes, (column, title) in zip(figure.subplots(1, len(titles), sharey=True), titles.items(), strict=True):
        bars = axes.barh([row["variant"] for row in rows], [row[column] for row in rows])
        axes.bar_label(bars, padding=2, fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.35)
        axes.set_xticks([])
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("export", nargs="*", help="keys of `longseq export`, such as dynamic_length=true")
    parser.add_argument("--metric", help="such as test/top1, measured by `longseq evaluate`; left out: none")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--title", default="a checkpoint", help="of the table: what the checkpoint is")
    parser.add_argument("--outputs", type=Path, help=argparse.SUPPRESS)
    add_common_arguments(parser, seconds=2, output="exported.json")
    keys = parser.parse_args()
    if keys.outputs is not None:
        print(json.dumps(measure(keys)))
        return
    versions = ", ".join(f"{name} {version(name)}" for name in ENGINES if find_spec(name)) + "."
    with tempfile.TemporaryDirectory() as made:
        outputs = Path(made, "outputs")
        found = measure_apart(keys.checkpoint, outputs, keys)
        rows = [{"variant": "checkpoint", "mib": round(size_of(keys.checkpoint) / 2**20, 2), **found}]
        wanted = torch.load(outputs)
        for name in keys.variants:
            file, *words = VARIANTS[name]
            path, row = Path(made, file), {"variant": name}
            words += [f"checkpoint={keys.checkpoint}", f"output={path}", "latency=false", *keys.export]
            try:
                row["mib"] = round(call(export.run, "export", *words).size / 2**20, 2)
                row |= measure_apart(path, outputs, keys)
                row["difference"] = f"{(torch.load(outputs) - wanted).abs().max():.1e}"
            except Exception as error:
                row["failure"] = one_line(error)
            rows.append(row)
            notes = (f"The plot: {keys.output.stem}.png.", *NOTES, versions)
            result = make_result(f"Exported files of {keys.title}", rows, torch.device("cpu"), notes)
            write_result(result, keys.output)
    draw(rows).savefig(keys.output.with_suffix(".png"), dpi=100)
    print(to_markdown(result))


if __name__ == "__main__":
    main()

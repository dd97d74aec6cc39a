"""Train every mixer by its Triton kernels and by the torch form; write loss_curves.json and loss_curves.png.

python benchmarks/loss_curves.py FOLDER [UPDATES] [JOBS]

What two runs of one form may differ by is measured beside it: the torch form trains in float32 too, and in bfloat16
from weights that were rounded to bfloat16 at random, which is what autocast does to them in every product.

FOLDER holds text files; every tenth one, by name, is left out. JOBS mixers train at a time, spread over torch's CUDA
devices, those first whose torch form takes longest. The files are written after every mixer.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import triton
from byte_text import read_text, train
from matplotlib import pyplot
from torch import Tensor

from longseq import mixers
from longseq.backbones.text import TextBackbone
from longseq.kernels import explain
from longseq.tools.benchmark.measure import one_line

HERE = Path(__file__).parent
TOKENS, BATCH, UPDATES = 256, 32, 200
LOOPED = {"lattice": 64, "ttt": 64}  # tokens where the torch form is a loop over them
LEARNING_RATE = 1e-3
SMOOTH = 10  # updates whose losses are averaged before two curves are compared
ROUNDINGS = 2  # further runs of the torch form, each from weights rounded in another way


def operations_with_kernels(name: str) -> list[str]:
    """Those operations of a mixer that have a Triton form."""
    return [op for op in mixers.get(name).operations if explain(op, device="cuda").get("triton") == []]


def backend_with_kernels(name: str) -> str:
    """The backend that runs them: where another operation has none, the preferred one of each."""
    return "triton" if len(operations_with_kernels(name)) == len(mixers.get(name).operations) else "auto"


@torch.no_grad()
def round_at_random(model: torch.nn.Module, seed: int) -> None:
    """Round the weights to one of their two neighbours among the numbers of bfloat16, the nearer one more often."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        bits = parameter.view(torch.int32)
        bits += torch.randint(2**16, bits.shape, generator=generator, dtype=torch.int32)
        bits &= -(2**16)


def curve(
    name: str, backend: str, bfloat16: bool, text: Tensor, updates: int, device: torch.device, rounding: int = 0
) -> Tensor:
    """The smoothed losses of one training run, the same weights and batches in every run of a mixer.

    With a `rounding` other than 0, that one of these weights.
    """
    torch.manual_seed(0)
    model = TextBackbone(vocab_size=256, d_model=256, depth=4, mixer=name, mixer_options={"backend": backend})
    if rounding:
        round_at_random(model, rounding)
    losses, _ = train(
        model.to(device), text, device, updates=updates, tokens=LOOPED.get(name, TOKENS), batch=BATCH,
        learning_rate=LEARNING_RATE, bfloat16=bfloat16,
    )  # fmt: skip
    return torch.tensor(losses)[: updates // SMOOTH * SMOOTH].view(-1, SMOOTH).mean(1)


def compare(name: str, folder: str, updates: int, index: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """One row for a mixer, and its curves."""
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    text, _, _ = read_text(folder)
    full = curve(name, "torch", False, text, updates, device)
    plain = curve(name, "torch", True, text, updates, device)
    others = [curve(name, "torch", True, text, updates, device, n + 1) for n in range(ROUNDINGS)]
    ours = curve(name, backend_with_kernels(name), True, text, updates, device)
    row = {
        "mixer": name,
        "last_loss_torch_float32": round(full[-1].item(), 4),
        "last_loss_torch_bfloat16": round(plain[-1].item(), 4),
        "last_loss_triton_bfloat16": round(ours[-1].item(), 4),
        "largest_gap_triton_to_torch_bfloat16": _largest_gap(ours, plain),
        "largest_gap_torch_bfloat16_to_float32": _largest_gap(full, plain),
        "largest_gap_torch_bfloat16_to_rounded_weights": max(_largest_gap(other, plain) for other in others),
    }
    roundings = {f"torch, bfloat16, rounded weights {n}": other for n, other in enumerate(others, 1)}
    lines = {"torch, float32": full, "torch, bfloat16": plain, **roundings, "Triton, bfloat16": ours}
    return row, {label: line.tolist() for label, line in lines.items()}


def _largest_gap(one: Tensor, other: Tensor) -> float:
    return round((one - other).abs().max().item(), 4)


def draw(curves: dict[str, dict[str, list[float]]]) -> None:
    columns = 4
    rows = -(-len(curves) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(3 * columns, 2.4 * rows), squeeze=False, sharex=True)
    for axis in axes.flat[len(curves) :]:
        axis.remove()
    for axis, (name, lines) in zip(axes.flat, sorted(curves.items()), strict=False):
        for label, line in lines.items():
            axis.plot([(n + 1) * SMOOTH for n in range(len(line))], line, label=label, linewidth=1)
        axis.set_title(name, fontsize=9)
    axes[0, 0].legend(fontsize=7)
    figure.supxlabel("updates")
    figure.supylabel("training loss (nats a byte)")
    figure.tight_layout()
    figure.savefig(HERE / "loss_curves.png", dpi=120)
    pyplot.close(figure)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if not torch.cuda.is_available():
        sys.exit("loss_curves.py compares kernels on a CUDA device, and torch sees none")
    updates = int(sys.argv[2]) if len(sys.argv) > 2 else UPDATES
    jobs = int(sys.argv[3]) if len(sys.argv) > 3 else torch.cuda.device_count()
    _, _, files = read_text(sys.argv[1])
    names = sorted(filter(operations_with_kernels, mixers.mixer_names()), key=lambda name: name not in LOOPED)
    rows: list[dict[str, Any]] = []
    curves: dict[str, dict[str, list[float]]] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(compare, name, sys.argv[1], updates, n): name for n, name in enumerate(names)}
        for done in as_completed(running):
            name = running[done]
            try:
                row, curves[name] = done.result()
            except Exception as error:
                row = {"mixer": name, "remark": one_line(error)}
            rows.append(row)
            print(row, flush=True)
            if curves:
                draw(curves)
            write(sorted(rows, key=lambda row: row["mixer"]), updates, jobs, files)


def write(rows: list[dict[str, Any]], updates: int, jobs: int, files: int) -> None:
    result = {
        "what": "Training by the Triton kernels and by the torch form",
        "command": f"python benchmarks/loss_curves.py FOLDER {updates} {jobs}",
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__.split("+")[0], "triton": triton.__version__},
        "rows": rows,
        "notes": [
            f"Four layers of width 256; {updates} updates of {BATCH} windows of {TOKENS} bytes of {files} texts "
            f"({', '.join(LOOPED)}, whose torch form is a loop: of {LOOPED['lattice']}); AdamW, one seed: the same "
            "weights and batches in all runs of a mixer. Not compiled.",
            f"Gaps are between losses averaged over {SMOOTH} updates. Noise is what rounding alone does, all in the "
            "torch form: the gap between bfloat16 and float32, and the larger one between bfloat16 and two runs of it "
            "from weights that were rounded to bfloat16 at random.",
            "The curves: loss_curves.png.",
        ],
    }
    (HERE / "loss_curves.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

"""Train every mixer with its Triton kernels and with the torch form; write loss_curves.json and loss_curves.png.

python benchmarks/loss_curves.py FOLDER [--updates 200] [--jobs N] [--output FILE] [--mixers NAME ...]

Runs of the torch form show how much two runs of one form differ: in float32, and in bfloat16 from weights that were
rounded to bfloat16 at random, as autocast rounds them in every product.

FOLDER holds text files; every tenth one, by name, is left out. JOBS mixers train at a time, distributed over torch's
CUDA devices, those with the slowest torch form first. The files are written after every mixer, and mixers that OUTPUT
holds from this commit are not trained again. With --mixers only those are trained, and rows of other
mixers stay in OUTPUT, whatever their commit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from byte_text import read_text, train
from matplotlib import pyplot
from measure import one_line
from torch import Tensor

from longseq import mixers
from longseq.backbones.tokens import TokenBackbone
from longseq.kernels import explain
from longseq.tasks.circumstances import find_circumstances, find_commit

HERE = Path(__file__).parent
TOKENS, BATCH = 256, 32
LOOPED = {"lattice": 64, "ttt": 64}  # tokens for mixers whose torch form is a loop over them
LEARNING_RATE = 1e-3
SMOOTH = 10  # updates over which losses are averaged before two curves are compared
ROUNDINGS = 2  # further runs of the torch form, each from differently rounded weights


def operations_with_kernels(name: str) -> list[str]:
    """The operations of a mixer that have a Triton form."""
    return [op for op in mixers.get(name).operations if explain(op, device="cuda").get("triton") == []]


def backend_with_kernels(name: str) -> str:
    """The backend that runs them: if another operation has no Triton form, "auto" prefers the best backend of each."""
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
    """The smoothed losses of one training run; all runs of a mixer have the same weights and batches.

    A `rounding` other than 0 seeds a random rounding of the weights.
    """
    torch.manual_seed(0)
    model = TokenBackbone(vocab_size=256, d_model=256, depth=4, mixer=name, mixer_options={"backend": backend})
    if rounding:
        round_at_random(model, rounding)
    losses = train(
        model.to(device), text, device, updates=updates, tokens=LOOPED.get(name, TOKENS), batch=BATCH,
        learning_rate=LEARNING_RATE, bfloat16=bfloat16,
    )  # fmt: skip
    return torch.tensor(losses)[: updates // SMOOTH * SMOOTH].view(-1, SMOOTH).mean(1)


def compare(name: str, folder: str, updates: int, index: int) -> dict[str, Any]:
    """One row for a mixer, with its curves."""
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    text = read_text(folder)
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
    curves = [{"label": label, "losses": [round(loss, 4) for loss in line.tolist()]} for label, line in lines.items()]
    return {**row, "curves": curves, "measured": find_circumstances(device)}


def _largest_gap(one: Tensor, other: Tensor) -> float:
    return round((one - other).abs().max().item(), 4)


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    columns = 4
    figure, axes = pyplot.subplots(
        -(-len(rows) // columns),
        columns,
        figsize=(3 * columns, 2.4 * -(-len(rows) // columns)),
        squeeze=False,
        sharex=True,
    )
    for axis in axes.flat[len(rows) :]:
        axis.remove()
    for axis, row in zip(axes.flat, rows, strict=False):
        for curve in row["curves"]:
            updates = [(n + 1) * SMOOTH for n in range(len(curve["losses"]))]
            axis.plot(updates, curve["losses"], label=curve["label"], linewidth=1)
        axis.set_title(row["mixer"], fontsize=9)
    axes[0, 0].legend(fontsize=7)
    figure.supxlabel("updates")
    figure.supylabel("training loss (nats a byte)")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=torch.cuda.device_count())
    parser.add_argument("--output", type=Path, default=HERE / "loss_curves.json")
    parser.add_argument("--mixers", nargs="+")
    options = parser.parse_args()
    updates, jobs, output = options.updates, options.jobs, options.output
    names = choose(options.mixers)
    _, _, files = read_text(options.folder)
    rows = [
        row for row in kept_rows(output) if row["mixer"] not in names or row["measured"].get("commit") == find_commit()
    ]
    done = [row["mixer"] for row in rows]
    left = [name for name in names if name not in done]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(compare, name, options.folder, updates, n): name for n, name in enumerate(left)}
        for ended in as_completed(running):
            try:
                row = ended.result()
            except Exception as error:
                print(f"{running[ended]}: {one_line(error)}", flush=True)
                continue
            rows.append(row)
            print({key: value for key, value in row.items() if key not in ("curves", "measured")}, flush=True)
            rows.sort(key=lambda row: row["mixer"])
            draw(rows, output.with_suffix(".png"))
            write(rows, updates, jobs, files, output)
    if missing := sorted(set(names) - {row["mixer"] for row in rows}):
        sys.exit(f"failed: {', '.join(missing)}")


def choose(given: list[str] | None) -> list[str]:
    """The mixers to train, those with the slowest torch form first."""
    names = given or filter(operations_with_kernels, mixers.mixer_names())
    return sorted(names, key=lambda name: name not in LOOPED)


def kept_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of an earlier call that have curves."""
    return (
        [row for row in json.loads(file.read_text(encoding="utf-8"))["rows"] if "curves" in row]
        if file.is_file()
        else []
    )


def below_noise(row: Mapping[str, Any]) -> bool:
    noise = ("largest_gap_torch_bfloat16_to_float32", "largest_gap_torch_bfloat16_to_rounded_weights")
    return row["largest_gap_triton_to_torch_bfloat16"] <= max(row[name] for name in noise)


def name_above(row: Mapping[str, Any]) -> str:
    """The mixer of a row above noise, with its gap."""
    return "" if below_noise(row) else f"; above it is {row['mixer']} ({row['largest_gap_triton_to_torch_bfloat16']:g})"


def write(rows: Sequence[Mapping[str, Any]], updates: int, jobs: int, files: int, output: Path) -> None:
    result = {
        "what": "Training by the Triton kernels and by the torch form",
        "command": f"python benchmarks/loss_curves.py FOLDER {updates} {jobs}",
        "kind": "accuracy and speed",  # a change of speed is one of the kernels, too
        "rows": rows,
        "notes": [
            f"Four layers of width 256; {updates} updates of {BATCH} windows of {TOKENS} bytes of {files} texts "
            f"({', '.join(LOOPED)}, whose torch form is a loop: of {LOOPED['lattice']}); AdamW, one seed: the same "
            "weights and batches in all runs of a mixer. Not compiled.",
            f"Gaps are between losses averaged over {SMOOTH} updates. Noise is what rounding alone does, all in the "
            "torch form: the gap between bfloat16 and float32, and the larger one between bfloat16 and two runs of it "
            "from weights that were rounded to bfloat16 at random.",
            f"In {sum(map(below_noise, rows))} of {len(rows)} mixers the gap between Triton and torch is below noise"
            f"{''.join(map(name_above, rows))}. Each change of a mixer's kernels makes its row older here, also one of "
            "speed alone.",
            "The curves: loss_curves.png.",
        ],
    }
    output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

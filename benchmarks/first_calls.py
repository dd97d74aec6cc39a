"""Time first calls, each in a new process with empty caches, one after the other, and write first_calls.json.

python benchmarks/first_calls.py [OUTPUT.json [PART]]

With PART, only the calls are timed whose names contain it: give a file of their own, whose rows keep.py then saves
among the others. The file is written after every call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from command import run_script
from hydra import compose, initialize_config_module

from longseq.kernels.self_test import CACHE_VARIABLE
from longseq.tasks.training.configuration import read_command
from longseq.tools.benchmark import models
from longseq.tools.benchmark.gate import call_op, options_of, tensors_of
from longseq.tools.benchmark.kernels import find_modules
from longseq.tools.benchmark.measure import time_once
from longseq.tools.benchmark.report import add_circumstances
from longseq.tools.benchmark.work import TABLE, Work

HERE = Path(__file__).parent
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", CACHE_VARIABLE)
OPS = ("delta_rule", "linear_attention", "slot_attention", "variational_linear_attention", "longhorn_scan")
# For each operation the first shape in the table of `longseq benchmark kernels`, and heads of 256 channels.
WORK = [next(work for work in TABLE if work.op == op) for op in OPS]
WORK.insert(1, next(work for work in TABLE if work.op == "delta_rule" and work.sizes["K"] == 256))
IMAGES = ["text=null", "image.peers=[]", "image.sizes=[[224,256]]", "image.models=[longseq_vit_tiny_patch16_224]"]
LANGUAGE = ["image=null", "text.peers=[]", "text.lengths=[2048]", "text.decoding_batches=[]"]
MODELS = {
    f"training step, {name}, {mixer}": [*overrides, f"{part}.mixers=[{mixer}]", "seconds=0.01"]
    for name, part, overrides in (
        ("longseq_vit_tiny_patch16_224", "image", IMAGES),
        ("language model of 24 x 1024", "text", LANGUAGE),
    )
    for mixer in ("deltanet", "longhorn")
}
CALLS: dict[str, Work | list[str]] = {f"{work.op}, {work.variant}, {work.shape}": work for work in WORK} | MODELS


def time_call(call: Work | list[str], device: torch.device) -> float:
    """Seconds of the first forward and backward of an operation, or of the first training step of a model."""
    if isinstance(call, list):
        with initialize_config_module("longseq.conf", version_base="1.3"):
            keys = read_command(models.ModelsKeys, compose("benchmark_models", call))
        ((_, measure),) = models.plan(keys, device)
        return measure()["first_step_s"]
    inputs = call.make(torch.bfloat16, device)
    tensors = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in tensors_of(inputs).items()}
    operation = call_op(inputs, options_of(inputs, call), "auto")
    for module in find_modules(call.op):
        __import__(module)

    def both() -> None:
        outputs = operation(tensors)
        torch.autograd.grad(
            outputs, [x for x in tensors.values() if x.requires_grad], [torch.ones_like(y) for y in outputs]
        )

    return round(time_once(both, device), 2)


def in_a_new_process(call: str) -> float:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = os.environ | {name: f"{folder}/{name}" for name in CACHES}
        command = [sys.executable, __file__, "call", call]
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return float(told.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["call"]:
        print(time_call(CALLS[sys.argv[2]], torch.device("cuda")))
        return
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "first_calls.json"
    part = sys.argv[2] if len(sys.argv) > 2 else ""
    calls = [call for call in CALLS if part in call]
    if not calls:
        sys.exit(f"no call has {part} in its name; the calls: {'; '.join(CALLS)}")
    rows = []
    for call in calls:
        rows.append({"call": call, "first_call_s": in_a_new_process(call)})
        print(rows[-1], flush=True)
        result = {
            "what": "Cold first calls",
            "command": "python benchmarks/first_calls.py",
            "kind": "speed",
            "rows": add_circumstances(rows, torch.device("cuda")),
            "notes": [
                "Seconds of the first forward and backward, or training step, imports left out: compilation, the "
                "self-test and the call. bfloat16."
            ],
        }
        output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run_script(main, __doc__, most=2, gpu="times what kernels take to compile for a GPU")

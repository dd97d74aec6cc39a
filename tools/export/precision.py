"""Smaller ONNX files: linear layers in float16 or int8, by onnxruntime's converters. All other nodes stay float32."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from longseq.files import sha256
from longseq.tasks import evaluate, registry
from longseq.tasks.training.checkpoint import Loaded
from longseq.tools.export.checked_file import quiet
from longseq.tools.export.report import ExportReport


def shrink(report: ExportReport, loaded: Loaded, precision: str, allowed_drop: float) -> ExportReport:
    """Replace an exported file by one with linear layers in `precision`, float16 or int8.

    The task's metric is measured on the validation data with both files. ValueError if it gets worse by more than
    `allowed_drop`, or is NaN; then no file is left.
    """
    path, name = report.path, str(loaded.config["task"]["metric"])
    described = Path(f"{path}.json")
    facts = json.loads(described.read_text(encoding="utf-8"))
    try:
        with TemporaryDirectory(prefix=".partial.", dir=path.parent) as folder:
            small = Path(folder, path.name)
            convert(path, small, precision)
            size = small.stat().st_size
            facts |= {"sha256": sha256(small), "precision": precision}
            facts["run"]["size"] = size
            Path(f"{small}.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            before, after = (_measure(file, Path(folder), name) for file in (path, small))
            drop = before - after if _higher_is_better(loaded, name) else after - before
            if not drop <= allowed_drop:
                raise ValueError(
                    f"precision={precision}: {name} goes from {before:.4f} to {after:.4f}, which is more than "
                    f"allowed_drop={allowed_drop:g}"
                )
            os.replace(small, path)
            os.replace(f"{small}.json", described)
    except BaseException:
        path.unlink()
        described.unlink()
        raise
    shrunk = f"{precision}: {report.size / 2**20:.1f} to {size / 2**20:.1f} MiB, {name} {before:.4f} to {after:.4f}"
    return replace(report, size=size, metadata={**report.metadata, "precision": precision}, shrunk=shrunk)


def convert(source: Path, target: Path, precision: str) -> None:
    """Write the ONNX file `source` to `target` with its linear layers in `precision`.

    float16 layers round their inputs, too. int8 weights have a scale for each output; inputs of their layers are
    quantized with a scale for each call.
    """
    import onnx

    model = onnx.load(str(source))
    weights = {weight.name for weight in model.graph.initializer}
    linear, others = [], []
    for node in model.graph.node:
        is_linear = node.op_type in ("MatMul", "Gemm") and node.input[1] in weights
        (linear if is_linear else others).append(node.name)
    facts = {prop.key: prop.value for prop in model.metadata_props} | {"precision": precision}
    with quiet():
        if precision == "int8":
            from onnxruntime.quantization import QuantType, quantize_dynamic

            kinds = {"op_types_to_quantize": ["MatMul", "Gemm"], "nodes_to_quantize": linear}
            quantize_dynamic(source, target, **kinds, per_channel=True, weight_type=QuantType.QInt8)
            model = onnx.load(str(target))
        else:
            from onnxruntime.transformers.float16 import convert_float_to_float16

            model = convert_float_to_float16(
                model, keep_io_types=True, node_block_list=others, disable_shape_infer=True
            )
    onnx.helper.set_model_props(model, facts)
    onnx.save(model, str(target))


def _measure(file: Path, folder: Path, metric: str) -> float:
    """The metric of a file on the validation data of its run."""
    from hydra import compose

    output = folder / "metrics.json"
    words = [f"checkpoint='{file}'", "split=val", f"output='{output}'", "trainer=cpu"]
    with quiet():
        found: dict[str, Any] = evaluate.run(compose("evaluate", words))
    return float(found[metric])


def _higher_is_better(loaded: Loaded, metric: str) -> bool:
    task = registry.get(loaded.task_name)
    info = task.data.info_class.from_dict(loaded.data)
    module = task.module.from_config(loaded.config, loaded.backbone, info, None)
    return bool(module.higher_is_better(metric, "task.metric"))

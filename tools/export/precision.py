"""Smaller ONNX files: linear layers in float16, or in int8 by onnxruntime's quantization. All else stays float32."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from longseq.files import sha256
from longseq.tasks import evaluate, registry
from longseq.tasks.training.checkpoint import Loaded
from longseq.tools.export.checked_file import quiet
from longseq.tools.export.onnx_file import clean
from longseq.tools.export.report import ExportReport

CALIBRATION = 128  # images


def shrink(
    report: ExportReport, loaded: Loaded, precision: str, allowed_drop: float, calibrate: str | None = None
) -> ExportReport:
    """Replace an exported file by one with linear layers in `precision`, float16 or int8.

    `calibrate` is a folder of images, for fixed ranges of int8 activations.

    The task's metric is measured on the validation data with both files. ValueError if it gets worse by more than
    `allowed_drop`, or is NaN; then no file is left.
    """
    path, name = report.path, str(loaded.config["task"]["metric"])
    described = Path(f"{path}.json")
    facts = json.loads(described.read_text(encoding="utf-8"))
    try:
        with TemporaryDirectory(prefix=".partial.", dir=path.parent) as folder:
            small = Path(folder, path.name)
            batches = None if calibrate is None else _read_images(calibrate, loaded, facts["run"]["options"])
            convert(path, small, precision, batches)
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


def convert(source: Path, target: Path, precision: str, batches: Iterable[Any] | None = None) -> None:
    """Write the ONNX file `source` to `target` with its linear layers in `precision`.

    float16 layers round their inputs, too. int8 weights have a scale for each output; inputs of their layers are
    quantized with a scale for each call, or with `batches` (arrays) by the range that they have over these.
    """
    import onnx

    model = onnx.load(str(source))
    weights = {weight.name for weight in model.graph.initializer if len(weight.dims) == 2}
    linear = {node.name for node in model.graph.node if node.op_type in ("MatMul", "Gemm") and node.input[1] in weights}
    facts = {prop.key: prop.value for prop in model.metadata_props} | {"precision": precision}
    with quiet():
        if precision == "int8":
            from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static

            kinds = {"op_types_to_quantize": ["MatMul", "Gemm"], "nodes_to_quantize": sorted(linear)}
            options: dict[str, Any] = {**kinds, "per_channel": True, "weight_type": QuantType.QInt8}
            if batches is None:
                quantize_dynamic(source, target, **options)
            else:
                name = model.graph.input[0].name
                feeds = iter([{name: batch} for batch in batches])
                reader: Any = SimpleNamespace(get_next=lambda: next(feeds, None))
                quantize_static(source, target, reader, **options)
            model = onnx.load(str(target))
        else:
            _halve(model, linear)
            clean(model)
    onnx.helper.set_model_props(model, facts)
    onnx.save(model, str(target))


def _read_images(folder: str, loaded: Loaded, options: Mapping[str, Any]) -> list[Any]:
    """Images of a folder as an exported file takes them, one by one: at most `CALIBRATION`, evenly chosen."""
    from longseq.tasks.image.transforms import normalize

    data: Any = registry.get(loaded.task_name).data
    if loaded.task_name not in registry.like("image"):
        raise ValueError("calibrate is for image classifiers")
    files = data.inputs(folder, data.info_class.from_dict(loaded.data))
    batches = []
    for number in range(0, len(files.paths), -(-len(files.paths) // CALIBRATION)):
        images, _, unreadable = files.batches[[number]]
        if not unreadable:
            batches.append((images if options["preprocess"] else normalize(images, files.info)).numpy())
    return batches


def _halve(model: Any, linear: Collection[str]) -> None:
    """Let the nodes `linear` compute in float16. Their outputs keep their names: bodies of loops may read them, which
    onnxruntime's converter to float16 does not know.
    """
    from onnx import TensorProto, helper, numpy_helper

    graph = model.graph
    weights = {weight.name: weight for weight in graph.initializer}
    nodes, made = [], set()
    for node in deepcopy(list(graph.node)):
        nodes.append(node)
        if node.name not in linear:
            continue
        for place, name in enumerate(node.input):
            node.input[place] = half = f"{name}.float16"
            if half in made:
                continue
            made.add(half)
            if name in weights:
                graph.initializer.append(
                    numpy_helper.from_array(numpy_helper.to_array(weights[name]).astype("e"), half)
                )
            else:
                nodes.insert(-1, helper.make_node("Cast", [name], [half], to=TensorProto.FLOAT16))
        whole = node.output[0]
        node.output[0] = f"{whole}.of_float16"
        nodes.append(helper.make_node("Cast", [node.output[0]], [whole], to=TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend(nodes)


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

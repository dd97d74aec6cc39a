"""Exported files: their results, their metadata, and that other processes can run them."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
import timm
import torch
from cases import cases
from export_programs import SUFFIXES, share_program
from PIL import Image
from torch import Tensor, nn

import longseq  # noqa: F401  registers the models
from longseq import mixers
from longseq.files import sha256
from longseq.tasks.image.config import DataInfo
from longseq.tasks.image.decoding import decode
from longseq.tasks.image.transforms import evaluation_transform
from longseq.tasks.training.checkpoint import load
from longseq.tools.export import FORMATS, export_image_classifier, onnx_file
from longseq.tools.export.checked_file import TRACED_BATCH
from longseq.tools.export.metadata import classifier_metadata, encode
from longseq.tools.export.parity import probe_images
from longseq.tools.export.precision import convert

PROGRAM = Path(__file__).resolve().parents[2] / "docs" / "programs" / "read_image.py"
VIM, VIT = "longseq_tiny_patch16_224", "longseq_vit_tiny_patch16_224"
CHASSIS: dict[str, dict[str, Any]] = {VIM: {}, VIT: {"direction": "forward", "global_pool": "avg"}}

# 82 tokens: two chunks of the chunk forms, the second not full.
DATA: dict[str, Any] = {
    "img_size": 36,
    "in_chans": 1,
    "mean": [0.3],
    "std": [0.25],
    "interpolation": "bicubic",
    "crop_pct": 0.9,
    "class_names": ["ant", "bee", "cat", "dog", "eel"],
}


def build(chassis: str = VIM, mixer: str = "attention", *, seed: int = 0, **options: Any) -> nn.Module:
    """A small model whose mixers affect the logits: with fresh weights, they would be nearly alike for every image."""
    torch.manual_seed(seed)
    sizes = {"img_size": 36, "patch_size": 4, "embed_dim": 32, "depth": 1, "num_classes": 5, "in_chans": 1}
    model = timm.create_model(chassis, mixer=mixer, **{**sizes, **options})
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    return model.eval()


# Every mixer, where tokens are read forward; both ways and around a class token, one that needs one pass for it and two
# that need a scan for each.
EXPORTED = [*((VIT, mixer) for mixer in mixers.mixer_names()), (VIM, "attention"), (VIM, "longhorn"), (VIM, "deltanet")]
# ONNX and pt2 take up to ten seconds, TorchScript a fifth of one. This model reads both ways.
# `test_dynamic_resolution` has a scan over time. tests/kernels/test_export.py exports every operation and
# test_export_language.py steps.
IN_ALL_FORMATS = [(VIM, "attention")]


# Programs without our packages. Each is given pairs of a file and the images with their logits.
WITH_TORCH = """
import json, sys
sys.modules.update(dict.fromkeys(("longseq", "timm", "lightning", "hydra")))
import numpy, torch
torch.set_num_threads(1)
for path, cases in zip(sys.argv[1::2], sys.argv[2::2]):
    cases, extra = numpy.load(cases), {"longseq.json": ""}
    if path.endswith(".pt"):
        call = torch.jit.load(path, _extra_files=extra)
    else:
        call = torch.export.load(path, extra_files=extra).module()
    assert json.loads(extra["longseq.json"])["class_names"][1] == "bee"
    images = torch.from_numpy(cases["images"])
    with torch.no_grad():
        difference = numpy.abs(call(images).numpy() - cases["logits"]).max()
    assert difference < 1e-4, (path, difference)
    assert call(images[:0]).shape == (0, 5)
"""
WITH_ONNXRUNTIME = """
import json, sys
sys.modules.update(dict.fromkeys(("torch", "longseq", "onnx")))
import numpy, onnxruntime
for path, cases in zip(sys.argv[1::2], sys.argv[2::2]):
    cases, session = numpy.load(cases), onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["class_names"])[1] == "bee"
    difference = numpy.abs(session.run(["logits"], {"images": cases["images"]})[0] - cases["logits"]).max()
    assert difference < 1e-4, (path, difference)
"""


@pytest.mark.slow
def test_files_run_in_other_processes(tmp_path: Path) -> None:
    """Two processes read all files: their start takes longer than most exports."""
    written: dict[str, list[str | Path]] = {format: [] for format in SUFFIXES}
    images = probe_images(5, 1, 36, 36, pixels=False)
    for chassis, mixer in EXPORTED:
        # Lattice's recurrence is not linear: with the weights of seed 0, rounding changes an image's logits by 1e-3.
        model = build(chassis, mixer, seed=2 if mixer == "lattice" else 0, **CHASSIS[chassis])
        with torch.no_grad():
            logits = model(images)
        assert logits.std(0).max() > 0.05, "the model must tell images apart"
        cases = tmp_path / f"{chassis}_{mixer}.npz"
        np.savez(cases, images=images.numpy(), logits=logits.numpy())
        with pytest.MonkeyPatch.context() as patch:
            share_program(patch)
            for format in SUFFIXES if (chassis, mixer) in IN_ALL_FORMATS else ("torchscript",):
                path = cases.with_suffix(SUFFIXES[format])
                report = export_image_classifier(model, path, format=format, data=DATA, batch_sizes=(1,))
                assert [row.shape[0] for row in report.comparisons] == [1]
                assert all(row.passed and row.top1 == 1 for row in report.comparisons)
                written[format] += [path, cases]
    runs = {WITH_TORCH: written["torchscript"] + written["pt2"], WITH_ONNXRUNTIME: written["onnx"]}
    for program, files in runs.items():
        done = subprocess.run([sys.executable, "-c", program, *files], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_preprocessing_and_softmax_in_a_file_of_a_fixed_resolution(tmp_path: Path, captured_once: None) -> None:
    model = build(reg_tokens=2, no_embed_class=False, init_values=0.1, global_pool="map")
    pixels = probe_images(4, 1, 36, 36, pixels=True)
    with torch.no_grad():
        expected = model((pixels / 255 - 0.3) / 0.25).softmax(-1)
    for format, suffix in SUFFIXES.items():
        path = tmp_path / f"model{suffix}"
        export_image_classifier(model, path, format=format, data=DATA, preprocess=True, softmax=True)
        call = FORMATS[format].open_file(path)
        torch.testing.assert_close(call(pixels), expected, atol=1e-5, rtol=0)
        with pytest.raises(Exception, match=r"(?i)size|dimension|guard"):
            call(pixels.reshape(4, 1, 12, 108))  # as many patches as 36 x 36 has


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "direction", "formats"),
    [
        ("attention", "bidirectional", ["torchscript"]),
        ("longhorn", "forward", ["torchscript", "onnx"]),
        ("deltanet", "cross", ["torchscript"]),
    ],
)
def test_dynamic_resolution(
    mixer: str, direction: str, formats: list[str], tmp_path: Path, captured_once: None
) -> None:
    pads = mixer == "attention"
    stride = 2 if direction == "cross" else 4  # patches overlap
    model = build(mixer=mixer, direction=direction, dynamic_img_size=True, dynamic_img_pad=pads, stride=stride)
    images = probe_images(3, 1, 20, 61 if pads else 64, pixels=False)
    with torch.no_grad():
        expected = model(images)
    for format in formats:
        path = tmp_path / ("model" + SUFFIXES[format])
        export_image_classifier(model, path, format=format, data=DATA, dynamic_resolution=True, batch_sizes=(1, 3))
        torch.testing.assert_close(FORMATS[format].open_file(path)(images), expected, atol=1e-4, rtol=0)
        if format == "onnx":  # with layers in float16 beside the loop
            convert(path, half := path.with_name("half.onnx"), "float16")
            assert half.stat().st_size < path.stat().st_size
            assert 0 < (onnx_file.open_file(half)(images) - expected).abs().max() < 3e-3 * expected.abs().max()


@pytest.mark.slow
def test_a_pt2_file_takes_one_patch_and_no_rows(tmp_path: Path) -> None:
    model, path = build(mixer="linear_attention", dynamic_img_size=True), tmp_path / "model.pt2"
    report = export_image_classifier(
        model, path, format="pt2", data=DATA, dynamic_resolution=True, batch_sizes=[1], tolerance=1e-3
    )
    assert {row.shape[2:] for row in report.comparisons} >= {(4, 4), (4, 36), (36, 4)}
    call = FORMATS["pt2"].open_file(path)
    for shape in ((3, 1, 4, 4), (2, 1, 4, 50), (1, 1, 23, 5), (5, 1, 20, 36)):
        images = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(call(images), model(images), atol=1e-3, rtol=0)
    assert call(torch.zeros(0, 1, 20, 24)).shape == (0, 5)


@pytest.mark.slow
def test_a_file_refuses_parts_of_patches_as_the_model_does(tmp_path: Path) -> None:
    """A Vision Transformer of timm: its own check is Python, which no file keeps."""
    options = {"embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 5, "dynamic_img_size": True}
    model, images = timm.create_model("vit_tiny_patch16_224", **options).eval(), torch.randn(2, 3, 80, 16)
    path = tmp_path / "model.onnx"
    report = export_image_classifier(
        model, path, format="onnx", data={"img_size": 64}, dynamic_resolution=True, batch_sizes=[1]
    )
    assert (report.metadata["model"], report.metadata["patch_size"]) == ("vit_tiny_patch16_224", [16, 16])
    call = FORMATS["onnx"].open_file(path)
    with torch.no_grad():
        torch.testing.assert_close(call(images), model(images), atol=1e-4, rtol=0)
    for height, width in ((70, 65), (64, 65), (70, 64)):
        with pytest.raises(Exception, match=r"of this size|out of data bounds"):
            call(torch.randn(2, 3, height, width))


@pytest.mark.slow
@cases(("mode", "img_size", "channels"), [("center", 36, 3), ("squash", [48, 80], 1), ("border", [48, 80], 3)])
def test_a_program_without_longseq_prepares_images(
    mode: str, img_size: int | list[int], channels: int, tmp_path: Path
) -> None:
    """The program of the page on exports, with the metadata alone, reads what `longseq predict` reads."""
    data = {**DATA, "img_size": img_size, "in_chans": channels, "crop_pct": 0.8, "crop_mode": mode}
    data |= {"mean": [0.5, 0.2, 0.7][:channels], "std": [0.5] * channels}
    facts = encode(classifier_metadata(build(), data, preprocess=True, softmax=False, extra={}))
    read_image, transform = (
        runpy.run_path(str(PROGRAM))["read_image"],
        evaluation_transform(DataInfo(**data, num_classes=5)),
    )
    random = np.random.default_rng(0)
    colours = Image.fromarray(random.integers(0, 256, (40, 60, 4), np.uint8))
    images = {f"{kind}.png": colours.convert("RGB").convert(kind) for kind in ("1", "L", "P", "RGB")}
    images |= {"transparent.png": colours, "inks.jpg": colours.convert("CMYK"), "animated.gif": images["P.png"]}
    images["wide.png"] = Image.fromarray(random.integers(0, 65536, (40, 60)).astype(np.uint16))
    for number, (width, height) in enumerate([(36, 36), (41, 67), (20, 133), (500, 38), (20, 400)]):
        images[f"{number}.png"] = Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
    for name, image in images.items():
        image.save(tmp_path / name)
        read = read_image(tmp_path / name, facts)
        np.testing.assert_array_equal(read, transform(decode(tmp_path / name)).numpy(), err_msg=name)
    images["RGB.png"].save(tmp_path / "turned.tif", tiffinfo={274: 6})
    read = read_image(tmp_path / "turned.tif", facts)
    np.testing.assert_array_equal(read, transform(decode(tmp_path / "turned.tif")).numpy())


@pytest.mark.slow
def test_onnx_file_is_one_file_with_metadata_and_open_axes(tmp_path: Path) -> None:
    report = export_image_classifier(
        build(mixer="attention"), tmp_path / "model.onnx", data=DATA, opset=21, extra_metadata={"epoch": 3}
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.json"]
    facts = json.loads((tmp_path / "model.onnx.json").read_text())
    assert facts == json.loads(json.dumps({"file": "model.onnx", "sha256": sha256(report.path), **report.metadata}))
    model = onnx.load(str(report.path))
    onnx.checker.check_model(model)
    properties = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(properties["class_names"]) == DATA["class_names"]
    assert json.loads(properties["mean"]) == DATA["mean"]
    assert properties["interpolation"] == "bicubic"
    assert properties["mixer"] == "attention"
    assert properties["epoch"] == "3"
    assert properties["opset"] == "21"
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == 21
    assert "float32" in properties["input"]
    dimensions = model.graph.input[0].type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in dimensions] == ["batch", 1, 36, 36]
    assert b"image.py" not in report.path.read_bytes(), "no source lines of the machine that exported"


def test_export_leaves_the_model_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build().train().double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    path = tmp_path / "[/b]" / "model.pt"  # no markup
    export_image_classifier(model, path, format="torchscript", data=DATA).print()
    assert str(path) in capsys.readouterr().out
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.dtype == torch.float64


class BatchAware(nn.Module):
    """Gives another result for the traced batch size than for others, which a trace cannot represent."""

    pretrained_cfg: ClassVar = {"input_size": (1, 8, 8), "mean": (0.5,), "std": (0.5,)}

    def forward(self, images: Tensor) -> Tensor:  # [B, C, H, W] -> [B, 64]
        return images.flatten(1) * (2 if len(images) == TRACED_BATCH else 1)


def test_a_file_that_differs_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_text("of yesterday")
    with pytest.raises(ValueError, match="differs from the model by"):
        export_image_classifier(BatchAware(), path, format="torchscript")
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]
    assert path.read_text() == "of yesterday"


def test_class_names_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="5 classes and class_names 1"):
        export_image_classifier(build(), tmp_path / "model.onnx", data={**DATA, "class_names": ["ant"]})


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = build()
    model.head.bias.data[0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        export_image_classifier(model, tmp_path / "model.onnx", data=DATA)


@pytest.mark.slow
def test_command_exports_a_checkpoint(command_here: Any, checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "deep" / "digits.onnx"
    result = command_here(
        tmp_path,
        "export",
        f"checkpoint={checkpoint}",
        f"output={output}",
        "preprocess=true",
        "latency=false",
        "batch_sizes=[1,4]",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("writing digits.onnx")
    assert "4 x 1 x 8 x 8" in result.stdout
    properties = {entry.key: entry.value for entry in onnx.load(str(output)).metadata_props}
    assert json.loads(properties["class_names"]) == [str(digit) for digit in range(10)]
    assert properties["checkpoint_sha256"] == sha256(checkpoint)
    assert properties["weights"] == "ema"

    pixels = probe_images(5, 1, 8, 8, pixels=True)
    loaded = load(checkpoint)
    mean, std = loaded.data["mean"][0], loaded.data["std"][0]
    with torch.no_grad():
        expected = loaded.backbone((pixels / 255 - mean) / std)
    torch.testing.assert_close(onnx_file.open_file(output)(pixels), expected, atol=1e-5, rtol=0)

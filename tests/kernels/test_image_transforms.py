"""The fused image transforms beside those of torch, and that kernels which change images wrongly are refused."""

import importlib

import pytest
import torch
from cases import cases

from longseq.kernels import explain, first_use, image_resize, image_steps
from longseq.kernels.image_transforms import fused
from longseq.kernels.image_transforms.parameters import KINDS

triton_resizing = importlib.import_module("longseq.kernels.image_transforms.triton_resizing")
triton_steps = importlib.import_module("longseq.kernels.image_transforms.triton_steps")

CHECKED = (*fused.FILTERS, fused.STEPS)


@pytest.mark.slow
@cases("kind", CHECKED)
def test_the_kernels_give_the_pixels_of_torch(kind, interpreted):
    assert fused.compare(torch.device("cpu"), kind, size=33) is None


@pytest.mark.parametrize(
    ("module", "name", "wrong", "kind"),
    [
        (triton_resizing, "FILTERS", {"bicubic": triton_resizing.FILTERS["bicubic"]._replace(support=1.0)}, "bicubic"),
        (triton_steps, "COLOR", triton_steps.CONTRAST, "steps"),
        (triton_steps, "SHARPNESS", triton_steps.TABLE, "steps"),
        (triton_steps, "BICUBIC", triton_steps.BILINEAR, "steps"),
    ],
)
def test_a_kernel_that_changes_images_wrongly_does_not_pass_its_check(
    module, name, wrong, kind, interpreted, monkeypatch
):
    monkeypatch.setattr(module, name, wrong)
    assert "values are wrong" in fused.compare(torch.device("cpu"), kind, size=33)


def test_blur_is_a_step_among_the_others(interpreted):
    images, steps = fused.make_steps(20)
    steps.kinds[0, ::3] = KINDS.index("blur")
    wanted = image_steps(images.clone(), steps, fused.FILL, backend="torch")
    assert torch.equal(image_steps(images, steps, fused.FILL, backend="fused"), wanted)


def test_the_processor_takes_the_form_of_torch_and_names_the_reason():
    assert explain("image_steps")["torch"] == []
    assert "it runs on a CUDA device, not on cpu" in explain("image_steps")["fused"][0]
    photographs, geometries = fused.make_photographs(8)
    with pytest.raises(ValueError, match="three channels, not of 1"):
        image_resize(photographs, geometries, 8, channels=1, backend="fused")


def test_kernels_that_fail_their_check_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(fused, "compare", lambda *_, **__: "7 values are wrong (color)")
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: torch.no_grad())
    monkeypatch.setattr(first_use, "side_stream", lambda index: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    with pytest.warns(UserWarning, match="refuses the fused form of image transforms"):
        error = fused.find_error(0, "steps")
    assert error == "the kernels that transform images (steps) failed their check on a GPU: 7 values are wrong (color)"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CHECKED)
def test_the_kernels_give_the_pixels_of_torch_on_a_gpu(kind):
    for size in (224, 33, 512):
        assert fused.compare(torch.device("cuda"), kind, size) is None
    assert fused.find_error(torch.cuda.current_device(), kind) is None

"""One process of several: each model, sharded over them, gives the same results as unsharded; see test_sharding.py."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from lightning.pytorch import LightningModule
from representatives import REPRESENTATIVES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import longseq.backbones.image  # its models register with timm
from longseq import save_pretrained
from longseq.backbones.tokens import TokenBackbone
from longseq.tasks.training.callbacks.weights import NonFiniteError, NonFiniteStop

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FEW = ("attention", "deltanet", "longhorn")
TOKENS = torch.arange(7)[None] * 3 % 11


def shard(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def text_model(mixer: str) -> TokenBackbone:
    # Eleven words: a number of rows that two processes cannot divide evenly.
    torch.manual_seed(0)
    return TokenBackbone(vocab_size=11, d_model=24, depth=1, mixer=mixer, tie_embeddings=False)


def image_model(mixer: str) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "longseq_vit_tiny_patch16_224", mixer=mixer, embed_dim=24, depth=1, img_size=32, num_classes=3
    )


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-5, msg=lambda text: f"{what}: {text}")


def check_text(mixer: str) -> None:
    # The mixers do not affect whether the model itself reshards after each method, nor which methods there are.
    few = mixer in FEW
    for number, options in enumerate(({}, {"reshard_after_forward": True})[: 2 if few else 1]):
        plain = text_model(mixer)
        sharded = shard(copy.deepcopy(plain), **options)
        assert any(isinstance(parameter, DTensor) for parameter in sharded.parameters())
        uses: list[Callable[[Any], Tensor]] = [
            lambda model: model.generate(TOKENS[:, :3], 2, temperature=0),
            lambda model: model.step(TOKENS[:, 0], model.initial_state(1))[0],
            lambda model: model.forward_features(TOKENS)[0],
            lambda model: model.forward_head(torch.ones(1, 24)),
        ]
        with torch.no_grad():
            for use in (uses if number == 0 else uses[::-1]) if few else uses[:3]:
                assert_same(use(sharded), use(plain), mixer)
        ways: list[Callable[[Any], Tensor]] = [
            lambda model: model(TOKENS)[0],
            lambda model: model.forward_head(model.forward_features(TOKENS)[0][:, ::2]),
        ]
        for way in ways if few else ways[:1]:
            for model in (plain, sharded):
                way(model).square().sum().backward()
        wanted = dict(plain.named_parameters())
        for name, parameter in sharded.named_parameters():
            if wanted[name].grad is None:
                assert parameter.grad is None, f"{mixer}.{name}"
            else:
                assert_same(parameter.grad, wanted[name].grad, f"the gradient of {name} of {mixer}")


def check_image(mixer: str) -> None:
    plain = image_model(mixer)
    sharded = shard(copy.deepcopy(plain))
    image = torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)
    with torch.no_grad():
        assert_same(sharded.forward_head(sharded.forward_features(image)), plain(image), mixer)
        assert_same(sharded.forward_intermediates(image)[1][0], plain.forward_intermediates(image)[1][0], mixer)
        assert_same(sharded(image), plain(image), mixer)


def check_first_weights(build: Callable[[], nn.Module], mixer: str) -> None:
    """A sharded model from the meta device draws the same weights as an unsharded one."""
    wanted = build()
    with torch.device("meta"):
        model = build()
    shard(model).to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    tensors = (*model.named_parameters(), *model.named_buffers())
    expected = dict((*wanted.named_parameters(), *wanted.named_buffers()))
    for name, tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, expected[name]), f"{name} of {mixer}"


def check_nonfinite_stop() -> None:
    """A weight that goes infinite in one process stops both, and both name it."""
    sharded = shard(text_model("deltanet"))
    module = LightningModule()
    module.backbone = sharded
    trainer: Any = SimpleNamespace(precision_plugin=None, precision="32-true", gradient_clip_val=1.0, global_step=4)
    stop = NonFiniteStop()
    stop.on_train_start(trainer, module)
    for bad in (False, True):
        loss = sharded(TOKENS)[0].square().sum()
        loss.backward()
        stop.on_before_backward(trainer, module, loss)
        if bad and RANK == 1:
            sharded.norm.weight.data.to_local().fill_(float("inf"))  # only this process's part
        stop.on_before_optimizer_step(trainer, module, None)
        if not bad:
            stop.check()
    with pytest.raises(NonFiniteError, match=r"step 5: parameter norm\.weight went"):
        stop.check()


def check_saved(model: nn.Module, folder: Path) -> None:
    state = copy.deepcopy(model.state_dict())
    sharded = shard(model)
    assert save_pretrained(sharded, folder) == folder
    loaded = longseq.from_pretrained(folder).state_dict()  # in both processes: the file is whole when the call ends
    assert loaded.keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in loaded.items())
    assert not list(folder.glob("*.partial"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(Path(sys.argv[1]) / "store"), WORLD)
    torch.distributed.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD)
    for name in REPRESENTATIVES:
        check_text(name)
        check_first_weights(lambda name=name: text_model(name), name)
        if name in FEW:
            check_image(name)
            check_first_weights(lambda name=name: image_model(name), name)
    check_nonfinite_stop()
    check_saved(text_model("deltanet"), Path(sys.argv[1]) / "text")
    check_saved(image_model("deltanet"), Path(sys.argv[1]) / "image")
    torch.distributed.destroy_process_group()
    print("checked", *REPRESENTATIVES, flush=True)
    # All checks are done. A process that is done sometimes aborts in threads of torch at the interpreter's end.
    os._exit(0)

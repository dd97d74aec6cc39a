"""Options of timm's Vision Transformer in our image models, and the published Vim's weights."""

import math

import pytest
import timm
import torch
from cases import cases
from torch.nn import functional

from longseq import mixers
from longseq.backbones.image import checkpoint_filter_fn

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 128, "depth": 2, "num_classes": 5}


def tiny(**options):
    """Two narrow blocks over 4 x 4 patches, with weights that all matter."""
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_classes": 5} | options
    torch.manual_seed(0)
    return randomised(timm.create_model("longseq_tiny_patch16_224", **options))


def randomised(model):
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def images(*size, batch=2):
    return torch.randn(batch, 3, *(size or (32, 32)), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@cases(
    ("options", "size"),
    [
        ({"reg_tokens": 3, "init_values": 0.1, "global_pool": "avgmax"}, (32, 32)),
        ({"reg_tokens": 2, "no_embed_class": True, "global_pool": "max", "dynamic_img_size": True}, (40, 24)),
        ({"reg_tokens": 2, "class_token": False, "global_pool": "avg"}, (32, 32)),
        ({"class_token": False, "global_pool": "map"}, (32, 32)),
        ({"reg_tokens": 1, "dynamic_img_size": True, "dynamic_img_pad": True}, (37, 26)),
    ],
)
@pytest.mark.slow
def test_models_compute_what_timm_computes_with_the_same_options(options, size):
    vit = randomised(timm.create_model("vit_tiny_patch16_224", num_heads=2, fc_norm=False, **SIZES, **options))
    x = images(*size)
    for no_embed_class in (True, False):
        ours = timm.create_model(
            "longseq_vit_tiny_patch16_224",
            mixer="attention",
            mixer_options={"num_heads": 2},
            **SIZES,
            **options | {"class_token": "first" if vit.has_class_token else "none", "no_embed_class": no_embed_class},
        ).eval()
        ours.load_state_dict(checkpoint_filter_fn(vit.state_dict(), ours))
        assert ours.num_prefix_tokens == vit.num_prefix_tokens
        torch.testing.assert_close(ours(x), vit(x), rtol=1e-4, atol=1e-4)
        arguments = {"n": (0, 1), "reshape": True, "return_prefix_tokens": True, "norm": True}
        for found, wanted in zip(
            ours.get_intermediate_layers(x, **arguments), vit.get_intermediate_layers(x, **arguments), strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        vit.set_input_size(img_size=(48, 32))
        ours.set_input_size(img_size=(48, 32))
        torch.testing.assert_close(ours(images(48, 32)), vit(images(48, 32)), rtol=1e-4, atol=1e-4)
        vit.set_input_size(img_size=(32, 32))


@torch.no_grad()
@cases(
    ("options", "tokens"),
    [({}, 3), ({"class_token": "first"}, 3), ({"class_token": "none"}, 2), ({"no_embed_class": False}, 3)],
)
def test_registers_stand_behind_the_class_token_and_first_in_features(options, tokens):
    model = tiny(reg_tokens=2, global_pool="avg", direction="cross", mixer="linear_attention", **options)
    sequence, layout = model._embed(images())
    expected = torch.cat([token for token in (model.cls_token, model.reg_token) if token is not None], dim=1)
    expected = expected + model.pos_embed[:, : model.num_prefix_positions] if model.num_prefix_positions else expected
    at = 8 if model.class_token == "middle" else 0
    assert layout == (4, 4, at, tokens)
    assert torch.equal(sequence[:, at : at + tokens], expected.expand(2, -1, -1))
    features = model.forward_features(images())
    logits = model(images())
    torch.testing.assert_close(logits, model.head(features[:, tokens:].mean(1)))
    taps = model.get_intermediate_layers(images(), [1], return_prefix_tokens=True, norm=True)
    torch.testing.assert_close(torch.cat(taps[0][::-1], dim=1), features)
    seen = []
    model.blocks[1].register_forward_hook(lambda module, arguments, output: seen.append(output))
    assert torch.equal(model(images()), logits)
    torch.testing.assert_close(model.norm(seen[0]), features)


@torch.no_grad()
def test_masked_tokens_are_not_read():
    model = tiny(reg_tokens=2, mixer="deltanet")
    mask = torch.ones(2, 19, dtype=torch.bool)
    mask[0, 11:], mask[1, 3:7] = False, False
    x = images()
    changed = x.clone()
    changed[0, :, 16:], changed[1, :, :8] = 7.0, 7.0  # the patches at False
    expected, found = (model.forward_features(one, attn_mask=mask)[mask] for one in (x, changed))
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(model.forward_features(changed)[mask], model.forward_features(x)[mask])
    taps = model.get_intermediate_layers(x, norm=True, attn_mask=mask[:, None, None])
    torch.testing.assert_close(taps[0][mask[:, 3:]], model.forward_features(x, mask)[:, 3:][mask[:, 3:]])
    model.blocks[0].register_forward_hook(lambda *_: None)
    torch.testing.assert_close(model.forward_features(x, mask)[mask], expected)
    with pytest.raises(ValueError, match="attn_mask must hold booleans"):
        model.forward_features(x, attn_mask=torch.zeros(19, 19))


def test_dropout_of_patches_keeps_their_order_and_works_in_training_only():
    model = tiny(mixer="longhorn", patch_drop_rate=0.5)
    with torch.no_grad():
        model.pos_embed.copy_(torch.arange(16.0).view(1, 16, 1).expand_as(model.pos_embed))
        model.patch_embed.proj.weight.zero_()
        model.patch_embed.proj.bias.zero_()
        sequence, layout = model.train()._embed(images())
        patches = torch.cat([sequence[:, : layout.token], sequence[:, layout.token + 1 :]], dim=1)[..., 0]
        assert patches.shape == (2, 8)
        assert (patches.diff(dim=1) > 0).all()
        assert model.eval()._embed(images())[0].shape == (2, 17, 16)
    model.train()(images()).sum().backward()
    assert model.forward_intermediates(images(), output_fmt="NLC")[1][0].shape == (2, 8, 16)


@torch.no_grad()
def test_pooling_changes_with_the_classifier():
    model = tiny(reg_tokens=1)
    patches = model.forward_features(images())[:, 2:]
    ways = {"avg": patches.mean(1), "max": patches.amax(1), "avgmax": (patches.mean(1) + patches.amax(1)) / 2}
    for way, expected in ways.items():
        model.reset_classifier(0, way)
        torch.testing.assert_close(model(images()), expected)
    model.reset_classifier(3, "map")
    assert not model.attn_pool.training
    torch.testing.assert_close(model(images()), model.head(model.attn_pool(patches)))
    assert "reg_token" in model.no_weight_decay()
    model.reset_classifier(0, "")
    assert model.attn_pool is None


def test_patch_dropout_and_columns_contradict():
    with pytest.raises(ValueError, match="no grid whose columns"):
        tiny(patch_drop_rate=0.5, direction="cross")


def published_vim(width=24, depth=2, patches=16, classes=5, width_of_patches=8):
    """Random weights under the names and in the shapes of github.com/hustvl/Vim, `vim_tiny_...midclstok_div2`."""
    inner, rank, state = 2 * width, math.ceil(width / 16), 16
    mixer = {"in_proj.weight": (2 * inner, width), "out_proj.weight": (width, inner)}
    for side in ("", "_b"):
        mixer |= {
            f"A{side}_log": (inner, state),
            f"D{side}": (inner,),
            f"conv1d{side}.weight": (inner, 1, 4),
            f"conv1d{side}.bias": (inner,),
            f"x_proj{side}.weight": (rank + 2 * state, inner),
            f"dt_proj{side}.weight": (inner, rank),
            f"dt_proj{side}.bias": (inner,),
        }
    shapes = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, patches + 1, width),
        "patch_embed.proj.weight": (width, 3, width_of_patches, width_of_patches),
        "patch_embed.proj.bias": (width,),
        "head.weight": (classes, width),
        "head.bias": (classes,),
        "norm_f.weight": (width,),
    }
    for layer in range(depth):
        shapes |= {f"layers.{layer}.mixer.{name}": shape for name, shape in mixer.items()}
        shapes[f"layers.{layer}.norm.weight"] = (width,)
    generator = torch.Generator().manual_seed(3)
    return {name: 0.4 * torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}


def run_vim(p, x, depth=2):
    """Vim as its paper and its published models define it, token by token, from the parameters by their names."""

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def read(x, z, name, side):
        """One Mamba layer without its outer projections over x, z [T, I]."""
        weight = p[f"{name}.conv1d{side}.weight"][:, 0]
        padded = functional.pad(x, (0, 0, 3, 0))
        taps = torch.stack([padded[k : k + len(x)] * weight[:, k] for k in range(4)]).sum(0)
        x = functional.silu(taps + p[f"{name}.conv1d{side}.bias"])
        selected = x @ p[f"{name}.x_proj{side}.weight"].T
        rate, key, query = selected.split([selected.shape[1] - 32, 16, 16], dim=1)
        step = functional.softplus(rate @ p[f"{name}.dt_proj{side}.weight"].T + p[f"{name}.dt_proj{side}.bias"])
        decay = -p[f"{name}.A{side}_log"].exp()
        memory, outputs = torch.zeros_like(decay), []
        for t in range(len(x)):
            memory = (step[t, :, None] * decay).exp() * memory + (step[t] * x[t])[:, None] * key[t]
            outputs.append(memory @ query[t] + p[f"{name}.D{side}"] * x[t])
        return torch.stack(outputs) * functional.silu(z)

    weight, bias = p["patch_embed.proj.weight"], p["patch_embed.proj.bias"]
    patches = functional.conv2d(x[None], weight, bias, stride=weight.shape[-1])[0].flatten(1).T
    middle = len(patches) // 2
    x = torch.cat([patches[:middle], p["cls_token"][0], patches[middle:]]) + p["pos_embed"][0]
    for layer in range(depth):
        name = f"layers.{layer}.mixer"
        a, z = (norm(x, p[f"layers.{layer}.norm.weight"]) @ p[f"{name}.in_proj.weight"].T).chunk(2, dim=1)
        both = read(a, z, name, "") + read(a.flip(0), z.flip(0), name, "_b").flip(0)
        branch = both / 2 @ p[f"{name}.out_proj.weight"].T
        x = x + branch * p.get(f"{name}.gamma", 1)
    return norm(x, p["norm_f.weight"])[middle] @ p["head.weight"].T + p["head.bias"]


VIM = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_classes": 5, "mixer": "mamba"}


@torch.no_grad()
@cases("options", [{"merge": "mean"}, {"merge": "sum"}, {"merge": "mean", "init_values": 0.1, "no_embed_class": False}])
def test_published_weights_of_vim_give_what_vim_computes(options):
    weights = published_vim()
    if "init_values" in options:
        weights |= {f"layers.{layer}.mixer.gamma": torch.rand(24).double() for layer in range(2)}
    model = timm.create_model("longseq_tiny_patch16_224", **VIM, **options).double().eval()
    model.load_state_dict(checkpoint_filter_fn({"model": weights, "epoch": 3}, model))
    x = images().double()
    torch.testing.assert_close(model(x), torch.stack([run_vim(weights, one) for one in x]))


def test_a_file_of_vim_loads_through_timm_at_another_size(tmp_path):
    weights = {name: value.float() for name, value in published_vim().items()}
    torch.save({"model": weights}, tmp_path / "vim.pth")
    source = {"file": str(tmp_path / "vim.pth")}
    options = VIM | {"img_size": (48, 32), "num_classes": 3}
    model = timm.create_model("longseq_tiny_patch16_224", pretrained=True, pretrained_cfg_overlay=source, **options)
    table = weights["pos_embed"]
    grid = torch.cat([table[:, :8], table[:, 9:]], dim=1).mT.unflatten(2, (4, 4))
    resized = functional.interpolate(grid, size=(6, 4), mode="bicubic", antialias=True)
    torch.testing.assert_close(model.pos_embed.detach(), resized.flatten(2).mT)
    torch.testing.assert_close(model.cls_token.detach(), weights["cls_token"] + table[:, 8:9])
    assert model.head.out_features == 3


@pytest.mark.slow
def test_every_mixer_takes_registers_and_layer_scale():
    for mixer in mixers.mixer_names():
        model = tiny(mixer=mixer, reg_tokens=2, init_values=0.1, global_pool="avgmax", depth=1).train()
        model(images()).square().mean().backward()
        assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()], mixer

"""What timm's tests require of timm's models, required of every registered longseq model and of every mixer, direction
and class token.

Each registered model runs once at its own width, depth and image size. Other tests make it narrow, with four blocks and
images of 64 px, and keep what else its name decides: timm's requirements do not depend on the size.
"""

import copy
import fnmatch
import itertools

import pytest
import timm
import torch
from representatives import REPRESENTATIVES
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, resolve_model_data_config
from timm.models import get_notrace_functions, get_notrace_modules
from timm.models._manipulate import group_parameters
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names
from zeros import without_zeros

from longseq.blocks.positions import TOKEN_PLACES
from longseq.blocks.reading import DIRECTIONS

MODELS = timm.list_models("longseq_*")
# Mixers in every direction, with the places of the token in turn; one mixer with a scan and one without, in every
# place.
COMBINATIONS = sorted(
    {(mixer, *pair) for mixer in REPRESENTATIVES for pair in zip(DIRECTIONS, itertools.cycle(TOKEN_PLACES))}
    | set(itertools.product(("longhorn", "attention"), DIRECTIONS, TOKEN_PLACES))
)


def small(name, **options):
    """A registered model, narrow and of four blocks, for images of 64 px."""
    torch.manual_seed(0)
    return timm.create_model(name, **{"img_size": 64, "embed_dim": 48, "depth": 4} | options)


def tiny(mixer="longhorn", direction="bidirectional", class_token="middle", **options):
    """A model of two narrow blocks over 4 x 3 patches."""
    torch.manual_seed(0)
    pool = "avg" if class_token == "none" or (class_token, direction) == ("first", "forward") else "token"
    defaults = {"img_size": (32, 24), "patch_size": 8, "embed_dim": 16, "depth": 2, "num_classes": 5}
    model = timm.create_model(
        "longseq_tiny_patch16_224",
        mixer=mixer,
        direction=direction,
        class_token=class_token,
        **defaults | {"global_pool": pool} | options,
    )
    return without_zeros(model)


def images(model, batch=2):
    torch.manual_seed(1)
    return torch.randn(batch, model.in_chans, *model.patch_embed.img_size)


def traced_graph(model, last=None):
    """The trace up to its last node, which is searched for unless it is given."""
    options = {"leaf_modules": get_notrace_modules(), "autowrap_functions": get_notrace_functions()}
    if last is None:
        last = get_graph_node_names(model, tracer_kwargs=options)[1][-1]
    return create_feature_extractor(model, [last], tracer_kwargs=options)


def check_gradients(model):
    logits = model.train()(images(model))
    logits.square().mean().backward()
    assert not logits.isnan().any()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not missing
    still = [name for name, p in model.named_parameters() if not p.grad.any()]
    assert not still


def check_intermediates(model):
    x = images(model)
    height, width = model.patch_embed.grid_size
    depth = len(model.blocks)
    with torch.no_grad():
        features = model.forward_features(x)
        output, taps = model.forward_intermediates(x)
        assert torch.equal(output, features)
        assert [tap.shape for tap in taps] == [(2, model.num_features, height, width)] * depth
        normed = model.forward_intermediates(x, indices=1, norm=True, output_fmt="NLC", intermediates_only=True)
        assert torch.equal(normed[0], features[:, model.num_prefix_tokens :])
        pairs = model.forward_intermediates(x, [0], return_prefix_tokens=True, stop_early=True, intermediates_only=True)
        if model.num_prefix_tokens:
            pairs = [pair[0] for pair in pairs]
        assert torch.equal(pairs[0], taps[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_forward_at_the_default_size(name):
    # The larger ones differ from the tiny ones in numbers only: they run without values.
    device = "cpu" if "tiny" in name else "meta"
    model = timm.create_model(name, device=device).eval()
    with torch.no_grad():
        logits = model(torch.randn(1, *model.default_cfg["input_size"], device=device))
    assert logits.shape == (1, 1000)
    assert device == "meta" or logits.isfinite().all()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_default_configuration(name):
    model = timm.create_model(name, device="meta")
    config = model.default_cfg
    assert config is model.pretrained_cfg
    assert config["architecture"] == name
    assert config["input_size"] == (3, 224, 224)
    assert config["fixed_input_size"]
    assert config["pool_size"] is None
    assert (config["mean"], config["std"]) == (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    assert (config["interpolation"], config["crop_pct"]) == ("bicubic", 0.875)
    assert not any(config.get(source) for source in ("url", "hf_hub_id", "file"))
    assert name not in timm.list_models("longseq_*", pretrained=True)
    parameters = dict(model.named_parameters())
    assert parameters[config["classifier"] + ".weight"].shape == (1000, model.num_features)
    assert parameters[config["first_conv"] + ".weight"].shape[1] == model.in_chans == 3
    assert resolve_model_data_config(model)["input_size"] == (3, 224, 224)
    assert model.get_submodule(model.feature_info[-1]["module"]) is model.blocks[-1]


@pytest.mark.parametrize("name", MODELS)
def test_heads(name):
    model = small(name, in_chans=1).eval()
    x = images(model)
    assert x.shape == (2, 1, 64, 64)
    assert model.num_features == model.head_hidden_size == model.embed_dim
    with torch.no_grad():
        features = model.forward_features(x)
        assert features.shape == (2, 17, model.num_features)
        pooled = model.forward_head(features, pre_logits=True)
        assert pooled.shape == (2, model.head_hidden_size)
        assert torch.equal(model.get_classifier()(pooled), model(x))
        model.reset_classifier(42)
        assert model.num_classes == 42
        assert model(x).shape == (2, 42)
        model.reset_classifier(0)
        assert torch.equal(model(x), pooled)
        model.reset_classifier(0, "avg")
        assert torch.equal(model(x), features[:, 1:].mean(1))
        model.reset_classifier(0, "")
        assert torch.equal(model(x), features)
    assert isinstance(small(name, device="meta", num_classes=0).get_classifier(), torch.nn.Identity)


@pytest.mark.parametrize("name", MODELS)
def test_the_output_follows_the_type_of_the_weights(name):
    model = small(name).eval()
    x = images(model)
    with torch.no_grad():
        model(x)
        assert model.to(torch.bfloat16)(x.to(torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_parameter_groups(name):
    model = timm.create_model(name, device="meta")
    names = {name for name, _ in model.named_parameters()}
    assert all(any(fnmatch.fnmatch(name, pattern) for name in names) for pattern in model.no_weight_decay())
    assert {"pos_embed", "cls_token"} <= model.no_weight_decay()
    layers = group_parameters(model, model.group_matcher(), reverse=True)
    assert set(layers) == names
    depth = len(model.blocks)
    assert {layers["pos_embed"], layers["cls_token"], layers["patch_embed.proj.weight"]} == {0}
    assert [layers[f"blocks.{i}.norm1.weight"] for i in range(depth)] == list(range(1, depth + 1))
    assert layers["norm.weight"] == depth  # it has the learning rate of the last block, as in timm
    assert layers["head.weight"] == depth + 1


@pytest.mark.parametrize("name", MODELS)
def test_features_only(name):
    model = small(name, features_only=True, out_indices=(-3, -1)).eval()
    with torch.no_grad():
        outputs = model(torch.randn(2, 3, 64, 64))
    assert [tuple(output.shape) for output in outputs] == [(2, c, 4, 4) for c in model.feature_info.channels()]
    assert model.feature_info.reduction() == [16, 16]
    assert len(model.model.head.state_dict()) == 0


@pytest.mark.parametrize("direction", ["bidirectional", "cross"])
def test_the_symbolic_trace_keeps_the_size_dynamic(direction):
    model = tiny(direction=direction, dynamic_img_size=True).eval()
    traced = traced_graph(model)
    with torch.no_grad():
        for x in (torch.randn(2, 3, 32, 24), torch.randn(1, 3, 40, 64)):
            assert torch.equal(traced(x)["head"], model(x))


@pytest.mark.parametrize("name", MODELS)
def test_every_registered_model_keeps_the_contract(name):
    check_gradients(small(name, num_classes=42))
    check_contract(small(name).eval())


@pytest.mark.parametrize(("mixer", "direction", "place"), COMBINATIONS)
def test_every_combination_keeps_the_contract(mixer, direction, place):
    # Pooled over all tokens: with the first token alone, the last forward scan has no past, and its decay rates no
    # gradient.
    check_gradients(tiny(mixer, direction, place, global_pool="avg"))
    check_contract(tiny(mixer, direction, place).eval())


def check_contract(model):
    check_intermediates(model)
    x = images(model)
    with torch.no_grad():
        logits = model(x)
        (traced,) = traced_graph(model, "head")(x).values()
        assert torch.equal(traced, logits)
        assert torch.allclose(model(x[1:]), logits[1:], rtol=1e-4, atol=1e-5)
    model.set_grad_checkpointing()
    torch.testing.assert_close(model(x), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction", ["bidirectional", "cross"])
def test_separate_projections_get_a_gradient(direction):
    check_gradients(tiny("longhorn", direction, share_directions="none", merge="mean"))


@pytest.mark.parametrize("mixer", REPRESENTATIVES)
def test_checkpointing_gives_the_same_gradients(mixer):
    gradients = []
    for enable in (False, True):
        model = tiny(mixer).train()
        model.set_grad_checkpointing(enable)
        model(images(model)).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("place", TOKEN_PLACES)
def test_pruned_models_keep_their_intermediates(place):
    model = tiny(class_token=place, depth=4, drop_rate=0.5).eval()
    x = images(model)
    with torch.no_grad():
        logits = model(x)
        taps = model.forward_intermediates(x, intermediates_only=True)
        kept = copy.deepcopy(model)
        kept.prune_intermediate_layers([3], prune_head=False)
        assert torch.equal(kept(x), logits)
    for index in range(4):
        pruned = copy.deepcopy(model)
        assert pruned.prune_intermediate_layers([index], prune_norm=True) == [index]
        selected = pruned.forward_intermediates(x, [index], intermediates_only=True)
        assert torch.equal(selected[0], taps[index])
        sum(tap.sum() for tap in selected).backward()
        assert [name for name, p in pruned.named_parameters() if p.grad is None] == []
        assert len(pruned.blocks) == index + 1


def placed(place, **options):
    """A small model of three blocks with its class token at `place`."""
    options = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_classes": 5} | options
    torch.manual_seed(0)
    return timm.create_model("longseq_tiny_patch16_224", class_token=place, direction="cross", **options).eval()


@pytest.mark.parametrize("place", ["middle", "first"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_hooks_on_blocks_find_the_class_token_first(place, checkpointing):
    model = placed(place, mixer="linear_attention")
    model.set_grad_checkpointing(checkpointing)
    x = images(model)
    plain = model(x)
    taps = model.forward_intermediates(x, output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True)
    inputs, outputs, normed = [], [], []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
        block.register_forward_hook(lambda module, arguments, output: outputs.append(output))
    model.norm.register_forward_hook(lambda module, arguments, output: normed.append(output))
    assert torch.equal(model(x), plain)
    assert torch.equal(normed[0], model.forward_features(x))
    for output, following, (patches, token) in zip(outputs, [*inputs[1:3], None], taps, strict=False):
        assert torch.equal(output, torch.cat([token, patches], dim=1))
        assert following is None or torch.equal(following, output)
    torch.testing.assert_close(inputs[0][:, 1:], model.patch_embed(x).flatten(1, 2) + model.pos_embed)


@pytest.mark.parametrize("place", ["middle", "first"])
@pytest.mark.parametrize("feature_cls", ["hook", "fx"])
def test_features_of_every_kind_have_the_class_token_first(place, feature_cls):
    model = placed(place, mixer="linear_attention")
    features = placed(
        place, mixer="linear_attention", features_only=True, feature_cls=feature_cls, out_indices=(0, 1, 2)
    )
    x = images(model)
    taps = model.forward_intermediates(x, output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True)
    for output, (patches, token) in zip(features(x), taps, strict=True):
        torch.testing.assert_close(output[:, 1:], patches)
        torch.testing.assert_close(output[:, :1], token)

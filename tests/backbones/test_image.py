import pytest
import timm
import torch
from cases import cases
from representatives import REPRESENTATIVES
from zeros import without_zeros

import longseq
from longseq.backbones.image import checkpoint_filter_fn
from longseq.blocks.positions import Layout


def tiny(chassis="", **options):
    """Two narrow blocks over 4 x 3 patches."""
    torch.manual_seed(0)
    defaults = {"img_size": (32, 24), "patch_size": 8, "embed_dim": 16, "depth": 2, "num_classes": 5}
    return without_zeros(timm.create_model(f"longseq_{chassis}tiny_patch16_224", **defaults | options)).eval()


def images(height=32, width=24, batch=2, channels=3):
    torch.manual_seed(1)
    return torch.randn(batch, channels, height, width)


def randomised(model):
    """Every parameter, moved away from the zeros and ones of its initialisation."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


def test_gradients_of_vit_with_attention_equal_those_of_a_vit_of_timm():
    options = {"depth": 2, "embed_dim": 48, "img_size": 64, "num_classes": 7}
    vit = randomised(timm.create_model("vit_tiny_patch16_224", num_heads=3, **options)).double()
    ours = timm.create_model(
        "longseq_vit_tiny_patch16_224", mixer="attention", mixer_options={"num_heads": 3}, **options
    ).double()
    ours.load_state_dict(checkpoint_filter_fn(vit.state_dict(), ours))
    for model in (ours, vit):
        model(images(64, 64).double()).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in vit.named_parameters()}
    # The class token and its position are one parameter here; each of timm's two has its gradient.
    expected = {**checkpoint_filter_fn(gradients, ours), "cls_token": gradients["cls_token"]}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-9 * expected[name].abs().max())


@pytest.mark.parametrize("no_embed_class", [False, True])
@pytest.mark.parametrize(
    ("img_size", "target"),
    [((80, 160), (80, 160)), ((96, 160), (96, 160)), ((64, 64), (64, 64)), ((64, 64), (48, 96)), ((64, 64), (96, 96))],
)
def test_weights_of_timm_load_on_their_own_grid_and_from_a_square_one(img_size, target, no_embed_class):
    """5 x 10 patches are 7 x 7 and a class token; 6 x 10 and a class token are no square."""
    options = {"depth": 1, "embed_dim": 48, "num_classes": 7}
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=img_size, num_heads=3, no_embed_class=no_embed_class, **options
    )
    vit = randomised(vit)
    ours = timm.create_model(
        "longseq_vit_tiny_patch16_224", mixer="attention", mixer_options={"num_heads": 3}, img_size=target, **options
    ).eval()
    ours.load_state_dict(checkpoint_filter_fn(vit.state_dict(), ours))
    vit.set_input_size(img_size=target)
    x = images(*target)
    with torch.no_grad():
        assert (ours(x) - vit(x)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("options", "weight"),
    [({"init_values": 1e-5}, "ls1.gamma"), ({"qk_norm": True}, "q_norm.weight"), ({"fc_norm": True}, "fc_norm.weight")],
)
def test_weights_without_a_place_are_refused(options, weight):
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, **options)
    ours = timm.create_model("longseq_vit_tiny_patch16_224", mixer="attention", depth=1)
    with pytest.raises(ValueError, match=f"no place for the checkpoint's .*{weight}"):
        checkpoint_filter_fn(vit.state_dict(), ours)


def test_pooling_by_attention_has_the_heads_of_the_attention_in_weights_of_timm():
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 1, "num_classes": 5, "global_pool": "map"}
    vit = timm.create_model("vit_tiny_patch16_224", num_heads=3, **sizes).eval()
    torch.nn.init.normal_(vit.attn_pool.kv.weight)
    options = {"mixer": "attention", "mixer_options": {"num_heads": 3}, **sizes}
    ours = timm.create_model("longseq_vit_tiny_patch16_224", **options)
    with pytest.raises(ValueError, match="give pool_num_heads=3"):
        checkpoint_filter_fn(vit.state_dict(), ours)
    ours = timm.create_model("longseq_vit_tiny_patch16_224", pool_num_heads=3, **options).eval()
    ours.load_state_dict(checkpoint_filter_fn(vit.state_dict(), ours))
    x = images(32, 32)
    with torch.no_grad():
        assert (ours(x) - vit(x)).abs().max() < 1e-5
    ours.reset_classifier(5, "avg")
    ours.reset_classifier(5, "map")
    assert ours.attn_pool.num_heads == 3


@cases("size", [(48, 48), (72, 32), 64])
def test_another_size_than_that_of_the_weights_is_refused_in_a_line(tmp_path, size):
    model = tiny(img_size=(32, 72))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="set_input_size"):
        longseq.from_pretrained(tmp_path, img_size=size)
    assert longseq.from_pretrained(tmp_path, img_size=(32, 75)).patch_embed.img_size == (32, 75)
    dynamic = longseq.from_pretrained(tmp_path, dynamic_img_size=True)
    model.set_input_size(img_size=size)
    x = images(*model.patch_embed.img_size)
    with torch.no_grad():
        assert torch.equal(dynamic(x), model(x))


@pytest.mark.parametrize("place", ["middle", "first", "none"])
@pytest.mark.parametrize("direction", ["bidirectional", "cross"])
def test_dynamic_size_equals_a_changed_size(direction, place):
    options = {"direction": direction, "class_token": place, "global_pool": "avg"}
    dynamic, fixed = tiny(dynamic_img_size=True, **options), tiny(**options)
    fixed.load_state_dict(dynamic.state_dict())
    with torch.no_grad():
        assert torch.equal(dynamic(images()), fixed(images()))
        fixed.set_input_size(img_size=(40, 64))
        x = images(40, 64)
        assert torch.equal(dynamic(x), fixed(x))
        taps = dynamic.forward_intermediates(x, intermediates_only=True)
        assert taps[0].shape == (2, 16, 5, 8)


def influence(model, output):
    """Which pixels of the first image affect `output(model, image)`: one number for each patch."""
    x = images(batch=1).to(model.pos_embed.dtype).requires_grad_()
    output(model, x).square().sum().backward()
    return x.grad.abs().sum(1).unfold(1, 8, 8).unfold(2, 8, 8).sum((-1, -2))[0]


@pytest.mark.parametrize("mixer", REPRESENTATIVES)
@cases("direction", ["bidirectional", "cross"])
@cases("place", ["middle", "first"])
def test_the_class_token_sees_the_whole_image_in_one_layer(mixer, direction, place):
    model = tiny(depth=1, mixer=mixer, direction=direction, class_token=place)
    assert (influence(model, lambda m, x: m(x)) > 0).all()


@pytest.mark.parametrize("mixer", REPRESENTATIVES)
def test_forward_reads_only_what_came_before(mixer):
    model = tiny(depth=2, mixer=mixer, direction="forward").double()
    moved = influence(model, lambda m, x: m(x)).flatten()
    seen = moved > 1e-10 * moved.max()  # Fourier transforms leave rounding errors in the past
    assert seen.tolist() == [True] * 6 + [False] * 6  # the token stands in the middle


@pytest.mark.parametrize("chassis", ["", "vit_"])
@pytest.mark.parametrize("mixer", REPRESENTATIVES)
def test_bfloat16_autocast_trains_without_nan(mixer, chassis):
    model = tiny(chassis, mixer=mixer).train()
    exact = model(images())
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images())
        residual, _ = model._embed(images())
    assert residual.dtype == torch.float32
    torch.testing.assert_close(logits.float(), exact, rtol=0.05, atol=0.05)
    logits.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("token_first", [False, True])
@pytest.mark.parametrize("mixer", ["longhorn", "attention"])
def test_a_block_of_an_image_reads_real_tokens_alone(mixer, token_first):
    block, layout = tiny(mixer=mixer).blocks[0], Layout(3, 4, 6)
    x = torch.randn(2, 13, block.norm1.weight.shape[0])
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[0, 9:], mask[1, 7] = False, False  # behind the class token, in both orders
    changed = torch.where(mask[..., None], x, 5.0)
    expected, actual = (block(tokens, layout, token_first=token_first, mask=mask) for tokens in (x, changed))
    torch.testing.assert_close(actual[mask], expected[mask])

"""The token model: whole sequences, splits, steps and packed rows agree; initial weights and counts are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from representatives import REPRESENTATIVES
from torch import Tensor
from zeros import without_zeros

from longseq import mixers
from longseq.backbones.generation import StepGraph
from longseq.backbones.tokens import TokenBackbone
from longseq.blocks.recompute import RECOMPUTE
from longseq.kernels.packing import Packing

VOCABULARY = 11
HYBRID = "2xdeltanet+attention"
MODELS = [*REPRESENTATIVES, HYBRID]


def make(mixer: str = "deltanet", **options: Any) -> TokenBackbone:
    torch.manual_seed(0)
    depth = 3 if mixer == HYBRID else 1
    model = TokenBackbone(**{"vocab_size": VOCABULARY, "d_model": 32, "depth": depth, "mixer": mixer, **options})
    return without_zeros(model).double().eval()


def make_tokens(batch: int, length: int = 13) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9)


def steps(model: TokenBackbone, tokens: Tensor, state: Any) -> Tensor:
    logits = []
    for token in tokens.unbind(1):
        y, state = model.step(token, state)
        logits.append(y)
    return torch.stack(logits, dim=1)


@pytest.mark.parametrize(
    "options", [{"norm_order": "post", "mlp_bias": True}, {"norm_order": "post", "mlp": None}], ids=str
)
def test_post_norms_have_the_same_contract(options: dict[str, Any]) -> None:
    model, tokens = make("attention", depth=2, **options), make_tokens(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    whole, _ = model(tokens)
    x = model.embedding(tokens)
    for block in model.blocks:
        x = x + block.norm1(block.mixer(x)[0])
        x = x if block.mlp is None else x + block.norm2(block.mlp(x))
    assert_same(whole, model.forward_head(model.norm(x)))
    assert_same(steps(model, tokens, model.initial_state(2, dtype=torch.float64)), whole)
    assert model.bfloat16()(tokens)[0].isfinite().all()


@pytest.mark.parametrize("mixer", MODELS)
def test_splits_steps_and_packed_rows_are_the_whole(mixer: str) -> None:
    model = make(mixer, positions="learned", max_length=13)
    tokens = make_tokens(2)
    whole, _ = model(tokens)
    assert whole.shape == (2, 13, VOCABULARY)
    first, state = model(tokens[:, :5])
    second, state = model(tokens[:, 5:6], state)
    third, _ = model(tokens[:, 6:], state)
    assert_same(torch.cat([first, second, third], dim=1), whole)
    assert_same(steps(model, tokens, model.initial_state(2, dtype=torch.float64)), whole)
    packed, packed_state = model(tokens.flatten()[None], cu_seqlens=torch.tensor([0, 13, 26]))
    assert_same(packed.view_as(whole), whole)
    assert packed_state.position.tolist() == [13, 13]


@pytest.mark.parametrize("mixer", ["deltanet", HYBRID])
def test_generation_continues_as_the_model_would(mixer: str) -> None:
    model = make(mixer)
    prompt = make_tokens(3, 4)
    text = model.generate(prompt, 6, temperature=0)
    assert text.shape == (3, 10)
    assert torch.equal(text[:, :4], prompt)
    for place in range(4, 10):
        assert torch.equal(model(text[:, :place])[0][:, -1].argmax(-1), text[:, place])
    drawn = [
        model.generate(prompt, 6, temperature=50.0, generator=torch.Generator().manual_seed(seed)) for seed in (7, 7, 8)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(model.generate(prompt, 0), prompt)
    assert model.generate(prompt[:0], 6).shape == (0, 10)


@pytest.mark.parametrize("mixer", MODELS)
def test_a_preallocated_state_takes_steps_as_any_other(mixer: str) -> None:
    model, tokens = make(mixer, positions="learned", max_length=13), make_tokens(2)
    whole, _ = model(tokens)
    with torch.no_grad():
        features, state = model.forward_features(tokens[:, :5], max_length=13)
        assert_same(model.forward_head(features), whole[:, :5])
        assert model.room(state) in (8, None)
        assert_same(steps(model, tokens[:, 5:9], state), whole[:, 5:9])
        state = model.forward_features(tokens[:, 5:9], model.preallocate(model(tokens[:, :5])[1], 9))[1]
        assert model.room(state) in (0, None)
        assert_same(model(tokens[:, 9:], model.trim(state))[0], whole[:, 9:])
        assert_same(steps(model, tokens[:, 9:], model.preallocate(state, 13)), whole[:, 9:])


STEP_GRAPHS = [
    name for name in MODELS if name == HYBRID or mixers.get(name).preallocates or not mixers.get(name).growing_state
]


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", STEP_GRAPHS)
def test_generation_by_a_step_graph_gives_the_same_text(mixer: str) -> None:
    model = make(mixer).float().cuda()
    prompt = make_tokens(3, 4).cuda()
    for options in ({"temperature": 0}, {"temperature": 20.0, "top_k": 9}):
        plain, replayed = (
            model.generate(prompt, 12, generator=torch.Generator().manual_seed(0), cuda_graph=graph, **options)
            for graph in (False, True)
        )
        assert torch.equal(plain, replayed)


@pytest.mark.gpu
def test_a_step_graph_refuses_states_that_grow() -> None:
    prompt = make_tokens(1).cuda()
    with pytest.raises(ValueError, match="Hyena grows with every token"):
        make("hyena").float().cuda().generate(prompt, 4, cuda_graph=True)
    model = make("attention").float().cuda()
    with torch.no_grad():
        with pytest.raises(ValueError, match="Attention grows with every token"):
            StepGraph(model, model(prompt)[1])
        graph = StepGraph(model, model.forward_features(prompt, max_length=14)[1])
        graph(prompt[:, 0])
        with pytest.raises(ValueError, match="no room for another token"):
            graph(prompt[:, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "bidirectional", "alternating"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_packed_training_waits_for_nothing_and_is_one_graph(compiled: bool, direction: str) -> None:
    options = {"attention": {"rotary": True}, "window_attention": {"window": 32, "rotary": True}, "deltanet": {}}
    layers, depth = "attention+window_attention+deltanet", 6 if direction == "alternating" else 3
    model = TokenBackbone(
        vocab_size=64, d_model=128, depth=depth, mixer=layers, mixer_options=options, direction=direction
    ).cuda()
    borders = torch.tensor([0, 100, 100, 101, 400, 512])
    tokens = torch.randint(64, (1, 512), device="cuda")
    run = torch.compile(model, fullgraph=True) if compiled else model

    def train(found: Packing) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits, state = run(tokens, cu_seqlens=found, output_final_state=False)
        logits.float().square().mean().backward()
        assert state is None
        return logits

    train(Packing(borders, device="cuda"))  # compilation and autotuning wait for the device
    torch.cuda.synchronize()
    found = Packing(borders, device="cuda")
    torch.cuda.set_sync_debug_mode("default" if compiled else "error")
    try:
        packed = train(found)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.autocast("cuda", torch.bfloat16):
        alone = torch.cat([model(part)[0] for part in tokens.split([100, 1, 299, 112], dim=1)], dim=1)
    assert (packed - alone).norm() <= 2e-2 * alone.norm()


@pytest.mark.parametrize("option", [{}, {"mlp": "gelu"}, {"mlp": None}, {"norm": "layer", "embedding_norm": True},
                                    {"tie_embeddings": False}, {"positions": "learned", "max_length": 13}])  # fmt: skip
def test_the_model_is_its_formula(option: dict[str, Any]) -> None:
    """The formula uses the parameters by name; of the layers, only the mixers are called."""
    model, tokens = make(depth=2, **option), make_tokens(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    p = model.state_dict()

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True) if "norm" in option else x
        y = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"]
        return y + p[f"{name}.bias"] if "norm" in option else y

    x = p["embedding.weight"][tokens] + p.get("positions.weight", torch.zeros(()))
    x = norm("embedding_norm", x) if "embedding_norm" in option else x
    for i, block in enumerate(model.blocks):
        x = x + block.mixer(norm(f"blocks.{i}.norm1", x))[0]
        if option.get("mlp", "swiglu") is None:
            continue
        h, own = norm(f"blocks.{i}.norm2", x), f"blocks.{i}.mlp"
        if "mlp" in option:
            h = h @ p[f"{own}.fc1.weight"].T + p[f"{own}.fc1.bias"]
            x = x + (h * (1 + torch.erf(h / 2**0.5)) / 2) @ p[f"{own}.fc2.weight"].T + p[f"{own}.fc2.bias"]
        else:
            gate = h @ p[f"{own}.fc1_g.weight"].T
            x = x + (h @ p[f"{own}.fc1_x.weight"].T * gate / (1 + (-gate).exp())) @ p[f"{own}.fc2.weight"].T
    whole = model(tokens)[0]
    assert_same(whole, norm("norm", x) @ p["head.weight" if "head.weight" in p else "embedding.weight"].T)
    assert_same(steps(model, tokens, model.initial_state(2, dtype=torch.float64)), whole)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("mixer", ["deltanet", "attention", "longhorn", "gsa", "vla"])
def test_recomputing_keeps_less_and_changes_nothing(mixer: str, packed: bool) -> None:
    options = {"cu_seqlens": torch.tensor([0, 4, 13])} if packed else {}
    results, kept = [], []
    for recompute in RECOMPUTE:
        model = make(mixer, recompute=recompute, mlp_ratio=4.0, depth=2, dropout=0.1, drop_path=0.5).train()
        held: dict[int, Tensor] = {}

        def keep(tensor: Tensor, held: dict[int, Tensor] = held) -> Tensor:
            held[tensor.data_ptr()] = tensor
            return tensor

        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits, _ = model(make_tokens(1 if packed else 4), **options)
        results.append([logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
        own = {parameter.data_ptr() for parameter in model.parameters()}
        kept.append(sum(tensor.numel() for place, tensor in held.items() if place not in own))
    for result in results[1:]:
        assert all(torch.equal(actual, expected) for actual, expected in zip(result, results[0], strict=True))
    assert kept[1] < 0.9 * kept[0]
    assert kept[2] < 0.5 * kept[1]


@pytest.mark.parametrize("mixer", ["deltanet", HYBRID])
def test_padding_leaves_no_trace(mixer: str) -> None:
    model = make(mixer, positions="learned", max_length=20)
    tokens, following = make_tokens(2), make_tokens(2, 3)
    real = torch.arange(13) < torch.tensor([[13], [6]])
    padded, state = model(tokens, mask=real)
    alone, own = model(tokens[1:, :6])
    assert_same(padded[1:, :6], alone)
    assert_same(model(following, state)[0][1:], model(following[1:], own)[0])

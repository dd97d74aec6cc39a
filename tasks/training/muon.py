"""Muon for the matrices inside a model, and AdamW for its other parameters, as one optimizer."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn

from longseq.blocks.sharding import is_sharded

_OURS = "muon"  # the key of parameter groups that is True for Muon's


class Muon(torch.optim.Muon):
    """torch's Muon with updates of AdamW's size, and on a CPU with float32 products, 10 to 27 times faster there."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if any(parameter.device.type != "cpu" for parameter in parameters):
            return super().step(closure)
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            momentum = group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                mean = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                update = parameter.grad.lerp(mean, momentum) if group["nesterov"] else mean
                update = orthogonalize(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-0.2 * group["lr"] * math.sqrt(max(parameter.shape)))
        return loss


def orthogonalize(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """About the nearest orthogonal matrix to `matrix [M, N]`, in float32: Newton-Schulz iterations of degree five.

    Products are rounded to bfloat16, as in torch: the iterations amplify the roundings, which change what is learned.

    Source: Muon (Jordan et al., 2024): with X = matrix / ‖matrix‖, X ← a X + (b X Xᵀ + c (X Xᵀ)²) X in each step.
    """
    first, second, third = coefficients
    x = _rounded(matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T)
    x = _rounded(x / _rounded(x.norm()).clamp(min=eps))
    for _ in range(steps):
        products = _rounded(x @ x.T)
        factor = _rounded(torch.addmm(products, products, products, beta=second, alpha=third))
        x = _rounded(torch.addmm(x, factor, x, beta=first))
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


class MuonAdamW(torch.optim.Optimizer):
    """Muon and torch's AdamW as one optimizer; groups with `muon: True` are Muon's, the others AdamW's.

    ValueError for sharded parameters: Muon needs whole matrices.
    """

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW) -> None:
        groups = [{**group, _OURS: True} for group in muon.param_groups]
        groups += [{**group, _OURS: False} for group in adamw.param_groups]
        if any(is_sharded(parameter) for group in groups for parameter in group["params"]):
            raise ValueError("Muon needs whole matrices, and trainer=fsdp shards them")
        self._parts = {True: muon, False: adamw}
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for ours, part in self._parts.items():
            # Loading a checkpoint replaces the groups and the state of this optimizer.
            part.param_groups = [group for group in self.param_groups if group[_OURS] is ours]
            part.state = self.state
            part.step()
        return loss


def create_muon(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    ns_steps: int = 5,
    layer_decay: float | None = None,
    fused: bool | None = None,
) -> MuonAdamW:
    """Muon for the weights of the linear layers in `model.blocks`, AdamW for all other parameters.

    Muon's updates are scaled to the size of AdamW's, so that one learning rate and one weight decay serve both.
    `momentum` and `ns_steps` (of the Newton-Schulz iteration) are Muon's, `betas`, `eps` and `fused` AdamW's.
    Embeddings, head, convolutions, norms and what `no_weight_decay` names are AdamW's. With `layer_decay`, the learning
    rate of each layer is this part of the rate of the layer above, as in timm's `param_groups_layer_decay`.

    Sources: Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon); Muon is scalable for LLM training
    (Liu et al., 2025, arXiv:2502.16982), section 2.2, for the scale.
    """
    kept: set[str] = getattr(model, "no_weight_decay", set)()
    blocks: Any = model.blocks
    inside = {id(part.weight) for part in blocks.modules() if isinstance(part, nn.Linear)}
    hidden = {id(parameter) for name, parameter in model.named_parameters() if name not in kept} & inside
    if layer_decay is None:
        groups = param_groups_weight_decay(model, weight_decay, no_weight_decay_list=kept)
    else:
        groups = param_groups_layer_decay(model, weight_decay, no_weight_decay_list=kept, layer_decay=layer_decay)
    inner, others = (
        [{**group, "params": [one for one in group["params"] if (id(one) in hidden) is ours]} for group in groups]
        for ours in (True, False)
    )
    inner = [{**group, "weight_decay": weight_decay} for group in inner]
    muon = Muon(inner, lr=lr, momentum=momentum, ns_steps=ns_steps)
    filled = [group for group in others if group["params"]]
    first, second = betas
    return MuonAdamW(muon, torch.optim.AdamW(filled, lr=lr, betas=(first, second), eps=eps, fused=fused))

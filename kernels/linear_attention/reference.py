"""Gated linear attention as its recurrence: the definition that every other form is compared with."""

from torch import Tensor


def repeat_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [..., G, K], repeated for the heads of v [..., H, V] that share them: a view if G is 1."""
    if q.shape[-2] != v.shape[-2]:
        share = v.shape[-2] // q.shape[-2]
        q, k = (x.unsqueeze(-2).expand(*x.shape[:-1], share, -1).flatten(-3, -2) for x in (q, k))
    return q, k


def linear_attention_step_torch(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, *, g: Tensor | None = None, g_value: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`linear_attention_step` in torch: differentiable, in the state's precision."""
    q, k = repeat_keys(q, k, v)
    dtype = state.dtype
    if g_value is not None:
        state = state * g_value.to(dtype).exp()[..., None, :]
    if g is not None:
        decay = g.to(dtype).exp()
        state = state * (decay[..., None, None] if g.dim() == 2 else decay[..., None])
    state = state + k.to(dtype)[..., None] * v.to(dtype)[..., None, :]
    o = scale * (state * q.to(dtype)[..., None]).sum(-2)
    return o.to(v.dtype), state

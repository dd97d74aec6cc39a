"""The delta rule as its recurrence: the definition that every other form is compared with."""

from torch import Tensor


def delta_rule_step_torch(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, beta: Tensor | None = None, *, write_key: Tensor | None = None,
    value_key: Tensor | None = None, g: Tensor | None = None, read_before_decay: bool = False, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`delta_rule_step` in torch: differentiable, in the state's precision."""
    dtype, before = state.dtype, state
    q, k, value = q.to(dtype), k.to(dtype), v.to(dtype)
    if g is not None:
        decay = g.to(dtype).exp()
        state = state * (decay[..., None, None] if g.dim() == 2 else decay[..., None])
    write = k if write_key is None else write_key.to(dtype)  # [B, H, K]
    if beta is not None:
        write = beta.to(dtype)[..., None] * write
    read = ((before if read_before_decay else state) * k[..., None]).sum(-2)  # [B, H, V]
    if value_key is None:
        state = state + write[..., None] * (value - read)[..., None, :]
    else:
        state = state - write[..., None] * read[..., None, :] + value_key.to(dtype)[..., None] * value[..., None, :]
    o = scale * (state * q[..., None]).sum(-2)
    return o.to(v.dtype), state

"""The time mixing of RWKV-4."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from longseq.blocks.precision import at_least_float32
from longseq.blocks.token_shift import latest_token, previous_tokens, previous_tokens_pair, shift_tokens
from longseq.kernels import linear_attention, linear_attention_step
from longseq.kernels.chunks import scan
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.packing import Packing
from longseq.kernels.precision import without_autocast
from longseq.kernels.reading import Reverse, halves, turn
from longseq.mixers.base import ALL_TOKENS, Device, Mixer, ScanOptions, memory_dtype, required
from longseq.mixers.heads import largest_heads
from longseq.mixers.registry import register

NOTHING = -1e38  # the exponent before the first token, in place of log 0
NEVER = -100.0  # e to this power vanishes next to 1, in float64 too
WIDTH = 64  # channels of a head of the recurrence; the result does not depend on it


class RWKV4State(NamedTuple):
    """The last token `[B, d_model, 1]`; numerator and denominator of the average, divided by e^exponent; and that
    exponent, the largest so far: `[B, d_model]` each.
    """

    shift: Tensor
    numerator: Tensor
    denominator: Tensor
    exponent: Tensor


@register("rwkv4")
class RWKV4(Mixer[RWKV4State]):
    """An average of all values so far, weighted by exponentials of keys, with a decay and a bonus for each channel.

        k, v, r = W_k x_k, W_v x_v, W_r x_r;   x_□ = μ_□ ⊙ x_t + (1 − μ_□) ⊙ x_{t−1}                      □ in k, v, r
        o_t = (a_{t−1} + e^{u + k} ⊙ v) / (b_{t−1} + e^{u + k});   y = W_o (sigmoid(r) ⊙ o)
        a_t = e^{−w} ⊙ a_{t−1} + e^k ⊙ v;   b_t = e^{−w} ⊙ b_{t−1} + e^k;   w = exp(decay)

    The memory holds a e^{−p} and b e^{−p}, with p_t = max(p_{t−1} − w, k_t), so that keys of any size are safe. p needs
    no gradient, because it cancels in o.

    Two tokens are mixed before they are projected: `in_proj` is None, `scan` reads the tokens themselves, and several
    scans over an image share only the output projection. The channel mixing of RWKV is an MLP of token models,
    mlp="rwkv" (`longseq.blocks.channel_mixing`).

    μ, u and the decay start with the published code's values for the middle layer of a network. W_k, W_r and W_o start
    like the model's other matrices; the published code starts them at zero.

    Source: RWKV: Reinventing RNNs for the Transformer Era (Peng et al., 2023), section 3.1, equations 11 to 18, with
    the numbers of appendix D; the stable form is from appendix E.
    """

    paper = "RWKV-4 (arXiv:2305.13048), section 3.1"
    operations = ("short_convolution", "linear_attention")
    reads_backwards = True
    reads_pairs = True
    no_weight_decay_names = ("mix", "decay", "bonus")

    def __init__(self, d_model: int, *, backend: str = "auto") -> None:
        super().__init__(d_model, backend=backend)
        self.head_dim = largest_heads(d_model, WIDTH)
        self.in_proj = None
        self.mix = nn.Parameter(torch.empty(3, d_model))  # of the key, the value and the receptance
        self.decay = nn.Parameter(torch.empty(d_model))
        self.bonus = nn.Parameter(torch.empty(d_model))
        self.key, self.value, self.receptance = (nn.Linear(d_model, d_model, bias=False) for _ in range(3))
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        depth = 0.5  # of the layer in the network, from 0 to 1
        place = torch.linspace(0, 1, self.d_model + 1)[:-1]  # of the channel, from 0 to 1
        amount = place ** (1 - depth)
        self.mix.copy_(torch.stack([amount, amount + 0.3 * depth, place ** ((1 - depth) / 2)]))
        self.decay.copy_(8 * torch.linspace(0, 1, self.d_model) ** (0.7 + 1.3 * depth) - 5)
        self.bonus.copy_(math.log(0.3) + 0.5 * ((torch.arange(self.d_model) + 1) % 3 - 1))

    def project_in(self, x: Tensor) -> Tensor:
        return x

    def scan(
        self, projected: Tensor, state: RWKV4State | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, RWKV4State | None]:
        shift = None if state is None else state.shift
        previous, latest = previous_tokens(projected, shift, **self.call_options(options), mask=options.mask)
        r, k, v = self._project(projected, previous)
        o, memory = self._average(k, v, self.decay, self.bonus, state, options)
        return _gate(o, r), None if memory is None else RWKV4State(required(latest), *memory)

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        options = ScanOptions.of_pair(mask)
        previous = previous_tokens_pair(projected, mask=mask, backend=self.backend)
        pair, rows = (self, backward), projected.shape[0]
        tokens = [mixer._project(projected, own) for mixer, own in zip(pair, halves(previous), strict=True)]
        r, k, v = (torch.cat(both) for both in zip(*tokens, strict=True))
        decay, bonus = (
            torch.stack(both).unsqueeze(1).expand(-1, rows, -1).flatten(0, 1).unsqueeze(1)
            for both in ((self.decay, backward.decay), (self.bonus, backward.bonus))
        )
        o, _ = self._average(k, v, decay, bonus, None, options)
        return _gate(o, r).unflatten(0, (2, -1)).sum(0)

    def scan_step(self, projected: Tensor, state: RWKV4State) -> tuple[Tensor, RWKV4State]:
        r, k, v = self._project(projected, state.shift.squeeze(-1).to(projected.dtype))
        dtype = state.numerator.dtype
        k, v, exponent = k.to(dtype), v.to(dtype), state.exponent
        o = _read(state.numerator, state.denominator, exponent, k, v, self.bonus)
        step = self.decay.to(dtype).exp()
        largest = torch.maximum(exponent - step, k)
        memory, update = self._heads(state.numerator, state.denominator), self._writes(k, v, largest)
        gate = self._heads(*2 * (_log_kept(exponent, step, largest),))
        one = torch.ones_like(update[..., :1])
        _, memory = linear_attention_step(
            one, one, update, memory.unsqueeze(-2), g_value=gate, backend=self.step_backend
        )
        shift = projected.to(state.shift.dtype).unsqueeze(-1)
        return _gate(o, r), RWKV4State(shift, *self._split(memory.squeeze(-2)), largest)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> RWKV4State:
        shift = torch.zeros(batch, self.d_model, 1, device=device, dtype=memory_dtype(dtype))
        numerator, denominator = (torch.zeros_like(shift[..., 0]) for _ in range(2))
        return RWKV4State(shift, numerator, denominator, torch.full_like(numerator, NOTHING))

    def _project(self, x: Tensor, previous: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Receptance, key and value `[..., d_model]` of each token."""
        for_key, for_value, for_receptance = (
            previous + (x - previous) * amount.to(x.dtype) for amount in self.mix.unbind()
        )
        return self.receptance(for_receptance), self.key(for_key), self.value(for_value)

    def _average(
        self, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: RWKV4State | None, options: ScanOptions
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        """o `[B, T, d_model]`; and the last numerator, denominator and exponent, if they are wanted.

        `decay` and `bonus` are `[d_model]`, or `[B, 1, d_model]` for rows of two mixers.
        """
        packing, mask, reverse, keep = options
        k, v = at_least_float32(k), at_least_float32(v)
        with without_autocast(k):
            if state is None:
                rows = k.shape[0] if packing is None else packing.count
                state = RWKV4.initial_state(self, rows, k.device, k.dtype)
            numerator, denominator, exponent = (part.to(k.dtype) for part in state[1:])
            step = decay.to(k.dtype).exp()
            largest = _largest_exponents(k.detach(), step.detach(), exponent.detach(), packing, mask, reverse)
            before = shift_tokens(largest, exponent, packing=packing, reverse=reverse)
            if mask is None:
                writes = self._writes(k, v, largest)
            else:
                step = step * mask.unsqueeze(-1)
                writes = self._writes(k.masked_fill(~mask.unsqueeze(-1), 2 * NOTHING), v, largest)
            gate = _log_kept(before, step, largest)
            memory = self._heads(numerator, denominator)
            # Two tensors: torch.compile refuses one tensor for two arguments.
            query, key = (torch.ones_like(writes[..., :1]) for _ in range(2))
            call = self.call_options(options) | {"initial_state": memory.unsqueeze(-2)}
            written, final = linear_attention(query, key, writes, g_value=self._heads(gate, gate), **call)
            read = shift_tokens(written, memory, packing=packing, reverse=reverse)
            o = _read(*self._split(read), before, k, v, bonus)
            if not keep:
                return o, None
            last = latest_token(largest, packing=packing, reverse=reverse)
            if packing is not None:  # an empty sequence has no token
                last = torch.where((packing.lengths == 0).unsqueeze(-1), exponent, last)
            elif not is_exporting() and k.shape[1] == 0:
                last = exponent
            return o, (*self._split(required(final).squeeze(-2)), last)

    def _writes(self, k: Tensor, v: Tensor, largest: Tensor) -> Tensor:
        """What a token adds to the numerator and to the denominator, `[..., 2 H, d_model / H]`."""
        weight = (k - largest).exp()
        return self._heads(weight * v, weight)

    def _heads(self, numerator: Tensor, denominator: Tensor) -> Tensor:
        """Two tensors `[..., d_model]` as heads `[..., 2 H, d_model / H]`."""
        return torch.cat((numerator, denominator), -1).unflatten(-1, (-1, self.head_dim))

    def _split(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `_heads`."""
        numerator, denominator = heads.flatten(-2).split(self.d_model, dim=-1)
        return numerator, denominator

    def scan_flops(self, tokens: int) -> int:
        # For each channel: 7 operations of the shift, 2 of the exponent, 3 of the gate, 3 of the writes, 4 of the two
        # sums, 12 of the average, 2 of the receptance; an exponential counts as one.
        return tokens * 33 * self.d_model


def _gate(o: Tensor, r: Tensor) -> Tensor:
    return r.sigmoid() * o.to(r.dtype)


def _read(numerator: Tensor, denominator: Tensor, exponent: Tensor, k: Tensor, v: Tensor, bonus: Tensor) -> Tensor:
    """The average with the bonus of the token itself, from the memory before the token."""
    own = k + bonus.to(k.dtype)
    largest = torch.maximum(exponent, own).detach()
    before, now = (exponent - largest).exp(), (own - largest).exp()
    return (before * numerator + now * v) / (before * denominator + now)


def _log_kept(before: Tensor, step: Tensor, largest: Tensor) -> Tensor:
    """The log of what a token leaves of the memory, where the exponent goes from `before` to `largest`."""
    gate = before - step - largest
    # Where the token's exponent is not the largest, rounding may leave a little more than 0, which is no decay.
    gate = gate - gate.detach().clamp_min(0)
    return gate.clamp_min(NEVER)


def _largest_exponents(
    k: Tensor, step: Tensor, start: Tensor, packing: Packing | None, mask: Tensor | None, reverse: Reverse
) -> Tensor:
    """p_t = max(p_{t−1} − w, k_t) from `start` on, unchanged at padding: `[B, T, d_model]`.

    k is `[B, T, d_model]`; step, the w above, `[d_model]` or `[B, 1, d_model]`; start `[B, d_model]` or `[N, d_model]`.
    """
    count = _count_read(k, packing, mask, reverse).to(k.dtype).unsqueeze(-1)
    if mask is not None:
        k = k.masked_fill(~mask.unsqueeze(-1), NOTHING)
    k = turn(k, reverse)
    if is_exporting() and not torch.jit.is_tracing() and not isinstance(k.shape[1], int):
        largest = _one_by_one(k, step, count)
    else:
        largest = _by_doubling(k, step, count, packing is not None)
    before = start.unsqueeze(1) if packing is None else turn(start[packing.sequence].unsqueeze(0), reverse)
    return turn(torch.maximum(largest, before - count * step), reverse)


def _count_read(k: Tensor, packing: Packing | None, mask: Tensor | None, reverse: Reverse) -> Tensor:
    """The number of real tokens of a sequence up to each token, in the order of reading: `[B, T]`, or `[1, T]`."""
    if packing is not None:
        count = packing.lengths[packing.sequence] - packing.positions if reverse else packing.positions + 1
        return turn(count.unsqueeze(0), reverse)
    if mask is not None:
        return turn(mask, reverse).cumsum(1)
    return torch.arange(1, k.shape[1] + 1, device=k.device).unsqueeze(0)


@torch.jit.script_if_tracing
def _by_doubling(k: Tensor, step: Tensor, count: Tensor, packed: bool) -> Tensor:
    """max_s (k_s − (count_t − count_s) step) over s <= t of a sequence; each pass doubles the reach of s."""
    nothing = -1e38  # NOTHING, which TorchScript cannot read
    reach = 1
    while reach < k.shape[1]:
        passed = count[:, reach:] - count[:, :-reach]
        earlier = k[:, :-reach] - passed * step
        if packed:  # the first tokens of a sequence have none so far back
            earlier = earlier.masked_fill(count[:, reach:] <= reach, nothing)
        k = torch.cat((k[:, :reach], torch.maximum(k[:, reach:], earlier)), 1)
        reach *= 2
    return k


def _one_by_one(k: Tensor, step: Tensor, count: Tensor) -> Tensor:
    """`_by_doubling` for graphs exported with open length, whose number of passes cannot be open."""
    first = torch.full_like(k[:, 0], NOTHING)
    # Not by diff, whose T - 1 differences a program of torch.export would require to be at least two.
    passed = (count - functional.pad(count, (0, 0, 1, 0))[:, :-1]).expand(k.shape[0], -1, -1)
    step = step if step.dim() == 1 else step.squeeze(1)
    return scan(_next_exponent, first, [k.transpose(0, 1), passed.transpose(0, 1)], (step,))[1].transpose(0, 1)


def _next_exponent(largest: Tensor, k: Tensor, passed: Tensor, step: Tensor) -> list[Tensor]:
    largest = torch.maximum(largest - passed * step, k)
    return [largest, largest.clone()]

"""The channel mixing of RWKV-4 and RWKV-6, and of RWKV-7: the MLP of their blocks."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from longseq.blocks.hooks import has_observers, step_by_call
from longseq.blocks.recompute import checkpoint_if
from longseq.blocks.sharding import gathers_parameters
from longseq.blocks.token_shift import previous_tokens
from longseq.kernels.packing import Packing
from longseq.state import Device


class ChannelMixing(nn.Module):
    """An MLP with a squared ReLU and a gate, which reads each token together with the one before it.

        y = sigmoid(W_r x_r) ⊙ W_v ReLU(W_k x_k)²;   x_□ = μ_□ ⊙ x_t + (1 − μ_□) ⊙ x_{t−1}                 □ in k, r

    W_k is `fc1`, W_v `fc2`; none has a bias. The state is the last token, `[B, D, 1]`, zeros at the start.

    μ starts with the values of the published code for the middle layer of a network. The matrices start like the
    model's others; the published code starts W_k, W_v and W_r at zero.

    Args:
        width, hidden: D, and the number of channels between W_k and W_v.
        recompute: compute the squared ReLU and the gate again in the backward pass instead of keeping them.
        backend: the kernel backend of the token shift.

    Source: RWKV: Reinventing RNNs for the Transformer Era (Peng et al., 2023), section 3.1, equations 14, 15 and 18.
    RWKV-6 (Peng et al., 2024, arXiv:2404.05892) has the same formula.
    """

    no_weight_decay_names = ("mix",)
    gated: ClassVar[bool] = True

    def __init__(self, width: int, hidden: int, *, recompute: bool = False, backend: str = "auto") -> None:
        super().__init__()
        self.recompute = recompute
        self.backend = backend
        self.mix = nn.Parameter(torch.empty(2 if self.gated else 1, width))  # of the key and of the receptance
        self.fc1 = nn.Linear(width, hidden, bias=False)
        self.fc2 = nn.Linear(hidden, width, bias=False)
        self.receptance = nn.Linear(width, width, bias=False) if self.gated else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the matrices as torch does, and set μ."""
        for layer in (self.fc1, self.fc2, self.receptance):
            if layer is not None:
                layer.reset_parameters()
        place = torch.arange(self.mix.shape[1], device=self.mix.device) / self.mix.shape[1]
        self.mix.copy_(self._initial_mix(place).expand_as(self.mix))

    def _initial_mix(self, place: Tensor) -> Tensor:
        return place.sqrt()

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        *,
        cu_seqlens: Packing | None = None,
        mask: Tensor | None = None,
        output_final_state: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix `x [B, T, D]`; returns the same shape, and if wanted the last real token of each sequence `[N, D, 1]`."""
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "mask": mask, "output_final_state": output_final_state}
        previous, latest = previous_tokens(x, state, **options, backend=self.backend)
        return self._mix(x, previous), latest if output_final_state else None

    @gathers_parameters
    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Mix one more token `x [B, D]`."""
        if has_observers(self):
            return step_by_call(self, x, state)
        return self._mix(x, state.squeeze(-1).to(x.dtype)), x.to(state.dtype).unsqueeze(-1)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return zeros `[batch, D, 1]`, in float32 for every `dtype` but float64."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return torch.zeros(batch, self.mix.shape[1], 1, device=device, dtype=wide)

    def _mix(self, x: Tensor, previous: Tensor) -> Tensor:
        assert self.receptance is not None
        for_key, for_receptance = (previous + (x - previous) * amount.to(x.dtype) for amount in self.mix.unbind())
        return checkpoint_if(self.recompute, self._activate, self.fc1(for_key), self.receptance(for_receptance))

    def _activate(self, key: Tensor, receptance: Tensor | None = None) -> Tensor:
        y = self.fc2(key.relu().square())
        return y if receptance is None else receptance.sigmoid() * y


class ChannelMixing7(ChannelMixing):
    """The channel mixing of RWKV-7, which has no gate.

        y = W_v ReLU(W_k x_k)²;   x_k = x_t + μ ⊙ (x_{t−1} − x_t)

    μ, `[1, D]`, is here the share of the token before, with the published initial values for the place in the model (a
    layer by itself has those of the middle); all else is as in `ChannelMixing`.

    Source: RWKV-7 "Goose" with Expressive Dynamic State Evolution (Peng et al., 2025), section 4, and its published
    code RWKV-LM.
    """

    gated = False
    rest = 0.5

    def place_in_model(self, layer: int, layers: int) -> None:
        """Choose the initial values of block `layer` (0, 1, ...) among `layers`."""
        self.rest = 1 - layer / layers

    def _initial_mix(self, place: Tensor) -> Tensor:
        return 1 - place**self.rest**4

    def _mix(self, x: Tensor, previous: Tensor) -> Tensor:
        for_key = x + (previous - x) * self.mix[0].to(x.dtype)
        return checkpoint_if(self.recompute, self._activate, self.fc1(for_key))

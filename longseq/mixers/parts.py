"""A short convolution and an output gate for mixers that have none: `convolution_width=4`, `output_gate=True`."""

import inspect
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from longseq.blocks.convolution import ShortConvolution
from longseq.mixers.base import ALL_TOKENS, Device, Mixer, ScanOptions, memory_dtype, required

# The options that every mixer has, with the values that add nothing.
ADDED: dict[str, Any] = {"convolution_width": 0, "output_gate": False}


class PartsState(NamedTuple):
    """The convolution's last inputs `[B, P, W - 1]`, None without convolution, and the mixer's own state."""

    convolution: Tensor | None
    own: Any


class Parts(Mixer[PartsState]):
    """A mixer with a short convolution before its scan and a gate behind it, as a base in front of the mixer's class.

        u = conv(W_in x);   y = W_out (scan(u) ⊙ sigmoid(W_g x))

    The convolution reads all projected channels and has no activation, as in DeltaNet. The gate is that of Gated
    Attention (arXiv:2505.06708, section 2.3: elementwise, behind the attention, for each head).
    """

    reads_pairs: ClassVar[bool] = False

    added_convolution: ShortConvolution | None
    added_gate: nn.Linear | None
    added_width: int = 0  # I, the channels that the gate multiplies

    def add_parts(self, convolution_width: int, output_gate: bool) -> None:
        """Create the parts, in the constructor."""
        if convolution_width and getattr(self, "causal", True) is False:
            raise ValueError("convolution_width: a convolution needs a causal mixer, and this one sees all tokens")
        self.added_gate = None
        width = self.project_in(torch.zeros(1, self.d_model)).shape[-1]
        backend = self.backend if self.operations else "auto"
        self.added_convolution = ShortConvolution.of_width(width, convolution_width, backend)
        if output_gate:
            self.added_width = self.d_model if self.out_proj is None else self.out_proj.in_features
            self.added_gate = nn.Linear(self.d_model, self.added_width, bias=False)

    def project_in(self, x: Tensor) -> Tensor:
        u = super().project_in(x)
        return u if self.added_gate is None else torch.cat((u, self.added_gate(x[..., : self.d_model])), -1)

    def release_projections(self) -> None:
        super().release_projections()
        self._modules.pop("added_gate", None)
        self.added_gate = None  # its logits come with what the other mixer projects

    def read(
        self, projected: Tensor, state: PartsState | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, PartsState | None]:
        convolution, own = (None, None) if state is None else state
        u, logits = self._part_from_gate(projected)
        if self.added_convolution is not None:
            u, convolution = self.added_convolution(u, convolution, **options._asdict())
        y, own = super().read(u, own, options)
        return self._multiply_by_gate(y, logits), PartsState(convolution, own) if options.output_final_state else None

    def read_step(self, projected: Tensor, state: PartsState) -> tuple[Tensor, PartsState]:
        convolution, own = state
        u, logits = self._part_from_gate(projected)
        if self.added_convolution is not None:
            u, convolution = self.added_convolution.step(u, required(convolution))
        y, own = super().read_step(u, own)
        return self._multiply_by_gate(y, logits), PartsState(convolution, own)

    def _part_from_gate(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the mixer's scan, and the gate's logits `[..., I]`, empty without a gate."""
        width = projected.shape[-1] - self.added_width
        return projected[..., :width], projected[..., width:]

    def _multiply_by_gate(self, y: Tensor, logits: Tensor) -> Tensor:
        if not self.added_width:
            return y
        gated = y[..., : self.added_width] * logits.sigmoid()
        return torch.cat((gated, y[..., self.added_width :]), -1) if self.makes_values else gated

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> PartsState:
        own = super().initial_state(batch, device, dtype)
        if self.added_convolution is None:
            return PartsState(None, own)
        return PartsState(self.added_convolution.initial_state(batch, device, memory_dtype(dtype)), own)

    def preallocate(self, state: PartsState, max_length: int) -> PartsState:
        return state._replace(own=super().preallocate(state.own, max_length))

    def trim(self, state: PartsState) -> PartsState:
        return state._replace(own=super().trim(state.own))

    def room(self, state: PartsState) -> int | None:
        return super().room(state.own)

    @property
    def projections(self) -> list[nn.Linear]:
        return super().projections + ([] if self.added_gate is None else [self.added_gate])


@lru_cache(None)
def with_parts(kind: type[Mixer[Any]]) -> type[Mixer[Any]]:
    """The class of a mixer with the options of `ADDED` that its constructor lacks."""
    signature = inspect.signature(kind.__init__)
    missing = missing_options(kind)

    def construct(self: Any, d_model: int, **options: Any) -> None:
        chosen = missing | {name: options.pop(name) for name in missing if name in options}
        kind.__init__(self, d_model, **options)
        self.add_parts(chosen.get("convolution_width", 0), chosen.get("output_gate", False))

    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value) for name, value in missing.items()]
    construct.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    body = {"__init__": construct, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(f"{kind.__name__}WithParts", (Parts, kind), body)


def missing_options(kind: type[Mixer[Any]]) -> dict[str, Any]:
    """The options of `ADDED` that a mixer's constructor lacks."""
    own = inspect.signature(kind).parameters
    return {name: value for name, value in ADDED.items() if name not in own}

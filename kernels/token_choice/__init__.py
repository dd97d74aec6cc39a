"""The choice of the next token from the scores of a language model."""

from torch import Tensor

from longseq.kernels.dispatch import Backend, Call, is_exporting, register, select
from longseq.kernels.operation import Later
from longseq.kernels.token_choice import choice
from longseq.kernels.token_choice.fused import name_kind, reasons


def token_choice(
    scores: Tensor,
    counter: Tensor,
    valid: Tensor,
    seen: Tensor | None = None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    backend: str = "auto",
) -> Tensor:
    """Draw a token for each row of scores, from that row alone: `[B]`. It never waits for the device.

    A row's counter is advanced and hashed to a place in [0, 1), by SplitMix64 (Steele et al., Fast Splittable
    Pseudorandom Number Generators, 2014, figure 16, with Stafford's variant 13 as its mixing function). The token is
    the one at which the running sum of the probabilities passes the place. Rows whose scores are no distribution (NaN
    or infinite) give the token 0.

    Args:
        scores: `[B, V]`, of any float type; arithmetic is float32, or float64 for float64.
        counter: `[B]` int64; changed in place.
        valid: `[B]` bool; set to False, in place, for rows that are no distribution.
        seen: `[B, V]` bool, the tokens that the penalty is for; the drawn ones are added in place.
        temperature, top_k, top_p, repetition_penalty: see `longseq.backbones.generation.Sampling`. A temperature of 0
            takes the best token, of several the first one.
        backend: fused, one Triton kernel behind the sorting that top_k and top_p need; torch; auto takes the first that
            can run. The fused form is checked at its first use in a process. Sums are rounded in another order, so that
            the two may draw neighbours where a place is within rounding of a border.

    Raises:
        ValueError: the backend that is named cannot run this call, with every reason.
    """
    if temperature == 0 or (top_k is not None and top_k >= scores.shape[-1]):
        top_k = None
    if temperature == 0:
        top_p = None
    kind = name_kind(temperature, top_k, top_p, seen)
    draw = select("token_choice", backend, Call(scores.device, scores.dtype, exporting=is_exporting(), kind=kind))
    return draw(scores, counter, valid, seen, temperature, top_k, top_p, repetition_penalty)


register(
    "token_choice",
    Backend("fused", Later(f"{__name__}.triton_choice", "token_choice_triton"), reasons),
    Backend("torch", choice.token_choice),
    kind="torch",
)

"""The laws that every mixer keeps, as checks of its class: `check("deltanet")`.

A whole sequence, any split of it with the state carried over, and token-by-token steps give the same numbers. Rows of a
batch, packed and padded sequences do not affect each other. Training mode changes only what is drawn. Gradients are the
derivatives. The tests of a plug-in can check its mixers, too:

    @pytest.mark.parametrize("law", contract.LAWS)
    def test_my_mixer(law):
        contract.check("mine", laws=[law])
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from longseq.kernels.packing import Packing
from longseq.mixers.base import Mixer, ScanOptions, count_weights
from longseq.mixers.registry import create
from longseq.parameters import no_weight_decay
from longseq.state import map_state, select_state, state_tensors

TOKENS = 37  # two of the shortest chunks and a part of a third
LONG = 300  # more than a chunk of any operation, and no multiple of one

Law = Callable[[Mixer[Any]], bool | None]  # True if the mixer refuses the law's inputs

# The laws by name, in the order in which they are checked.
LAWS: dict[str, Law] = {}


class ContractError(AssertionError):
    """A mixer breaks a law, which the message names."""


def check(name: str, d_model: int = 32, *, laws: Iterable[str] = (), **options: Any) -> tuple[str, ...]:
    """Check that the registered mixer `name` keeps the contract, on the CPU in float64.

    A mixer may refuse packed or padded sequences by a ValueError. It then serves tasks that have none.

    Args:
        d_model: channels of the layer.
        laws: names from `LAWS`; by default all.
        options: options of the mixer's constructor.

    Returns:
        The laws about inputs that the mixer refuses.

    Raises:
        ContractError: the mixer breaks a law; its cause has the numbers.
        ValueError: `name`, an option or a law is unknown.
    """
    wanted = tuple(laws) or tuple(LAWS)
    if unknown := [law for law in wanted if law not in LAWS]:
        raise ValueError(f"no law is named {', '.join(unknown)}; the laws are {', '.join(LAWS)}")
    refused = []
    for law in wanted:
        mixer = make(name, d_model, **options)
        try:
            if LAWS[law](mixer):
                refused.append(law)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__  # torch's messages have several lines
            raise ContractError(f"the mixer {name} breaks the law {law}: {reason}") from error
    return tuple(refused)


def make(name: str, d_model: int = 32, **options: Any) -> Mixer[Any]:
    """Build a mixer in float64 with enlarged weights, so that gates and states affect the output."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mixer = create(name, d_model, **options).double().eval()
        with torch.no_grad():
            for parameter in mixer.parameters():
                if parameter.ndim > 1 and not parameter.any():
                    parameter.normal_(std=0.1)
                # Twice the log of a decay rate would forget everything within a token.
                elif parameter.ndim > 1 and parameter is not getattr(mixer, "A_log", None):
                    parameter.mul_(2)
    return mixer


def draw(mixer: Mixer[Any], batch: int, tokens: int = TOKENS) -> Tensor:
    """Draw `[batch, tokens, d_model]` in float64, the same numbers in every call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, tokens, mixer.d_model, generator=generator, dtype=torch.float64)


def assert_same(actual: Any, expected: Any, message: str = "") -> None:
    """Require equal numbers but for rounding in float64."""
    tell = (lambda text: f"{message}: {text}") if message else None
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10, msg=tell)


def assert_same_state(actual: Any, expected: Any, message: str = "") -> None:
    """Require states with the same tensors and, but for rounding, the same numbers."""
    actual, expected = dict(state_tensors(actual)), dict(state_tensors(expected))
    _require(actual.keys() == expected.keys(), f"{message}: the state has {[*actual]}, where it had {[*expected]}")
    for name in expected:
        assert_same(actual[name], expected[name], f"{message}: {name} of the state" if message else name)


def assert_same_results(actual: tuple[Tensor, Any], expected: tuple[Tensor, Any], message: str = "") -> None:
    """Require the same outputs and states, but for rounding in float64."""
    assert_same(actual[0], expected[0], message)
    assert_same_state(actual[1], expected[1], message)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _law(check_law: Law) -> Law:
    LAWS[check_law.__name__] = check_law
    return check_law


def _refuses(mixer: Mixer[Any], x: Tensor, **options: Any) -> bool:
    """True if the mixer takes no such input, and says so."""
    try:
        mixer(x, **options)
    except ValueError:
        return True
    return False


def _floating(state: Any) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in state_tensors(state) if tensor.is_floating_point()]


def _numbers(y: Tensor, *states: Any) -> list[Tensor]:
    """An output and all floating-point tensors of some states."""
    return [y, *(tensor for state in states for _, tensor in _floating(state))]


def _as_leaves(state: Any) -> Any:
    return map_state(lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()), state)


def _leaves(mixer: Mixer[Any], x: Tensor, state: Any = None) -> dict[str, Tensor]:
    """The tensors whose gradients are compared, by name."""
    held = {f"{name} of the state": tensor for name, tensor in _floating(state)}
    return {"the input": x, **dict(mixer.named_parameters()), **held}


def _weigh(tensors: Sequence[Tensor], place: str = "") -> Tensor:
    """A sum of all numbers, with weights that are the same in every call."""
    generator = torch.Generator().manual_seed(3)
    drawn = (torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for tensor in tensors)
    total = torch.stack([(weights * tensor).sum() for weights, tensor in zip(drawn, tensors, strict=True)]).sum()
    _require(total.requires_grad, f"{place}no output has a gradient")
    return total


def assert_same_gradients(
    leaves: Mapping[str, Tensor], actual: Sequence[Tensor], expected: Sequence[Tensor], message: str = ""
) -> None:
    """Require that the results of two calls have the same gradients, but for rounding in float64.

    One call is compared with differences (see `gradients_are_the_derivatives`), and every other call with an equal one.
    """
    place = f"{message}: " if message else ""
    # Both calls may share a part of the graph, such as the projection of the input.
    gradients, wanted = (
        torch.autograd.grad(
            _weigh(each, place), [*leaves.values()], allow_unused=True, materialize_grads=True, retain_graph=True
        )
        for each in (actual, expected)
    )
    for name, one, other in zip(leaves, gradients, wanted, strict=True):
        error, norm = float((one - other).norm()), float(other.norm())
        message = f"{place}the gradient of {name} differs by {error:.2g}, and has the norm {norm:.2g}"
        _require(error <= 1e-8 * norm + 1e-10, message)


def _read_in_parts(mixer: Mixer[Any], x: Tensor, split: list[int]) -> tuple[Tensor, Any]:
    """Read parts of a sequence, each with the state of the one before: all outputs and the last state."""
    state, parts = mixer.initial_state(len(x), dtype=x.dtype), []
    for part in x.split(split, dim=1):
        y, state = mixer(part, state)
        parts.append(y)
    return torch.cat(parts, dim=1), state


@_law
def outputs_and_states_have_their_form(mixer: Mixer[Any]) -> None:
    """Outputs are like the inputs; a state keeps its type and dtypes and, unless it grows, its shapes."""
    x = draw(mixer, 3)
    scanned = mixer.read(mixer.project_in(x))
    _require(isinstance(scanned, tuple) and len(scanned) == 2, "scan returns other things than (y, state)")
    y, state = mixer(x)
    _require(y.shape == x.shape, f"the output is {list(y.shape)} for an input {list(x.shape)}")
    initial = mixer.initial_state(3, dtype=torch.float64)
    _require(hasattr(state, "_fields"), f"the state is no named tuple but {type(state).__name__}")
    _require(type(initial) is type(state), f"states are {type(initial).__name__} at first, then {type(state).__name__}")
    for (name, before), (_, after) in zip(state_tensors(initial), state_tensors(state), strict=True):
        _require(before.dtype == after.dtype, f"{name} of the state turns from {before.dtype} to {after.dtype}")
        if not mixer.growing_state:
            same = before.shape == after.shape
            _require(same, f"{name} of the state grows from {list(before.shape)} to {list(after.shape)}")


@_law
def it_is_built_without_numbers(mixer: Mixer[Any]) -> None:
    """The constructor reads no values of tensors: models are also built on the meta device, which has none."""
    with torch.device("meta"):
        type(mixer)(**mixer.arguments)


@_law
def half_precision_stays_close(mixer: Mixer[Any]) -> None:
    """With autocast to bfloat16, outputs are within 5 % of float32, and with bfloat16 weights, too, states are float32.

    A sum in bfloat16 would lose small terms. States that hold tokens keep the tokens' type.
    """
    mixer = mixer.float()
    x = draw(mixer, 2).float()
    exact, _ = mixer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = mixer(x)
    error = float((y - exact).detach().norm() / exact.detach().norm())
    _require(error < 0.05, f"outputs are {error:.1%} from float32's")
    if mixer.growing_state:
        return
    mixer, x = mixer.bfloat16(), x.bfloat16()
    _, last = mixer(x)
    for given in (state, last, mixer.initial_state(2, dtype=torch.bfloat16), mixer.step(x[:, 0], last)[1]):
        for name, tensor in _floating(given):
            _require(tensor.dtype == torch.float32, f"{name} of the state is {tensor.dtype}, not torch.float32")


@_law
def float32_is_close_to_float64(mixer: Mixer[Any]) -> None:
    """Outputs and gradients are within 1e-4 of float64, which reveals rounding to half precision anywhere.

    longseq's own mixers are within 2e-6, and bfloat16 rounds to 1e-3. States are tested by what is read after them.
    """
    results: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    for dtype in (torch.float64, torch.float32):
        mixer.to(dtype)
        x, following = (draw(mixer, 2, tokens).float().to(dtype).requires_grad_() for tokens in (TOKENS, 4))
        y, state = mixer(x)
        stepped, state = mixer.step(following[:, 0], state)
        rest, _ = mixer(following[:, 1:], state)
        outputs = {"a scan": y, "a step": stepped, "a scan from a given state": rest}
        leaves = _leaves(mixer, x)
        total = _weigh([*outputs.values()])
        slopes = torch.autograd.grad(total, [*leaves.values()], allow_unused=True, materialize_grads=True)
        found = {f"the outputs of {name}": tensor.detach() for name, tensor in outputs.items()}
        results.append((found, {f"the gradients of {name}": x for name, x in zip(leaves, slopes, strict=True)}))
    (expected, wanted), (found, gradients) = results
    # A parameter without effect, such as the bias of keys below a softmax, has a gradient of rounding errors.
    least = 0.1 * float(torch.stack([gradient.norm() for gradient in wanted.values()]).norm())
    for one, other, floor in ((found, expected, 1e-30), (gradients, wanted, least)):
        for name in other:
            error = float((one[name] - other[name]).norm()) / max(float(other[name].norm()), floor)
            _require(error < 1e-4, f"{name} in float32 and in float64 differ by {error:.1g} of their norm")


@_law
def any_split_is_the_whole(mixer: Mixer[Any]) -> None:
    """Parts of a sequence, each with the state of the one before, give the outputs and state of the whole.

    The first part has the initial state, and the whole has none.
    """
    x = draw(mixer, 2)
    expected = mixer(x)
    for split in ([37], [1, 36], [16, 21], [3, 30, 4], [36, 1]):
        assert_same_results(_read_in_parts(mixer, x, split), expected, f"in parts of {split} tokens")


@_law
def steps_are_the_whole(mixer: Mixer[Any]) -> None:
    """Token-by-token steps give the outputs and the state of the whole sequence."""
    x = draw(mixer, 2)
    state, parts = mixer.initial_state(2, dtype=x.dtype), []
    for token in x.unbind(1):
        y, state = mixer.step(token, state)
        parts.append(y)
    assert_same_results((torch.stack(parts, dim=1), state), mixer(x))


@_law
def a_long_sequence_is_its_parts(mixer: Mixer[Any]) -> None:
    """300 tokens, which are several chunks, give the outputs, state and gradients of two parts."""
    x = draw(mixer, 2, LONG).requires_grad_()
    expected, found = mixer(x), _read_in_parts(mixer, x, [131, LONG - 131])
    assert_same_results(found, expected)
    assert_same_gradients(_leaves(mixer, x), _numbers(*found), _numbers(*expected))


@_law
def given_states_stay_as_they_are(mixer: Mixer[Any]) -> None:
    """A scan and a step return a new state: callers may continue the old one again."""
    x = draw(mixer, 2)
    # While gradients are recorded, torch already refuses to write in place.
    for recorded, place in ((True, ""), (False, " without gradients")):
        with torch.set_grad_enabled(recorded):
            _, state = mixer(x)
            kept = map_state(Tensor.clone, state)
            following = mixer.step(x[:, 0], state)[1]
            assert_same_state(state, kept, f"after a step{place}")
            mixer(x, state)
            assert_same_state(state, kept, f"after a scan{place}")
            kept = map_state(Tensor.clone, following)
            mixer.step(x[:, 1], following)
            assert_same_state(following, kept, f"after a second step{place}")


@_law
def outputs_depend_on_the_past_only(mixer: Mixer[Any]) -> None:
    """A changed token changes no output before it, and some output from it on."""
    x = draw(mixer, 1)
    changed = x.clone()
    changed[:, 20] += 1.0
    y, y_changed = mixer(x)[0], mixer(changed)[0]
    assert_same(y_changed[:, :20], y[:, :20], "before a changed token")
    _require(bool((y_changed[:, 20:] - y[:, 20:]).abs().max() > 1e-12), "no output shows the change of a token")


def _in_training(mixer: Mixer[Any], *inputs: Tensor) -> list[Tensor]:
    """The outputs of calls in training mode that draw the same random numbers."""
    mixer.train()
    outputs = []
    for x in inputs:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            outputs.append(mixer(x)[0])
    mixer.eval()
    return outputs


@_law
def rows_are_separate(mixer: Mixer[Any]) -> None:
    """Each row of a batch gives the outputs and the state that it gives by itself, also in steps.

    In training mode, where a single row would draw other dropout, changing a row does not affect the others.
    """
    rows = 5  # more than in other laws
    x, state = draw(mixer, rows), mixer(draw(mixer, rows, 4))[1]
    calls = (("", lambda *given: mixer(*given)), (" in a step", lambda x, state: mixer.step(x[:, 0], state)))
    for place, call in calls:
        y, last = call(x, state)
        for row in range(rows):
            index = torch.tensor([row])
            alone, alone_last = call(x[index], select_state(state, index))
            assert_same(y[index], alone, f"a row of a batch is not as if alone{place}")
            assert_same_state(select_state(last, index), alone_last, f"a row of a batch{place}")
    changed, others = x.clone(), torch.arange(rows) != 2
    changed[2] += 1.0
    y, y_changed = _in_training(mixer, x, changed)
    assert_same(y_changed[others], y[others], "next to a changed row of the batch, in training mode")


@_law
def training_reads_as_evaluation_does(mixer: Mixer[Any]) -> None:
    """Without dropout, training mode gives the outputs and gradients of evaluation, also without the final state.

    Layers that draw other random numbers in training mode stay in evaluation mode.
    """
    for module in mixer.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, DropPath):
            module.drop_prob = 0.0
    trains = not _draws_in_training(mixer)
    real = _pad()[:3]
    x, state = draw(mixer, len(real)).requires_grad_(), _as_leaves(mixer(draw(mixer, len(real), 4))[1])
    calls: list[tuple[str, Tensor, dict[str, Any]]] = [
        ("", x[:2], {}),
        (" from a given state", x, {"state": state}),
        (" with the final state", x, {"state": state, "output_final_state": True}),
        (" with packed sequences", x[:1], {"cu_seqlens": torch.tensor([0, 5, 6, TOKENS])}),
        (" with padding", x, {"mask": real}),
        (" backwards", x[:2], {"reverse": True}),
    ]
    for place, read, options in calls:
        if _refuses(mixer.eval(), read, **options):
            continue  # another law reports it
        expected, expected_state = mixer(read, **options)
        y, last = mixer.train(trains)(read, **{"output_final_state": False, **options})
        own = options.get("mask", torch.ones(y.shape[:2], dtype=torch.bool))
        message = f"in training mode{place}"
        assert_same(y[own], expected[own], message)
        expected_state = expected_state if "output_final_state" in options else None
        _require((last is None) == (expected_state is None), f"{message} the state is {type(last).__name__}")
        assert_same_state(last, expected_state, message)
        wanted = _numbers(expected[own], expected_state)
        assert_same_gradients(_leaves(mixer, x, state), _numbers(y[own], last), wanted, message)


def _draws_in_training(mixer: Mixer[Any]) -> bool:
    """True if a call advances torch's generator, or if two calls differ."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        one, other = (mixer.train()(draw(mixer, 2))[0] for _ in range(2))
        moved = not torch.equal(before, torch.get_rng_state())
    mixer.eval()
    return moved or not torch.equal(one, other)


@_law
def a_state_dict_holds_all_that_was_drawn(mixer: Mixer[Any]) -> None:
    """A second layer with the same arguments and `state_dict` gives the same outputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        other = type(mixer)(**mixer.arguments).double().eval()
    other.load_state_dict(mixer.state_dict())
    x = draw(mixer, 2)
    assert_same_results(other(x), mixer(x), "a layer of the same arguments and state_dict")


@_law
def packed_sequences_are_separate(mixer: Mixer[Any]) -> bool:
    """Each of several packed sequences gives the numbers and gradients that it gives by itself, with its own state.

    A sequence may have no tokens.
    """
    borders = [0, 5, 5, 6, TOKENS]
    x = draw(mixer, 1).requires_grad_()
    if _refuses(mixer, x, cu_seqlens=torch.tensor(borders)):
        return True
    for before in (None, _as_leaves(mixer(draw(mixer, 4, 7))[1])):
        packed, alone = _compare_packed(mixer, x, borders, before, assert_same)
        assert_same_gradients(_leaves(mixer, x, before), packed, alone, "with packed sequences")
    return False


def _compare_packed(
    mixer: Mixer[Any], x: Tensor, borders: list[int], before: Any, same: Callable[[Any, Any, str], None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Compare packed sequences `x [1, T, d_model]`, and tokens that continue them, with each by itself.

    Returns:
        The outputs of the packed and of the single sequences.
    """
    following = draw(mixer, len(borders) - 1, 3).to(x)
    packed, packed_state = mixer(x, before, cu_seqlens=torch.tensor(borders, device=x.device))
    continued, _ = mixer(following, packed_state)
    alone, alone_continued = [], []
    for row, (start, end) in enumerate(pairwise(borders)):
        index = torch.tensor([row], device=x.device)
        state = mixer.initial_state(1, x.device, x.dtype) if before is None else select_state(before, index)
        if end > start:
            y, state = mixer(x[:, start:end], state)
            same(packed[:, start:end], y, f"tokens {start} to {end - 1} of a packed row are not as if alone")
            alone.append(y)
        y, _ = mixer(following[index], state)
        same(continued[index], y, f"tokens after packed sequence {row} are not as if alone")
        alone_continued.append(y)
    return [packed, continued], [torch.cat(alone, dim=1), torch.cat(alone_continued)]


@_law
def padding_leaves_no_trace(mixer: Mixer[Any]) -> bool:
    """Padding on either side or between tokens changes no output, gradient or continuation of real tokens.

    A layer may refuse padding between tokens only.
    """
    position, rows = torch.arange(TOKENS), torch.arange(3)
    lengths = torch.tensor([[TOKENS], [20], [1]])
    x, following = draw(mixer, 3).requires_grad_(), draw(mixer, 3, 2)
    state = _as_leaves(mixer(draw(mixer, 3, 4))[1])
    if _refuses(mixer, x, state=state, mask=torch.ones(3, TOKENS, dtype=torch.bool)):
        return True
    sides = {"on the left": position >= TOKENS - lengths, "on the right": position < lengths}
    # Single ones, many in a row, and on both sides.
    between = torch.stack([position % 3 != 1, (position < 5) | (position > 20), position % 7 == 3])
    for side, real in {**sides, "between tokens": between}.items():
        if side not in sides and _refuses(mixer, x, state=state, mask=real):
            return True
        padded, padded_state = mixer(x, state, mask=real)
        continued, _ = mixer(following, padded_state)
        _require(bool(padded.isfinite().all()), f"with padding {side} an output is not finite")
        outputs = []
        for row in rows.split(1):
            own = real[row[0]]
            alone, alone_state = mixer(x[row][:, own], select_state(state, row))
            assert_same(padded[row][:, own], alone, f"with padding {side}")
            alone_continued, _ = mixer(following[row], alone_state)
            assert_same(continued[row], alone_continued, f"going on after padding {side}")
            outputs.append((alone[0], alone_continued))
        wanted = [torch.cat(part) for part in zip(*outputs, strict=True)]
        assert_same_gradients(_leaves(mixer, x, state), [padded[real], continued], wanted, f"with padding {side}")
    return False


@_law
def reading_backwards_is_reading_turned_tokens(mixer: Mixer[Any]) -> None:
    """With `reads_backwards`: `reverse` reads as if each sequence were flipped."""
    if not mixer.reads_backwards:
        return
    flipping = copy.copy(mixer)  # flips the tokens, in `Mixer.read`
    flipping.__class__ = type("Flipping", (type(mixer),), {"reads_backwards": False})
    real, packing = _pad(), Packing(torch.tensor([0, 0, 5, 5, 6, TOKENS]))
    cases = (
        ("", ScanOptions(), False),
        (" with padding", ScanOptions(mask=real), False),
        (" with packed sequences", ScanOptions(packing), False),
        (" with packed sequences from their beginning", ScanOptions(packing), True),
    )
    for place, options, begins in cases:
        rows, sequences = (len(real), len(real)) if options.cu_seqlens is None else (1, packing.count)
        projected = mixer.project_in(draw(mixer, rows)).detach().requires_grad_()
        state = None if begins else _as_leaves(mixer(draw(mixer, sequences, 4))[1])
        leaves = _leaves(mixer, projected, state)
        own = torch.ones(projected.shape[:2], dtype=torch.bool) if options.mask is None else options.mask
        backward = options._replace(reverse=True)
        if place and _refuses(mixer, projected, projected=True, **options._asdict()):
            continue  # another law reports it
        back, back_last = mixer.read(projected, state, backward)
        flipped, flipped_last = flipping.read(projected, state, backward)
        message, wanted = f"backwards{place}", flipped[own]
        assert_same_results((back[own], back_last), (wanted, flipped_last), message)
        assert_same_gradients(leaves, _numbers(back[own], back_last), _numbers(wanted, flipped_last), message)


@_law
def a_pair_is_the_sum_of_its_scans(mixer: Mixer[Any]) -> None:
    """With `reads_pairs`: `scan_pair` adds the forward scan of one mixer and the backward scan of another."""
    if not mixer.reads_pairs:
        return
    real = _pad()[:3]
    projected = mixer.project_in(draw(mixer, len(real))).detach().requires_grad_()
    other = copy.deepcopy(mixer)
    other.release_projections()  # as in a layer whose directions share them
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in other.parameters():
            # Initial norms of ones would be alike.
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    leaves = {**_leaves(mixer, projected), **{f"{name} of the other mixer": p for name, p in other.named_parameters()}}
    for mask, padding in ((None, ""), (real, " with padding")):
        if _refuses(mixer, projected, projected=True, mask=mask):
            continue  # another law reports it
        own = torch.ones_like(real) if mask is None else mask
        ahead, _ = mixer.read(projected, None, ScanOptions(None, mask))
        back, _ = other.read(projected, None, ScanOptions(None, mask, True))
        pair, wanted, message = mixer.scan_pair(other, projected, mask)[own], (ahead + back)[own], f"a pair{padding}"
        assert_same(pair, wanted, message)
        assert_same_gradients(leaves, [pair], [wanted], message)


def _pad() -> Tensor:
    """A mask `[6, T]`: padding on the left, on the right and between tokens, in each half of the rows."""
    position = torch.arange(TOKENS)
    return torch.stack([position < 20, position >= 5, position % 3 != 1] * 2)


@_law
def gradients_are_the_derivatives(mixer: Mixer[Any]) -> None:
    """Gradients of the input, each parameter and each part of the state equal differences along a random direction.

    Each of them affects the output.

    A step and a further scan read the final state, whose parts may only have meaning together (digits and exponent).
    """
    x, following = draw(mixer, 2, 6).requires_grad_(), draw(mixer, 2, 4)
    state = _as_leaves(mixer(draw(mixer, 2, 5))[1])
    leaves = _leaves(mixer, x, state)
    generator = torch.Generator().manual_seed(2)

    def like(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64)

    weights, more_weights = like(x), like(following)

    def loss() -> Tensor:
        y, final = mixer(x, state)
        stepped, final = mixer.step(following[:, 0], final)
        rest, _ = mixer(following[:, 1:], final)
        return (weights * y).sum() + (more_weights * torch.cat([stepped[:, None], rest], dim=1)).sum()

    gradients = torch.autograd.grad(loss(), [*leaves.values()], allow_unused=True, materialize_grads=True)
    step = 1e-6
    for (name, tensor), gradient in zip(leaves.items(), gradients, strict=True):
        # A convolution of one tap has an empty state.
        _require(bool(gradient.any()) or not tensor.numel(), f"the gradient of {name} is zero")
        direction = like(tensor)
        with torch.no_grad():
            ahead, behind = (_moved(tensor, sign * step * direction, loss) for sign in (1, -1))
        difference, derivative = float(ahead - behind) / (2 * step), float((gradient * direction).sum())
        bar = 1e-5 * float(gradient.norm() * direction.norm()) + 1e-7 * abs(difference)
        message = f"the gradient of {name} along a direction is {derivative:.8g}, differences give {difference:.8g}"
        _require(abs(difference - derivative) <= bar + 1e-7, message)


def _moved(tensor: Tensor, change: Tensor, function: Callable[[], Tensor]) -> Tensor:
    kept = tensor.clone()
    tensor.add_(change)
    try:
        return function()
    finally:
        tensor.copy_(kept)


@_law
def parameters_without_weight_decay_exist(mixer: Mixer[Any]) -> None:
    """`no_weight_decay_names` names parameters, or None where options leave a parameter out."""
    left_out = {name for name in mixer.no_weight_decay_names if getattr(mixer, name, ...) is None}
    named = {*mixer.no_weight_decay_names, *no_weight_decay(mixer)} - left_out
    unknown = sorted(named - dict(mixer.named_parameters()).keys())
    _require(not unknown, f"no_weight_decay_names has {', '.join(unknown)}, which is no parameter")


@_law
def flops_are_those_of_the_steps(mixer: Mixer[Any]) -> None:
    """`flops` counts the operations of a step for each token, and more where the state grows."""
    one, two, three = (mixer.flops(length) for length in (2000, 4000, 6000))  # beyond any window
    _require(mixer.scan_flops(2000) > 0, "scan_flops is not above 0")
    if mixer.growing_state:
        _require(three - two > two - one, "the state grows, and the last tokens cost no more than the first")
        return
    _require(three - two == two - one, "the state does not grow, and the last tokens cost not the same as the first")
    _, state = mixer(draw(mixer, 1))
    projected = mixer.project_in(draw(mixer, 1)[:, 0])
    with torch.no_grad(), _Count() as counted:
        mixer.read_step(projected, state)
    stated = (three - two) / 2000 - 2 * count_weights(mixer.projections)
    # A count may leave out norms, activations and other work on single channels.
    message = f"flops states {stated:.0f} operations of a token's scan, and a step computes {counted.operations}"
    _require(0.5 * counted.operations <= stated <= 1.1 * counted.operations, message)


class _Count(TorchDispatchMode):
    """Counts operations: of matrix products as torch does, of others one for each number."""

    MOVES = frozenset(("_to_copy", "cat", "clone", "constant_pad_nd", "copy_", "gather", "scatter", "where"))

    def __init__(self) -> None:
        super().__init__()
        # torch 2.14 and before count this form on GPUs only.
        aten = torch.ops.aten
        known = flop_registry[aten._scaled_dot_product_flash_attention]
        flop_registry.setdefault(aten._scaled_dot_product_flash_attention_for_cpu, known)
        self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        packet = function.overloadpacket
        if packet in flop_registry:
            self.operations += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        elif not function.is_view and packet.__name__ not in self.MOVES:
            results = result if isinstance(result, tuple | list) else [result]
            tensors = [each for each in (*args, *results) if isinstance(each, Tensor)]
            self.operations += max((tensor.numel() for tensor in tensors), default=0)
        return result


def check_sequences_apart(mixer: Mixer[Any], *, packed: bool) -> None:
    """Require that a layer, as it is, keeps packed or padded sequences apart (to 2 %), or refuses them.

    Raises:
        ContractError: an output of a sequence, or after packed ones, differs from the sequence by itself.
    """
    weight = next((p for p in mixer.parameters() if p.is_floating_point()), torch.zeros(()))
    layer = copy.deepcopy(mixer).eval()
    x = draw(mixer, 1 if packed else 2).to(weight)

    def same(actual: Tensor, expected: Tensor, message: str) -> None:
        error = float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
        _require(error < 0.02, f"{message}: they differ by {error:.0%}")

    borders = [0, 5, 6, TOKENS]
    real = torch.arange(TOKENS, device=x.device) < torch.tensor([[TOKENS], [20]], device=x.device)
    with torch.no_grad():
        if _refuses(layer, x, **({"cu_seqlens": torch.tensor(borders, device=x.device)} if packed else {"mask": real})):
            return
        try:
            if packed:
                _compare_packed(layer, x, borders, None, same)
            else:
                for side, mask in (("right", real), ("left", real.flip(1))):
                    alone = layer(x[1:, mask[1]])[0]
                    same(layer(x, mask=mask)[0][1:, mask[1]], alone, f"tokens padded on the {side} are not as if alone")
        except AssertionError as error:
            raise ContractError(str(error)) from None

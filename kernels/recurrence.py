"""Run the core of a recurrence: choose its precision, its first state and its direction, and unpack packed sequences.

Packed sequences lie end to end in one batch row; cu_seqlens = [0, end of segment 0, end of segment 1, ..., T].
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longseq.kernels.dispatch import is_exporting
from longseq.kernels.packing import Packing, pack_like
from longseq.kernels.precision import compute_dtype, without_autocast
from longseq.kernels.reading import Reverse, turn

# The tensors of a call with time in dimension 1; None for each optional one that is not given.
Sequences = Sequence[Any]
# A tensor [B, ...], or a tuple of such tensors.
State = Any
# (sequences [B, T, ...], state [B, ...]) -> (output [B, T, ...], final state [B, ...])
Core = Callable[[Sequences, Any], tuple[Tensor, Any]]
# Runs a core on packed sequences: (core, sequences, state [N, ...], packing) -> what the core returns.
Unpack = Callable[[Core, Sequences, Any, Packing], tuple[Tensor, Any]]


def run_recurrence(
    core: Core,
    sequences: Sequences,
    initial_state: State | None,
    state_shape: Sequence[Any] | Callable[[int, torch.dtype], State],
    *,
    output_dtype: torch.dtype,
    output_final_state: bool,
    cu_seqlens: Tensor | Packing | None,
    unpack: Unpack,
    reverse: Reverse = False,
) -> tuple[Tensor, Any]:
    """Run `core` on sequences, packed or not, from `initial_state` or from the first state of the recurrence.

    With `reverse` each sequence is read from its last token to its first, and the given state is the one behind the
    last token. With "second_half" only the second half of the rows is read so; packed sequences do not take it.

    The state is float32, or float64 where an input is float64; integers of a state keep their type. The core computes
    in the state's type. The sequences keep their own type, so that a core saves no larger copies for its backward
    pass. The first sequence must be given. `state_shape` is the shape of a first state of zeros, without its leading
    dimension; or the shapes of its parts; or a function of (rows, dtype) that makes another first state.
    """
    first = sequences[0]
    with without_autocast(first):
        given = initial_state if isinstance(initial_state, tuple) else (initial_state,)
        dtype = compute_dtype(*sequences, *given)
        packing = pack_like(cu_seqlens, first)
        rows = first.shape[0] if packing is None else packing.count
        if initial_state is not None:
            state = each(lambda x: x.to(dtype) if x.is_floating_point() else x, initial_state)
        elif callable(state_shape):
            state = state_shape(rows, dtype)
        elif state_shape and isinstance(state_shape[0], tuple):
            state = tuple([first.new_zeros((rows, *shape), dtype=dtype) for shape in state_shape])
        else:
            state = first.new_zeros((rows, *state_shape), dtype=dtype)
        if reverse:
            sequences = [None if x is None else turn(x, reverse) for x in sequences]
        if not is_exporting() and first.shape[1] == 0:
            output, final_state = _run_nothing(core, sequences, state), state
        elif packing is None:
            output, final_state = core(sequences, state)
        elif reverse:  # the last segment comes first, too
            output, final_state = _unpack_eagerly(unpack, core, sequences, each(_flip_rows, state), packing.turned())
            final_state = each(_flip_rows, final_state)
        else:
            output, final_state = _unpack_eagerly(unpack, core, sequences, state, packing)
        if reverse:
            output = turn(output, reverse)
    return output.to(output_dtype), final_state if output_final_state else None


FILL = 2  # rows in place of zero; even, because some calls read half of the rows in each direction


def run_empty(run: Callable[..., Any], **arguments: Any) -> tuple[Any, ...]:
    """Run an operation with `FILL` rows in place of zero, and cut its results to zero again."""
    weight = arguments.get("weight")
    # Weights of both directions read each row twice, and have a state for each reading.
    readings = 2 if isinstance(weight, Tensor) and weight.dim() == 3 else 1

    def fill(x: Any, rows: int = FILL) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.detach() if x.shape[0] else x.new_ones((rows, *x.shape[1:]))

    filled = {name: fill(x) for name, x in arguments.items()}
    if filled["initial_state"] is not None:
        filled["initial_state"] = each(lambda x: fill(x, readings * FILL), arguments["initial_state"])
    *outputs, state = run(**filled)
    tensors = [x for value in arguments.values() for x in (value if isinstance(value, tuple) else (value,))]
    # All inputs get a gradient of zeros: in distributed training, ranks wait for the gradient of every parameter.
    none = sum([x.sum() * 0 for x in tensors if isinstance(x, Tensor) and x.requires_grad])
    outputs = [x[:0] if isinstance(none, int) else x[:0] + none.to(x.dtype) for x in outputs]
    return (*outputs, None if state is None else each(lambda x: x[:0], state))


# The lengths are values, and a graph of one packing serves no other: torch.compile would compile each batch anew.
@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="the torch form of a recurrence needs the lengths of packed sequences on the host: leave fullgraph=True "
    "out, or pad the sequences"
)
def _unpack_eagerly(
    unpack: Unpack, core: Core, sequences: Sequences, state: State, packing: Packing
) -> tuple[Tensor, Any]:
    return unpack(core, sequences, state, packing)


def _run_nothing(core: Core, sequences: Sequences, state: State) -> Tensor:
    """The output for zero tokens: the core's output for one token of zeros, cut to zero tokens."""
    rows = sequences[0].shape[0]
    padded = [None if x is None else torch.cat((x, x.new_zeros(rows, 1, *x.shape[2:])), 1) for x in sequences]
    return core(padded, each(lambda x: x[:rows].detach(), state))[0][:, :0]


def _flip_rows(x: Tensor) -> Tensor:
    return x.flip(0)


def each(function: Callable[..., Any], *states: State) -> State:
    """Apply `function` to a state's tensor, or to each tensor of a tuple; of several states, to those that correspond.

    A named tuple keeps its type.
    """
    first = states[0]
    if isinstance(first, Tensor):
        return function(*states)
    parts = [function(*tensors) for tensors in zip(*states, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)


def token(sequences: Sequences, t: int) -> list[Any]:
    """Token t of each sequence."""
    return [None if x is None else x[:, t] for x in sequences]


def run_tokens(step: Callable[[list[Any], Any], tuple[Tensor, Any]], sequences: Sequences, **call: Any) -> Any:
    """Run a recurrence token by token, by a function from a token's tensors and a state to an output and a state.

    The other arguments are those of `run_recurrence`. This is the definition that every other form is compared with.
    """

    def core(sequences: Sequences, state: Any) -> tuple[Tensor, Any]:
        outputs = []
        for t in range(sequences[0].shape[1]):
            output, state = step(token(sequences, t), state)
            outputs.append(output)
        return torch.stack(outputs, dim=1), state

    return run_recurrence(core, sequences, unpack=run_segments, **call)


def run_segments(core: Core, sequences: Sequences, state: State, packing: Packing) -> tuple[Tensor, Any]:
    """Run `core` on each segment by itself: the definition of packing."""
    outputs, states = [], []
    for index, (start, end) in enumerate(pairwise(packing.bounds)):
        own = each(lambda x, n=index: x[n : n + 1], state)
        if start == end:
            states.append(own)
            continue
        segment = [None if x is None else x[:, start:end] for x in sequences]
        output, final_state = core(segment, own)
        outputs.append(output)
        states.append(final_state)
    return torch.cat(outputs, dim=1), each(lambda *x: torch.cat(x), *states)


def run_padded(core: Core, sequences: Sequences, state: State, packing: Packing) -> tuple[Tensor, Any]:
    """Run `core` on padded batches of segments of similar length.

    Padding is zeros, which the core must take as tokens that leave the state as it is. A batch holds segments of over
    half the length of its longest one, so more than half of what is computed is real.
    """
    groups = groups_of(packing)
    outputs, states = [], []
    for group in groups.members:
        batch = [None if x is None else pad_group(x, group) for x in sequences]
        output, final_state = core(batch, each(lambda x, rows=group.rows: x[rows], state))
        outputs.append(output.flatten(0, 1)[group.slot_of])
        states.append(final_state)
    states.append(each(lambda x: x[groups.empty], state))
    final_state = each(lambda *x: torch.cat(x)[groups.by_segment], *states)
    return torch.cat(outputs)[groups.by_token].unsqueeze(0), final_state


class Group(NamedTuple):
    """Segments of similar lengths as the rows of a padded batch.

    `rows` and `lengths` [n] are the numbers and lengths of the segments. `token_of` and `slot_of` [t] are, for each of
    their tokens, its place in the packed row and its place in the rows of the batch laid end to end.
    """

    rows: Tensor
    lengths: Tensor
    longest: int
    token_of: Tensor
    slot_of: Tensor


class Groups(NamedTuple):
    """All segments that are not empty in groups, the empty ones, and the indices that restore the order of both."""

    members: list[Group]
    empty: Tensor
    by_token: Tensor
    by_segment: Tensor


def groups_of(packing: Packing) -> Groups:
    """The groups of a packing, found once. They need the lengths on the host."""
    return packing.once("groups", lambda: _find_groups(packing.bounds, packing.cu_seqlens.device))


def pad_group(x: Tensor, group: Group) -> Tensor:
    """The tokens of a group's segments in packed `x [1, T, ...]` as rows `[n, L, ...]`, with zeros behind them."""
    rows, length = group.rows.shape[0], group.longest
    batch = x.new_zeros((rows * length, *x.shape[2:]))
    return batch.index_copy(0, group.slot_of, x[0, group.token_of]).unflatten(0, (rows, length))


def _find_groups(bounds: list[int], device: torch.device) -> Groups:
    groups, tokens, segments = [], [], []
    for members in _similar_lengths(bounds):
        lengths = [bounds[n + 1] - bounds[n] for n in members]
        longest = max(lengths)
        token_of = torch.cat([torch.arange(bounds[n], bounds[n + 1]) for n in members])
        slot_of = torch.cat([i * longest + torch.arange(length) for i, length in enumerate(lengths)])
        rows, sizes = torch.tensor(members), torch.tensor(lengths)
        groups.append(Group(rows.to(device), sizes.to(device), longest, token_of.to(device), slot_of.to(device)))
        tokens.append(token_of)
        segments.extend(members)
    empty = [n for n in range(len(bounds) - 1) if bounds[n] == bounds[n + 1]]
    by_token = torch.cat(tokens).argsort() if tokens else torch.arange(0)
    by_segment = torch.tensor(segments + empty, dtype=torch.long).argsort()
    return Groups(groups, torch.tensor(empty, dtype=torch.long).to(device), by_token.to(device), by_segment.to(device))


def _similar_lengths(bounds: list[int]) -> list[list[int]]:
    """Group the segments that are not empty; in a group the shortest is over half as long as the longest."""
    lengths = {n: bounds[n + 1] - bounds[n] for n in range(len(bounds) - 1) if bounds[n + 1] > bounds[n]}
    groups: list[list[int]] = []
    for n in sorted(lengths, key=lambda n: -lengths[n]):
        if groups and 2 * lengths[n] > lengths[groups[-1][0]]:
            groups[-1].append(n)
        else:
            groups.append([n])
    return groups

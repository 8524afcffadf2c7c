"""Feeding memory_scan in pieces of any length: what a sequence leaves behind in the middle of a chunk."""

from typing import NamedTuple

import torch

from bakeoff.ops.memory_scan.op import OP, READS
from bakeoff.ops.memory_scan.plain import chunk_step, working_dtype
from bakeoff.select import call

__all__ = ["Memory", "MemoryState", "memory_stream"]

Memory = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(W1 [G, H, D], b1 [G, H], W2 [G, Dv, H], b2 [G, Dv])."""


class MemoryState(NamedTuple):
    """All that later tokens need of those before: of a constant size, and no token is kept."""

    memory: Memory
    """M after the last token."""
    momentum: Memory
    """S after the last token."""
    start: Memory
    """M at the start of the unfinished chunk, at which its gradients are taken; unused where `filled` is
    0."""
    filled: int | torch.Tensor = 0
    """How many tokens the unfinished chunk has; a device tensor for single tokens in a CUDA graph."""


def memory_stream(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lr: torch.Tensor,
    decay: torch.Tensor,
    forget: torch.Tensor,
    state: MemoryState,
    *,
    chunk: int = 64,
    read: str = "after",
    orthogonalize: int = 0,
    impl: str | None = None,
) -> tuple[torch.Tensor, MemoryState]:
    """memory_scan of the next T tokens, wherever in a chunk they begin, and the state after them.

    Pieces of any lengths equal one pass. Arguments as in `bakeoff.ops.memory_scan`; a fresh state is
    ``MemoryState(memory, momentum, memory)``. With `state.filled` a tensor of no dimensions, T must be 1:
    shapes and launches are then the same for every token, as a CUDA graph needs. An orthogonalised chunk is
    one piece: what it makes of the memory is no sum over its tokens, and the state keeps none of them.

    Raises:
        ValueError: a chunk below 1, another `read`, a state within a chunk of more tokens, and what
            `memory_scan` refuses.
    """
    _check(chunk, read, state.filled)
    if orthogonalize and (isinstance(state.filled, torch.Tensor) or state.filled):
        raise ValueError(
            f"memory_stream: with orthogonalize a piece begins where a chunk does, got a state with filled "
            f"{state.filled if isinstance(state.filled, int) else 'a tensor'}: such an update is no sum over "
            f"tokens, so that a chunk can't go on; feed multiples of chunk={chunk} tokens, with filled an int"
        )
    real = working_dtype(q, state.memory[0])
    memory, momentum, start = (
        tuple(t.to(real) for t in parts) for parts in (state.memory, state.momentum, state.start)
    )
    gates = (lr, decay, forget)
    if isinstance(state.filled, torch.Tensor):
        if q.shape[1] != 1:
            raise ValueError(
                f"memory_stream: with filled a tensor there is one token a call, got {q.shape[1]}: pass "
                f"filled as an int"
            )
        fresh = state.filled == 0
        start = tuple(torch.where(fresh, m, s) for m, s in zip(memory, start, strict=True))
        out, *new = chunk_step((q, k, v, *gates), start, memory, momentum, read)
        counted = torch.remainder(state.filled + 1, chunk)
        return out.to(q.dtype), _state(new, start, counted)
    T, filled = q.shape[1], state.filled
    first = min(T, (chunk - filled) % chunk)
    whole = first + (T - first) // chunk * chunk
    outs = []
    if first:
        piece = [x[:, :first] for x in (q, k, v, *gates)]
        out, *new = chunk_step(piece, start, memory, momentum, read)
        outs.append(out.to(q.dtype))
        memory, momentum = tuple(new[:4]), tuple(new[4:])
    for begin, end in ((first, whole), (whole, T)):
        if begin < end:
            start = memory
            piece = [x[:, begin:end] for x in (q, k, v)]
            rates = [x[:, begin:end] for x in gates]
            how = (chunk, read, orthogonalize)
            out, *new = call(OP, *piece, *memory, *momentum, *rates, *how, impl=impl)
            outs.append(out)
            memory, momentum = tuple(new[:4]), tuple(new[4:])
    o = torch.cat(outs, 1) if outs else v[:, :0].clone()
    return o, _state([*memory, *momentum], start, (filled + T) % chunk)


def _check(chunk: int, read: str, filled: int | torch.Tensor) -> None:
    """What decides which tokens go to memory_scan, which therefore can't look at it."""
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"memory_stream: chunk is {chunk!r}, expected a whole number of tokens, at least 1")
    if read not in READS:
        raise ValueError(f"memory_stream: read is {read!r}, expected one of {', '.join(READS)}")
    if not isinstance(filled, torch.Tensor) and not (isinstance(filled, int) and 0 <= filled < chunk):
        raise ValueError(
            f"memory_stream: the state's unfinished chunk has {filled!r} tokens of chunk={chunk}: go on with "
            f"the chunk that it was made with, or begin one with filled=0"
        )


def _state(
    parts: list[torch.Tensor], start: tuple[torch.Tensor, ...], filled: int | torch.Tensor
) -> MemoryState:
    memory, momentum = tuple(parts[:4]), tuple(parts[4:])
    return MemoryState(memory, momentum, start, filled)  # type: ignore[arg-type]

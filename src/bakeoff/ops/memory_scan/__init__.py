"""A neural memory that learns while it reads: an MLP per group, trained token by token and asked in
between."""

import torch

from bakeoff.ops.memory_scan.op import OP
from bakeoff.ops.memory_scan.stream import Memory, MemoryState, memory_stream
from bakeoff.ops.memory_update.parts import check_parts
from bakeoff.select import call

__all__ = ["OP", "Memory", "MemoryState", "memory_scan", "memory_stream"]


def memory_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    memory: Memory,
    momentum: Memory,
    lr: torch.Tensor,
    decay: torch.Tensor,
    forget: torch.Tensor,
    chunk: int = 64,
    read: str = "after",
    orthogonalize: int = 0,
    *,
    impl: str | None = None,
) -> tuple[torch.Tensor, Memory, Memory]:
    """A memory M(x) = W2 s(W1 x + b1) + b2 with s(z) = z sigmoid(z) for each group, that stores v under k by
    gradient descent with momentum and forgetting, and is asked with q.

    With t* the start of t's chunk, u_t = the gradient of |M_{t*}(k_t) - v_t|^2 in (W1, b1, W2, b2):

    S_t = decay_t S_{t-1} - lr_t u_t;  M_t = (1 - forget_t) M_{t-1} + S_t;  o_t = M_t(q_t) with `read`
    "after", M_{t-1}(q_t) with "before", M_{t*}(q_t) with "chunk". o_t depends on tokens ..t alone (with
    "before" on q_t and tokens ..t-1).

    A call begins at the start of a chunk. Its last chunk may be shorter; its tokens are part of o, memory and
    momentum like all others. Where a sequence goes on after such a chunk, or in pieces of any length, even
    of one token, `memory_stream` does that: its state holds M, S and the memory at the start of the
    unfinished chunk, which stands for the chunk's tokens, so that no tail of tokens is kept and a token
    costs the same everywhere.

    The state is float32 (float64 if it or q is); with 16-bit q, k, v products are taken in their dtype and
    summed in float32. Gradients are in closed form, so it learns under no_grad and inference_mode, too.

    With `orthogonalize` a chunk moves its matrices in another way. D = f S_0 - sum_i G_i u_i is what its b
    tokens otherwise add to kept M_0, kept = (1 - forget_1) ... (1 - forget_b). Now W_b = kept W_0 + NS(D),
    and then every row of W_b gets the length that it has in W_0. NS takes that many Newton-Schulz steps from
    D / |D|, which bring all singular values near 1, so that of the rates only their ratios matter. Biases and
    the momentum, a sum of gradients, are as always; what it adds to the memory is part of D.

    Args:
        q, k: [G, T, D], float16, bfloat16, float32 or float64, of one dtype with v. G counts memories, as a
            rule samples times heads. Keys of length 1 keep the learning stable at any D.
        v: [G, T, Dv].
        memory: (W1 [G, H, D], b1 [G, H], W2 [G, Dv, H], b2 [G, Dv]) before the first token, float32 or
        float64.
        momentum: the same four, as a rule zeros.
        lr: [G, T], any floating dtype; the rate at which token t is stored.
        decay: [G, T], what S keeps, as a rule in [0, 1].
        forget: [G, T], what M loses, as a rule in [0, 1].
        chunk: how many tokens share the memory at which their gradients are taken; 1 is plain online descent.
        read: "after", "before" or "chunk".
        orthogonalize: how many Newton-Schulz steps the updates of W1 and W2 take; 5 is usual, 0 means none.
            With read "chunk" alone: such an update is no sum over tokens, so that those within the chunk have
            no memory to ask. Rows of zeros stay so.
        impl: the candidate to run; by default the selected one.

    Returns:
        (o, memory, momentum): o [G, T, Dv] in q's dtype; memory and momentum after the last token, in float32
        (float64 where computed so). All carry gradients, to all arguments.

    Raises:
        ValueError: shapes that don't fit, chunk below 1, another `read`, `orthogonalize` with a read that is
            not "chunk"; the message says what was expected.
        TypeError: dtypes that don't fit.
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: Behrouz et al. 2024, Titans: Learning to Memorize at Test Time, sections 3.1 and 3.2. The
    orthogonalised update of large chunks: Zhang et al. 2025, Test-Time Training Done Right (LaCT), with the
    iteration of Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks.

    Example:
        >>> import torch
        >>> from bakeoff.ops import memory_scan
        >>> key, value = torch.eye(4)[None, :1], torch.ones(1, 1, 2)
        >>> zeros = torch.zeros(1, 8, 4), torch.zeros(1, 8), torch.zeros(1, 2, 8), torch.zeros(1, 2)
        >>> half, one, none = torch.full((1, 1), 0.5), torch.ones(1, 1), torch.zeros(1, 1)
        >>> o, memory, momentum = memory_scan(key, key, value, zeros, zeros, half, one, none)
        >>> o  # one step at rate 1/2 stores the value exactly, in the bias
        tensor([[[1., 1.]]])
    """
    check_parts("memory_scan", memory, momentum)
    out: tuple[torch.Tensor, ...] = call(
        OP, q, k, v, *memory, *momentum, lr, decay, forget, chunk, read, orthogonalize, impl=impl
    )
    return out[0], out[1:5], out[5:9]  # type: ignore[return-value]

"""Gated DeltaNet in the place of a neural memory: the linear memory that it is measured against.

A state S [N, V] per row and head, S_t = a_t S_{t-1} + k_t b_t (v_t - a_t S_{t-1}^T k_t)^T, o_t = S_t^T q_t
(Yang et al. 2024, Gated Delta Networks). Projections, short convolution and gates are as in `NeuralMemory`.
In plain PyTorch: fla-core 0.6.0 refuses the backward of its kernels on Hopper with Triton 3.4 to 3.7.0, which
computes it wrong.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.models.titan_mac import TitanMAC
from bakeoff.nn import RMSNorm
from bakeoff.nn.neural_memory import Projected, of_length

__all__ = ["GatedDelta", "delta_rule", "with_gated_delta"]

_CHUNK = 16


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_keep: Tensor, rate: Tensor) -> Tensor:
    """o [B, T, h, V] of q, k [B, T, h, N], v [B, T, h, V], log a and b [B, T, h], in chunks.

    With c_t the product of a from a chunk's start on, S_t = c_t S_0 + sum_{i <= t} (c_t / c_i) k_i u_i^T and
    (1 + A) U = b (V - c K S_0), A_ti = b_t (c_t / c_i) k_t . k_i for i < t. A is nilpotent, so (1 + A)^-1 is
    the product of 1 - A, 1 + A^2, 1 + A^4, ...
    """
    T, pad = q.shape[1], -q.shape[1] % _CHUNK
    q, k, v = (_chunks(x, pad) for x in (q, k, v))  # [chunks, B, h, C, .]
    decay, rate = (_chunks(x[..., None], pad) for x in (log_keep, rate))
    decay = decay.cumsum(3)
    below = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=q.device).tril()
    between = torch.where(below, decay - decay.mT, -torch.inf).exp()
    power = (rate * between * (k @ k.mT)).tril(-1)
    one = torch.eye(_CHUNK, dtype=power.dtype, device=q.device)
    inverse, length = one - power, 2
    while length < _CHUNK:
        power, length = power @ power, 2 * length
        inverse = inverse @ (one + power)
    values, keys = inverse @ (rate * v), inverse @ (rate * decay.exp() * k)
    seen, asked = between * (q @ k.mT), decay.exp() * q
    last = decay[:, :, :, -1:]
    kept, stored = last.exp(), ((last - decay).exp() * k).mT
    state, out = values.new_zeros(*k.shape[1:3], k.shape[-1], v.shape[-1]), []
    for c in range(len(q)):
        learned = values[c] - keys[c] @ state
        out.append(asked[c] @ state + seen[c] @ learned)
        state = kept[c] * state + stored[c] @ learned
    return torch.cat(out, dim=2)[:, :, :T].transpose(1, 2)


def _chunks(x: Tensor, pad: int) -> Tensor:
    """x [B, T, h, n] as [chunks, B, h, C, n], in float32 or wider, with zeros behind it."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    rows: Tensor = F.pad(x, (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, _CHUNK))
    return rows.permute(1, 0, 3, 2, 4)


class GatedDelta(nn.Module):
    """norm(o_t) W of x [B, T, D], called as `NeuralMemory` is; for whole rows alone, so there is no state.

    Args:
        dim: D.
        heads: h.
        keys, values: N and V, the sizes of a head's state.
    """

    def __init__(self, dim: int, heads: int, keys: int, values: int) -> None:
        super().__init__()
        self.heads, self.keys, self.values = heads, keys, values
        self.qk, self.v = Projected(dim, (0, 1), heads * keys), Projected(dim, (0,), heads * values)
        self.gates = nn.Linear(dim, 2 * heads)
        self.norm = RMSNorm(values)
        self.merge = nn.Linear(heads * values, dim, bias=False)
        nn.init.normal_(self.gates.weight, std=0.02)
        nn.init.normal_(self.merge.weight, std=0.02)
        with torch.no_grad():  # as in NeuralMemory, and a state keeps 0.999 of itself per token
            self.qk.linear.weight[heads * keys :] = self.qk.linear.weight[: heads * keys]
            self.gates.bias.copy_(torch.tensor([math.log(999), 0.0]).repeat_interleave(heads))

    def forward(self, x: Tensor, state: None = None) -> tuple[Tensor, None]:
        qk, v = self.qk(x, None)[0], self.v(x, None)[0]
        q, k = of_length(1.0, qk, 2 * self.heads).chunk(2, dim=2)
        keep, rate = self.gates(x).float().chunk(2, dim=-1)
        v = v.unflatten(-1, (self.heads, -1))
        with torch.autocast(x.device.type, enabled=False):
            o = delta_rule(q, k, v, F.logsigmoid(keep), rate.sigmoid()).to(x.dtype)
        y: Tensor = self.merge(self.norm(o).flatten(2))
        return y, None


def with_gated_delta(model: TitanMAC) -> TitanMAC:
    """`model`, gated DeltaNet in the place of its memories, with states about as large as memory and momentum
    are: N = V / 2 = sqrt(2 E H)."""
    config = model.config
    keys = max(16, 16 * round(math.sqrt(2 * config.expansion) * config.head_dim / 16))
    for block in model.blocks:
        delta = GatedDelta(config.d_model, config.heads, keys, 2 * keys)
        block.get_submodule("mixer").memory = delta.to(model.embed.weight.device)
    return model

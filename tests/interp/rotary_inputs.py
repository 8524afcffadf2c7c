"""Inputs of the tests of rotary: tensors in every memory layout, and the op's grid made small."""

import torch

from bakeoff.select import Case, TensorMeta
from bakeoff.select.declare.key import layout, with_layout

FORMS = ("dense", "fused", "head-major", "last strided")


def tensors(B, T, H, HK, D, *, dtype=torch.float32, form="dense"):
    """Leaves q and k in the given memory layout."""
    if form == "fused":
        qkv = torch.randn(B, T, (H + 2 * HK) * D).to(dtype)
        q, k = qkv.split([H * D, HK * D, HK * D], -1)[:2]
        q, k = q.unflatten(-1, (H, D)), k.unflatten(-1, (HK, D))
    elif form == "head-major":
        q, k = (torch.randn(B, n, T, D).to(dtype).transpose(1, 2) for n in (H, HK))
    elif form == "last strided":
        q, k = (torch.randn(B, T, D, n).to(dtype).transpose(2, 3) for n in (H, HK))
    else:
        q, k = (torch.randn(B, T, n, D).to(dtype) for n in (H, HK))
    return q.detach().requires_grad_(), k.detach().requires_grad_()


def shrunk(case):
    """The case on the CPU: few tokens and heads, the same head size, options and layout; fp16 for bf16."""
    B, T, _, D = case.q.shape
    B, T = min(B, 2), min(T, 5)

    def dtype(meta):
        return torch.float16 if meta.dtype == torch.bfloat16 else meta.dtype

    def rows(meta):
        shape = (B, T, min(meta.shape[2], 4), D)
        narrow = TensorMeta(meta.shape, dtype(meta), meta.stride, meta.requires_grad)
        if layout(meta, 2) != "other":
            return with_layout(narrow, shape, 2)
        return TensorMeta(shape, narrow.dtype, (shape[2] * T * D, D, T * D, 1), narrow.requires_grad)

    table = TensorMeta.dense((T, case.cos.shape[1]), dtype(case.cos))
    ids = case.position_ids and TensorMeta.dense((B, T), case.position_ids.dtype)
    weights = {
        name: meta and TensorMeta.dense(meta.shape, dtype(meta), grad=meta.requires_grad)
        for name, meta in (("q_weight", case.q_weight), ("k_weight", case.k_weight))
    }
    small = case.replace(q=rows(case.q), k=rows(case.k), cos=table, sin=table, position_ids=ids, **weights)
    return Case(small.args, "cpu", case.name)

"""Kernels as ops of PyTorch: how they are declared, prepared and launched.

`op.kernel_op` makes a differentiable, traceable op of a few functions. They launch through a `plan.Plan`,
which remembers what a call of its kind does. `triton.TritonKernel` and `cuda.CudaKernel` launch one kernel
each, and `counter` counts them. `variants` names launch configurations; `layout` reads strides. `rows` and
`row_tilings` are what normalisations of rows share, `pair` is two ops as one candidate. Only `triton`, `rows`
and `row_tilings` import Triton.
"""

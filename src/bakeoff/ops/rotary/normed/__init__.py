"""The form of `rotary` that normalises each head first (QK-norm): its kernels and how they are launched."""

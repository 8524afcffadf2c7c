"""Rows of time: [B, T, C] tensors of any strides, copied to and from channel-major rows that kernels can read
16 bytes at a time."""

"""The Triton kernels of long_conv: one module for each candidate, and what they share."""

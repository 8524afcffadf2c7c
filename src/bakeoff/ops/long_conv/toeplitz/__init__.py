"""long_conv as products with Toeplitz matrices on tensor cores, in Triton."""

"""dilated_attention in CUDA C++, for GPUs that Triton can't compile for."""

"""byte_spectral in CUDA C++, for GPUs that Triton can't compile for."""

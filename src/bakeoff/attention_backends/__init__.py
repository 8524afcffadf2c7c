"""PyTorch's attention kernels and those of packages, as the ops that choose among them share them."""

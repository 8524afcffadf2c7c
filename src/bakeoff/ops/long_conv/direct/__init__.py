"""long_conv as one product after another, for few taps, in CUDA C++."""

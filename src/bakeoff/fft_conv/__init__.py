"""Convolution by FFTs that never leave the chip, in CUDA C++, for ops that filter rows of time.

`plans` says how a transform is cut, `launch` runs one: of a causal filter given by its taps, or of a circular
one given by its spectrum.
"""

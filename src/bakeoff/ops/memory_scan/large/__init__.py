"""Chunks of hundreds of tokens and more, answered from the memory at their start: products decide.

Forward nine products a chunk, each 2 b D H FLOPs a group (D = V): Z of keys and queries, their answers, the
error carried back, and both matrices' sums over tokens, twice, because memory and momentum weigh tokens
differently: one product with rows of both beside each other. Backward 18: what arrives for the sums is asked
with keys and with hidden units (4) and read with the weighted rows, in products that also sum over what goes
on through the matrices themselves (6), the error carried back once more (1), queries (2), gradients of the
matrices (5). All are cuBLAS's, in the tokens' dtype, summed in float32; sums over tokens stay float32, as
they become state.

Between products a few kernels read and write rows of 16 bits, about 14 of D elements a token forward and 35
backward: at D = H = 512 and 4x2048 tokens in bfloat16 some 120 and 300 MB, half of which the L2 has, beside
39 and 77 GFLOP.

Rounded to 16 bits is what `plain` rounds: operands of products, and products over features. Kept for the
backward are Z of keys and queries, E and dH, and the states at chunks' starts.
"""

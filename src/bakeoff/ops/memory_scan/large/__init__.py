"""Chunks of hundreds of tokens and more, answered from the memory at their start: products decide.

Forward nine products a chunk, each 2 b D H FLOPs a group (D = V): Z of keys and queries, their answers, the
error carried back, and both matrices' sums over tokens, twice, because memory and momentum weigh tokens
differently. Backward 18: what arrives for the sums is asked with keys and with hidden units (4) and read with
errors and slopes, beside what goes on through the matrices themselves (6), the error carried back once more
(1), queries (2), gradients of the matrices (5).

One launch for each product over tokens, or for those that are added up, with all that is elementwise behind
it: 9 forward and 10 backward, with what the scans and the state need. The sums take the step in their
launch. Tokens' weights multiply rows in registers, so that no weighted rows are written: at D = H = 512 and
4x2048 tokens in bfloat16 every row of 512 that is read or written is 8 MB, 19 forward (17 where nothing is
kept) and 34 backward, about as long as the products' 39 and 77 GFLOP take.

Rounded to 16 bits are operands of products, as in `plain`, and Z, which the backward reads; sums are float32.
Kept for the backward are Z of keys and queries and s of both, E, dH and dZ, the tokens' weights and the
states at chunks' starts.
"""

// Filters of few taps, TAPS, which a thread has in registers.

#include "data.cuh"

// The filter of a channel, the skip added to its first tap; 0 for taps beyond every sequence.
DEVICE void read_taps(float taps[TAPS], const float *h, const float *skip, int c, int h_c, int h_l, int T) {
    UNROLL for (int j = 0; j < TAPS; j++) taps[j] = j < T ? h[(long long)c * h_c + (long long)j * h_l] : 0.f;
    if (skip) taps[0] += skip[c];
}

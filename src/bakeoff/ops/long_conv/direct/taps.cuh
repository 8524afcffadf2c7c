// Filters of few taps, TAPS, which a thread has in registers.

#include "../../../kernels/data.cuh"

// The filters of N channels from c on, the skip added to their first taps; 0 for taps beyond every sequence.
template <int N>
DEVICE void read_taps(float (&taps)[TAPS][N], const float *h, const float *skip, int c, int h_c, int h_l, int T) {
    h += (long long)c * h_c;
    bool four = TAPS % 4 == 0 && TAPS <= T && h_l == 1 && h_c % 4 == 0 && (unsigned long long)h % 16 == 0;
    UNROLL for (int i = 0; i < N; i++) {
        if (four) {
            UNROLL for (int j = 0; j + 3 < TAPS; j += 4) {
                float4 x = *(const float4 *)(h + (long long)i * h_c + j);
                taps[j][i] = x.x, taps[j + 1][i] = x.y, taps[j + 2][i] = x.z, taps[j + 3][i] = x.w;
            }
        } else {
            UNROLL for (int j = 0; j < TAPS; j++)
                taps[j][i] = j < T ? h[(long long)i * h_c + (long long)j * h_l] : 0.f;
        }
        if (skip) taps[0][i] += skip[c + i];
    }
}

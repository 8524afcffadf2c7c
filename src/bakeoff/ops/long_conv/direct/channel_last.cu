// Causal convolution with few taps, one product after another, on tensors [B, T, C] whose channels lie side by side.
//
// A thread has CHANNELS neighbouring channels of a piece of a sequence, and walks along it by STEPS positions. Every
// value is read once, STEPS positions before it is needed, but for TAPS - 1 at a piece's edge. Forward, an input is
// added to the TAPS sums that it has a part in, which are in registers, in float32. Backward, which walks towards the
// start, the gradient of v[s] is the sum over j of h[j] dy[s + j], that of h[j] the sum over s of v[s] dy[s + j]: one
// window of dy, in registers, serves both.
//
// In 16 bits and without gates a value costs 4 bytes and 2 TAPS FLOPs forward, 6 and 4 TAPS backward, so with few taps
// the memory decides: what counts is how many bytes are on their way to a multiprocessor, STEPS accesses a thread.
//
// Compiled with -D for: TAPS; CHANNELS of a thread, which it reads and writes by one access: every tensor's positions
// are so aligned; STEPS; THREADS of a block, of which a multiprocessor should hold BLOCKS; GATES, 1 if there is a
// gate_in, plus 2 if there is a gate_out; DATA (see data.cuh); and BACKWARD, 0 for `convolve`, 1 for `differentiate`.

#include "taps.cuh"
#include "vectors.cuh"

typedef Vector<CHANNELS> Values;

// A thread's channels of a sequence.
struct Line {
    data_t *data;
    int stride;

    DEVICE Line of(data_t *tensor, int b, int c, int stride_b, int stride_t) {
        return {tensor ? tensor + (long long)b * stride_b + c : nullptr, stride_t};
    }
    __device__ __forceinline__ Values get(int t, int first, int end) const {  // 0 outside
        return Values::read(data + t * stride, (unsigned)(t - first) < (unsigned)(end - first));
    }
    __device__ __forceinline__ void put(int t, const float *values) const {
        Values::of(values).write(data + t * stride);
    }
};

// Which of the pieces of all sequences, and which channels from the first of CHANNELS on, are a thread's.
struct Share {
    int index, c;
};
DEVICE Share share_of(int groups) {
    long long first = (long long)blockIdx.x * THREADS;
    int index = first / groups, group = first - (long long)index * groups + threadIdx.x;
    index += group / groups;
    return {index, group % groups * CHANNELS};
}

// A piece of a sequence b; pieces have `length` positions, a multiple of STEPS.
struct Piece {
    int b, first, end;
};
DEVICE Piece piece(int index, int pieces, int length, int T) {
    int b = index / pieces, first = (index - b * pieces) * length;
    return {b, first, first + length < T ? first + length : T};
}

#if !BACKWARD
// out = y gate_out with y = h * (u gate_in) + skip u gate_in, and y itself if it is wanted. A thread has a piece, of
// `all`, and one of `groups` of channels.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
convolve(data_t *u, data_t *gate_in, data_t *gate_out, const float *h, const float *skip, data_t *out, data_t *y, int T,
         int groups, int all, int pieces, int length, int h_c, int h_l, int u_b, int u_t, int gate_in_b, int gate_in_t,
         int gate_out_b, int gate_out_t, int out_b, int out_t) {
    auto [index, c] = share_of(groups);
    if (index >= all) return;
    Piece here = piece(index, pieces, length, T);
    Line from = Line::of(u, here.b, c, u_b, u_t), in = Line::of(gate_in, here.b, c, gate_in_b, gate_in_t);
    Line gate = Line::of(gate_out, here.b, c, gate_out_b, gate_out_t);
    Line to = Line::of(out, here.b, c, out_b, out_t), to_y = Line::of(y, here.b, c, out_b, out_t);
    float taps[TAPS][CHANNELS];
    read_taps(taps, h, skip, c, h_c, h_l, T);

    float sums[TAPS][CHANNELS] = {};  // sums[j]: what inputs before t add to the output at t + j
    int start = here.first - (TAPS - 1 + STEPS - 1) / STEPS * STEPS;
    Values next[STEPS], next_in[STEPS], next_gate[STEPS];
    auto read = [&](int i, int t) {
        next[i] = from.get(t, 0, here.end);
        if (GATES & 1) next_in[i] = in.get(t, 0, here.end);
        if (GATES & 2) next_gate[i] = gate.get(t, here.first, here.end);
    };
    UNROLL for (int i = 0; i < STEPS; i++) read(i, start + i);
    _Pragma("unroll 1") for (int t = start; t < here.end; t += STEPS) {
        Values now[STEPS], now_in[STEPS], now_gate[STEPS];
        UNROLL for (int i = 0; i < STEPS; i++) {
            now[i] = next[i];
            if (GATES & 1) now_in[i] = next_in[i];
            if (GATES & 2) now_gate[i] = next_gate[i];
            read(i, t + STEPS + i);
        }
        UNROLL for (int i = 0; i < STEPS; i++) {
            float result[CHANNELS];
            UNROLL for (int k = 0; k < CHANNELS; k++) {
                float v = GATES & 1 ? now[i][k] * now_in[i][k] : now[i][k];
                UNROLL for (int j = 0; j < TAPS; j++) sums[j][k] += taps[j][k] * v;
                result[k] = sums[0][k];
                UNROLL for (int j = 0; j < TAPS - 1; j++) sums[j][k] = sums[j + 1][k];
                sums[TAPS - 1][k] = 0;
            }
            if (t + i >= here.first && t + i < here.end) {
                if (y) to_y.put(t + i, result);
                if (GATES & 2) UNROLL for (int k = 0; k < CHANNELS; k++) result[k] *= now_gate[i][k];
                to.put(t + i, result);
            }
        }
    }
}
#else
// Of sums over STEPS positions, so that those which are loud drown nothing but their neighbours; as far as registers
// go, for a double takes two.
#if TAPS * CHANNELS <= 16
typedef double total_t;
#else
typedef float total_t;
#endif

// The gradients of u and of the gates, and in partial[program, j, c] what the `share` pieces that a thread takes, one
// after another, add to that of h. Those that are null aren't wanted. `y` is that of `convolve`. Results lie like `du`,
// with its strides.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
differentiate(data_t *dout, data_t *u, data_t *gate_in, data_t *gate_out, data_t *y, const float *h, const float *skip,
              data_t *du, data_t *dgate_in, data_t *dgate_out, float *partial, int T, int groups, int programs, int all,
              int share, int pieces, int length, int h_c, int h_l, int dout_b, int dout_t, int u_b, int u_t,
              int gate_in_b, int gate_in_t, int gate_out_b, int gate_out_t, int y_b, int y_t, int du_b, int du_t) {
    auto [program, c] = share_of(groups);
    if (program >= programs) return;
    float taps[TAPS][CHANNELS];
    total_t sums[TAPS][CHANNELS] = {};
    read_taps(taps, h, skip, c, h_c, h_l, T);

    int last = (program + 1) * share < all ? (program + 1) * share : all;
    _Pragma("unroll 1") for (int index = program * share; index < last; index++) {
        Piece here = piece(index, pieces, length, T);
        Line from = Line::of(dout, here.b, c, dout_b, dout_t), x = Line::of(u, here.b, c, u_b, u_t);
        Line in = Line::of(gate_in, here.b, c, gate_in_b, gate_in_t);
        Line gate = Line::of(gate_out, here.b, c, gate_out_b, gate_out_t), kept = Line::of(y, here.b, c, y_b, y_t);
        Line to = Line::of(du, here.b, c, du_b, du_t), to_in = Line::of(dgate_in, here.b, c, du_b, du_t);
        Line to_gate = Line::of(dgate_out, here.b, c, du_b, du_t);

        // Where results end: before they begin if they aren't wanted.
        int du_end = du ? T : 0, in_end = dgate_in ? T : 0, gate_end = dgate_out ? T : 0;

        int end = here.first + (here.end - here.first + STEPS - 1) / STEPS * STEPS;
        float window[TAPS - 1 + STEPS][CHANNELS];  // of dy = dout gate_out, from s on
        UNROLL for (int k = 0; k < TAPS - 1; k++) {
            Values beyond = from.get(end + k, 0, T), by = {};
            if (GATES & 2) by = gate.get(end + k, 0, T);
            UNROLL for (int n = 0; n < CHANNELS; n++) window[k][n] = GATES & 2 ? beyond[n] * by[n] : beyond[n];
        }
        Values next[STEPS], next_gate[STEPS], next_x[STEPS], next_in[STEPS], next_y[STEPS];
        auto read = [&](int i, int s) {
            next[i] = from.get(s, here.first, T);
            next_x[i] = x.get(s, here.first, T);
            if (GATES & 2) next_gate[i] = gate.get(s, here.first, T);
            if (GATES & 1) next_in[i] = in.get(s, here.first, T);
            if (GATES & 2) next_y[i] = kept.get(s, 0, gate_end);
        };
        UNROLL for (int i = 0; i < STEPS; i++) read(i, end - STEPS + i);
        _Pragma("unroll 1") for (int s = end - STEPS; s >= here.first; s -= STEPS) {
            UNROLL for (int k = TAPS - 2; k >= 0; k--)
                UNROLL for (int n = 0; n < CHANNELS; n++) window[k + STEPS][n] = window[k][n];
            Values now_x[STEPS], now_in[STEPS];
            UNROLL for (int i = 0; i < STEPS; i++) {
                if ((GATES & 2) && s + i < gate_end) {
                    float result[CHANNELS];
                    UNROLL for (int n = 0; n < CHANNELS; n++) result[n] = next[i][n] * next_y[i][n];
                    to_gate.put(s + i, result);
                }
                UNROLL for (int n = 0; n < CHANNELS; n++)
                    window[i][n] = GATES & 2 ? next[i][n] * next_gate[i][n] : next[i][n];
                now_x[i] = next_x[i];
                if (GATES & 1) now_in[i] = next_in[i];
                read(i, s - STEPS + i);
            }
            float dv[STEPS][CHANNELS];
            UNROLL for (int n = 0; n < CHANNELS; n++) {
                float v[STEPS];
                UNROLL for (int i = 0; i < STEPS; i++) {
                    v[i] = GATES & 1 ? now_x[i][n] * now_in[i][n] : now_x[i][n];
                    dv[i][n] = 0;
                }
                UNROLL for (int j = TAPS - 1; j >= 0; j--)
                    UNROLL for (int i = 0; i < STEPS; i++) dv[i][n] += taps[j][n] * window[i + j][n];
                UNROLL for (int j = 0; j < TAPS; j += 4) {
                    float few[4] = {};
                    UNROLL for (int i = 0; i < STEPS; i++)
                        UNROLL for (int k = 0; k < 4 && j + k < TAPS; k++) few[k] += v[i] * window[i + j + k][n];
                    UNROLL for (int k = 0; k < 4 && j + k < TAPS; k++) sums[j + k][n] += few[k];
                }
            }
            UNROLL for (int i = 0; i < STEPS; i++) {
                float result[CHANNELS];
                if (s + i < du_end) {
                    UNROLL for (int n = 0; n < CHANNELS; n++)
                        result[n] = GATES & 1 ? dv[i][n] * now_in[i][n] : dv[i][n];
                    to.put(s + i, result);
                }
                if ((GATES & 1) && s + i < in_end) {
                    UNROLL for (int n = 0; n < CHANNELS; n++) result[n] = dv[i][n] * now_x[i][n];
                    to_in.put(s + i, result);
                }
            }
        }
    }
    if (partial)
        UNROLL for (int j = 0; j < TAPS; j++)
            UNROLL for (int n = 0; n < CHANNELS; n++)
                partial[((long long)program * TAPS + j) * groups * CHANNELS + c + n] = sums[j][n];
}
#endif

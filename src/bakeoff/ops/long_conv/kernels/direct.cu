// Causal convolution with few taps, one product after another, on tensors [B, T, C] whose channels lie side by side.
//
// A thread has one channel of a piece of a sequence, and walks along it by STEPS positions. Every value is read once,
// STEPS positions before it is needed, but for TAPS - 1 at a piece's edge. Forward, an input is added to the TAPS sums
// that it has a part in, which are in registers, in float32. Backward, which walks towards the start, the gradient of
// v[s] is the sum over j of h[j] dy[s + j], that of h[j] the sum over s of v[s] dy[s + j]: one window of dy, in
// registers, serves both.
//
// Compiled with -D for: TAPS; STEPS; THREADS of a block, of which BLOCKS are wanted on a multiprocessor; GATES, 1 if
// there is a gate_in, plus 2 if there is a gate_out; DATA (see data.cuh); and BACKWARD, 0 for `convolve`, 1 for
// `differentiate`, as each is cut otherwise.

#include "taps.cuh"

// A channel of a sequence.
struct Line {
    data_t *data;
    int step;

    DEVICE Line of(data_t *tensor, int b, int c, int to_b, int to_t) {
        return {tensor ? tensor + (long long)b * to_b + c : nullptr, to_t};
    }
    __device__ __forceinline__ data_t get(int t, int first, int end) const {  // 0 outside
        return (unsigned)(t - first) < (unsigned)(end - first) ? data[t * step] : data_t(0);
    }
    __device__ __forceinline__ void put(int t, float x) const { data[t * step] = narrowed(x); }
};

// A thread's channel, and its piece of which sequence; pieces have `length` positions, a multiple of STEPS.
struct Place {
    int c, b, first, end;
};

DEVICE Place place(int unit, int column, int pieces, int length, int T) {
    int b = unit / pieces, first = (unit - b * pieces) * length;
    return {column * THREADS + (int)threadIdx.x, b, first, first + length < T ? first + length : T};
}

#if !BACKWARD
// out = y gate_out with y = h * (u gate_in) + skip u gate_in, and y itself if there is room for it. A block has a
// piece of a sequence, of `pieces`.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
convolve(data_t *u, data_t *gate_in, data_t *gate_out, const float *h, const float *skip, data_t *out, data_t *kept,
         int T, int C, int columns, int pieces, int length, int h_c, int h_l, int u_b, int u_t, int in_b, int in_t,
         int gate_b, int gate_t, int out_b, int out_t) {
    int unit = blockIdx.x / columns;
    Place here = place(unit, blockIdx.x - unit * columns, pieces, length, T);
    if (here.c >= C) return;
    Line from = Line::of(u, here.b, here.c, u_b, u_t), in = Line::of(gate_in, here.b, here.c, in_b, in_t);
    Line gate = Line::of(gate_out, here.b, here.c, gate_b, gate_t);
    Line to = Line::of(out, here.b, here.c, out_b, out_t), keep = Line::of(kept, here.b, here.c, out_b, out_t);
    float taps[TAPS];
    read_taps(taps, h, skip, here.c, h_c, h_l, T);

    float sums[TAPS] = {};  // sums[j]: what inputs before t add to the output at t + j
    int start = here.first - (TAPS - 1 + STEPS - 1) / STEPS * STEPS;
    data_t next[STEPS], next_in[STEPS], next_gate[STEPS];
    auto read = [&](int i, int t) {
        next[i] = from.get(t, 0, here.end);
        if (GATES & 1) next_in[i] = in.get(t, 0, here.end);
        if (GATES & 2) next_gate[i] = gate.get(t, here.first, here.end);
    };
    UNROLL for (int i = 0; i < STEPS; i++) read(i, start + i);
    _Pragma("unroll 1") for (int t = start; t < here.end; t += STEPS) {
        float v[STEPS], gates[STEPS];
        UNROLL for (int i = 0; i < STEPS; i++) {
            v[i] = widened(next[i]);
            if (GATES & 1) v[i] *= widened(next_in[i]);
            if (GATES & 2) gates[i] = widened(next_gate[i]);
            read(i, t + STEPS + i);
        }
        float y[STEPS];
        UNROLL for (int i = 0; i < STEPS; i++) {
            UNROLL for (int j = 0; j < TAPS; j++) sums[j] += taps[j] * v[i];
            y[i] = sums[0];
            UNROLL for (int j = 0; j < TAPS - 1; j++) sums[j] = sums[j + 1];
            sums[TAPS - 1] = 0;
        }
        UNROLL for (int i = 0; i < STEPS; i++)
            if (t + i >= here.first && t + i < here.end) {
                if (kept) keep.put(t + i, y[i]);
                to.put(t + i, GATES & 2 ? y[i] * gates[i] : y[i]);
            }
    }
}
#else
// The gradients of u and of the gates, and in partial[program, j, c] the share of h's that a block's pieces, one after
// another, have. Those without room aren't wanted. `kept` is y of `convolve`. Results lie like `du`, with its steps.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
differentiate(data_t *dout, data_t *u, data_t *gate_in, data_t *gate_out, data_t *kept, const float *h,
              const float *skip, data_t *du, data_t *dgate_in, data_t *dgate_out, float *partial, int T, int C,
              int columns, int units, int share, int pieces, int length, int h_c, int h_l, int dout_b, int dout_t,
              int u_b, int u_t, int in_b, int in_t, int gate_b, int gate_t, int kept_b, int kept_t, int du_b,
              int du_t) {
    int program = blockIdx.x / columns, column = blockIdx.x - program * columns;
    Place here = place(0, column, pieces, length, T);
    if (here.c >= C) return;
    float taps[TAPS], sums[TAPS] = {};
    read_taps(taps, h, skip, here.c, h_c, h_l, T);

    int last = (program + 1) * share < units ? (program + 1) * share : units;
    _Pragma("unroll 1") for (int unit = program * share; unit < last; unit++) {
        here = place(unit, column, pieces, length, T);
        Line from = Line::of(dout, here.b, here.c, dout_b, dout_t), in = Line::of(gate_in, here.b, here.c, in_b, in_t);
        Line gate = Line::of(gate_out, here.b, here.c, gate_b, gate_t), x = Line::of(u, here.b, here.c, u_b, u_t);
        Line y = Line::of(kept, here.b, here.c, kept_b, kept_t);
        Line to = Line::of(du, here.b, here.c, du_b, du_t), to_in = Line::of(dgate_in, here.b, here.c, du_b, du_t);
        Line to_gate = Line::of(dgate_out, here.b, here.c, du_b, du_t);

        // Where results end: before they begin if they aren't wanted.
        int du_end = du ? T : 0, in_end = dgate_in ? T : 0, gate_end = dgate_out ? T : 0;

        int end = here.first + (here.end - here.first + STEPS - 1) / STEPS * STEPS;
        float window[TAPS - 1 + STEPS];  // of dy = dout gate_out, from s on
        UNROLL for (int k = 0; k < TAPS - 1; k++) {
            window[k] = widened(from.get(end + k, 0, T));
            if (GATES & 2) window[k] *= widened(gate.get(end + k, 0, T));
        }
        data_t next[STEPS], next_gate[STEPS], next_x[STEPS], next_in[STEPS], next_y[STEPS];
        auto read = [&](int i, int s) {
            next[i] = from.get(s, here.first, T);
            next_x[i] = x.get(s, here.first, T);
            if (GATES & 2) next_gate[i] = gate.get(s, here.first, T);
            if (GATES & 1) next_in[i] = in.get(s, here.first, T);
            if (GATES & 2) next_y[i] = y.get(s, 0, gate_end);
        };
        UNROLL for (int i = 0; i < STEPS; i++) read(i, end - STEPS + i);
        _Pragma("unroll 1") for (int s = end - STEPS; s >= here.first; s -= STEPS) {
            UNROLL for (int k = TAPS - 2; k >= 0; k--) window[k + STEPS] = window[k];
            data_t now_x[STEPS], now_in[STEPS];
            UNROLL for (int i = 0; i < STEPS; i++) {
                float dy = widened(next[i]);
                if ((GATES & 2) && s + i < gate_end) to_gate.put(s + i, dy * widened(next_y[i]));
                window[i] = GATES & 2 ? dy * widened(next_gate[i]) : dy;
                now_x[i] = next_x[i];
                if (GATES & 1) now_in[i] = next_in[i];
                read(i, s - STEPS + i);
            }
            float v[STEPS], dv[STEPS] = {};
            UNROLL for (int i = 0; i < STEPS; i++) {
                v[i] = widened(now_x[i]);
                if (GATES & 1) v[i] *= widened(now_in[i]);
            }
            UNROLL for (int j = TAPS - 1; j >= 0; j--)
                UNROLL for (int i = 0; i < STEPS; i++) dv[i] += taps[j] * window[i + j];
            UNROLL for (int j = 0; j < TAPS; j += 4) {
                float few[4] = {};  // added up apart, so that the long sums round less
                UNROLL for (int i = 0; i < STEPS; i++)
                    UNROLL for (int k = 0; k < 4 && j + k < TAPS; k++) few[k] += v[i] * window[i + j + k];
                UNROLL for (int k = 0; k < 4 && j + k < TAPS; k++) sums[j + k] += few[k];
            }
            UNROLL for (int i = 0; i < STEPS; i++) {
                if (s + i < du_end) to.put(s + i, GATES & 1 ? dv[i] * widened(now_in[i]) : dv[i]);
                if ((GATES & 1) && s + i < in_end) to_in.put(s + i, dv[i] * widened(now_x[i]));
            }
        }
    }
    if (partial)
        UNROLL for (int j = 0; j < TAPS; j++) partial[((long long)program * TAPS + j) * C + here.c] = sums[j];
}
#endif

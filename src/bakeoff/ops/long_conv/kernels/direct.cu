// Causal convolution with few taps, one product after another, on tensors [B, T, C] whose channels lie side by side.
//
// A thread has WIDTH neighbouring channels of a piece of a sequence, and walks along it by STEPS positions. What its
// taps reach is in registers, so that every value is read once (but for TAPS - 1 at a piece's edge), and sums are
// float32. Backward walks towards the start: the gradient of v[s] is the sum over j of h[j] dy[s + j], that of h[j]
// the sum over s of v[s] dy[s + j], so one window of dy serves both.
//
// Compiled with -D for: TAPS; STEPS; WIDTH (1, 2 or 4); THREADS of a block; GATES, 1 if there is a gate_in, plus 2 if
// there is a gate_out; and DATA, one of 0 (float32), 1 (bfloat16), 2 (float16).

#define DEVICE static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define SPAN (TAPS - 1 + STEPS)

#if DATA == 0
typedef float data_t;
#else
typedef unsigned short data_t;
#endif

#ifndef EMULATED
#if DATA == 1
DEVICE data_t narrowed(float x) {
    data_t y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
#elif DATA == 2
DEVICE float widened(data_t x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
DEVICE data_t narrowed(float x) {
    data_t y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
#endif
#endif
#if DATA == 0
DEVICE float narrowed(float x) { return x; }
DEVICE float widened(float x) { return x; }
#elif DATA == 1
DEVICE float widened(data_t x) { return __uint_as_float((unsigned)x << 16); }
#endif

// A thread's channels at one position.
struct alignas(sizeof(data_t) * WIDTH) Word {
    data_t of[WIDTH];
};
struct Row {
    float of[WIDTH];
};

// A sequence of a tensor, from a thread's first channel on.
struct Line {
    data_t *data;
    long long step;

    DEVICE Line at(data_t *whole, int b, int c, int to_b, int to_t) {
        return {whole ? whole + (long long)b * to_b + c : nullptr, to_t};
    }
    __device__ __forceinline__ Word get(int t, int first, int end) const {
        Word zero = {};
        return t >= first && t < end ? *(const Word *)(data + t * step) : zero;
    }
    __device__ __forceinline__ void put(int t, Row x) const {
        Word word;
        UNROLL for (int w = 0; w < WIDTH; w++) word.of[w] = narrowed(x.of[w]);
        *(Word *)(data + t * step) = word;
    }
};

DEVICE Row row(Word x) {
    Row y;
    UNROLL for (int w = 0; w < WIDTH; w++) y.of[w] = widened(x.of[w]);
    return y;
}

DEVICE Row times(Row x, Row y) {
    UNROLL for (int w = 0; w < WIDTH; w++) x.of[w] *= y.of[w];
    return x;
}

// sum += x y
DEVICE void add(Row &sum, Row x, Row y) {
    UNROLL for (int w = 0; w < WIDTH; w++) sum.of[w] += x.of[w] * y.of[w];
}

// The filter of a thread's channels, the skip added to its first tap.
DEVICE void read_taps(Row taps[TAPS], const float *h, const float *skip, int c, int h_c, int h_l) {
    UNROLL for (int w = 0; w < WIDTH; w++) {
        UNROLL for (int j = 0; j < TAPS; j++) taps[j].of[w] = h[(long long)(c + w) * h_c + (long long)j * h_l];
        if (skip) taps[0].of[w] += skip[c + w];
    }
}

// Which channels and which piece of which sequence; pieces have `length` positions, a multiple of STEPS.
struct Place {
    int c, b, first, end;
};

DEVICE Place place(int unit, int column, int pieces, int length, int T) {
    int b = unit / pieces, first = (unit - b * pieces) * length;
    return {(column * THREADS + (int)threadIdx.x) * WIDTH, b, first, first + length < T ? first + length : T};
}

// out = y gate_out with y = h * (u gate_in) + skip u gate_in, and y itself if there is room for it. A block has a
// piece of a sequence, of `pieces`.
extern "C" __global__ void __launch_bounds__(THREADS)
convolve(data_t *u, data_t *gate_in, data_t *gate_out, const float *h, const float *skip, data_t *out, data_t *kept,
         int T, int C, int columns, int pieces, int length, int h_c, int h_l, int u_b, int u_t, int in_b, int in_t,
         int gate_b, int gate_t, int out_b, int out_t) {
    int unit = blockIdx.x / columns;
    Place here = place(unit, blockIdx.x - unit * columns, pieces, length, T);
    if (here.c >= C) return;
    Line from = Line::at(u, here.b, here.c, u_b, u_t), in = Line::at(gate_in, here.b, here.c, in_b, in_t);
    Line gate = Line::at(gate_out, here.b, here.c, gate_b, gate_t);
    Line to = Line::at(out, here.b, here.c, out_b, out_t), keep = Line::at(kept, here.b, here.c, out_b, out_t);
    Row taps[TAPS];
    read_taps(taps, h, skip, here.c, h_c, h_l);

    Row window[SPAN];  // of v = u gate_in, from TAPS - 1 positions before t on
    UNROLL for (int k = 0; k < TAPS - 1; k++) {
        int t = here.first - (TAPS - 1) + k;
        window[k] = row(from.get(t, 0, T));
        if (GATES & 1) window[k] = times(window[k], row(in.get(t, 0, T)));
    }
    Word next[STEPS], next_in[STEPS], next_gate[STEPS];
    UNROLL for (int i = 0; i < STEPS; i++) {
        next[i] = from.get(here.first + i, 0, here.end);
        if (GATES & 1) next_in[i] = in.get(here.first + i, 0, here.end);
        if (GATES & 2) next_gate[i] = gate.get(here.first + i, 0, here.end);
    }
    _Pragma("unroll 1") for (int t = here.first; t < here.end; t += STEPS) {
        Row gates[STEPS];
        UNROLL for (int i = 0; i < STEPS; i++) {
            window[TAPS - 1 + i] = row(next[i]);
            if (GATES & 1) window[TAPS - 1 + i] = times(window[TAPS - 1 + i], row(next_in[i]));
            if (GATES & 2) gates[i] = row(next_gate[i]);
            int later = t + STEPS + i;
            next[i] = from.get(later, 0, here.end);
            if (GATES & 1) next_in[i] = in.get(later, 0, here.end);
            if (GATES & 2) next_gate[i] = gate.get(later, 0, here.end);
        }
        UNROLL for (int i = 0; i < STEPS; i++) {
            Row y = {};
            UNROLL for (int j = TAPS - 1; j >= 0; j--) add(y, taps[j], window[TAPS - 1 + i - j]);
            if (t + i < here.end) {
                if (kept) keep.put(t + i, y);
                to.put(t + i, GATES & 2 ? times(y, gates[i]) : y);
            }
        }
        UNROLL for (int k = 0; k < TAPS - 1; k++) window[k] = window[k + STEPS];
    }
}

// The gradients of u and of the gates, and in partial[program, j, c] the share of h's that a block's pieces, one after
// another, have. Those without room aren't wanted. `kept` is y of `convolve`. Results lie like `du`, with its steps.
extern "C" __global__ void __launch_bounds__(THREADS)
differentiate(data_t *dout, data_t *u, data_t *gate_in, data_t *gate_out, data_t *kept, const float *h,
              const float *skip, data_t *du, data_t *dgate_in, data_t *dgate_out, float *partial, int T, int C,
              int columns, int units, int share, int pieces, int length, int h_c, int h_l, int dout_b, int dout_t,
              int u_b, int u_t, int in_b, int in_t, int gate_b, int gate_t, int kept_b, int kept_t, int du_b,
              int du_t) {
    int program = blockIdx.x / columns, column = blockIdx.x - program * columns;
    Place here = place(0, column, pieces, length, T);
    if (here.c >= C) return;
    Row taps[TAPS], sums[TAPS] = {};
    read_taps(taps, h, skip, here.c, h_c, h_l);

    int last = (program + 1) * share < units ? (program + 1) * share : units;
    _Pragma("unroll 1") for (int unit = program * share; unit < last; unit++) {
        here = place(unit, column, pieces, length, T);
        Line from = Line::at(dout, here.b, here.c, dout_b, dout_t), in = Line::at(gate_in, here.b, here.c, in_b, in_t);
        Line gate = Line::at(gate_out, here.b, here.c, gate_b, gate_t), x = Line::at(u, here.b, here.c, u_b, u_t);
        Line y = Line::at(kept, here.b, here.c, kept_b, kept_t);
        Line to = Line::at(du, here.b, here.c, du_b, du_t), to_in = Line::at(dgate_in, here.b, here.c, du_b, du_t);
        Line to_gate = Line::at(dgate_out, here.b, here.c, du_b, du_t);

        int end = here.first + (here.end - here.first + STEPS - 1) / STEPS * STEPS;
        Row window[SPAN];  // of dy = dout gate_out, from s on
        UNROLL for (int k = 0; k < TAPS - 1; k++) {
            window[k] = row(from.get(end + k, 0, T));
            if (GATES & 2) window[k] = times(window[k], row(gate.get(end + k, 0, T)));
        }
        Word next[STEPS], next_gate[STEPS], next_x[STEPS], next_in[STEPS], next_y[STEPS];
        UNROLL for (int i = 0; i < STEPS; i++) {
            int s = end - STEPS + i;
            next[i] = from.get(s, here.first, T);
            next_x[i] = x.get(s, here.first, T);
            if (GATES & 2) next_gate[i] = gate.get(s, here.first, T);
            if (GATES & 1) next_in[i] = in.get(s, here.first, T);
            if (GATES & 2) next_y[i] = dgate_out ? y.get(s, here.first, T) : next[i];
        }
        _Pragma("unroll 1") for (int s = end - STEPS; s >= here.first; s -= STEPS) {
            UNROLL for (int k = TAPS - 2; k >= 0; k--) window[k + STEPS] = window[k];
            Word now_x[STEPS], now_in[STEPS];
            UNROLL for (int i = 0; i < STEPS; i++) {
                Row dy = row(next[i]);
                if ((GATES & 2) && dgate_out && s + i < T) to_gate.put(s + i, times(dy, row(next_y[i])));
                window[i] = GATES & 2 ? times(dy, row(next_gate[i])) : dy;
                now_x[i] = next_x[i];
                if (GATES & 1) now_in[i] = next_in[i];
                int sooner = s - STEPS + i;
                next[i] = from.get(sooner, here.first, T);
                next_x[i] = x.get(sooner, here.first, T);
                if (GATES & 2) next_gate[i] = gate.get(sooner, here.first, T);
                if (GATES & 1) next_in[i] = in.get(sooner, here.first, T);
                if (GATES & 2) next_y[i] = dgate_out ? y.get(sooner, here.first, T) : next[i];
            }
            UNROLL for (int i = 0; i < STEPS; i++) {
                Row dv = {}, v = row(now_x[i]);
                if (GATES & 1) v = times(v, row(now_in[i]));
                UNROLL for (int j = TAPS - 1; j >= 0; j--) add(dv, taps[j], window[i + j]);
                UNROLL for (int j = 0; j < TAPS; j++) add(sums[j], v, window[i + j]);
                if (s + i < T) {
                    if (du) to.put(s + i, GATES & 1 ? times(dv, row(now_in[i])) : dv);
                    if ((GATES & 1) && dgate_in) to_in.put(s + i, times(dv, row(now_x[i])));
                }
            }
        }
    }
    if (partial) UNROLL for (int j = 0; j < TAPS; j++) {
        float *place = partial + ((long long)program * TAPS + j) * C + here.c;
        UNROLL for (int w = 0; w < WIDTH; w++) place[w] = sums[j].of[w];
    }
}

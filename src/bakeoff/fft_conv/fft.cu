// Long convolution by FFTs in float32 that never leave the chip.
//
// A block transforms two rows a, b of a channel at once, as z = a + i b: the filter is real, so the real and
// imaginary parts of the result are the two rows' convolutions. Each row is divided by a power of 2 first, so
// that a loud one's roundings don't drown the other; one that isn't finite is kept out and comes back as NaN.
// N >= T + L - 1, or the end would wrap around to the start, as it does in a circular convolution.
//
// Each of THREADS threads holds E = N / THREADS values in registers. Time n is cut into digits n1, n2, n3 and
// frequency k into k1, k2, k3 of radix R1, R2, R3: n = (n1 R2 + n2) R3 + n3, k = k1 + R1 (k2 + R2 k3). Three
// passes (decimation in time, so that twiddles fold into the butterflies' FMAs) turn n1 into k1, n2 into k2, n3
// into k3, each in its digit's place, and three more turn them back. In between, values are multiplied by the
// filter's spectrum, which lies in the same order. Between passes values change threads through shared memory,
// in as many ROUNDS as the workspace needs; where sets of two passes don't let halves change apart, ROUNDS is 0, and
// real parts move before imaginary ones.
//
// Rows too long for that are cut into SEGMENTS of N values. A block then computes one of SEGMENTS parts of a row's
// spectrum, frequencies k SEGMENTS + part, and the last of a row's blocks puts the row together again. Where there is
// a SINGLE sequence its row is real, and parts beyond SEGMENTS / 2 mirror the others: they are not computed, and what
// the others give counts twice.
//
// Where filters are short, sequences are cut into WINDOWS, which overlap, and each is a row: of N SEGMENTS values, of
// which `valid` are its own, and a result's too; the others are as many as a filter reaches (overlap-save).
//
// Compiled with -D for: N, E, R1, R2, R3, SEGMENTS (powers of 2, R1 R2 R3 = N, R1 = E the largest); HALF, whether rows
// fill no more than half of N SEGMENTS, as filters do; CIRCULAR, whether rows fill all of it, the end is meant to wrap
// around, and filters are given by their spectra; SINGLE, whether there is one sequence only; WINDOWS, whether
// sequences are cut; ROUNDS (0, 1, or 2 if R2 = R3 = E / 2); BACKWARD, 0 for `convolve`, 1 for `differentiate`; BLOCKS
// that a multiprocessor should hold at a time; STORES, whether `differentiate` has shared memory for the filter's
// spectrum and registers for the sum of its gradient's; and DATA (see data.cuh).

#include "../kernels/data.cuh"

#define THREADS (N / E)
#define WARPS (THREADS / 32)
#define TOTAL (N * SEGMENTS)
#define COMPUTED (SINGLE ? SEGMENTS / 2 + 1 : SEGMENTS)               // parts
#define PART_VALUES (N * COMPUTED)                                    // of a pair of rows
#define BANKS (ROUNDS ? 16 : 32)                                      // of a float or of a pair
#define WORKSPACE (N / (ROUNDS ? ROUNDS : 1) / BANKS * (BANKS + 1))   // for values that change threads at a time
#define ROW_VALUES (HALF && SEGMENTS == 1 ? E / 2 : E)                // of a thread that may lie inside a row
#define ROW_SEGMENTS (HALF && SEGMENTS > 1 ? SEGMENTS / 2 : SEGMENTS) // that a row may reach
#define FILTER_VALUES (SEGMENTS > 1 ? E : E / 2)                      // of a thread that may lie inside a filter
#define FILTER_SEGMENTS ((SEGMENTS + 1) / 2)                          // that a filter may reach
#ifndef SHARED
#define SHARED(name) extern __shared__ float name[]
#endif

#ifndef EMULATED
// Makes x look changed, so that what is computed from it inside a loop takes no registers around it.
DEVICE void refresh(int &x) { asm volatile("" : "+r"(x)); }

// NaN if either is.
DEVICE float larger(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
#endif

struct Values {
    float re[E], im[E];
};

// exp(-2 pi i k / 32) for 0 <= k < 16.
DEVICE float2 root(int k) {
    const float sines[9] = {0.f,
                            0.19509032201612826785f,
                            0.38268343236508977173f,
                            0.55557023301960222474f,
                            0.70710678118654752440f,
                            0.83146961230254523708f,
                            0.92387953251128675613f,
                            0.98078528040323044913f,
                            1.f};
    return k < 8 ? make_float2(sines[8 - k], -sines[k]) : make_float2(-sines[k - 8], -sines[16 - k]);
}

DEVICE void multiply(float &re, float &im, float2 by) {
    float r = re;
    re = r * by.x - im * by.y;
    im = r * by.y + im * by.x;
}

DEVICE constexpr int log_2(int x) { return x > 1 ? 1 + log_2(x / 2) : 0; }

// The bits of k < R in the opposite order.
template <int R>
DEVICE constexpr int reversed(int k) {
    return ((k & 1) << 4 | (k & 2) << 2 | (k & 4) | (k & 8) >> 2 | (k & 16) >> 4) / (32 / R);
}

// a + w b and a - w b, the second as 2 a less the first.
DEVICE void butterfly(float &a_re, float &a_im, float &b_re, float &b_im, float2 w) {
    float re = fmaf(-w.y, b_im, fmaf(w.x, b_re, a_re)), im = fmaf(w.y, b_re, fmaf(w.x, b_im, a_im));
    b_re = fmaf(2.f, a_re, -re);
    b_im = fmaf(2.f, a_im, -im);
    a_re = re;
    a_im = im;
}

// The same for w = 1.
DEVICE void butterfly(float &a_re, float &a_im, float &b_re, float &b_im) {
    float re = a_re, im = a_im;
    a_re += b_re;
    a_im += b_im;
    b_re = re - b_re;
    b_im = im - b_im;
}

// The DFT of R values, if TURNED the k-th of them times w^k, powers[l] = w^(2^l), from steps of STEP down to 1.
// The k-th of the result lies at reversed(k). Unless FULL, the second half of the values is 0 whatever it holds.
template <int R, bool TURNED, bool FULL = true, int STEP = R / 2>
DEVICE void transform(float *re, float *im, const float2 *powers) {
    if constexpr (STEP > 0) {
        const int groups = R / 2 / STEP;
        UNROLL for (int n = 0; n < R / 2; n++) {
            int group = n / STEP, a = n + group * STEP, b = a + STEP;
            int k = reversed<groups>(group & ~1) * STEP * (32 / R);  // odd groups turn by -i more than even ones
            float2 w = root(k);
            if (TURNED && k == 0) w = powers[log_2(STEP)];
            if (TURNED && k > 0) multiply(w.x, w.y, powers[log_2(STEP)]);
            if (!FULL && STEP == R / 2) {
                re[b] = re[a];
                im[b] = im[a];
            } else if (!TURNED && k == 0 && group % 2 == 0) {
                butterfly(re[a], im[a], re[b], im[b]);
            } else if (!TURNED && k == 0) {
                float r = re[b];
                re[b] = im[b];
                im[b] = -r;
                butterfly(re[a], im[a], re[b], im[b]);
            } else {
                butterfly(re[a], im[a], re[b], im[b], group % 2 ? make_float2(w.y, -w.x) : w);
            }
        }
        transform<R, TURNED, FULL, STEP / 2>(re, im, powers);
    }
}

// A pass's radix, and where its values lie: thread t holds E / R sets of R values, the k-th of a set at start(t)
// + apart(set, k), the second a constant after unrolling. The two have no bit in common. Bits of t that choose k1
// in the second pass are rotated, so that a warp's values fall into different banks.
template <int PASS>
DEVICE constexpr int radix() {
    return PASS == 1 ? R1 : PASS == 2 ? R2 : R3;
}
template <int PASS>
DEVICE int start(int t) {
    const int highs = THREADS / R3, turn = BANKS / R2;
    int high = t / R3;
    if (PASS == 1) return t;
    if (PASS == 2) return (high % (highs / turn) * turn + high / (highs / turn)) * R2 * R3 + t % R3;
    return t * R3;
}
template <int PASS>
DEVICE constexpr int apart(int set, int k) {
    return PASS == 1 ? k * THREADS : set * THREADS * radix<PASS>() + k * (PASS == 2 ? R3 : 1);
}

// A place is left out after every 32 floats or 16 pairs, which spreads strides over the banks.
DEVICE constexpr int padded(int position) { return position + position / BANKS; }

#if ROUNDS
typedef float2 word_t;
#else
typedef float word_t;
#endif

// From the threads of one pass, which left its values at reversed(k), to those of another, in order.
template <int FROM, int TO>
DEVICE void exchange(Values &v, int t, word_t *workspace) {
    const int from = radix<FROM>(), to = radix<TO>(), rounds = ROUNDS ? ROUNDS : 2, some = ROUNDS ? E / rounds : E;
    word_t *source = workspace + padded(start<FROM>(t)), *target = workspace + padded(start<TO>(t));
    Values moved;
    UNROLL for (int round = 0; round < rounds; round++) {
        __syncthreads();
        UNROLL for (int i = 0; i < some; i++) {
            int e = ROUNDS ? round * some + i : i, at = e / from * from + reversed<from>(e % from);
            word_t &place = source[padded(apart<FROM>(e / from, e % from) - (e - i) * THREADS)];
#if ROUNDS
            place = make_float2(v.re[at], v.im[at]);
#else
            place = round ? v.im[at] : v.re[at];
#endif
        }
        __syncthreads();
        UNROLL for (int i = 0; i < some; i++) {
            int e = ROUNDS ? round * some + i : i;
            word_t &place = target[padded(apart<TO>(e / to, e % to) - (e - i) * THREADS)];
#if ROUNDS
            moved.re[e] = place.x;
            moved.im[e] = place.y;
#else
            (round ? moved.im : moved.re)[e] = place;
#endif
        }
    }
    v = moved;
}

// `twiddles` is a list of tables of w^(2^l), one row of `count` for each l: for the inverse second pass by n3,
// for the inverse first pass by thread, for SEGMENTS parts by place; and then for each part: factors of segments,
// and tables for the first pass, for the second by k1, and for the third by k1 R2 + k2.
#define INVERSE_1 (log_2(R2) * R3)
#define INVERSE_SEGMENTS (INVERSE_1 + log_2(R1) * THREADS)
#define PART_TABLES (INVERSE_SEGMENTS + log_2(SEGMENTS) * N)
#define FORWARD_1 SEGMENTS
#define FORWARD_2 (FORWARD_1 + log_2(R1))
#define FORWARD_3 (FORWARD_2 + log_2(R2) * R1)
#define PART (FORWARD_3 + log_2(R3) * (N / R3))

template <int R>
DEVICE void look_up(float2 *powers, const float2 *table, int count, int index) {
    UNROLL for (int l = 0; l < log_2(R); l++) powers[l] = table[l * count + index];
}

// The part of the DFT whose tables are given, of values in the first pass's order. Its result stays in the
// third pass's threads, the k-th of a set at reversed(k).
template <bool FULL>
DEVICE void forward(Values &v, int t, word_t *workspace, const float2 *tables) {
    float2 powers[5];
    if (SEGMENTS > 1) look_up<R1>(powers, tables + FORWARD_1, 1, 0);
    transform<R1, (SEGMENTS > 1), FULL>(v.re, v.im, powers);
    exchange<1, 2>(v, t, workspace);
    UNROLL for (int set = 0; set < E / R2; set++) {
        look_up<R2>(powers, tables + FORWARD_2, R1, (start<2>(t) + apart<2>(set, 0)) / (R2 * R3));
        transform<R2, true>(v.re + set * R2, v.im + set * R2, powers);
    }
    exchange<2, 3>(v, t, workspace);
    UNROLL for (int set = 0; set < E / R3; set++) {
        look_up<R3>(powers, tables + FORWARD_3, N / R3, t + set * THREADS);
        transform<R3, true>(v.re + set * R3, v.im + set * R3, powers);
    }
}

// The inverse of `forward` for SEGMENTS = 1, times N: the conjugate transform, real and imaginary parts swapped.
// The k-th value of the result, in the first pass's order, lies at reversed(k).
DEVICE void backward(Values &v, int t, word_t *workspace, const float2 *twiddles) {
    float2 powers[5];
    Values z;
    UNROLL for (int e = 0; e < E; e++) {
        z.re[e] = v.re[e / R3 * R3 + reversed<R3>(e % R3)];
        z.im[e] = v.im[e / R3 * R3 + reversed<R3>(e % R3)];
    }
    UNROLL for (int set = 0; set < E / R3; set++)
        transform<R3, false>(z.im + set * R3, z.re + set * R3, powers);
    exchange<3, 2>(z, t, workspace);
    look_up<R2>(powers, twiddles, R3, t % R3);
    UNROLL for (int set = 0; set < E / R2; set++)
        transform<R2, true>(z.im + set * R2, z.re + set * R2, powers);
    exchange<2, 1>(z, t, workspace);
    look_up<R1>(powers, twiddles + INVERSE_1, THREADS, t);
    transform<R1, true>(z.im, z.re, powers);
    v = z;
}

// A row, of which `count` places from `first` on are there.
template <class Data>
struct Row {
    Data *values;
    int first, count;
};
template <class Data>
DEVICE bool has(Row<Data> row, int at) {
    return (unsigned)(at - row.first) < (unsigned)row.count;
}
template <class Data>
DEVICE float value(Row<Data> row, int at) {
    return has(row, at) ? widened(row.values[at]) : 0.f;
}

// Sequences of T values as rows of a channel: a row each, or windows of it, one after another.
struct RowLayout {
    int T, valid, windows;
};
DEVICE RowLayout row_layout(int T, int valid) {
    return WINDOWS ? RowLayout{T, valid, (T + valid - 1) / valid} : RowLayout{T, T, 1};
}

// The r-th row of channel c, from `before` places ahead of its valid values on. There are those values alone, or
// WITH all of the sequence around them.
template <bool WITH, class Data>
DEVICE Row<Data> row(Data *x, int x_b, int x_c, RowLayout layout, int r, long long c, int before) {
    int b = r / layout.windows, start = (r - b * layout.windows) * layout.valid;
    x += ((long long)b * x_b + c * x_c) * 8 + start - before;
    return {x, WITH ? before - start : before, WITH ? layout.T : min(layout.T - start, layout.valid)};
}

// Two rows, and whether there is a second; it is the first again where there is none.
template <class Data>
struct Pair {
    Row<Data> first, second;
    bool both;
};
template <bool WITH, class Data>
DEVICE Pair<Data> rows(Data *x, int x_b, int x_c, RowLayout layout, int r, bool both, long long c, int before) {
    return {row<WITH>(x, x_b, x_c, layout, r, c, before), row<WITH>(x, x_b, x_c, layout, r + both, c, before), both};
}
typedef Pair<const data_t> Source;
typedef Pair<data_t> Result;

// The first segment of two rows, in the first pass's order.
DEVICE void fetch(Values &z, int t, Source rows) {
    UNROLL for (int k = 0; k < ROW_VALUES; k++) z.re[k] = value(rows.first, t + k * THREADS);
    UNROLL for (int k = 0; k < ROW_VALUES; k++) z.im[k] = value(rows.second, t + k * THREADS);
}

// The power of 2 just below a row's largest value, if it has an inverse; 1 for zeros, NaN where it isn't finite.
DEVICE float power_below(unsigned largest) {
    if (largest >= 0x7f800000u) return __uint_as_float(0x7fffffffu);
    return largest & 0x7f800000u ? __uint_as_float(min(largest, 0x7e800000u) & 0x7f800000u) : 1.f;
}

// The two rows' powers of 2. Other barriers must lie between two calls.
DEVICE float2 scales(const Values &z, int t, Source rows, unsigned *largest) {
    float first = 0.f, second = 0.f;
    for (int n = 0; n < ROW_SEGMENTS; n++)
        UNROLL for (int k = 0; k < ROW_VALUES; k++) {
            int at = n * N + t + k * THREADS;
            first = larger(first, fabsf(SEGMENTS == 1 ? z.re[k] : value(rows.first, at)));
            second = larger(second, fabsf(SEGMENTS == 1 ? z.im[k] : value(rows.second, at)));
        }
    unsigned all = 0xffffffffu, one = __reduce_max_sync(all, __float_as_uint(first)),
             other = __reduce_max_sync(all, __float_as_uint(second));
    if (t % 32 == 0) {
        largest[t / 32] = one;
        largest[WARPS + t / 32] = other;
    }
    __syncthreads();
    one = __reduce_max_sync(all, largest[t % WARPS]);
    other = __reduce_max_sync(all, largest[WARPS + t % WARPS]);
    return make_float2(power_below(one), power_below(other));
}

// 1 / scale, a power of 2 as well; 0 keeps a row that isn't finite out.
DEVICE float inverse(float scale) {
    return scale == scale ? __uint_as_float(0x7f000000u - __float_as_uint(scale)) : 0.f;
}

// What `forward` transforms, of two rows whose first segment has been fetched, each times its factor; 0 keeps a
// row out, whatever it holds.
DEVICE void fetch_scaled(Values &z, int t, Source rows, float2 by, const float2 *tables) {
    if (SEGMENTS > 1) {
        UNROLL for (int k = 0; k < E; k++) z.re[k] = z.im[k] = 0.f;
        if (by.x == 0.f) rows.first.count = 0;
        if (by.y == 0.f) rows.second.count = 0;
        for (int n = 0; n < ROW_SEGMENTS; n++) {
            float2 w = tables[n];
            UNROLL for (int k = 0; k < E; k++) {
                int at = n * N + t + k * THREADS;
                float r = by.x * value(rows.first, at), i = by.y * value(rows.second, at);
                z.re[k] += r * w.x - i * w.y;
                z.im[k] += r * w.y + i * w.x;
            }
        }
        return;
    }
    UNROLL for (int k = 0; k < ROW_VALUES; k++) {
        z.re[k] *= by.x;
        z.im[k] *= by.y;
    }
    if (by.x == 0.f) UNROLL for (int k = 0; k < ROW_VALUES; k++) z.re[k] = 0.f;
    if (by.y == 0.f) UNROLL for (int k = 0; k < ROW_VALUES; k++) z.im[k] = 0.f;
}

#if CIRCULAR
// What the frequency of a value that `forward` leaves is multiplied by: filter[l, c] are a channel's complex weights
// of the first L frequencies, the others' are 1. Frequencies 0 and TOTAL / 2 are real.
DEVICE float2 weight(int t, int e, int part, const float *filter, long long c, int L, int C) {
    const int k3 = reversed<R3>(e % R3), step = R1 * R2 * SEGMENTS;
    const bool beyond = k3 >= R3 / 2;
    int high = t + e / R3 * THREADS, low = (high / R2 + R1 * (high % R2)) * SEGMENTS + part;
    int l = beyond ? (R3 - k3) * step - low : k3 * step + low;
    float2 w = l < L ? ((const float2 *)filter)[l * (long long)C + c] : make_float2(1.f, 0.f);
    return make_float2(w.x, k3 % (R3 / 2) == 0 && low == 0 ? 0.f : beyond ? -w.y : w.y);
}
#endif

// The spectrum of a channel's filter, as `forward` leaves it: of taps filter[c, l], on a circle of weights
// filter[l, c].
DEVICE void spectrum(Values &z, int t, int part, const float *filter, long long c, int L, int C, word_t *workspace,
                     const float2 *tables) {
#if CIRCULAR
    UNROLL for (int e = 0; e < E; e++) {
        if (e % 8 == 0) refresh(t);  // few loads at a time
        float2 w = weight(t, e, part, filter, c, L, C);
        z.re[e] = w.x;
        z.im[e] = w.y;
    }
#else
    Row<const float> taps = {filter + c * L, 0, L};
    UNROLL for (int k = 0; k < E; k++) z.re[k] = z.im[k] = 0.f;
    for (int n = 0; n < FILTER_SEGMENTS; n++) {
        float2 w = tables[n];
        UNROLL for (int k = 0; k < FILTER_VALUES; k++) {
            float x = value(taps, n * N + t + k * THREADS);
            z.re[k] = SEGMENTS > 1 ? z.re[k] + x * w.x : x;
            z.im[k] = SEGMENTS > 1 ? z.im[k] + x * w.y : 0.f;
        }
    }
    forward<FILTER_VALUES == E>(z, t, workspace, tables);
#endif
}

// Stores a filter's spectrum divided by N SEGMENTS, or with sign = -1 its conjugate, thread by thread.
DEVICE void store_spectrum(float2 *stored, int t, const Values &z, int sign) {
    UNROLL for (int e = 0; e < E; e++)
        stored[e * THREADS + t] = make_float2(z.re[e] * (1.f / TOTAL), z.im[e] * (sign * (1.f / TOTAL)));
}

// Stores one of the SEGMENTS parts of two rows in `parts`, added to what is there if there is `more`.
DEVICE void store_part(const Values &z, int t, int part, float2 *parts, bool more) {
    UNROLL for (int k = 0; k < E; k++) {
        float2 &place = parts[part * N + t + k * THREADS], before = more ? place : make_float2(0.f, 0.f);
        place = make_float2(before.x + z.re[reversed<R1>(k)], before.y + z.im[reversed<R1>(k)]);
    }
}

// True in the block that is the last of COMPUTED to come here, which finds there what all of them have left; `count`
// is 0 before the first. Blocks don't wait for each other.
DEVICE bool is_last_block(int t, unsigned *count) {
    __threadfence();
    __syncthreads();
    bool is_last = __syncthreads_or(t == 0 && atomicAdd(count, 1u) == COMPUTED - 1);
    __threadfence();
    return is_last;
}

// The values of two rows at some places of every segment, from their parts: the one of segment n at reversed(n).
// Several places at a time, whose loads wait together.
#define PLACES (SEGMENTS < 8 ? 8 / SEGMENTS : 1)
struct Places {
    float re[PLACES][SEGMENTS], im[PLACES][SEGMENTS];
};
DEVICE void combine(Places &z, int m, const float2 *parts, const float2 *twiddles) {
    UNROLL for (int i = 0; i < PLACES; i++) UNROLL for (int k = 0; k < SEGMENTS; k++) {
        float2 part = k < COMPUTED ? __ldcg(parts + k * N + m + i * THREADS) : make_float2(0.f, 0.f);
        float times = SINGLE && k > 0 && k < SEGMENTS / 2 ? 2.f : 1.f;
        z.re[i][k] = times * part.x;
        z.im[i][k] = times * part.y;
    }
    UNROLL for (int i = 0; i < PLACES; i++) {
        float2 powers[5];
        look_up<SEGMENTS>(powers, twiddles + INVERSE_SEGMENTS, N, m + i * THREADS);
        transform<SEGMENTS, true>(z.im[i], z.re[i], powers);
    }
}

// Writes two rows, times their scales, with `skip` times what they were made of.
DEVICE void store(Values &z, int t, Source from, float skip, float2 scale, Result to) {
    UNROLL for (int k = 0; k < ROW_VALUES; k++) {
        z.re[reversed<R1>(k)] *= scale.x;
        z.im[reversed<R1>(k)] *= scale.y;
    }
    if (skip != 0.f) UNROLL for (int k = 0; k < ROW_VALUES; k++) {
        z.re[reversed<R1>(k)] += skip * value(from.first, t + k * THREADS);
        z.im[reversed<R1>(k)] += skip * value(from.second, t + k * THREADS);
    }
    UNROLL for (int k = 0; k < ROW_VALUES; k++) {
        int at = t + k * THREADS;
        if (has(to.first, at)) to.first.values[at] = narrowed(z.re[reversed<R1>(k)]);
    }
    if (to.both) UNROLL for (int k = 0; k < ROW_VALUES; k++) {
        int at = t + k * THREADS;
        if (has(to.second, at)) to.second.values[at] = narrowed(z.im[reversed<R1>(k)]);
    }
}

// The same for rows in SEGMENTS parts.
DEVICE void store_parts(const float2 *parts, int t, Source from, float skip, float2 scale, Result to,
                        const float2 *twiddles) {
    for (int m = t; m < N; m += PLACES * THREADS) {
        Places z;
        combine(z, m, parts, twiddles);
        UNROLL for (int i = 0; i < PLACES; i++) UNROLL for (int n = 0; n < ROW_SEGMENTS; n++) {
            int at = n * N + m + i * THREADS, k = reversed<SEGMENTS>(n);
            if (has(to.first, at)) {
                float first = skip != 0.f ? skip * widened(from.first.values[at]) : 0.f;
                to.first.values[at] = narrowed(z.re[i][k] * scale.x + first);
            }
            if (to.both && has(to.second, at)) {
                float second = skip != 0.f ? skip * widened(from.second.values[at]) : 0.f;
                to.second.values[at] = narrowed(z.im[i][k] * scale.y + second);
            }
        }
    }
}

// What becomes of two rows' inverse transform, the `pair`-th of all.
DEVICE void write_rows(Values &z, int t, int part, Source from, float skip, float2 scale, Result to, float2 *parts,
                   unsigned *counts, long long pair, const float2 *twiddles) {
    if (SEGMENTS == 1) {
        store(z, t, from, skip, scale, to);
        return;
    }
    store_part(z, t, part, parts + pair * PART_VALUES, false);
    if (is_last_block(t, counts + pair)) store_parts(parts + pair * PART_VALUES, t, from, skip, scale, to, twiddles);
}

#if !BACKWARD
// y = filter * x + skip x, with sign = -1 correlated with the filter. A block has one part of every `splits`-th pair
// of a channel's rows; steps from sequence to sequence are in units of 8 values. Where SEGMENTS > 1, `parts` holds all
// parts of every pair and channel, and `counts` zeros.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
convolve(const data_t *x, const float *filter, const float *skips, data_t *y, float2 *parts, unsigned *counts,
         const float2 *__restrict__ twiddles, int sign, int B, int T, int L, int C, int valid, int splits, int x_b,
         int x_c, int y_b, int y_c) {
    SHARED(shared);
    word_t *workspace = (word_t *)shared;
    float2 *stored = (float2 *)(workspace + WORKSPACE);
    unsigned *largest = (unsigned *)(stored + N);
    int t = threadIdx.x, part = blockIdx.x % COMPUTED, before = WINDOWS && sign > 0 ? TOTAL - valid : 0;
    long long c = blockIdx.x / COMPUTED / splits;
    float skip = skips ? skips[c] : 0.f;
    const float2 *tables = twiddles + PART_TABLES + part * PART;
    RowLayout layout = row_layout(T, valid);
    int count = B * layout.windows;
    Values z;
    spectrum(z, t, part, filter, c, L, C, workspace, tables);
    store_spectrum(stored, t, z, sign);
    for (int r = blockIdx.x / COMPUTED % splits * 2; r < count; r += 2 * splits) {
        refresh(t);
        bool both = r + 1 < count;
        Source from = rows<true>(x, x_b, x_c, layout, r, both, c, before);
        if (SEGMENTS == 1) fetch(z, t, from);
        float2 scale = scales(z, t, from, largest);
        fetch_scaled(z, t, from, make_float2(inverse(scale.x), both ? inverse(scale.y) : 0.f), tables);
        forward<!(HALF && SEGMENTS == 1)>(z, t, workspace, tables);
        UNROLL for (int e = 0; e < E; e++) multiply(z.re[e], z.im[e], stored[e * THREADS + t]);
        backward(z, t, workspace, twiddles);
        Result to = rows<false>(y, y_b, y_c, layout, r, both, c, before);
        write_rows(z, t, part, from, skip, scale, to, parts, counts, r / 2 * (long long)C + c, twiddles);
    }
}

#else
// Adds the inverse transform of what a block has of the filter's gradient to dh, or to its parts; on a circle what it
// has, in its own order, to `dh`. If there is no `more` yet it is the first.
DEVICE void add(Values &z, int t, int part, float *dh, int L, word_t *workspace, float2 *parts, const float2 *twiddles,
                bool more) {
#if CIRCULAR
    UNROLL for (int e = 0; e < E; e++) {
        float2 &place = ((float2 *)dh)[part * N + e * THREADS + t];
        float2 before = more ? __ldcg(&place) : make_float2(0.f, 0.f);
        place = make_float2(before.x + z.re[e], before.y + z.im[e]);
    }
#else
    backward(z, t, workspace, twiddles);
    if (SEGMENTS > 1) {
        store_part(z, t, part, parts, more);
        return;
    }
    UNROLL for (int k = 0; k < FILTER_VALUES; k++) {
        int at = t + k * THREADS;
        if (at < L) dh[at] = z.re[reversed<R1>(k)] * (1.f / TOTAL) + (more ? __ldcg(dh + at) : 0.f);
    }
#endif
}

// The gradients of the filter, as sums[split, c, l], and, if dx is given, of x: dx = dy correlated with the filter,
// + skip dy. On a circle it is sums[split, c, part, e, t] of two rows' spectra x* dy, in which parts that change sign
// with the frequency's are to be left out. Rows of dy are divided by their scales and those of x multiplied by them, so that
// of each product's two factors neither is loud alone. A block has one part of every `splits`-th pair of a channel's
// rows; unless it STORES both, each pair transforms the filter once more, and the gradient's spectrum back. Where
// SEGMENTS > 1, `parts` holds all parts of every pair and channel, then of every split and channel, and `counts` zeros.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
differentiate(const data_t *x, const data_t *dy, const float *filter, const float *skips, data_t *dx, float *sums,
              float2 *parts, unsigned *counts, const float2 *__restrict__ twiddles, int B, int T, int L, int C,
              int valid, int splits, int x_b, int x_c, int dy_b, int dy_c, int dx_b, int dx_c) {
    SHARED(shared);
    word_t *workspace = (word_t *)shared;
    float2 *output = (float2 *)(workspace + WORKSPACE), *stored = output + N;
    unsigned *largest = (unsigned *)(output + (STORES ? 2 : 1) * N);
    int t = threadIdx.x, part = blockIdx.x % COMPUTED, split = blockIdx.x / COMPUTED % splits;
    long long c = blockIdx.x / COMPUTED / splits, sum_row = split * (long long)C + c;
    const float2 *tables = twiddles + PART_TABLES + part * PART;
    float *dh = sums + sum_row * (CIRCULAR ? 2 * PART_VALUES : L);
    RowLayout layout = row_layout(T, valid);
    int count = B * layout.windows;
    sum_row += (count + 1) / 2 * (long long)C;
    Values sum, z;
    if (STORES && dx) {
        spectrum(z, t, part, filter, c, L, C, workspace, tables);
        store_spectrum(stored, t, z, -1);
    }
    if (STORES) UNROLL for (int e = 0; e < E; e++) sum.re[e] = sum.im[e] = 0.f;
    for (int r = split * 2; r < count; r += 2 * splits) {
        if (!STORES) refresh(t);
        bool both = r + 1 < count;
        Source from = rows<true>(dy, dy_b, dy_c, layout, r, both, c, 0);
        float2 scale;
        _Pragma("unroll 1") for (int turn = 0; turn < 2; turn++) {  // dy's, then x's, by the same instructions
            Source of = turn ? rows<false>(x, x_b, x_c, layout, r, both, c, 0) : from;
            if (SEGMENTS == 1) fetch(z, t, of);
            if (!turn) scale = scales(z, t, of, largest);
            float2 by = turn ? scale : make_float2(inverse(scale.x), inverse(scale.y));
            if (!both) by.y = 0.f;
            fetch_scaled(z, t, of, by, tables);
            forward<!(HALF && SEGMENTS == 1)>(z, t, workspace, tables);
            if (!turn) UNROLL for (int e = 0; e < E; e++)
                output[e * THREADS + t] = make_float2(z.re[e], z.im[e]);
        }
        UNROLL for (int e = 0; e < E; e++) {
            float2 w = output[e * THREADS + t];
            multiply(w.x, w.y, make_float2(z.re[e], -z.im[e]));
            z.re[e] = w.x;
            z.im[e] = w.y;
            if (STORES) {
                sum.re[e] += w.x;
                sum.im[e] += w.y;
            }
        }
        if (!STORES) {
            add(z, t, part, dh, L, workspace, parts + sum_row * PART_VALUES, twiddles, r > split * 2);
            refresh(t);
        }
        if (!dx) continue;
        if (!STORES && !CIRCULAR) spectrum(z, t, part, filter, c, L, C, workspace, tables);
        UNROLL for (int e = 0; e < E; e++) {
            float2 w = output[e * THREADS + t], by = make_float2(z.re[e], z.im[e]);
#if CIRCULAR
            if (!STORES && e % 8 == 0) refresh(t);  // few loads at a time
            if (!STORES) by = weight(t, e, part, filter, c, L, C);
#endif
            by = STORES ? stored[e * THREADS + t] : make_float2(by.x * (1.f / TOTAL), by.y * (-1.f / TOTAL));
            multiply(w.x, w.y, by);
            z.re[e] = w.x;
            z.im[e] = w.y;
        }
        if (!STORES) refresh(t);
        backward(z, t, workspace, twiddles);
        Result to = rows<false>(dx, dx_b, dx_c, layout, r, both, c, 0);
        write_rows(z, t, part, from, skips ? skips[c] : 0.f, scale, to, parts, counts, r / 2 * (long long)C + c,
                   twiddles);
    }
    if (STORES) add(sum, t, part, dh, L, workspace, parts + sum_row * PART_VALUES, twiddles, false);
    if (CIRCULAR || SEGMENTS == 1 || !is_last_block(t, counts + sum_row)) return;
    for (int m = t; m < N; m += PLACES * THREADS) {
        Places z;
        combine(z, m, parts + sum_row * PART_VALUES, twiddles);
        UNROLL for (int i = 0; i < PLACES; i++) UNROLL for (int n = 0; n < FILTER_SEGMENTS; n++) {
            int at = n * N + m + i * THREADS;
            if (at < L) dh[at] = z.re[i][reversed<SEGMENTS>(n)] * (1.f / TOTAL);
        }
    }
}
#endif

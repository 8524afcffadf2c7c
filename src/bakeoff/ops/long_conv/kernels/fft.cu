// Long convolution by FFTs in float32 that never leave the chip.
//
// A block transforms two rows a, b of a channel at once, as z = a + i b: the filter is real, so the real and
// imaginary parts of the result are the two rows' convolutions. Each row is divided by a power of 2 first, so
// that a loud one's roundings don't drown the other; one that isn't finite is kept out and comes back as NaN.
// N >= T + L - 1, or the end would wrap around to the start. Each of THREADS threads holds E = N / THREADS values in registers; three passes of radix R1,
// R2, R3 (decimation in frequency) leave the spectrum in the order of its digits, where it is multiplied by
// the filter's, which this file leaves in the same order; the way back mirrors the passes. Between passes
// values change threads through shared memory, first the real, then the imaginary parts.
//
// Rows too long for that are cut into OUTER parts: time n N + m, n < OUTER. A block then transforms one of the
// OUTER interleaved sequences that make up the row's spectrum, and `combine` puts the row together again.
//
// Compiled with -D for: N, E, R1, R2, R3, OUTER (powers of 2, R1 R2 R3 = N, R1 = E the largest), BLOCKS (wanted
// on a multiprocessor at a time, by `convolve` and by `correlate`), and DATA, one of 0 (float32), 1 (bfloat16),
// 2 (float16). `circle` holds exp(-2 pi i k / (N OUTER)) for every k.

#define THREADS (N / E)
#define TOTAL (N * OUTER)
#define DEVICE static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#ifndef SHARED
#define SHARED(name) extern __shared__ float name[]
#endif

DEVICE float widened(float x) { return x; }
#if DATA == 0
typedef float data_t;
DEVICE data_t narrowed(float x) { return x; }
#elif DATA == 1
typedef unsigned short data_t;
DEVICE float widened(data_t x) { return __uint_as_float((unsigned)x << 16); }
DEVICE data_t narrowed(float x) {  // to the nearest, ties to even; a NaN stays one
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (data_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
#else
typedef unsigned short data_t;
#ifndef HALVES  // with no header at hand
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

struct Values {
    float re[E], im[E];
};

// cos and -sin of 2 pi k / 32 for 0 <= k < 16: all that transforms inside a thread need.
DEVICE float cosine(int k) {
    if (k > 8) return -cosine(16 - k);
    return k == 0   ? 1.f
           : k == 1 ? 0.98078528040323044913f
           : k == 2 ? 0.92387953251128675613f
           : k == 3 ? 0.83146961230254523708f
           : k == 4 ? 0.70710678118654752440f
           : k == 5 ? 0.55557023301960222474f
           : k == 6 ? 0.38268343236508977173f
           : k == 7 ? 0.19509032201612826785f
                    : 0.f;
}
DEVICE float minus_sine(int k) { return -cosine(k < 8 ? 8 - k : k - 8); }

// (re, im) *= exp(-2 pi i k / 32), k a constant after unrolling.
DEVICE void turn(float &re, float &im, int k) {
    if (k == 0) return;
    float r = re, i = im;
    if (k == 8) {
        re = i;
        im = -r;
    } else if (k == 4) {
        re = 0.70710678118654752440f * (r + i);
        im = 0.70710678118654752440f * (i - r);
    } else if (k == 12) {
        re = 0.70710678118654752440f * (i - r);
        im = -0.70710678118654752440f * (i + r);
    } else {
        float c = cosine(k), s = minus_sine(k);
        re = r * c - i * s;
        im = r * s + i * c;
    }
}

// The bits of k < R in the opposite order.
template <int R>
DEVICE int reversed(int k) {
    return ((k & 1) << 4 | (k & 2) << 2 | (k & 4) | (k & 8) >> 2 | (k & 16) >> 4) / (32 / R);
}

// The DFT of R values, from steps of HALF down to 1; the k-th of the result lies at reversed(k).
template <int R, int HALF = R / 2>
DEVICE void transform(float *re, float *im) {
    UNROLL for (int n = 0; n < R / 2; n++) {
        int k = n % HALF, a = n / HALF * 2 * HALF + k, b = a + HALF;
        float r = re[a] - re[b], i = im[a] - im[b];
        re[a] += re[b];
        im[a] += im[b];
        turn(r, i, k * (16 / HALF));
        re[b] = r;
        im[b] = i;
    }
    if constexpr (HALF > 1) transform<R, HALF / 2>(re, im);
}

// The DFT of R values of which the k-th lies at reversed(k), from steps of HALF up; the result is in order.
template <int R, int HALF = 1>
DEVICE void transform_reversed(float *re, float *im) {
    UNROLL for (int n = 0; n < R / 2; n++) {
        int k = n % HALF, a = n / HALF * 2 * HALF + k, b = a + HALF;
        float r = re[b], i = im[b];
        turn(r, i, k * (16 / HALF));
        re[b] = re[a] - r;
        im[b] = im[a] - i;
        re[a] += r;
        im[a] += i;
    }
    if constexpr (2 * HALF < R) transform_reversed<R, 2 * HALF>(re, im);
}

// A pass of radix R inside blocks of S positions: thread t holds E / R sets of R values, each S / R apart. The
// k-th of a set lies at start(t) + apart(set, k), the second a constant after unrolling.
template <int R, int S>
DEVICE int start(int t) {
    return t / (S / R) * S + t % (S / R);
}
template <int R, int S>
DEVICE int apart(int set, int k) {
    return set * THREADS * R + k * (S / R);
}

// One word in 33 is left out, which spreads strides over the banks. start(t) + apart(..) has no carry into the
// bits above 32, so that the parts may be padded one by one.
DEVICE int padded(int position) { return position + position / 32; }

// Multiplies the k-th value of each set, which lies at reversed(k), by exp(-+ 2 pi i j k / S), j its offset.
// Powers are products of few factors from the table, so that roundings don't add up.
template <int R, int S, bool BACK>
DEVICE void twiddle(Values &v, int t, const float2 *circle) {
    if (S == R) return;
    int j = t % (S / R) * (TOTAL / S);  // the same for every set, as S / R divides THREADS
    float low_r[8], low_i[8];
    UNROLL for (int k = 1; k < 8; k++) {
        if (k == 1 || k == 2 || k == 4) {
            float2 w = circle[j * k];
            low_r[k] = w.x;
            low_i[k] = BACK ? -w.y : w.y;
        } else {
            int a = k > 4 ? 4 : 2, b = k - a;
            low_r[k] = low_r[a] * low_r[b] - low_i[a] * low_i[b];
            low_i[k] = low_r[a] * low_i[b] + low_i[a] * low_r[b];
        }
    }
    UNROLL for (int high = 0; high < R; high += 8) {
        float2 base = high ? circle[j * high] : make_float2(1.f, 0.f);
        if (BACK) base.y = -base.y;
        UNROLL for (int low = high ? 0 : 1; low < 8; low++) {
            float c = base.x, s = base.y;
            if (low) {
                c = high ? low_r[low] * base.x - low_i[low] * base.y : low_r[low];
                s = high ? low_r[low] * base.y + low_i[low] * base.x : low_i[low];
            }
            UNROLL for (int set = 0; set < E / R; set++) {
                int at = set * R + reversed<R>(high + low);
                float r = v.re[at], i = v.im[at];
                v.re[at] = r * c - i * s;
                v.im[at] = r * s + i * c;
            }
        }
    }
}

template <int R, int S, bool REVERSED>
DEVICE void put(const float *values, int t, float *room) {
    room += padded(start<R, S>(t));
    UNROLL for (int set = 0; set < E / R; set++)
        UNROLL for (int k = 0; k < R; k++)
            room[padded(apart<R, S>(set, k))] = values[set * R + (REVERSED ? reversed<R>(k) : k)];
}

template <int R, int S, bool REVERSED>
DEVICE void take(float *values, int t, const float *room) {
    room += padded(start<R, S>(t));
    UNROLL for (int set = 0; set < E / R; set++)
        UNROLL for (int k = 0; k < R; k++)
            values[set * R + (REVERSED ? reversed<R>(k) : k)] = room[padded(apart<R, S>(set, k))];
}

// From the threads of one pass to those of another. FROM_REVERSED: where the values' k-th lies now.
template <int FROM, int FROM_S, bool FROM_REVERSED, int TO, int TO_S, bool TO_REVERSED>
DEVICE void exchange(Values &v, int t, float *room) {
    __syncthreads();
    put<FROM, FROM_S, FROM_REVERSED>(v.re, t, room);
    __syncthreads();
    take<TO, TO_S, TO_REVERSED>(v.re, t, room);
    __syncthreads();
    put<FROM, FROM_S, FROM_REVERSED>(v.im, t, room);
    __syncthreads();
    take<TO, TO_S, TO_REVERSED>(v.im, t, room);
}

template <int R>
DEVICE void sets(Values &v) {
    UNROLL for (int set = 0; set < E / R; set++) transform<R>(v.re + set * R, v.im + set * R);
}

// The conjugate transform: real and imaginary parts swapped, before and after.
template <int R>
DEVICE void sets_back(Values &v) {
    UNROLL for (int set = 0; set < E / R; set++) transform_reversed<R>(v.im + set * R, v.re + set * R);
}

#define S1 N
#define S2 (N / R1)
#define S3 R3

// The DFT of N values, in order over the first pass's threads; its result stays in the third pass's.
DEVICE void forward(Values &v, int t, float *room, const float2 *circle) {
    sets<R1>(v);
    twiddle<R1, S1, false>(v, t, circle);
    exchange<R1, S1, true, R2, S2, false>(v, t, room);
    sets<R2>(v);
    twiddle<R2, S2, false>(v, t, circle);
    exchange<R2, S2, true, R3, S3, false>(v, t, room);
    sets<R3>(v);
}

// The inverse of `forward`, times N.
DEVICE void backward(Values &v, int t, float *room, const float2 *circle) {
    sets_back<R3>(v);
    exchange<R3, S3, false, R2, S2, true>(v, t, room);
    twiddle<R2, S2, true>(v, t, circle);
    sets_back<R2>(v);
    exchange<R2, S2, false, R1, S1, true>(v, t, room);
    twiddle<R1, S1, true>(v, t, circle);
    sets_back<R1>(v);
}

// Multiplies each value by exp(-2 pi i m part / TOTAL), m its place, or with sign = -1 by the conjugate.
DEVICE void rotate(Values &v, int t, int part, const float2 *circle, float sign) {
    UNROLL for (int set = 0; set < E / R1; set++)
        UNROLL for (int k = 0; k < R1; k++) {
            float2 w = circle[(t + apart<R1, S1>(set, k)) * part];
            float r = v.re[set * R1 + k], i = v.im[set * R1 + k], s = sign * w.y;
            v.re[set * R1 + k] = r * w.x - i * s;
            v.im[set * R1 + k] = r * s + i * w.x;
        }
}

// The power of 2 just below the largest of a row of T values; 1 for zeros, NaN where one isn't finite. Rows are
// read 16 bytes at a time: they are 0 from T to the next multiple of that. `most` is 0 before and after.
DEVICE float scale(const data_t *row, int T, int t, unsigned *most) {
    const int wide = 16 / sizeof(data_t);
    const unsigned mask = sizeof(data_t) == 4 ? 0x7fffffffu : 0x7fffu;  // without the sign, bits are in order
    unsigned found = 0;
    for (int i = t; i * wide < T; i += THREADS) {
        uint4 q = ((const uint4 *)row)[i];
        unsigned words[4] = {q.x, q.y, q.z, q.w};
        UNROLL for (int w = 0; w < 4; w++) {
            found = max(found, words[w] & mask);
            if (sizeof(data_t) == 2) found = max(found, words[w] >> 16 & mask);
        }
    }
    found = __reduce_max_sync(0xffffffffu, found);
    if (t % 32 == 0) atomicMax(most, found);
    __syncthreads();
    found = *most;
    __syncthreads();
    if (t == 0) *most = 0;
#if DATA == 0
    unsigned bits = found;
#else
    unsigned bits = __float_as_uint(widened((data_t)found));
#endif
    if (bits >= 0x7f800000u) return __uint_as_float(0x7fffffffu);
    bits &= 0x7f800000u;
    return bits ? __uint_as_float(bits) : 1.f;
}

// A factor that a row is multiplied by on loading: 0 keeps it out, whatever it holds.
DEVICE float factor(float scale) { return scale == scale ? scale : 0.f; }

// One of the OUTER sequences of two rows, each times its factor, as one complex row; `part` is its number. Rows
// are 0 from T on.
template <class Data>
DEVICE void load(Values &v, int t, const Data *first, const Data *second, float by_first, float by_second, int T,
                 int part, const float2 *circle) {
    UNROLL for (int n = 0; n < OUTER; n++) {
        if (n > 0 && n * N >= T) break;
        float2 w = circle[n * part % OUTER * N];
        UNROLL for (int set = 0; set < E / R1; set++)
            UNROLL for (int k = 0; k < R1; k++) {
                int e = set * R1 + k, at = n * N + t + apart<R1, S1>(set, k);
                float r = at < T && by_first != 0.f ? by_first * widened(first[at]) : 0.f;
                float i = at < T && by_second != 0.f ? by_second * widened(second[at]) : 0.f;
                if (n == 0) {
                    v.re[e] = r;
                    v.im[e] = i;
                } else {
                    v.re[e] += r * w.x - i * w.y;
                    v.im[e] += r * w.y + i * w.x;
                }
            }
    }
    if (OUTER > 1) rotate(v, t, part, circle, 1.f);
}

// The DFT of a filter over N OUTER, divided by it, thread by thread.
extern "C" __global__ void __launch_bounds__(THREADS)
spectrum(const float *h, float2 *spectra, const float2 *circle, int L) {
    SHARED(room);
    int t = threadIdx.x, part = blockIdx.x % OUTER;
    Values v;
    load(v, t, h + (long long)(blockIdx.x / OUTER) * L, (const float *)0, 1.f, 0.f, L, part, circle);
    forward(v, t, room, circle);
    spectra += (long long)blockIdx.x * N;
    UNROLL for (int e = 0; e < E; e++)
        spectra[e * THREADS + t] = make_float2(v.re[e] * (1.f / TOTAL), v.im[e] * (1.f / TOTAL));
}

// v times the spectrum, or with sign = -1 times its conjugate.
DEVICE void filter(Values &v, int t, const float2 *spectrum, int sign) {
    UNROLL for (int e = 0; e < E; e++) {
        float2 w = spectrum[e * THREADS + t];
        float r = v.re[e], i = v.im[e], s = sign * w.y;
        v.re[e] = r * w.x - i * s;
        v.im[e] = r * s + i * w.x;
    }
}

// y = h * v + skip v, with sign = -1 correlated with h. A block has one part of every SHARES-th pair of a
// channel's rows; steps from row to row are in units of 8 values. Where OUTER > 1, the parts and scales[b, c] go
// to `combine`.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
convolve(const data_t *v, const float2 *spectra, const float *skips, data_t *y, float2 *parts, float *scales,
         const float2 *circle, int sign, int B, int T, int C, int shares, int v_b, int v_c, int y_b, int y_c) {
    SHARED(room);
    unsigned *most = (unsigned *)(room + N + N / 32);
    int t = threadIdx.x, part = blockIdx.x % OUTER;
    long long c = blockIdx.x / OUTER / shares;
    float skip = skips ? skips[c] : 0.f;
    spectra += (c * OUTER + part) * N;
    if (t == 0) *most = 0;
    __syncthreads();
    for (int b = blockIdx.x / OUTER % shares * 2; b < B; b += 2 * shares) {
        bool pair = b + 1 < B;
        const data_t *first = v + ((long long)b * v_b + c * v_c) * 8, *second = first + (long long)v_b * 8;
        float scale_first = scale(first, T, t, most), scale_second = 1.f;
        __syncthreads();
        if (pair) scale_second = scale(second, T, t, most);
        Values z;
        load(z, t, first, second, factor(1.f / scale_first), pair ? factor(1.f / scale_second) : 0.f, T, part,
             circle);
        forward(z, t, room, circle);
        filter(z, t, spectra, sign);
        backward(z, t, room, circle);
        if (OUTER > 1) {
            rotate(z, t, part, circle, -1.f);
            float2 *mine = parts + ((b / 2 * (long long)C + c) * OUTER + part) * N + t;
            UNROLL for (int e = 0; e < E; e++) mine[e * THREADS] = make_float2(z.re[e], z.im[e]);
            if (t == 0 && part == 0) {
                scales[b * (long long)C + c] = scale_first;
                if (pair) scales[(b + 1) * (long long)C + c] = scale_second;
            }
            continue;
        }
        data_t *out = y + ((long long)b * y_b + c * y_c) * 8, *other = out + (long long)y_b * 8;
        UNROLL for (int e = 0; e < E; e++) {
            int at = t + e * THREADS;
            if (at >= T) continue;
            out[at] = narrowed(z.re[e] * scale_first + (skip != 0.f ? skip * widened(first[at]) : 0.f));
            if (pair)
                other[at] = narrowed(z.im[e] * scale_second + (skip != 0.f ? skip * widened(second[at]) : 0.f));
        }
    }
}

// Two rows, with skip times what they were made of, from the OUTER parts that blocks left of each; one thread
// for every place of a part.
extern "C" __global__ void __launch_bounds__(256)
combine(const float2 *parts, const float *scales, const data_t *v, const float *skips, data_t *y,
        const float2 *circle, int B, int T, int C, int v_b, int v_c, int y_b, int y_c) {
    long long row = blockIdx.x / (N / 256);
    int m = blockIdx.x % (N / 256) * 256 + threadIdx.x, b = (int)(row / C) * 2;
    long long c = row % C;
    bool pair = b + 1 < B;
    float skip = skips ? skips[c] : 0.f;
    float scale_first = scales[b * (long long)C + c], scale_second = pair ? scales[(b + 1) * (long long)C + c] : 0.f;
    float2 value[OUTER];
    UNROLL for (int k = 0; k < OUTER; k++) value[k] = parts[(row * OUTER + k) * N + m];
    v += ((long long)b * v_b + c * v_c) * 8;
    y += ((long long)b * y_b + c * y_c) * 8;
    UNROLL for (int n = 0; n < OUTER; n++) {
        int at = n * N + m;
        if (at >= T) break;
        float r = 0.f, i = 0.f;
        UNROLL for (int k = 0; k < OUTER; k++) {
            float2 w = circle[n * k % OUTER * N];
            r += value[k].x * w.x + value[k].y * w.y;
            i += value[k].y * w.x - value[k].x * w.y;
        }
        y[at] = narrowed(r * scale_first + (skip != 0.f ? skip * widened(v[at]) : 0.f));
        if (!pair) continue;
        long long next = at + (long long)y_b * 8;
        y[next] = narrowed(i * scale_second + (skip != 0.f ? skip * widened(v[at + (long long)v_b * 8]) : 0.f));
    }
}

// The spectrum of h's gradient over a block's pairs, transformed back. Rows of v are divided by their scales and
// those of dy multiplied, so that of each product's two factors neither is loud alone. 2 N values of shared
// memory keep v's spectrum, each thread its own.
extern "C" __global__ void __launch_bounds__(THREADS, CORRELATE_BLOCKS)
correlate(const data_t *v, const data_t *dy, float2 *sums, const float2 *circle, int B, int T, int C, int shares,
          int v_b, int v_c, int dy_b, int dy_c) {
    SHARED(room);
    unsigned *most = (unsigned *)(room + N + N / 32);
    float *kept = room + N + N / 32 + 1;
    int t = threadIdx.x, part = blockIdx.x % OUTER;
    long long c = blockIdx.x / OUTER / shares;
    int share = blockIdx.x / OUTER % shares;
    Values sum;
    UNROLL for (int e = 0; e < E; e++) sum.re[e] = sum.im[e] = 0.f;
    if (t == 0) *most = 0;
    __syncthreads();
    for (int b = share * 2; b < B; b += 2 * shares) {
        bool pair = b + 1 < B;
        const data_t *first = v + ((long long)b * v_b + c * v_c) * 8, *second = first + (long long)v_b * 8;
        float scale_first = scale(first, T, t, most), scale_second = 1.f;
        __syncthreads();
        if (pair) scale_second = scale(second, T, t, most);
        Values z;
        load(z, t, first, second, 1.f / scale_first, pair ? 1.f / scale_second : 0.f, T, part, circle);
        forward(z, t, room, circle);
        UNROLL for (int e = 0; e < E; e++) {
            kept[e * THREADS + t] = z.re[e];
            kept[N + e * THREADS + t] = z.im[e];
        }
        first = dy + ((long long)b * dy_b + c * dy_c) * 8;
        load(z, t, first, first + (long long)dy_b * 8, scale_first, pair ? scale_second : 0.f, T, part, circle);
        forward(z, t, room, circle);
        UNROLL for (int e = 0; e < E; e++) {
            float r = kept[e * THREADS + t], i = kept[N + e * THREADS + t];
            sum.re[e] += r * z.re[e] + i * z.im[e];
            sum.im[e] += r * z.im[e] - i * z.re[e];
        }
    }
    backward(sum, t, room, circle);
    if (OUTER > 1) rotate(sum, t, part, circle, -1.f);
    sums += ((share * (long long)C + c) * OUTER + part) * N + t;
    UNROLL for (int e = 0; e < E; e++) sums[e * THREADS] = make_float2(sum.re[e], sum.im[e]);
}

// dh[c, k], 0 from T on, from the parts that blocks left, summed over SHARES; one thread for every place of a
// part. dskip is lag 0 once more.
extern "C" __global__ void __launch_bounds__(256)
finish(const float2 *sums, float *dh, float *dskip, const float2 *circle, int T, int L, int C, int shares) {
    long long c = blockIdx.x / (N / 256);
    int m = blockIdx.x % (N / 256) * 256 + threadIdx.x;
    UNROLL for (int n = 0; n < OUTER; n++) {
        int at = n * N + m;
        if (at >= L) break;
        float found = 0.f;
        for (int share = 0; share < shares && at < T; share++)
            UNROLL for (int k = 0; k < OUTER; k++) {
                float2 w = circle[n * k % OUTER * N];
                float2 part = sums[((share * (long long)C + c) * OUTER + k) * N + m];
                found += part.x * w.x + part.y * w.y;
            }
        dh[c * L + at] = found * (1.f / TOTAL);
        if (at == 0 && dskip) dskip[c] = found * (1.f / TOTAL);
    }
}

// Spectra of the last W bytes, their features and projection, in float32 arithmetic without tensor cores. It needs
// nothing that came after sm_60.
//
// A tile is ROWS positions of one row, which see SPAN bytes. Their values, the phases (cos and sin of omega m, made in
// float64 by PyTorch) and the spectra live in shared memory; features never reach the device's memory where they are
// projected. Backward, a block takes every gridDim-th tile and adds up its own row of `partial`, each number of which
// one thread has, so that every sum has one order.
//
// A position costs 4 W FLOPs a bin, and 2 a feature and channel; backward 16 W a bin, and 4 a feature and channel.
//
// Compiled with -D for: C, columns of the table; W; K, frequencies; D, channels, 0 without a projection; PARTS of a
// feature, 2 where it is complex; LOG; ROWS and THREADS of a block; DATA (see data.cuh), of `out`, `weight`, `dout`.

#include "../../../kernels/data.cuh"

#ifndef EMULATED
#define SHARED(name) extern __shared__ float name[]
#endif

constexpr int SPAN = ROWS + W - 1, BINS = C * K, F = BINS * PARTS;
constexpr float EPS = 1e-6f, ROOT = 1e-3f;  // of EPS

DEVICE float rounded(float x) { return widened(narrowed(x)); }

// What a block keeps in shared memory.
struct Memory {
    float *phases, *window, *values, *spectra, *features, *slopes, *shares;
    int *bytes;

    DEVICE Memory of(float *start) {
        Memory at;
        at.phases = start;  // [W, 2, K]: cosines and sines
        at.window = at.phases + 2 * W * K;
        at.values = at.window + W;               // [C, SPAN], the oldest first
        at.spectra = at.values + C * SPAN;       // [ROWS, BINS, 2]
        at.features = PARTS == 2 ? at.spectra : at.spectra + 2 * ROWS * BINS;  // [ROWS, F]
        at.bytes = (int *)(at.features + ROWS * F);
        at.slopes = (float *)(at.bytes + SPAN);  // [ROWS, F], of the features: backward
        at.shares = at.slopes + ROWS * F;        // [C, SPAN], of the values: backward
        return at;
    }
};

DEVICE void fetch_constants(Memory at, const float *window, const float *phases) {
    for (int i = threadIdx.x; i < 2 * W * K; i += THREADS) at.phases[i] = phases[i];
    for (int m = threadIdx.x; m < W; m += THREADS) at.window[m] = window[m];
}

// The bytes that the tile from position `first` on sees, -1 before the start and behind the end, and their values.
DEVICE void fetch_bytes(Memory at, const unsigned char *ids, const float *table, int first, int T) {
    for (int s = threadIdx.x; s < SPAN; s += THREADS) {
        int t = first - (W - 1) + s, byte = t >= 0 && t < T ? ids[t] : -1;
        at.bytes[s] = byte;
        for (int c = 0; c < C; c++) at.values[c * SPAN + s] = byte < 0 ? 0.f : table[byte * C + c];
    }
}

DEVICE float magnitude(float re, float im) {
    float power = re * re + im * im;
    return power / (sqrtf(power + EPS) + ROOT);
}

DEVICE void transform(Memory at) {
    for (int i = threadIdx.x; i < ROWS * BINS; i += THREADS) {
        int row = i / BINS, c = i % BINS / K, k = i % K;
        const float *value = at.values + c * SPAN + row + W - 1;
        float re = 0, im = 0;
        for (int m = 0; m < W; m++) {
            float v = value[-m] * at.window[m];
            re += v * at.phases[2 * m * K + k];
            im -= v * at.phases[2 * m * K + K + k];
        }
        at.spectra[2 * i] = re;
        at.spectra[2 * i + 1] = im;
        if (PARTS == 1) {
            float size = magnitude(re, im);
            at.features[i] = LOG ? log1pf(size) : size;
        }
    }
}

// Features of a tile, or their projection.
extern "C" __global__ void __launch_bounds__(THREADS)
spectrum(unsigned char *ids, float *table, float *window, float *phases, data_t *weight, float *bias, data_t *out,
         int T, int row, int tiles) {
    SHARED(memory);
    Memory at = Memory::of(memory);
    int b = blockIdx.x / tiles, first = blockIdx.x % tiles * ROWS, count = T - first < ROWS ? T - first : ROWS;
    fetch_constants(at, window, phases);
    fetch_bytes(at, ids + (long long)b * row, table, first, T);
    __syncthreads();
    transform(at);
    __syncthreads();
    long long position = (long long)b * T + first;
#if D
    for (int d = threadIdx.x; d < D; d += THREADS) {
        float sums[ROWS] = {};
        for (int f = 0; f < F; f++) {
            float w = widened(weight[(long long)f * D + d]);
            UNROLL for (int r = 0; r < ROWS; r++) sums[r] += rounded(at.features[r * F + f]) * w;
        }
        float added = bias ? bias[d] : 0.f;
        UNROLL for (int r = 0; r < ROWS; r++)
            if (r < count) out[(position + r) * D + d] = narrowed(sums[r] + added);
    }
#else
    for (int i = threadIdx.x; i < count * F; i += THREADS) out[position * F + i] = narrowed(at.features[i]);
#endif
}

// Gradients of the features; on the way, those of weight and bias.
DEVICE void to_features(Memory at, const data_t *weight, const data_t *dout, float *partial, int count) {
#if D
    for (int j = threadIdx.x; j < F * D; j += THREADS) {
        int f = j / D, d = j % D;
        float sum = 0;
        for (int r = 0; r < count; r++) sum += rounded(at.features[r * F + f]) * widened(dout[(long long)r * D + d]);
        partial[j] += sum;
    }
    for (int d = threadIdx.x; d < D; d += THREADS) {
        float sum = 0;
        for (int r = 0; r < count; r++) sum += widened(dout[(long long)r * D + d]);
        partial[F * D + d] += sum;
    }
    for (int j = threadIdx.x; j < ROWS * F; j += THREADS) {
        int r = j / F, f = j % F;
        float sum = 0;
        if (r < count)
            for (int d = 0; d < D; d++)
                sum += widened(dout[(long long)r * D + d]) * widened(weight[(long long)f * D + d]);
        at.slopes[j] = sum;
    }
#else
    for (int j = threadIdx.x; j < ROWS * F; j += THREADS) at.slopes[j] = j < count * F ? widened(dout[j]) : 0.f;
#endif
}

// Gradients of the spectra, in their place; in that of the features' each bin's share of omega's gradient:
// d exp(-i omega m) / d omega = -m (sin omega m + i cos omega m).
DEVICE void to_spectra(Memory at) {
    for (int i = threadIdx.x; i < ROWS * BINS; i += THREADS) {
        int row = i / BINS, c = i % BINS / K, k = i % K;
        float dre = at.slopes[i * PARTS], dim = PARTS == 2 ? at.slopes[i * PARTS + 1] : 0.f;
        if (PARTS == 1) {
            float re = at.spectra[2 * i], im = at.spectra[2 * i + 1], slope = dre;
            if (LOG) slope /= 1.f + magnitude(re, im);
            slope /= sqrtf(re * re + im * im + EPS);
            dre = slope * re;
            dim = slope * im;
        }
        const float *value = at.values + c * SPAN + row + W - 1;
        float by_sin = 0, by_cos = 0;
        for (int m = 1; m < W; m++) {
            float v = value[-m] * at.window[m] * m;
            by_cos += v * at.phases[2 * m * K + k];
            by_sin += v * at.phases[2 * m * K + K + k];
        }
        at.spectra[2 * i] = dre;
        at.spectra[2 * i + 1] = dim;
        at.slopes[i * PARTS] = -dre * by_sin - dim * by_cos;
    }
}

// What one position's spectrum of a column gives back to the byte m before it, without the window.
DEVICE float given_back(Memory at, int row, int c, int m) {
    const float *slope = at.spectra + 2 * (row * BINS + c * K), *phase = at.phases + 2 * m * K;
    float sum = 0;
    for (int k = 0; k < K; k++) sum += slope[2 * k] * phase[k] - slope[2 * k + 1] * phase[K + k];
    return sum;
}

// Partial gradients of the tiles blockIdx, blockIdx + gridDim, ..: [F, D] of weight, [D] of bias, [256, C] of the
// table, [W] of the window and [K] of omega, in `columns` numbers, which are zero at first.
extern "C" __global__ void __launch_bounds__(THREADS)
slopes(unsigned char *ids, float *table, float *window, float *phases, data_t *weight, data_t *dout, float *partial,
       int T, int row, int tiles, int all, int columns) {
    SHARED(memory);
    Memory at = Memory::of(memory);
    partial += (long long)blockIdx.x * columns;
    float *dtable = partial + F * D + D, *dwindow = dtable + 256 * C, *domega = dwindow + W;
    fetch_constants(at, window, phases);
    for (int tile = blockIdx.x; tile < all; tile += gridDim.x) {
        int b = tile / tiles, first = tile % tiles * ROWS, count = T - first < ROWS ? T - first : ROWS;
        fetch_bytes(at, ids + (long long)b * row, table, first, T);
        __syncthreads();
        transform(at);
        __syncthreads();
        to_features(at, weight, dout + ((long long)b * T + first) * (D ? D : F), partial, count);
        __syncthreads();
        to_spectra(at);
        __syncthreads();
        for (int k = threadIdx.x; k < K; k += THREADS) {
            float sum = 0;
            for (int i = k; i < ROWS * BINS; i += K) sum += at.slopes[i * PARTS];
            domega[k] += sum;
        }
        for (int m = threadIdx.x; m < W; m += THREADS) {
            float sum = 0;
            for (int r = 0; r < ROWS; r++)
                for (int c = 0; c < C; c++) sum += at.values[c * SPAN + r + W - 1 - m] * given_back(at, r, c, m);
            dwindow[m] += sum;
        }
        for (int j = threadIdx.x; j < C * SPAN; j += THREADS) {
            int c = j / SPAN, s = j % SPAN;
            float sum = 0;
            for (int r = 0; r < ROWS; r++) {
                int m = r + W - 1 - s;
                if (m >= 0 && m < W) sum += at.window[m] * given_back(at, r, c, m);
            }
            at.shares[j] = sum;
        }
        __syncthreads();
        for (int j = threadIdx.x; j < 256 * C; j += THREADS) {
            int byte = j / C, c = j % C;
            float sum = 0;
            for (int s = 0; s < SPAN; s++)
                if (at.bytes[s] == byte) sum += at.shares[c * SPAN + s];
            dtable[j] += sum;
        }
        __syncthreads();
    }
}

// Dilated attention in float32 arithmetic, one product after another: for GPUs that Triton can't compile for, which
// have no tensor cores either. It needs nothing that came after sm_60.
//
// Tiles are those of the Triton kernels: ROWS tokens of one class of an interval, which no border of a segment cuts,
// so that all rows of a tile see the same segment of every branch. GROUP neighbouring threads have a row: each has
// every GROUP-th of its scores, and every GROUP-th dimension of its sums. Tiles of the other side, KEYS tokens, go
// through shared memory, widened to float32. Nobody adds to what another block adds to.
//
// 4 D FLOPs a pair forward, 14 D backward; a value from shared memory serves one product, so that is what limits it.
//
// Compiled with -D for: D, the head's dimensions; ROWS and KEYS; THREADS of a block; CAUSAL; DATA (see data.cuh);
// BACKWARD, 0 for `attend`, 1 for `query_slopes` and `key_slopes`.

#include "../../../kernels/data.cuh"

#ifndef EMULATED
#define SHARED(name) extern __shared__ float name[]
#endif

constexpr int GROUP = THREADS / ROWS;
constexpr int STEP = D + 1;  // from row to row of a tile in shared memory, so that rows start in different banks
constexpr int SCORES = KEYS / GROUP, DIMENSIONS = (D + GROUP - 1) / GROUP;

#define MINUS_INFINITY __uint_as_float(0xff800000u)

// A block's tile: its row of the batch, its head, and its tokens first, first + classes, .. before `end`, of the
// interval that begins at `start`, in a document from `origin` up to `limit`.
struct Tile {
    int b, h, start, end, origin, limit, first, last;

    DEVICE Tile of(const int *intervals, int classes, int blocks, int tiles, int heads) {
        int bh = blockIdx.x / tiles, tile = blockIdx.x - bh * tiles;
        int interval = tile / (classes * blocks), rest = tile - interval * classes * blocks;
        const int *at = intervals + 4 * interval;
        int first = at[0] + rest % classes + rest / classes * classes * ROWS;
        int last = first + classes * (ROWS - 1);
        return {bh / heads, bh % heads, at[0], at[1], at[2], at[3], first, last < at[1] ? last : at[1] - 1};
    }
};

// The tokens that a branch selects in a tile's segment: base, base + rate, .., `count` of them.
struct Branch {
    int base, rate, count;

    DEVICE Branch of(const int *branches, int phase, int i, Tile tile) {
        int w = branches[2 * i], rate = branches[2 * i + 1];
        int segment = tile.origin + (tile.start - tile.origin) / w * w, base = segment + phase;
        int stop = segment + w < tile.limit ? segment + w : tile.limit;
        return {base, rate, stop > base ? (stop - base + rate - 1) / rate : 0};
    }
    __device__ __forceinline__ bool selects(int t) const {  // t is in the segment
        return t >= base ? (t - base) % rate == 0 : false;
    }
    __device__ __forceinline__ int up_to(int t) const {  // how many are no later than t
        int all = t >= base ? (t - base) / rate + 1 : 0;
        return all < count ? all : count;
    }
};

// Rows of a head, `stride` apart, into shared memory, times `factor`; zeros from `count` on.
DEVICE void fetch(float *to, const data_t *from, int rows, int first, int step, int count, int stride, float factor) {
    for (int at = threadIdx.x; at < rows * D; at += THREADS) {
        int row = at / D, d = at - row * D;
        to[row * STEP + d] = row < count ? widened(from[(long long)(first + row * step) * stride + d]) * factor : 0.f;
    }
}

DEVICE float dot(const float *a, const float *b) {
    float sum = 0;
    _Pragma("unroll 16") for (int d = 0; d < D; d++) sum += a[d] * b[d];
    return sum;
}

DEVICE float group_sum(float x) {
    UNROLL for (int other = 1; other < GROUP; other *= 2) x += __shfl_xor_sync(0xffffffffu, x, other);
    return x;
}

#if !BACKWARD
DEVICE float group_largest(float x) {
    UNROLL for (int other = 1; other < GROUP; other *= 2) {
        float y = __shfl_xor_sync(0xffffffffu, x, other);
        x = x > y ? x : y;
    }
    return x;
}

// y and lse of a tile of queries.
extern "C" __global__ void __launch_bounds__(THREADS)
attend(data_t *q, data_t *k, data_t *v, data_t *y, float *lse, int *intervals, int *branches, int *phases, int classes,
       int blocks, int tiles, int count, int T, int heads, int shared_by, int scale_bits, int q_b, int q_t, int q_h,
       int k_b, int k_t, int k_h, int v_b, int v_t, int v_h) {
    Tile tile = Tile::of(intervals, classes, blocks, tiles, heads);
    if (tile.first >= tile.end) return;
    int row = threadIdx.x / GROUP, part = threadIdx.x % GROUP, t = tile.first + classes * row;
    int kv = tile.h / shared_by, kv_heads = heads / shared_by;
    q += (long long)tile.b * q_b + (long long)tile.h * q_h;
    k += (long long)tile.b * k_b + (long long)kv * k_h;
    v += (long long)tile.b * v_b + (long long)kv * v_h;

    SHARED(memory);
    float *query = memory, *other = query + ROWS * STEP, *shares = other + KEYS * STEP;
    int rows = (tile.end - tile.first + classes - 1) / classes;
    fetch(query, q, ROWS, tile.first, classes, rows, q_t, __uint_as_float(scale_bits));

    float top = MINUS_INFINITY, total = 0, sums[DIMENSIONS] = {};
    for (int i = 0; i < count; i++) {
        Branch branch = Branch::of(branches, phases[i * kv_heads + kv], i, tile);
        bool selected = t < tile.end && branch.selects(t);
        int mine = !selected ? 0 : CAUSAL ? branch.up_to(t) : branch.count;
        int most = CAUSAL ? branch.up_to(tile.last) : branch.count;
        if (!__syncthreads_or(selected)) continue;
        _Pragma("unroll 1") for (int j = 0; j < most; j += KEYS) {
            __syncthreads();
            fetch(other, k, KEYS, branch.base + j * branch.rate, branch.rate, branch.count - j, k_t, 1.f);
            __syncthreads();
            float scores[SCORES], largest = top;
            UNROLL for (int n = 0; n < SCORES; n++) {
                int key = part + n * GROUP;
                float score = dot(query + row * STEP, other + key * STEP);
                scores[n] = j + key < mine ? score : MINUS_INFINITY;
                largest = largest > scores[n] ? largest : scores[n];
            }
            largest = group_largest(largest);
            float level = largest == MINUS_INFINITY ? 0.f : largest, fade = expf(top - level), added = 0;
            UNROLL for (int n = 0; n < SCORES; n++) {
                float share = expf(scores[n] - level);
                added += share;
                shares[row * (KEYS + 1) + part + n * GROUP] = share;
            }
            total = total * fade + group_sum(added);
            top = largest;
            __syncthreads();
            fetch(other, v, KEYS, branch.base + j * branch.rate, branch.rate, branch.count - j, v_t, 1.f);
            __syncthreads();
            UNROLL for (int n = 0; n < DIMENSIONS; n++) sums[n] *= fade;
            for (int key = 0; key < KEYS; key++) {
                float share = shares[row * (KEYS + 1) + key];
                UNROLL for (int n = 0; n < DIMENSIONS; n++)
                    if (D % GROUP == 0 || part + n * GROUP < D) sums[n] += share * other[key * STEP + part + n * GROUP];
            }
        }
    }
    if (t >= tile.end) return;
    float scaling = total > 0 ? 1 / total : 0.f;
    data_t *to = y + ((long long)tile.b * T + t) * heads * D + tile.h * D;
    UNROLL for (int n = 0; n < DIMENSIONS; n++)
        if (D % GROUP == 0 || part + n * GROUP < D) to[part + n * GROUP] = narrowed(sums[n] * scaling);
    if (part == 0) {
        float found = total > 0 ? top + logf(total) : MINUS_INFINITY;
        lse[((long long)tile.b * heads + tile.h) * T + t] = found;
    }
}
#else
// dq of a tile of queries, and delta = sum(dy y) - dlse, which `key_slopes` asks for.
extern "C" __global__ void __launch_bounds__(THREADS)
query_slopes(data_t *q, data_t *k, data_t *v, data_t *dy, data_t *y, float *lse, float *dlse, float *delta, data_t *dq,
             int *intervals, int *branches, int *phases, int classes, int blocks, int tiles, int count, int T,
             int heads, int shared_by, int scale_bits, int q_b, int q_t, int q_h, int k_b, int k_t, int k_h, int v_b,
             int v_t, int v_h, int dy_b, int dy_t, int dy_h) {
    Tile tile = Tile::of(intervals, classes, blocks, tiles, heads);
    if (tile.first >= tile.end) return;
    int row = threadIdx.x / GROUP, part = threadIdx.x % GROUP, t = tile.first + classes * row;
    int kv = tile.h / shared_by, kv_heads = heads / shared_by;
    bool there = t < tile.end;
    float scale = __uint_as_float(scale_bits);
    q += (long long)tile.b * q_b + (long long)tile.h * q_h;
    k += (long long)tile.b * k_b + (long long)kv * k_h;
    v += (long long)tile.b * v_b + (long long)kv * v_h;
    dy += (long long)tile.b * dy_b + (long long)tile.h * dy_h;
    long long place = ((long long)tile.b * heads + tile.h) * T + t, at = ((long long)tile.b * T + t) * heads * D + tile.h * D;

    SHARED(memory);
    float *query = memory, *slope = query + ROWS * STEP, *key = slope + ROWS * STEP, *value = key + KEYS * STEP;
    float *shares = value + KEYS * STEP;
    int rows = (tile.end - tile.first + classes - 1) / classes;
    fetch(query, q, ROWS, tile.first, classes, rows, q_t, scale);
    fetch(slope, dy, ROWS, tile.first, classes, rows, dy_t, 1.f);
    __syncthreads();

    float mean = 0, sums[DIMENSIONS] = {};
    UNROLL for (int n = 0; n < DIMENSIONS; n++)
        if (there && (D % GROUP == 0 || part + n * GROUP < D))
            mean += slope[row * STEP + part + n * GROUP] * widened(y[at + part + n * GROUP]);
    mean = group_sum(mean);
    if (there && dlse) mean -= dlse[place];
    if (there && part == 0) delta[place] = mean;
    float level = there ? lse[place] : 0.f;

    for (int i = 0; i < count; i++) {
        Branch branch = Branch::of(branches, phases[i * kv_heads + kv], i, tile);
        bool selected = there && branch.selects(t);
        int mine = !selected ? 0 : CAUSAL ? branch.up_to(t) : branch.count;
        int most = CAUSAL ? branch.up_to(tile.last) : branch.count;
        if (!dq || !__syncthreads_or(selected)) continue;
        _Pragma("unroll 1") for (int j = 0; j < most; j += KEYS) {
            __syncthreads();
            fetch(key, k, KEYS, branch.base + j * branch.rate, branch.rate, branch.count - j, k_t, 1.f);
            fetch(value, v, KEYS, branch.base + j * branch.rate, branch.rate, branch.count - j, v_t, 1.f);
            __syncthreads();
            UNROLL for (int n = 0; n < SCORES; n++) {
                int c = part + n * GROUP;
                float score = dot(query + row * STEP, key + c * STEP), dp = dot(slope + row * STEP, value + c * STEP);
                shares[row * (KEYS + 1) + c] = j + c < mine ? expf(score - level) * (dp - mean) : 0.f;
            }
            __syncthreads();
            for (int c = 0; c < KEYS; c++) {
                float share = shares[row * (KEYS + 1) + c];
                UNROLL for (int n = 0; n < DIMENSIONS; n++)
                    if (D % GROUP == 0 || part + n * GROUP < D) sums[n] += share * key[c * STEP + part + n * GROUP];
            }
        }
    }
    if (there && dq)
        UNROLL for (int n = 0; n < DIMENSIONS; n++)
            if (D % GROUP == 0 || part + n * GROUP < D) dq[at + part + n * GROUP] = narrowed(sums[n] * scale);
}

// dk and dv of a tile of keys, from all queries of the heads that share them. Those that are null aren't wanted.
extern "C" __global__ void __launch_bounds__(THREADS)
key_slopes(data_t *q, data_t *k, data_t *v, data_t *dy, float *lse, float *delta, data_t *dk, data_t *dv,
           int *intervals, int *branches, int *phases, int classes, int blocks, int tiles, int count, int T, int heads,
           int shared_by, int scale_bits, int q_b, int q_t, int q_h, int k_b, int k_t, int k_h, int v_b, int v_t,
           int v_h, int dy_b, int dy_t, int dy_h) {
    int kv_heads = heads / shared_by;
    Tile tile = Tile::of(intervals, classes, blocks, tiles, kv_heads);
    if (tile.first >= tile.end) return;
    int row = threadIdx.x / GROUP, part = threadIdx.x % GROUP, t = tile.first + classes * row;
    bool there = t < tile.end;
    float scale = __uint_as_float(scale_bits);
    k += (long long)tile.b * k_b + (long long)tile.h * k_h;
    v += (long long)tile.b * v_b + (long long)tile.h * v_h;

    SHARED(memory);
    float *key = memory, *value = key + ROWS * STEP, *query = value + ROWS * STEP, *slope = query + KEYS * STEP;
    float *shares = slope + KEYS * STEP, *slopes = shares + ROWS * (KEYS + 1);
    int rows = (tile.end - tile.first + classes - 1) / classes;
    fetch(key, k, ROWS, tile.first, classes, rows, k_t, scale);
    fetch(value, v, ROWS, tile.first, classes, rows, v_t, 1.f);

    float key_sums[DIMENSIONS] = {}, value_sums[DIMENSIONS] = {};
    for (int step = 0; step < count * shared_by; step++) {
        int i = step / shared_by, h = tile.h * shared_by + step % shared_by;
        Branch branch = Branch::of(branches, phases[i * kv_heads + tile.h], i, tile);
        bool selected = there && branch.selects(t);
        int none = CAUSAL ? branch.up_to(t - 1) : 0;  // queries before t see nothing of it
        int fewest = CAUSAL ? branch.up_to(tile.first - 1) : 0;
        if (!__syncthreads_or(selected)) continue;
        const data_t *q_head = q + (long long)tile.b * q_b + (long long)h * q_h;
        const data_t *dy_head = dy + (long long)tile.b * dy_b + (long long)h * dy_h;
        const float *levels = lse + ((long long)tile.b * heads + h) * T, *means = delta + ((long long)tile.b * heads + h) * T;
        _Pragma("unroll 1") for (int j = fewest; j < branch.count; j += KEYS) {
            __syncthreads();
            fetch(query, q_head, KEYS, branch.base + j * branch.rate, branch.rate, branch.count - j, q_t, 1.f);
            fetch(slope, dy_head, KEYS, branch.base + j * branch.rate, branch.rate, branch.count - j, dy_t, 1.f);
            __syncthreads();
            UNROLL for (int n = 0; n < SCORES; n++) {
                int c = part + n * GROUP, token = branch.base + (j + c) * branch.rate;
                float share = 0, product = 0;
                if (selected && j + c >= none && j + c < branch.count) {
                    share = expf(dot(key + row * STEP, query + c * STEP) - levels[token]);
                    product = share * (dot(value + row * STEP, slope + c * STEP) - means[token]);
                }
                shares[row * (KEYS + 1) + c] = share;
                slopes[row * (KEYS + 1) + c] = product;
            }
            __syncthreads();
            for (int c = 0; c < KEYS; c++) {
                float share = shares[row * (KEYS + 1) + c], product = slopes[row * (KEYS + 1) + c];
                UNROLL for (int n = 0; n < DIMENSIONS; n++)
                    if (D % GROUP == 0 || part + n * GROUP < D) {
                        value_sums[n] += share * slope[c * STEP + part + n * GROUP];
                        key_sums[n] += product * query[c * STEP + part + n * GROUP];
                    }
            }
        }
    }
    if (!there) return;
    long long at = ((long long)tile.b * T + t) * kv_heads * D + tile.h * D;
    UNROLL for (int n = 0; n < DIMENSIONS; n++)
        if (D % GROUP == 0 || part + n * GROUP < D) {
            if (dk) dk[at + part + n * GROUP] = narrowed(key_sums[n] * scale);
            if (dv) dv[at + part + n * GROUP] = narrowed(value_sums[n]);
        }
}
#endif

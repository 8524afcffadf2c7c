// Causal convolution with few taps, one product after another, on tensors [B, T, C] whose positions lie side by side.
//
// A group of LANES neighbouring threads has a channel, and takes `share` pieces of its sequences, one after another. A
// piece is a vector for each of them: 16 bytes of positions, V of them. The TAPS - 1 values that a thread needs beside
// its own, before them forward and after them backward, are its neighbours', which read them at the same time: the
// memory gives every value once, the first-level cache the BESIDE vectors again.
//
// In 16 bits and without gates, a position costs 4 bytes and 2 TAPS FLOPs forward, 6 and 4 TAPS backward, so with up to
// some 30 taps the memory decides. Groups exchange nothing; a group's threads do only at its end, in a fixed order.
//
// Compiled with -D for: TAPS; LANES, a power of 2 up to 32; VECTORS a thread reads before it uses the first; THREADS of
// a block, of which a multiprocessor should hold BLOCKS; WIDE, whether every tensor's vectors lie at multiples of 16
// bytes and no sequence ends inside one; GATES, 1 if there is a gate_in, plus 2 if there is a gate_out; DATA (see
// data.cuh); and BACKWARD, 0 for `convolve`, 1 for `differentiate`, as each is cut otherwise.

#include "taps.cuh"
#include "vectors.cuh"

constexpr int V = 16 / sizeof(data_t);
constexpr int BESIDE = (TAPS - 1 + V - 1) / V;

typedef Vector<V> Values;

// What a thread computes next: positions from t on of sequence b, all before `end`, which is 0 for none.
struct Position {
    int b, t, end;
};

// A group's channel, its pieces up to the `last`, and where this thread is in the next one.
struct Walk {
    int c, piece, last, b, t;

    DEVICE Walk over(int C, int all, int share, int pieces) {
        int group = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES, part = group / C;
        int piece = part * share, last = piece + share < all ? piece + share : all, b = piece / pieces;
        return {group - part * C, piece, last, b, ((piece - b * pieces) * LANES + (int)threadIdx.x % LANES) * V};
    }
    __device__ __forceinline__ Position next(int T, int pieces) {
        Position here = {b, t, piece++ < last ? T : 0};
        t += LANES * V;
        if (t >= pieces * LANES * V) t -= pieces * LANES * V, b++;
        return here;
    }
};

// A channel of a tensor.
struct Channel {
    data_t *data;
    int stride;

    DEVICE Channel of(data_t *tensor, int c, int stride_b, int stride_c) {
        return {tensor ? tensor + (long long)c * stride_c : nullptr, stride_b};
    }
    __device__ __forceinline__ Values read(Position here, int vectors) const {  // so many further on; 0 outside
        data_t *row = data + (long long)here.b * stride;
        int t = here.t + vectors * V;
        if (WIDE) return Values::read(row + t, (unsigned)t < (unsigned)here.end);
        data_t x[V];
        UNROLL for (int i = 0; i < V; i++) x[i] = (unsigned)(t + i) < (unsigned)here.end ? row[t + i] : data_t(0);
        return Values::of_values(x);
    }
    __device__ __forceinline__ void write(Position here, const float values[V]) const {  // nothing without a tensor
        if (!data || here.t >= here.end) return;
        data_t *row = data + (long long)here.b * stride;
        Values x = Values::of(values);
        if (WIDE) {
            x.write(row + here.t);
        } else {
            UNROLL for (int i = 0; i < V; i++) if (here.t + i < here.end) row[here.t + i] = x.value(i);
        }
    }
};

// values = x gate, of which there is one if it is `gated`
DEVICE void multiply(float values[V], Values x, Values gate, bool gated) {
    UNROLL for (int i = 0; i < V; i++) values[i] = gated ? x[i] * gate[i] : x[i];
}

#if !BACKWARD
// out = y gate_out with y = h * (u gate_in) + skip u gate_in, and y itself if it is wanted.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
convolve(data_t *u, data_t *gate_in, data_t *gate_out, const float *h, const float *skip, data_t *out, data_t *y, int T,
         int C, int all, int share, int pieces, int h_c, int h_l, int u_b, int u_c, int gate_in_b, int gate_in_c,
         int gate_out_b, int gate_out_c, int out_b, int out_c) {
    Walk walk = Walk::over(C, all, share, pieces);
    Channel from = Channel::of(u, walk.c, u_b, u_c), in = Channel::of(gate_in, walk.c, gate_in_b, gate_in_c);
    Channel gate = Channel::of(gate_out, walk.c, gate_out_b, gate_out_c);
    Channel to = Channel::of(out, walk.c, out_b, out_c), to_y = Channel::of(y, walk.c, out_b, out_c);
    float taps[TAPS][1];
    read_taps(taps, h, skip, walk.c, h_c, h_l, T);

    _Pragma("unroll 1") while (walk.piece < walk.last) {
        Position here[VECTORS];
        Values x[VECTORS][BESIDE + 1], x_in[VECTORS][BESIDE + 1], x_gate[VECTORS];
        UNROLL for (int k = 0; k < VECTORS; k++) {
            here[k] = walk.next(T, pieces);
            UNROLL for (int n = 0; n <= BESIDE; n++) {
                x[k][n] = from.read(here[k], n - BESIDE);
                if (GATES & 1) x_in[k][n] = in.read(here[k], n - BESIDE);
            }
            if (GATES & 2) x_gate[k] = gate.read(here[k], 0);
        }
        UNROLL for (int k = 0; k < VECTORS; k++) {
            float window[(BESIDE + 1) * V], result[V] = {};  // window: of u gate_in, up to this thread's own
            UNROLL for (int n = 0; n <= BESIDE; n++) multiply(window + n * V, x[k][n], x_in[k][n], GATES & 1);
            UNROLL for (int j = 0; j < TAPS; j++)
                UNROLL for (int i = 0; i < V; i++) result[i] += taps[j][0] * window[BESIDE * V + i - j];
            to_y.write(here[k], result);
            if (GATES & 2)
                UNROLL for (int i = 0; i < V; i++) result[i] *= x_gate[k][i];
            to.write(here[k], result);
        }
    }
}
#else
// The gradients of u and of the gates, and in partial[part, c, j] the share of h's that a group has. Those that are
// null aren't wanted. `y` is that of `convolve`. Results lie like `du`, with its strides.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
differentiate(data_t *dout, data_t *u, data_t *gate_in, data_t *gate_out, data_t *y, const float *h,
              const float *skip, data_t *du, data_t *dgate_in, data_t *dgate_out, float *partial, int T, int C, int all,
              int share, int pieces, int h_c, int h_l, int dout_b, int dout_c, int u_b, int u_c, int gate_in_b,
              int gate_in_c, int gate_out_b, int gate_out_c, int y_b, int y_c, int du_b, int du_c) {
    Walk walk = Walk::over(C, all, share, pieces);
    Channel from = Channel::of(dout, walk.c, dout_b, dout_c);
    Channel gate = Channel::of(gate_out, walk.c, gate_out_b, gate_out_c);
    Channel x = Channel::of(u, walk.c, u_b, u_c), in = Channel::of(gate_in, walk.c, gate_in_b, gate_in_c);
    Channel kept = Channel::of(y, walk.c, y_b, y_c), to = Channel::of(du, walk.c, du_b, du_c);
    Channel to_in = Channel::of(dgate_in, walk.c, du_b, du_c), to_gate = Channel::of(dgate_out, walk.c, du_b, du_c);
    float taps[TAPS][1];
    double sums[TAPS] = {};  // of sums over vectors: positions that are loud drown nothing but their neighbours
    read_taps(taps, h, skip, walk.c, h_c, h_l, T);
    bool works = walk.piece < walk.last;

    _Pragma("unroll 1") while (walk.piece < walk.last) {
        Position here[VECTORS];
        Values next[VECTORS][BESIDE + 1], next_gate[VECTORS][BESIDE + 1];
        Values next_x[VECTORS], next_in[VECTORS], next_y[VECTORS];
        UNROLL for (int k = 0; k < VECTORS; k++) {
            here[k] = walk.next(T, pieces);
            UNROLL for (int n = 0; n <= BESIDE; n++) {
                next[k][n] = from.read(here[k], n);
                if (GATES & 2) next_gate[k][n] = gate.read(here[k], n);
            }
            next_x[k] = x.read(here[k], 0);
            if (GATES & 1) next_in[k] = in.read(here[k], 0);
            if ((GATES & 2) && dgate_out) next_y[k] = kept.read(here[k], 0);
        }
        UNROLL for (int k = 0; k < VECTORS; k++) {
            float window[(BESIDE + 1) * V], v[V], dv[V] = {}, result[V];  // window: of dy = dout gate_out
            UNROLL for (int n = 0; n <= BESIDE; n++) multiply(window + n * V, next[k][n], next_gate[k][n], GATES & 2);
            multiply(v, next_x[k], next_in[k], GATES & 1);
            UNROLL for (int j = 0; j < TAPS; j++) {
                float sum = 0;
                UNROLL for (int i = 0; i < V; i++) {
                    dv[i] += taps[j][0] * window[i + j];
                    sum += v[i] * window[i + j];
                }
                sums[j] += sum;
            }
            UNROLL for (int i = 0; i < V; i++) result[i] = GATES & 1 ? dv[i] * next_in[k][i] : dv[i];
            to.write(here[k], result);
            if (GATES & 1) {
                UNROLL for (int i = 0; i < V; i++) result[i] = dv[i] * next_x[k][i];
                to_in.write(here[k], result);
            }
            if ((GATES & 2) && dgate_out) {
                multiply(result, next[k][0], next_y[k], true);
                to_gate.write(here[k], result);
            }
        }
    }
    if (!partial) return;
    UNROLL for (int j = 0; j < TAPS; j++)
        UNROLL for (int far = LANES / 2; far; far /= 2) sums[j] += __shfl_xor_sync(~0u, sums[j], far);
    if (works && threadIdx.x % LANES == 0) {
        float *mine = partial + (blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES) * (long long)TAPS;
        UNROLL for (int j = 0; j < TAPS; j++) mine[j] = (float)sums[j];
    }
}
#endif

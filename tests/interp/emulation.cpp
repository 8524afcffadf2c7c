// CUDA C++ on a CPU: each thread of a block is a thread here, and a block a barrier. Compiled together with a
// source of kernels, -DSOURCE="..." and -DKERNEL=name; blocks run one after the other.

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
static float2 make_float2(float x, float y) { return {x, y}; }
struct Index {
    int x;
};
static thread_local Index threadIdx, blockIdx, gridDim;
static thread_local std::barrier<> *block_barrier;
static thread_local float *shared_memory;
struct uint4 {
    unsigned x, y, z, w;
};
static unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
template <class T>
static T min(T a, T b) {
    return a < b ? a : b;
}
static void refresh(int &) {}
static float larger(float a, float b) { return a > b || a != a ? a : b; }
static void atomicMax(unsigned *place, unsigned x) {
    std::atomic_ref<unsigned> held(*place);
    for (unsigned old = held; old < x && !held.compare_exchange_weak(old, x);) {
    }
}
static void __syncthreads() { block_barrier->arrive_and_wait(); }
static unsigned atomicAdd(unsigned *place, unsigned x) { return std::atomic_ref<unsigned>(*place).fetch_add(x); }
static void __threadfence() {}
template <class T>
static T __ldcg(const T *place) {
    return *place;
}
static std::atomic<int> block_any;
static int __syncthreads_or(int x) {
    __syncthreads();
    block_any = 0;
    __syncthreads();
    if (x) block_any = 1;
    __syncthreads();
    return block_any;
}
static unsigned warp_most[32];
static unsigned __reduce_max_sync(unsigned, unsigned x) {  // all threads of a block come here together
    unsigned *most = &warp_most[threadIdx.x / 32];
    __syncthreads();
    *most = 0;
    __syncthreads();
    atomicMax(most, x);
    __syncthreads();
    return *most;
}
static double block_given[1024];
template <class X> static X __shfl_xor_sync(unsigned, X x, int other) {  // all threads of a block come here together
    __syncthreads();
    block_given[threadIdx.x] = x;
    __syncthreads();
    return X(block_given[threadIdx.x ^ other]);
}

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define SHARED(name) float *name = shared_memory

static unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// What sources say in PTX.
#define EMULATED
#if DATA == 1
static unsigned short narrowed(float x) {  // to the nearest, ties to even; a NaN stays one
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
#elif DATA == 2
static float widened(unsigned short x) {
    _Float16 y;
    memcpy(&y, &x, 2);
    return y;
}
static unsigned short narrowed(float x) {
    _Float16 y = x;
    unsigned short bits;
    memcpy(&bits, &y, 2);
    return bits;
}
#endif

#include SOURCE

template <class... A, size_t... I>
static void run(void (*kernel)(A...), int blocks, int threads, int shared, void **args, std::index_sequence<I...>) {
    for (int block = 0; block < blocks; block++) {
        std::vector<float> memory(shared / 4 + 1, NAN);
        std::barrier<> barrier(threads);
        std::vector<std::thread> all;
        for (int t = 0; t < threads; t++)
            all.emplace_back([&, t] {
                threadIdx.x = t;
                blockIdx.x = block;
                gridDim.x = blocks;
                block_barrier = &barrier;
                shared_memory = memory.data();
                kernel(*static_cast<A *>(args[I])...);
            });
        for (auto &thread : all) thread.join();
    }
}

template <class... A>
static int run(void (*kernel)(A...), int blocks, int threads, int shared, void **args, int given) {
    if (given != sizeof...(A)) return 2;
    run(kernel, blocks, threads, shared, args, std::index_sequence_for<A...>());
    return 0;
}

// As cuLaunchKernel: pointers to the arguments, but how many there are, too.
extern "C" int emulate(int blocks, int threads, int shared, void **args, int given) {
    return run(KERNEL, blocks, threads, shared, args, given);
}

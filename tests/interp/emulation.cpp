// CUDA C++ on a CPU: the threads of a block take turns, each running from one barrier to the next. Compiled
// together with a source of kernels, -DSOURCE="..." and -DKERNEL=name; blocks run one after the other.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#define NAN __builtin_nanf("")
#define fmaf __builtin_fmaf
#define fabsf __builtin_fabsf
#define sqrtf __builtin_sqrtf
#define expf __builtin_expf
#define logf __builtin_logf
#define log1pf __builtin_log1pf

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
static Index threadIdx, blockIdx, gridDim;
static float *shared_memory;
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
static void atomicMax(unsigned *place, unsigned x) { *place = max(*place, x); }
static unsigned atomicAdd(unsigned *place, unsigned x) {
    unsigned old = *place;
    *place += x;
    return old;
}
static ucontext_t turns, threads_at[1024];
static void __syncthreads() { swapcontext(&threads_at[threadIdx.x], &turns); }
static void __threadfence() {}
template <class T>
static T __ldcg(const T *place) {
    return *place;
}
static int block_any;
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

constexpr size_t STACK = 1 << 18;
static bool thread_done;

// All threads up to a barrier, then all up to the next, forwards and backwards by turns: what one reads of
// another's without a barrier in between is still missing one way or the other.
static bool run_block(int threads, void (*body)(), char *stacks) {
    for (int t = 0; t < threads; t++) {
        getcontext(&threads_at[t]);
        threads_at[t].uc_stack.ss_sp = stacks + t * STACK;
        threads_at[t].uc_stack.ss_size = STACK;
        threads_at[t].uc_link = &turns;
        makecontext(&threads_at[t], body, 0);
    }
    for (bool backwards = false;; backwards = !backwards) {
        int done = 0;
        for (int i = 0; i < threads; i++) {
            threadIdx.x = backwards ? threads - 1 - i : i;
            thread_done = false;
            swapcontext(&turns, &threads_at[threadIdx.x]);
            done += thread_done;
        }
        if (done) return done == threads;  // else some wait at a barrier that others don't come to
    }
}

template <size_t...>
struct ArgumentsAt {};

template <class... A>
struct Call {
    static inline void (*kernel)(A...);
    static inline void **args;

    template <size_t... I>
    static void with(ArgumentsAt<I...>) {
        kernel(*static_cast<A *>(args[I])...);
    }
    static void thread() {
        with(ArgumentsAt<__integer_pack(sizeof...(A))...>());
        thread_done = true;
    }
};

// As cuLaunchKernel: pointers to the arguments, but how many there are, too.
template <class... A>
static int run(void (*kernel)(A...), int blocks, int threads, int shared, void **args, int given) {
    if (given != sizeof...(A)) return 2;
    void *stacks =
        mmap(nullptr, threads * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) return 4;
    Call<A...>::kernel = kernel;
    Call<A...>::args = args;
    gridDim.x = blocks;
    shared_memory = static_cast<float *>(malloc(shared + 4));
    bool well = true;
    for (blockIdx.x = 0; well && blockIdx.x < blocks; blockIdx.x++) {
        for (int i = 0; i < shared / 4 + 1; i++) shared_memory[i] = NAN;
        well = run_block(threads, Call<A...>::thread, static_cast<char *>(stacks));
    }
    free(shared_memory);
    munmap(stacks, threads * STACK);
    return well ? 0 : 3;
}

extern "C" int emulate(int blocks, int threads, int shared, void **args, int given) {
    return run(KERNEL, blocks, threads, shared, args, given);
}

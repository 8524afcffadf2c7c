// The data's dtype, DATA: 0 (float32), 1 (bfloat16), 2 (float16); computing is in float32.

#pragma once

#define DEVICE static __device__ __forceinline__
#define UNROLL _Pragma("unroll")

#if DATA == 0
typedef float data_t;
#else
typedef unsigned short data_t;
#endif

DEVICE float widened(float x) { return x; }
#if DATA == 0
DEVICE float narrowed(float x) { return x; }
#elif DATA == 1
DEVICE float widened(data_t x) { return __uint_as_float((unsigned)x << 16); }
#endif
#ifdef EMULATED
#if DATA
DEVICE unsigned narrowed(float low, float high) { return narrowed(low) | (unsigned)narrowed(high) << 16; }
#endif
#elif DATA == 1
DEVICE data_t narrowed(float x) {
    data_t y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
// Two in one word.
DEVICE unsigned narrowed(float low, float high) {
    unsigned y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
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
DEVICE unsigned narrowed(float low, float high) {
    unsigned y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
#endif

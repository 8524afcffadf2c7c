// Values of data_t that lie side by side, read and written by one access.

#include "../../../kernels/data.cuh"

template <int BYTES>
struct Words {
    unsigned at[BYTES / 4];
};
template <>
struct Words<2> {
    unsigned short at[1];
};

// What lies at `source`, or 0 where it isn't wanted: without a branch, which would keep other loads behind it.
template <int BYTES>
DEVICE Words<BYTES> load(const data_t *source, bool wanted) {
    Words<BYTES> x = {};
#ifdef EMULATED
    if (wanted) memcpy(&x, source, BYTES);
#else
    if constexpr (BYTES == 16) {
        asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t"
            "mov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\tmov.u32 %2, 0;\n\tmov.u32 %3, 0;\n\t"
            "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
            : "=&r"(x.at[0]), "=&r"(x.at[1]), "=&r"(x.at[2]), "=&r"(x.at[3])
            : "l"(source), "r"((int)wanted));
    } else if constexpr (BYTES == 8) {
        asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\tmov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\t"
            "@p ld.global.v2.u32 {%0, %1}, [%2];\n\t}"
            : "=&r"(x.at[0]), "=&r"(x.at[1])
            : "l"(source), "r"((int)wanted));
    } else if constexpr (BYTES == 4 && sizeof(data_t) == 2) {
        asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\tmov.u32 %0, 0;\n\t@p ld.global.u32 %0, [%1];\n\t}"
            : "=&r"(x.at[0])
            : "l"(source), "r"((int)wanted));
    } else if (wanted) {
#if DATA == 0
        x.at[0] = __float_as_uint(*source);
#else
        x.at[0] = *source;
#endif
    }
#endif
    return x;
}

// Never cut into narrower stores, as the compiler cuts some.
template <int BYTES>
DEVICE void store(data_t *target, Words<BYTES> x) {
#ifdef EMULATED
    memcpy(target, &x, BYTES);
#else
    if constexpr (BYTES == 16) {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(x.at[0]), "r"(x.at[1]), "r"(x.at[2]),
                     "r"(x.at[3]));
    } else if constexpr (BYTES == 8) {
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(target), "r"(x.at[0]), "r"(x.at[1]));
    } else if constexpr (BYTES == 4) {
        asm volatile("st.global.u32 [%0], %1;" ::"l"(target), "r"(x.at[0]));
    } else {
        asm volatile("st.global.u16 [%0], %1;" ::"l"(target), "h"(x.at[0]));
    }
#endif
}

// V values.
template <int V>
struct Vector {
    Words<V * sizeof(data_t)> words;

    static __device__ __forceinline__ Vector read(const data_t *source, bool wanted) {
        return {load<V * sizeof(data_t)>(source, wanted)};
    }
    static __device__ __forceinline__ Vector of(const float *values) {
        Vector x;
#if DATA == 0
        UNROLL for (int i = 0; i < V; i++) x.words.at[i] = __float_as_uint(values[i]);
#else
        if constexpr (V == 1) {
            x.words.at[0] = narrowed(values[0]);
        } else {
            UNROLL for (int i = 0; i < V; i += 2) x.words.at[i / 2] = narrowed(values[i], values[i + 1]);
        }
#endif
        return x;
    }
    // Of values one by one, and one of them.
    static __device__ __forceinline__ Vector of_values(const data_t *values) {
        Vector x = {};
#if DATA == 0
        UNROLL for (int i = 0; i < V; i++) x.words.at[i] = __float_as_uint(values[i]);
#else
        UNROLL for (int i = 0; i < V; i++) x.words.at[i / 2] |= (unsigned)values[i] << (16 * (i % 2));
#endif
        return x;
    }
    __device__ __forceinline__ data_t value(int i) const {
#if DATA == 0
        return __uint_as_float(words.at[i]);
#else
        return data_t(words.at[i / 2] >> (16 * (i % 2)));
#endif
    }
    __device__ __forceinline__ void write(data_t *target) const { store<V * sizeof(data_t)>(target, words); }
    __device__ __forceinline__ float operator[](int i) const {
#if DATA == 0
        return __uint_as_float(words.at[i]);
#else
        if constexpr (V == 1) {
            return widened(words.at[0]);
        } else {
            return widened(value(i));
        }
#endif
    }
};

// What token.cu says to the machine itself: bfloat16, loads that stay where they are written,
// copies ahead of use, and the words by which thread blocks tell each other their results.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

__device__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Two numbers rounded to bfloat16, the first in the lower half.
__device__ u32 pair(float first, float second) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    return bits;
}

__device__ u16 rounded(float x) { return (u16)pair(x, 0.0f); }
__device__ float as_bfloat16(float x) { return low(pair(x, 0.0f)); }

// Reads of what no thread block writes; plain ones the compiler moves to their first use.
__device__ uint4 fetch(const uint4 *from) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}

__device__ uint2 fetch(const uint2 *from) {
    uint2 x;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(x.x), "=r"(x.y)
                 : "l"(from)
                 : "memory");
    return x;
}

__device__ float fetch(const u16 *from) {
    u16 x;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(from) : "memory");
    return low(x);
}

// Copies into shared memory that go on beside the program; a thread reads what it asked for itself.
__device__ void copy(uint4 *to, const u16 *from) {
    u32 place = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
}

// The copies since the last such mark are a group.
__device__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait for all groups of this thread but the last few.
template <int FEW>
__device__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(FEW) : "memory");
}

// Have memory brought to L2: `bytes` is a multiple of 16. A warp calls this.
__device__ void prefetch(const void *from, int bytes) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
#else
    for (int at = threadIdx.x % 32 * 32; at < bytes; at += 1024)
        asm volatile("prefetch.global.L2 [%0];" ::"l"((const char *)from + at));
#endif
}

// A word that no sum and no pair of rounded numbers has: NaNs that are computed have no sign.
constexpr u32 EMPTY = 0xffffffffu;

__device__ void send(u32 *to, u32 word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ void send(u32 *to, float x) { send(to, __float_as_uint(x)); }

__device__ uint4 peek4(const u32 *from) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}

__device__ uint2 peek2(const u32 *from) {
    uint2 x;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(x.x), "=r"(x.y)
                 : "l"(from)
                 : "memory");
    return x;
}

__device__ bool missing(uint4 x) {
    return x.x == EMPTY || x.y == EMPTY || x.z == EMPTY || x.w == EMPTY;
}

__device__ bool missing(uint2 x) { return x.x == EMPTY || x.y == EMPTY; }

__device__ uint4 receive(const u32 *from) {
    uint4 x = peek4(from);
    while (missing(x)) x = peek4(from);
    return x;
}

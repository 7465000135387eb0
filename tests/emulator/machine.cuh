// The machine of token.cu without a GPU, in place of the header of this name: every thread of every
// thread block is a fiber, and a barrier, a shuffle and a read of a mailbox let others run.
//
// It is stricter than a GPU: a copy ahead of use is done when it is waited for and not before, a
// word is sent once, and memory outside of the arguments and misaligned addresses end the program.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __fdividef(a, b) ((a) / (b))
#define threadIdx (running->thread)
#define blockIdx (running->place)

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Index { unsigned x; };
struct Copy { uint4 *to, value; int group; };
// Where fibers meet: those of a warp, or of a thread block with its shared memory.
struct Group { int size, arrived, meeting; float lanes[32]; std::vector<char> memory; };
struct Fiber {
    void *stack;
    Index thread, place;
    Group *warp, *block;
    bool done;
    int copies;
    std::deque<Copy> waiting;
};
struct Region { const char *start, *stop; };

inline Fiber *running;
inline void *scheduler;
// Counts what brings the program on, so that its absence shows.
inline long progress;
inline std::vector<Region> regions;

extern "C" void switch_stacks(void **from, void *to);
asm(R"(
.globl switch_stacks
switch_stacks:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");

inline void let_others_run() { switch_stacks(&running->stack, scheduler); }

inline void expect(bool holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "%s: block %u, thread %u\n", what, blockIdx.x, threadIdx.x);
    abort();
}

inline void meet(Group *group) {
    int meeting = group->meeting;
    progress++;
    if (++group->arrived == group->size) {
        group->arrived = 0, group->meeting++;
        return;
    }
    while (group->meeting == meeting) let_others_run();
}

inline void __syncthreads() { meet(running->block); }

inline float shuffled(float x, int from) {
    running->warp->lanes[threadIdx.x % 32] = x;
    meet(running->warp);
    float result = running->warp->lanes[from];
    meet(running->warp);
    return result;
}

inline float __shfl_xor_sync(u32, float x, int mask) {
    return shuffled(x, (threadIdx.x % 32) ^ mask);
}

inline float __shfl_down_sync(u32, float x, int steps) {
    int lane = threadIdx.x % 32;
    return shuffled(x, lane + steps < 32 ? lane + steps : lane);
}

inline float __uint_as_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
inline u32 __float_as_uint(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

inline float low(u32 pair) { return __uint_as_float(pair << 16); }
inline float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

inline u16 rounded(float x) {
    u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline u32 pair(float first, float second) { return rounded(first) | (u32)rounded(second) << 16; }
inline float as_bfloat16(float x) { return low(rounded(x)); }

template <class T>
T fetch_any(const T *from) {
    expect((uintptr_t)from % sizeof(T) == 0, "misaligned");
    for (Region region : regions)
        if ((const char *)from >= region.start && (const char *)(from + 1) <= region.stop)
            return *from;
    expect(false, "out of bounds");
    return *from;
}

inline uint4 fetch(const uint4 *from) { return fetch_any(from); }
inline uint2 fetch(const uint2 *from) { return fetch_any(from); }
inline float fetch(const u16 *from) { return low(fetch_any(from)); }

inline void copy(uint4 *to, const u16 *from) {
    running->waiting.push_back({to, fetch((const uint4 *)from), running->copies});
    memset(to, 0xff, 16);
}

inline void copies_end() { running->copies++; }

template <int FEW>
void copies_wait() {
    std::deque<Copy> &waiting = running->waiting;
    for (; !waiting.empty() && waiting.front().group < running->copies - FEW; waiting.pop_front())
        *waiting.front().to = waiting.front().value;
}

inline void prefetch(const void *from, int bytes) {
    expect(bytes > 0 && bytes % 16 == 0, "wrong size");
    fetch((const uint4 *)from), fetch((const uint4 *)((const char *)from + bytes) - 1);
}

constexpr u32 EMPTY = 0xffffffffu;

inline void send(u32 *to, u32 word) {
    expect(fetch_any(to) == EMPTY && word != EMPTY, "sent twice, or nothing");
    progress++;
    *to = word;
}

inline void send(u32 *to, float x) { send(to, __float_as_uint(x)); }
inline uint4 peek4(const u32 *from) { return let_others_run(), fetch((const uint4 *)from); }
inline uint2 peek2(const u32 *from) { return let_others_run(), fetch((const uint2 *)from); }
inline bool missing(uint2 x) { return x.x == EMPTY || x.y == EMPTY; }
inline bool missing(uint4 x) { return missing(uint2{x.x, x.y}) || missing(uint2{x.z, x.w}); }

inline uint4 receive(const u32 *from) {
    uint4 x = peek4(from);
    while (missing(x)) x = peek4(from);
    return x;
}

// One new position of every sample through one block of a GPT-2, in one launch of one thread block
// per multiprocessor. Every phase needs all of the one before, so the thread blocks meet four times.
// A meeting costs a microsecond, and so does a read that is not in flight yet: whatever a phase
// reads that no phase writes, weights and old keys above all, is asked for before the meeting.
//
// B samples, C width, H heads of width D, F = 4 C, N room in the caches [B, H, N, D], S spans of
// SPAN keys. Weights are bfloat16 [in, out]; gamma and beta float32. Sums are float32, in a fixed
// order: over the rows of a thread, then over lanes, then over warps.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int D = C / H, F = 4 * C;
// Lanes that share a row of a head, rows at a time, and rows of a thread.
constexpr int GROUPS = D / 8, AT_ONCE = THREADS / GROUPS, ROWS = SPAN / AT_ONCE;
constexpr int S = (N + SPAN - 1) / SPAN;
// Sums of a span: D values, the maximum and the sum of its probabilities.
constexpr int PART = D + 2;
constexpr int EACH_C = (C + THREADS - 1) / THREADS;
constexpr float LOG2_E = 1.4426950408889634f;

__device__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ float number(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ u16 rounded(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// Reads of what no thread block writes. Not by __ldg, which the compiler moves up in front of an
// arrival, which then waits until they are done.
__device__ uint4 fetch(const uint4 *from) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}

__device__ float fetch(const float *from) {
    float x;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
    return x;
}

__device__ float fetch(const u16 *from) {
    u16 x;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(from) : "memory");
    return number(x);
}

__device__ float as_bfloat16(float x) { return number(rounded(x)); }

__device__ float gelu(float x) {
    return x / (1.0f + exp2f(-2.0f * LOG2_E * 0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

__device__ float warp_sum(float x) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

__device__ float warp_max(float x) {
    for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// Where all thread blocks wait for the last. The count of arrivals is never set back: MEETINGS of
// them belong to each launch, so the first count that a launch sees tells where it began.
struct Meeting {
    static constexpr u64 MEETINGS = 4;
    u64 *count, until;

    __device__ u64 seen() {
        u64 value;
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(count) : "memory");
        return value;
    }
    __device__ Meeting(u64 *count) : count(count) {
        constexpr u64 launch = MEETINGS * BLOCKS;
        until = seen() / launch * launch;
    }
    // This thread block has written all that the others will read.
    __device__ void arrive() {
        until += BLOCKS;
        __syncthreads();
        if (threadIdx.x == 0)
            asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(count) : "memory");
    }
    __device__ void wait() {
        if (threadIdx.x == 0)
            while (seen() < until) {
            }
        __syncthreads();
    }
};

// A product with a matrix [K, M]: the weights of this thread, which are 8 columns of every so
// manieth row, in strips of W columns; and the one sum, of one sample, that it ends up with.
template <int K, int M, int W>
struct Product {
    static constexpr int LANES = W / 8, STRIPS = M / W, EACH = (STRIPS + BLOCKS - 1) / BLOCKS;
    static constexpr int STEP = THREADS / LANES, TIMES = (K + STEP - 1) / STEP;
    static_assert(EACH * B * W <= THREADS, "one sum a thread at most");
    uint4 pieces[EACH][TIMES];
    float bias;
    int sample, column;
    bool mine;

    __device__ void ask(const u16 *w, const u16 *biases) {
        int part = threadIdx.x % LANES;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            int strip = blockIdx.x + e * BLOCKS;
#pragma unroll
            for (int r = 0; r < TIMES; r++) {
                int k = threadIdx.x / LANES + r * STEP;
                pieces[e][r] = uint4{0, 0, 0, 0};
                if (strip < STRIPS && k < K)
                    pieces[e][r] =
                        fetch((const uint4 *)(w + (long long)k * M + strip * W + part * 8));
            }
        }
        int strip = blockIdx.x + threadIdx.x / (B * W) * BLOCKS;
        mine = threadIdx.x < EACH * B * W && strip < STRIPS;
        sample = threadIdx.x / W % B;
        column = strip * W + threadIdx.x % W;
        bias = mine ? fetch(biases + column) : 0.0f;
    }

    // sum of x[sample][k] w[k][column], for the thread's own sample and column.
    __device__ float multiply(const float *x, float *sums) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
#pragma unroll
            for (int b = 0; b < B; b++) {
                float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
                for (int r = 0; r < TIMES; r++) {
                    int k = threadIdx.x / LANES + r * STEP;
                    float a = k < K ? x[b * K + k] : 0.0f;
                    uint4 p = pieces[e][r];
                    v[0] += a * low(p.x), v[1] += a * high(p.x);
                    v[2] += a * low(p.y), v[3] += a * high(p.y);
                    v[4] += a * low(p.z), v[5] += a * high(p.z);
                    v[6] += a * low(p.w), v[7] += a * high(p.w);
                }
                // Lanes share the columns out among them while they add.
#pragma unroll
                for (int half = 4; half; half /= 2) {
                    int bit = 4 / half * LANES;
#pragma unroll
                    for (int i = 0; i < half; i++) {
                        bool upper = lane & bit;
                        float give = upper ? v[i] : v[i + half];
                        float keep = upper ? v[i + half] : v[i];
                        v[i] = keep + __shfl_xor_sync(~0u, give, bit);
                    }
                }
#pragma unroll
                for (int step = 8 * LANES; step < 32; step *= 2)
                    v[0] += __shfl_xor_sync(~0u, v[0], step);
                int place = lane / LANES;
                if (place < 8) {
                    int at = lane % LANES * 8 + (place & 1) * 4 + (place & 2) + (place & 4) / 4;
                    sums[((e * B + b) * W + at) * WARPS + warp] = v[0];
                }
            }
        }
        __syncthreads();
        float total = 0;
        if (mine)
            for (int i = 0; i < WARPS; i++) total += sums[threadIdx.x * WARPS + i];
        return total;
    }
};

// layernorm of [B, C].
struct Norm {
    float gamma[EACH_C], beta[EACH_C];

    __device__ void ask(const float *gammas, const float *betas) {
#pragma unroll
        for (int i = 0; i < EACH_C; i++) {
            int c = min(threadIdx.x + i * THREADS, C - 1);
            gamma[i] = fetch(gammas + c), beta[i] = fetch(betas + c);
        }
    }

    __device__ void operator()(const u16 *h, float eps, float *x, float *sums) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        float value[B][EACH_C];
#pragma unroll
        for (int b = 0; b < B; b++)
#pragma unroll
            for (int i = 0; i < EACH_C; i++) {
                int c = threadIdx.x + i * THREADS;
                value[b][i] = c < C ? number(__ldcg(h + b * C + c)) : 0.0f;
            }
#pragma unroll
        for (int b = 0; b < B; b++) {
            float total = 0;
            for (int i = 0; i < EACH_C; i++) total += value[b][i];
            total = warp_sum(total);
            if (lane == 0) sums[b * WARPS + warp] = total;
        }
        __syncthreads();
        float mean[B];
#pragma unroll
        for (int b = 0; b < B; b++) {
            mean[b] = 0;
            for (int i = 0; i < WARPS; i++) mean[b] += sums[b * WARPS + i];
            mean[b] /= C;
            float squares = 0;
            for (int i = 0; i < EACH_C; i++) {
                float from = threadIdx.x + i * THREADS < C ? value[b][i] - mean[b] : 0.0f;
                squares += from * from;
            }
            squares = warp_sum(squares);
            if (lane == 0) sums[(B + b) * WARPS + warp] = squares;
        }
        __syncthreads();
#pragma unroll
        for (int b = 0; b < B; b++) {
            float variance = 0;
            for (int i = 0; i < WARPS; i++) variance += sums[(B + b) * WARPS + i];
            float scale = rsqrtf(variance / C + eps);
            for (int i = 0; i < EACH_C; i++) {
                int c = threadIdx.x + i * THREADS;
                if (c < C)
                    x[b * C + c] = as_bfloat16((value[b][i] - mean[b]) * scale * gamma[i] + beta[i]);
            }
        }
        __syncthreads();
    }
};

// A span of keys and values of one head of one sample: the rows of this thread.
struct Span {
    uint4 k[ROWS], v[ROWS];

    // The rows from position `from` up to `stop`.
    __device__ void ask(const u16 *keys, const u16 *values, int first, int from, int stop) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            int j = first + threadIdx.x / GROUPS + r * AT_ONCE;
            if (j >= from && j < stop) {
                long long at = (long long)j * D + threadIdx.x % GROUPS * 8;
                k[r] = __ldcg((const uint4 *)(keys + at));
                v[r] = __ldcg((const uint4 *)(values + at));
            }
        }
    }

    // Its part of the head's output, not yet divided by the sum of probabilities.
    __device__ void attend(const u16 *q, int first, int stop, float *part, float *room) {
        float *tops = room, *totals = room + WARPS, *adding = room + 2 * WARPS;
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = threadIdx.x % GROUPS;
        uint4 a = __ldcg((const uint4 *)(q + group * 8));
        float score[ROWS], top = -1e30f, total = 0;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float sum = low(a.x) * low(k[r].x) + high(a.x) * high(k[r].x) +
                        low(a.y) * low(k[r].y) + high(a.y) * high(k[r].y) +
                        low(a.z) * low(k[r].z) + high(a.z) * high(k[r].z) +
                        low(a.w) * low(k[r].w) + high(a.w) * high(k[r].w);
#pragma unroll
            for (int step = GROUPS / 2; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            bool visible = first + threadIdx.x / GROUPS + r * AT_ONCE < stop;
            score[r] = visible ? sum * (rsqrtf(D) * LOG2_E) : -1e30f;
            top = fmaxf(top, score[r]);
        }
        top = warp_max(top);
        if (lane == 0) tops[warp] = top;
        __syncthreads();
        for (int i = 0; i < WARPS; i++) top = fmaxf(top, tops[i]);
        float o[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (first + threadIdx.x / GROUPS + r * AT_ONCE < stop) {
                float p = exp2f(score[r] - top);
                total += p;
                o[0] += p * low(v[r].x), o[1] += p * high(v[r].x);
                o[2] += p * low(v[r].y), o[3] += p * high(v[r].y);
                o[4] += p * low(v[r].z), o[5] += p * high(v[r].z);
                o[6] += p * low(v[r].w), o[7] += p * high(v[r].w);
            }
        }
#pragma unroll
        for (int step = GROUPS; step < 32; step *= 2) {
            total += __shfl_xor_sync(~0u, total, step);
#pragma unroll
            for (int i = 0; i < 8; i++) o[i] += __shfl_xor_sync(~0u, o[i], step);
        }
        if (lane == 0) totals[warp] = total;
        if (lane < GROUPS)
            for (int i = 0; i < 8; i++) adding[warp * D + group * 8 + i] = o[i];
        __syncthreads();
        if (threadIdx.x < D) {
            float sum = 0;
            for (int i = 0; i < WARPS; i++) sum += adding[i * D + threadIdx.x];
            part[threadIdx.x] = sum;
        }
        if (threadIdx.x == D % THREADS) {
            total = 0;
            for (int i = 0; i < WARPS; i++) total += totals[i];
            part[D] = top, part[D + 1] = total;
        }
        __syncthreads();
    }
};

// x = the attention's output [B, C], out of the spans' parts.
__device__ void join(const float *parts, float *x, float *shares) {
    for (int b = 0; b < B; b++) {
        const float *here = parts + (long long)b * H * S * PART;
        float value[EACH_C][S];
#pragma unroll
        for (int i = 0; i < EACH_C; i++) {
            int c = min(threadIdx.x + i * THREADS, C - 1);
#pragma unroll
            for (int s = 0; s < S; s++) value[i][s] = __ldcg(here + (c / D * S + s) * PART + c % D);
        }
        if (threadIdx.x < H) {
            float tops[S], totals[S], top = -1e30f, total = 0;
#pragma unroll
            for (int s = 0; s < S; s++) {
                const float *part = here + (threadIdx.x * S + s) * PART + D;
                tops[s] = __ldcg(part), totals[s] = __ldcg(part + 1);
            }
#pragma unroll
            for (int s = 0; s < S; s++) top = fmaxf(top, tops[s]);
#pragma unroll
            for (int s = 0; s < S; s++) total += totals[s] * exp2f(tops[s] - top);
#pragma unroll
            for (int s = 0; s < S; s++)
                shares[threadIdx.x * S + s] = exp2f(tops[s] - top) / total;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < EACH_C; i++) {
            int c = threadIdx.x + i * THREADS;
            if (c < C) {
                float sum = 0;
#pragma unroll
                for (int s = 0; s < S; s++) sum += value[i][s] * shares[c / D * S + s];
                x[b * C + c] = as_bfloat16(sum);
            }
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) block(
    const u16 *h, const float *gamma_1, const float *beta_1, const u16 *w_attn, const u16 *b_attn,
    const u16 *w_proj, const u16 *b_proj, const float *gamma_2, const float *beta_2,
    const u16 *w_fc, const u16 *b_fc, const u16 *w_out, const u16 *b_out, u16 *k_cache,
    u16 *v_cache, const long long *pos, u16 *out, u16 *q, float *parts, u16 *middle, u16 *wide,
    u64 *arrivals, float eps
) {
    extern __shared__ float x[];
    float *room = x + B * F;
    Meeting meeting(arrivals);
    Norm norm;
    norm.ask(gamma_1, beta_1);
    Product<C, 3 * C, 16> attn;
    attn.ask(w_attn, b_attn);
    int item = blockIdx.x, position = (int)pos[min(item / S, B * H - 1) / H];
    long long place = attn.mine ? pos[attn.sample] : 0;
    norm(h, eps, x, room);
    float sum = attn.multiply(x, room);
    if (attn.mine) {
        u16 value = rounded(sum + attn.bias);
        int b = attn.sample, c = attn.column % C;
        long long at = ((long long)(b * H + c / D) * N + place) * D + c % D;
        if (attn.column < C) q[b * C + c] = value;
        else (attn.column < 2 * C ? k_cache : v_cache)[at] = value;
    }
    meeting.arrive();
    Span span;
    if (item < B * H * S) {
        int row = item / S, first = item % S * SPAN;
        long long cache = (long long)row * N * D;
        span.ask(k_cache + cache, v_cache + cache, first, 0, position);
    }
    Product<C, C, 8> proj;
    proj.ask(w_proj, b_proj);
    float before = proj.mine ? fetch(h + proj.sample * C + proj.column) : 0.0f;
    meeting.wait();

    for (int known = position; item < B * H * S; item += BLOCKS) {
        int row = item / S, first = item % S * SPAN;
        if (item != blockIdx.x) known = 0, position = (int)pos[row / H];
        long long cache = (long long)row * N * D;
        span.ask(k_cache + cache, v_cache + cache, first, known, position + 1);
        float *part = parts + (long long)item * PART;
        span.attend(q + row * D, first, min(position + 1, first + SPAN), part, room);
    }
    meeting.arrive();
    Product<C, F, 16> fc;
    fc.ask(w_fc, b_fc);
    norm.ask(gamma_2, beta_2);
    meeting.wait();

    join(parts, x, room);
    float branch = as_bfloat16(proj.multiply(x, room));
    before = as_bfloat16(before + branch + proj.bias);
    if (proj.mine) middle[proj.sample * C + proj.column] = rounded(before);
    meeting.arrive();
    Product<F, C, 8> last;
    last.ask(w_out, b_out);
    meeting.wait();

    norm(middle, eps, x, room);
    sum = fc.multiply(x, room);
    if (fc.mine) wide[fc.sample * F + fc.column] = rounded(gelu(as_bfloat16(sum + fc.bias)));
    meeting.arrive();
    meeting.wait();

    constexpr int LOADS = (B * F / 8 + THREADS - 1) / THREADS;
    uint4 loaded[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++)
        loaded[i] = __ldcg((const uint4 *)wide + min(threadIdx.x + i * THREADS, B * F / 8 - 1));
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        int at = min(threadIdx.x + i * THREADS, B * F / 8 - 1) * 8;
        x[at] = low(loaded[i].x), x[at + 1] = high(loaded[i].x);
        x[at + 2] = low(loaded[i].y), x[at + 3] = high(loaded[i].y);
        x[at + 4] = low(loaded[i].z), x[at + 5] = high(loaded[i].z);
        x[at + 6] = low(loaded[i].w), x[at + 7] = high(loaded[i].w);
    }
    __syncthreads();
    // The strips of `last` are those of `proj`: this thread made the sum that it adds to.
    branch = as_bfloat16(last.multiply(x, room));
    if (last.mine) out[last.sample * C + last.column] = rounded(before + branch + last.bias);
}

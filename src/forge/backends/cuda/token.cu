// The logits of one new position of every sample through a whole GPT-2, in one launch of a thread
// block per multiprocessor.
//
// Every phase needs all of the one before, five times in each of L blocks of the model, so what
// counts is how soon a result is known everywhere. There is no barrier: results are sent as words
// into a mailbox in memory that was EMPTY, and whoever needs a word reads it until it is there.
// That is one way through L2, where a barrier takes three. Each block of the model has its own
// mailbox, and a launch clears those of the next one, which alternate between two sets.
//
// Weights are copied to shared memory one product ahead or two, while results are on their way, out
// of L2, where they have been brought a block of the model ahead, little by little.
//
// B samples, C width, H heads of width D, F = 4 C, V tokens, N room in the caches [B, H, N, D], in
// up to S spans of SPAN keys; the rows of products with few columns are in SPLIT parts. Weights are
// bfloat16 [in, out], gamma and beta float32. Sums are float32, in a fixed order: over the rows of
// a thread, then over lanes, over warps, and over thread blocks.

#include "machine.cuh"

__device__ constexpr int up(int a, int b) { return (a + b - 1) / b; }
__device__ constexpr int least(int a, int b) { return a < b ? a : b; }
__device__ constexpr int most(int a, int b) { return a > b ? a : b; }

constexpr int WARPS = THREADS / 32, D = C / H, F = 4 * C;
// Columns of a product's strip.
constexpr int STRIP = 32;
// Spans whose parts are read together.
constexpr int TOGETHER = 4;
constexpr float LOG2_E = 1.4426950408889634f;

struct Block {
    const float *gamma_1, *beta_1;
    const u16 *w_attn, *b_attn, *w_proj, *b_proj;
    const float *gamma_2, *beta_2;
    const u16 *w_fc, *b_fc, *w_out, *b_out;
    u16 *k_cache, *v_cache;
};

struct Blocks {
    Block at[L];
};

// Words: queries, keys and values in pairs; parts of spans, each with its largest score and its sum
// of probabilities; parts of products; the MLP in pairs. What a warp sends fills sectors of 32
// bytes: for one that is written in parts, memory would have to be asked for the rest.
struct Mailbox {
    u32 qkv[B * 3 * C / 2], spans[B * H * S][D + 8], proj[SPLIT * B * C], wide[B * F / 2];
    u32 out[SPLIT * B * C];
};

__device__ float gelu(float x) {
    float slope = 0.7978845608028654f * (1.0f + 0.044715f * x * x);
    return __fdividef(x, 1.0f + exp2f(-2.0f * LOG2_E * slope * x));
}

__device__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

__device__ void unpack(uint4 pairs, float *x) {
    x[0] = low(pairs.x), x[1] = high(pairs.x), x[2] = low(pairs.y), x[3] = high(pairs.y);
    x[4] = low(pairs.z), x[5] = high(pairs.z), x[6] = low(pairs.w), x[7] = high(pairs.w);
}

__device__ float4 floats(uint4 x) {
    return float4{
        __uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)
    };
}

#include "token_product.cuh"

#include "token_attention.cuh"

#include "token_stream.cuh"

struct alignas(16) Shared {
    Blocks blocks;
    Staged staged[2];
    Span span;
    u16 x[B * F];
    float sums[WARPS * B * STRIP * up(F / STRIP, BLOCKS)];
    float2 moments[B][WARPS];
    float spans[WARPS][D + 2];
    int pos[B];
};

static_assert(sizeof(Mailbox) == MAILBOX && sizeof(Shared) == SHARED, "as token.py has them");

// This thread block's share of all mailboxes, which the next launch fills.
__device__ void clear(Mailbox *boxes) {
    uint4 *words = (uint4 *)boxes;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < L * MAILBOX / 16; i += BLOCKS * THREADS)
        words[i] = uint4{EMPTY, EMPTY, EMPTY, EMPTY};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) token(
    const long long *ids, const long long *pos, const u16 *wte, const u16 *wpe,
    const float *gamma, const float *beta, u16 *logits, u32 *turns, Mailbox *mail, int N,
    float eps, const __grid_constant__ Blocks pointers
) {
    extern __shared__ uint4 memory[];
    Shared &shared = *(Shared *)memory;
    Span &span = shared.span;
    u16 *x = shared.x;
    // Spans are given out from the end, for products are from the beginning.
    int mine = BLOCKS - 1 - blockIdx.x;
    // At hand, where parameters come from memory when they are first used.
    Blocks &blocks = shared.blocks;
    for (int i = threadIdx.x; i < sizeof(Blocks) / 8; i += THREADS)
        ((u64 *)&blocks)[i] = ((const u64 *)&pointers)[i];
    u32 turn = turns[blockIdx.x] + 1;
    Mailbox *boxes = mail + turn % 2 * L;

    Product<C, 3 * C, 1> attn(shared.staged[0]);
    Product<C, C, SPLIT> proj(shared.staged[1]);
    Product<C, F, 1> fc(shared.staged[0]);
    Product<F, C, SPLIT> out(shared.staged[1]);
    Affine norm;
    Stream h;
    if (threadIdx.x < B) shared.pos[threadIdx.x] = (int)pos[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) turns[blockIdx.x] = turn;
    attn.ask(blocks.at[0].w_attn, blocks.at[0].b_attn);
    span.ask(blocks.at[0], N, mine, shared.pos);
    proj.ask(blocks.at[0].w_proj);
    norm.ask(blocks.at[0].gamma_1, blocks.at[0].beta_1);
    h.start(ids, wte, wpe, shared.pos);
    clear(mail + (turn + 1) % 2 * L);
    bring(boxes[0]);

#pragma unroll 1
    for (int l = 0; l < L; l++) {
        const Block &block = blocks.at[l], &after = blocks.at[least(l + 1, L - 1)];
        Mailbox &box = boxes[l];

        h.normalise(norm, eps, x, shared.moments);
        bring<0>(after);
        float sum = attn.multiply<1>(block.w_attn, x, shared.sums) + attn.bias;
        bring<1>(after);
        float right = __shfl_down_sync(~0u, sum, 1);
        if (attn.mine) {
            int c = attn.column % C, b = attn.sample;
            if (c % 2 == 0) send(box.qkv + (b * 3 * C + attn.column) / 2, pair(sum, right));
            long long row = (b * H + c / D) * (long long)N + shared.pos[b];
            u16 *cache = attn.column < 2 * C ? block.k_cache : block.v_cache;
            if (attn.column >= C) cache[row * D + c % D] = rounded(sum);
        }
        fc.ask(block.w_fc, block.b_fc);
        norm.ask(block.gamma_2, block.beta_2, block.b_proj);
        bring<2>(after);

        for (int item = mine; item < B * H * S; item += BLOCKS) {
            if (item != mine) {
                __syncthreads();
                span.ask(block, N, item, shared.pos);
                copies_end();
            }
            copies_wait<0>();
            span.attend(item, shared.pos, box, shared.spans);
        }
        bring<3>(after);
        span.bring(after, N, mine, shared.pos);
        bring(boxes[least(l + 1, L - 1)]);

        if (proj.any) {
            join<proj.PART>(box, proj.first(), proj.rows, shared.pos, x);
            sum = proj.multiply<1>(block.w_proj, x, shared.sums);
            if (proj.mine) send(box.proj + proj.place(), sum);
        }
        bring<4>(after);
        out.ask(block.w_out);

        h.add(box.proj, norm);
        bring<5>(after);
        h.normalise(norm, eps, x, shared.moments);
        bring<6>(after);
        sum = gelu(as_bfloat16(fc.multiply<1>(block.w_fc, x, shared.sums) + fc.bias));
        bring<7>(after);
        right = __shfl_down_sync(~0u, sum, 1);
        if (fc.mine && fc.column % 2 == 0)
            send(box.wide + (fc.sample * F + fc.column) / 2, pair(sum, right));
        bool last = l == L - 1;
        norm.ask(last ? gamma : after.gamma_1, last ? beta : after.beta_1, block.b_out);
        bring<8>(after);

        if (out.any) {
            collect<out.PART>(box.wide, out.first(), out.rows, x);
            bring<9>(after);
            sum = out.multiply<0>(block.w_out, x, shared.sums);
            if (out.mine) send(box.out + out.place(), sum);
        }
        bring<10>(after);
        attn.ask(after.w_attn, after.b_attn);
        span.ask(after, N, mine, shared.pos);
        proj.ask(after.w_proj);
        h.add(box.out, norm);
        bring<11>(after);
    }
    Head head(wte);
    h.normalise(norm, eps, x, shared.moments);
    head.multiply(wte, x, logits);
}

// The logits of one new position of every sample through a whole GPT-2, in one launch of a thread
// block per multiprocessor.
//
// Every phase needs all of the one before, five times in each of L blocks of the model, so what
// counts is how soon a result is known everywhere. There is no barrier: results are sent as words
// into a mailbox in memory that was EMPTY, and whoever needs a word reads it until it is there. That
// is one way through L2, where a barrier takes three. Each block of the model has its own mailbox,
// and a launch clears those of the next one, which alternate between two sets.
//
// Weights are asked for a phase before they are used, and have been brought to L2 a block before.
//
// B samples, C width, H heads of width D, F = 4 C, V tokens, N room in the caches [B, H, N, D], S
// spans of SPAN keys; the rows of products with few columns are in SPLIT parts. Weights are bfloat16 [in, out], gamma and beta float32. Sums are float32, in
// a fixed order: over the rows of a thread, then over lanes, over warps, and over thread blocks.

#include "machine.cuh"

__device__ constexpr int up(int a, int b) { return (a + b - 1) / b; }
__device__ constexpr int least(int a, int b) { return a < b ? a : b; }
__device__ constexpr int most(int a, int b) { return a > b ? a : b; }

constexpr int WARPS = THREADS / 32, D = C / H, F = 4 * C, S = up(N, SPAN);
// Columns of a product's strip, which make a sector of 32 bytes, and vectors of weights that a
// thread asks for in advance.
constexpr int STRIP = 16, AHEAD = 12;
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

// Words: queries, keys and values in pairs; parts of spans; parts of products; the MLP in pairs.
struct Mailbox {
    u32 qkv[B * 3 * C / 2], spans[B * H * S * D], proj[SPLIT * B * C], wide[B * F / 2];
    u32 out[SPLIT * B * C], tops[up(B * H * S, 2) * 4];
};

struct Shared {
    u16 x[B * F];
    float sums[WARPS * B * STRIP * most(1, up(F / STRIP, BLOCKS))];
    float moments[B][WARPS][2], spans[WARPS][D + 2];
    int pos[B];
};

static_assert(sizeof(Mailbox) == MAILBOX && sizeof(Shared) == SHARED, "as token.py has them");

#include "token_parts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) token(
    const long long *ids, const long long *pos, const u16 *wte, const u16 *wpe,
    const float *gamma, const float *beta, u16 *logits, u32 *turns, Mailbox *mail, float eps,
    const __grid_constant__ Blocks blocks
) {
    extern __shared__ uint4 memory[];
    Shared &shared = *(Shared *)memory;
    u16 *x = shared.x;
    u32 turn = turns[blockIdx.x] + 1;
    Mailbox *full = mail + turn % 2 * L, *next = mail + (turn + 1) % 2 * L;

    Product<C, 3 * C, 1> attn;
    attn.ask(blocks.at[0].w_attn, blocks.at[0].b_attn);
    Affine norm;
    norm.ask(blocks.at[0].gamma_1, blocks.at[0].beta_1);
    if (threadIdx.x < B) shared.pos[threadIdx.x] = (int)pos[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) turns[blockIdx.x] = turn;
    Span span;
    span.ask(blocks.at[0], blockIdx.x, shared.pos);
    Stream h;
    h.start(ids, wte, wpe, shared.pos);

    for (int l = 0; l < L; l++) {
        const Block &block = blocks.at[l], &after = blocks.at[least(l + 1, L - 1)];
        Mailbox &box = full[l];

        h.normalise(norm, eps, x, shared.moments);
        float sum = attn.multiply(block.w_attn, x, shared.sums) + attn.bias;
        float right = __shfl_down_sync(~0u, sum, 1);
        if (attn.mine) {
            int c = attn.column % C;
            if (c % 2 == 0) send(box.qkv + (attn.sample * 3 * C + attn.column) / 2, pair(sum, right));
            long long row = (attn.sample * H + c / D) * (long long)N + shared.pos[attn.sample];
            if (attn.column >= C)
                (attn.column < 2 * C ? block.k_cache : block.v_cache)[row * D + c % D] = rounded(sum);
        }
        Product<C, C, SPLIT> proj;
        proj.ask(block.w_proj);
        attn.prefetch(after.w_attn);

        for (int item = blockIdx.x; item < B * H * S; item += BLOCKS) {
            if (item != blockIdx.x) span.ask(block, item, shared.pos);
            span.attend(item, shared.pos, box, shared.spans);
        }
        Product<C, F, 1> fc;
        fc.ask(block.w_fc, block.b_fc);
        norm.ask(block.gamma_2, block.beta_2, block.b_proj);
        proj.prefetch(after.w_proj);
        span.prefetch(after, blockIdx.x, shared.pos);
        clear(next + l);

        if (proj.any()) {
            join<proj.PART>(box, proj.first(), proj.rows(), shared.pos, x);
            sum = proj.multiply(block.w_proj, x, shared.sums);
            if (proj.mine) send(box.proj + proj.place(), sum);
        }
        Product<F, C, SPLIT> out;
        out.ask(block.w_out);
        fc.prefetch(after.w_fc);

        h.add(box.proj, norm);
        h.normalise(norm, eps, x, shared.moments);
        sum = gelu(as_bfloat16(fc.multiply(block.w_fc, x, shared.sums) + fc.bias));
        right = __shfl_down_sync(~0u, sum, 1);
        if (fc.mine && fc.column % 2 == 0)
            send(box.wide + (fc.sample * F + fc.column) / 2, pair(sum, right));
        attn.ask(after.w_attn, after.b_attn);
        bool last = l == L - 1;
        norm.ask(last ? gamma : after.gamma_1, last ? beta : after.beta_1, block.b_out);
        span.ask(after, blockIdx.x, shared.pos);
        out.prefetch(after.w_out);

        if (out.any()) {
            collect<out.PART>(box.wide, out.first(), out.rows(), x);
            sum = out.multiply(block.w_out, x, shared.sums);
            if (out.mine) send(box.out + out.place(), sum);
        }
        h.add(box.out, norm);
    }
    Head head(wte);
    h.normalise(norm, eps, x, shared.moments);
    head.multiply(wte, x, logits);
}

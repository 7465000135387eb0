// Products of a few rows x [B, K] with a matrix [K, M], of which every thread block has some strips
// of columns.

// Weights on their way, AHEAD vectors a thread.
typedef uint4 Staged[AHEAD][THREADS];

// A product in strips of STRIP columns and PARTS parts of the rows. A thread has 8 columns of every
// so manieth row, and ends up with one sum at most, of one sample and column.
template <int K, int M, int PARTS>
struct Product {
    static constexpr int STRIPS = M / STRIP, TASKS = STRIPS * PARTS, EACH = up(TASKS, BLOCKS);
    static constexpr int PART = up(K, 8 * PARTS) * 8, SUMS = EACH * B * STRIP;
    // Lanes that share a row, rows at a time, and times.
    static constexpr int LANES = STRIP / 8, STEP = THREADS / LANES, TIMES = up(PART, STEP);
    static constexpr bool EVEN = PART * PARTS == K && PART % STEP == 0;
    static_assert(SUMS <= THREADS, "one sum a thread at most");
    static_assert(PARTS == 1 || EACH == 1, "rows of one part in a thread block");
    static_assert((PARTS - 1) * PART < K, "no empty part");
    Staged &staged;
    float bias;
    int part, rows, sample, column;
    bool any, mine;

    __device__ Product(Staged &staged) : staged(staged) {
        int task = blockIdx.x + threadIdx.x / (B * STRIP) * BLOCKS;
        part = PARTS == 1 ? 0 : blockIdx.x / STRIPS;
        rows = EVEN ? PART : least(PART, K - first());
        any = blockIdx.x < TASKS;
        mine = threadIdx.x < SUMS && task < TASKS;
        sample = threadIdx.x / STRIP % B;
        column = task % STRIPS * STRIP + threadIdx.x % STRIP;
    }

    // The first row of this thread block.
    __device__ int first() const { return part * PART; }
    // Where the sum goes in [PARTS, B, M].
    __device__ int place() const { return (part * B + sample) * M + column; }
    // How many strips this thread block has.
    __device__ static int strips() {
        return TASKS % BLOCKS == 0 ? EACH : up(TASKS - blockIdx.x, BLOCKS);
    }

    // Weights of this thread in its e-th strip, for the r-th time.
    __device__ const u16 *weights(const u16 *w, int e, int r) const {
        int strip = (blockIdx.x + e * BLOCKS) % STRIPS, row = threadIdx.x / LANES;
        if (!EVEN) row = least(row + r * STEP, rows - 1) - r * STEP;
        w += (first() + row) * (long long)M + strip * STRIP + threadIdx.x % LANES * 8;
        return w + r * STEP * M;
    }

    // Begin to copy the weights that there is room for.
    __device__ void ask(const u16 *w) const {
#pragma unroll 1
        for (int e = 0; e < strips(); e++)
#pragma unroll
            for (int r = 0; r < TIMES; r++)
                if (EACH * TIMES <= AHEAD || e * TIMES + r < AHEAD)
                    copy(&staged[e * TIMES + r][threadIdx.x], weights(w, e, r));
        copies_end();
    }

    __device__ void ask(const u16 *w, const u16 *biases) {
        ask(w);
        bias = mine ? fetch(biases + column) : 0.0f;
    }

    // The sum of x[sample][k] w[k][column] over the rows; x [B, PART] begins at the first of them.
    // LATER groups of copies have been asked for since these weights, at most.
    template <int LATER>
    __device__ float multiply(const u16 *w, const u16 *x, float *sums) const {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        copies_wait<LATER>();
#pragma unroll 1
        for (int e = 0; e < strips(); e++) {
            float v[B][8] = {};
#pragma unroll 3
            for (int r = 0; r < TIMES; r++) {
                int i = e * TIMES + r, row = r * STEP + threadIdx.x / LANES;
                bool here = EACH * TIMES <= AHEAD || i < AHEAD;
                float p[8];
                unpack(here ? staged[i][threadIdx.x] : fetch((const uint4 *)weights(w, e, r)), p);
#pragma unroll
                for (int b = 0; b < B; b++) {
                    float a = EVEN || row < rows ? low(x[b * PART + row]) : 0.0f;
#pragma unroll
                    for (int j = 0; j < 8; j++) v[b][j] += a * p[j];
                }
            }
#pragma unroll
            for (int b = 0; b < B; b++) {
                // Lanes of different rows share the columns out among them while they add.
#pragma unroll
                for (int half = 4; half; half /= 2) {
                    bool upper = lane & (16 / half);
#pragma unroll
                    for (int j = 0; j < half; j++) {
                        float give = upper ? v[b][j] : v[b][j + half];
                        float keep = upper ? v[b][j + half] : v[b][j];
                        v[b][j] = keep + __shfl_xor_sync(~0u, give, 16 / half);
                    }
                }
                int at = lane % LANES * 8 + (lane & 4) + (lane & 8) / 4 + lane / 16;
                sums[warp * SUMS + (e * B + b) * STRIP + at] = v[b][0];
            }
        }
        __syncthreads();
        float total = 0;
        if (mine)
#pragma unroll
            for (int i = 0; i < WARPS; i++) total += sums[i * SUMS + threadIdx.x];
        return total;
    }
};

// The i-th of n pieces of this thread block's share of a matrix of `count` weights, into L2.
__device__ void bring(const u16 *w, int count, int i, int n) {
    int bytes = up(2 * count, BLOCKS * n * 128) * 128, start = (blockIdx.x * n + i) * bytes;
    if (start < 2 * count) prefetch((const char *)w + start, least(bytes, 2 * count - start));
}

// Have the next block's weights brought to L2, in twelve steps: all at once they would keep the
// memory busy, and what is wanted now would wait in the same queues. The last warp does it, which
// has nothing to do with the norms of most models.
template <int STEP>
__device__ void bring(const Block &block) {
    if (threadIdx.x < THREADS - 32) return;
    if (STEP < 3) bring(block.w_attn, 3 * C * C, STEP, 3);
    if (STEP == 3) bring(block.w_proj, C * C, 0, 1);
    if (STEP >= 4 && STEP < 8) bring(block.w_fc, C * F, STEP - 4, 4);
    if (STEP >= 8) bring(block.w_out, F * C, STEP - 8, 4);
}

// And its mailbox, which may not be there any more.
__device__ void bring(const Mailbox &box) {
    if (threadIdx.x < THREADS - 32) return;
    bring((const u16 *)&box, MAILBOX / 2, 0, 1);
}

// The parts of token.cu: products, the residual stream and its norm, attention, and the head. Every
// one says what it will need, by `ask`, before the results that it needs are there.

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

__device__ void unpack(uint4 pairs, float *x) {
    x[0] = low(pairs.x), x[1] = high(pairs.x), x[2] = low(pairs.y), x[3] = high(pairs.y);
    x[4] = low(pairs.z), x[5] = high(pairs.z), x[6] = low(pairs.w), x[7] = high(pairs.w);
}

// This thread block's share of a mailbox, to be filled by the next launch.
__device__ void clear(Mailbox *box) {
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < sizeof(Mailbox) / 16; i += BLOCKS * THREADS)
        ((uint4 *)box)[i] = uint4{EMPTY, EMPTY, EMPTY, EMPTY};
}

// A product with a matrix [K, M] in strips of columns and PARTS parts of the rows. A thread has 8
// columns of every so manieth row, and ends up with one sum at most, of one sample and column.
template <int K, int M, int PARTS>
struct Product {
    static constexpr int STRIPS = M / STRIP, TASKS = STRIPS * PARTS, EACH = up(TASKS, BLOCKS);
    static constexpr int PART = up(K, 8 * PARTS) * 8, STEP = THREADS / 2, TIMES = up(PART, STEP);
    static constexpr int SUMS = EACH * B * STRIP, COUNT = EACH * TIMES, KEPT = least(COUNT, AHEAD);
    static_assert(SUMS <= THREADS, "one sum a thread at most");
    static_assert(PARTS == 1 || EACH == 1, "rows of one part in a thread block");
    uint4 kept[KEPT];
    float bias;
    int sample, column;
    bool mine;

    __device__ static bool any() { return blockIdx.x < TASKS; }
    // The rows of this thread block, and how many they are.
    __device__ static int first() { return PARTS == 1 ? 0 : blockIdx.x / STRIPS * PART; }
    __device__ static int rows() {
        return K == PART * PARTS ? PART : most(0, least(PART, K - first()));
    }
    // Where the sum goes in [PARTS, B, M].
    __device__ int place() const { return (blockIdx.x / STRIPS * B + sample) * M + column; }

    // The i-th vector of weights of this thread, or none.
    __device__ static const uint4 *vector(const u16 *w, int i) {
        int task = blockIdx.x + i / TIMES * BLOCKS, row = i % TIMES * STEP + threadIdx.x / 2;
        if (task >= TASKS || row >= rows()) return nullptr;
        long long k = first() + row;
        return (const uint4 *)(w + k * M + task % STRIPS * STRIP + threadIdx.x % 2 * 8);
    }

    __device__ static uint4 weights(const u16 *w, int i) {
        const uint4 *from = vector(w, i);
        return from ? fetch(from) : uint4{0, 0, 0, 0};
    }

    __device__ void ask(const u16 *w, const u16 *biases = nullptr) {
#pragma unroll
        for (int i = 0; i < KEPT; i++) kept[i] = weights(w, i);
        int task = blockIdx.x + threadIdx.x / (B * STRIP) * BLOCKS;
        mine = threadIdx.x < SUMS && task < TASKS;
        sample = threadIdx.x / STRIP % B;
        column = task % STRIPS * STRIP + threadIdx.x % STRIP;
        bias = mine && biases ? fetch(biases + column) : 0.0f;
    }

    __device__ static void prefetch(const u16 *w) {
        if (threadIdx.x % 2) return;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (const uint4 *from = vector(w, i)) ::prefetch(from);
    }

    // The sum of x[sample][k] w[k][column] over the rows; x [B, PART] begins at the first of them.
    __device__ float multiply(const u16 *w, const u16 *x, float *sums) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            float v[B][8] = {};
#pragma unroll
            for (int r = 0; r < TIMES; r++) {
                int i = e * TIMES + r, row = r * STEP + threadIdx.x / 2;
                float p[8];
                unpack(i < KEPT ? kept[i < KEPT ? i : 0] : weights(w, i), p);
#pragma unroll
                for (int b = 0; b < B; b++) {
                    float a = row < rows() ? low(x[b * PART + row]) : 0.0f;
#pragma unroll
                    for (int j = 0; j < 8; j++) v[b][j] += a * p[j];
                }
            }
#pragma unroll
            for (int b = 0; b < B; b++) {
                // Lanes share the columns out among them while they add.
#pragma unroll
                for (int half = 4; half; half /= 2) {
                    bool upper = lane & (8 / half);
#pragma unroll
                    for (int j = 0; j < half; j++) {
                        float give = upper ? v[b][j] : v[b][j + half];
                        float keep = upper ? v[b][j + half] : v[b][j];
                        v[b][j] = keep + __shfl_xor_sync(~0u, give, 8 / half);
                    }
                }
                v[b][0] += __shfl_xor_sync(~0u, v[b][0], 16);
                int at = lane % 2 * 8 + (lane & 2) * 2 + (lane & 4) / 2 + (lane & 8) / 8;
                if (lane < 16) sums[warp * SUMS + (e * B + b) * STRIP + at] = v[b][0];
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

// Columns of the stream and its norm that a thread has: 8 at a time, in EACH places.
constexpr int VECTORS = C / 8, EACH = up(VECTORS, THREADS), NORM_WARPS = least(WARPS, up(VECTORS, 32));

// The weights of a norm, and the bias of what is added before it.
struct Affine {
    uint4 gamma[EACH][2], beta[EACH][2], bias[EACH];

    __device__ void ask(const float *gammas, const float *betas, const u16 *biases = nullptr) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int at = least(threadIdx.x + i * THREADS, VECTORS - 1);
            for (int k = 0; k < 2; k++) {
                gamma[i][k] = fetch((const uint4 *)gammas + 2 * at + k);
                beta[i][k] = fetch((const uint4 *)betas + 2 * at + k);
            }
            if (biases) bias[i] = fetch((const uint4 *)biases + at);
        }
    }
};

// The residual stream [B, C], which every thread block has whole.
struct Stream {
    float value[B][EACH][8];

    __device__ static int at(int i) { return threadIdx.x + i * THREADS; }

    // Embeddings of tokens and positions.
    __device__ void start(const long long *ids, const u16 *wte, const u16 *wpe, const int *pos) {
#pragma unroll
        for (int b = 0; b < B; b++)
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                int c = least(at(i), VECTORS - 1) * 8;
                float token[8], place[8];
                unpack(fetch((const uint4 *)(wte + ids[b] * C + c)), token);
                unpack(fetch((const uint4 *)(wpe + (long long)pos[b] * C + c)), place);
                for (int j = 0; j < 8; j++) value[b][i][j] = as_bfloat16(token[j] + place[j]);
            }
    }

    // Add a branch, whose parts [SPLIT, B, C] arrive, and its bias.
    __device__ void add(const u32 *branch, const Affine &affine) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (at(i) >= VECTORS) break;
            constexpr int WORDS = B * SPLIT * 2;
            uint4 words[WORDS];
            bool waiting;
            do {
                waiting = false;
#pragma unroll
                for (int n = 0; n < WORDS; n++)
                    words[n] = peek4(branch + (n / 2 % SPLIT * B + n / 2 / SPLIT) * C + at(i) * 8 + n % 2 * 4);
#pragma unroll
                for (int n = 0; n < WORDS; n++) waiting |= missing(words[n]);
            } while (waiting);
            float bias[8];
            unpack(affine.bias[i], bias);
#pragma unroll
            for (int b = 0; b < B; b++) {
                float sum[8] = {};
#pragma unroll
                for (int n = 0; n < SPLIT * 2; n++) {
                    uint4 word = words[b * SPLIT * 2 + n];
                    float *half = sum + n % 2 * 4;
                    half[0] += __uint_as_float(word.x), half[1] += __uint_as_float(word.y);
                    half[2] += __uint_as_float(word.z), half[3] += __uint_as_float(word.w);
                }
#pragma unroll
                for (int j = 0; j < 8; j++)
                    value[b][i][j] = as_bfloat16(value[b][i][j] + as_bfloat16(sum[j]) + bias[j]);
            }
        }
    }

    // x [B, C] = its layernorm. Warps find mean and squares of their own columns, and put them
    // together (Chan et al., 1979), which takes one wait of the thread block for two.
    __device__ void normalise(const Affine &affine, float eps, u16 *x, float (*moments)[WARPS][2]) {
        int warp = threadIdx.x / 32;
        if (warp < NORM_WARPS)
#pragma unroll
            for (int b = 0; b < B; b++) {
                float total = 0, squares = 0;
                for (int i = 0; i < EACH; i++)
                    for (int j = 0; j < 8; j++) total += at(i) < VECTORS ? value[b][i][j] : 0.0f;
                float mean = warp_sum(total) / columns(warp);
                for (int i = 0; i < EACH; i++)
                    for (int j = 0; j < 8; j++) {
                        float from = at(i) < VECTORS ? value[b][i][j] - mean : 0.0f;
                        squares += from * from;
                    }
                squares = warp_sum(squares);
                if (threadIdx.x % 32 == 0) moments[b][warp][0] = mean, moments[b][warp][1] = squares;
            }
        __syncthreads();
#pragma unroll
        for (int b = 0; b < B; b++) {
            float mean = 0, squares = 0;
            for (int w = 0; w < NORM_WARPS; w++) mean += moments[b][w][0] * (columns(w) / C);
            for (int w = 0; w < NORM_WARPS; w++) {
                float from = moments[b][w][0] - mean;
                squares += moments[b][w][1] + from * from * columns(w);
            }
            float scale = rsqrtf(squares / C + eps);
            for (int i = 0; i < EACH; i++) {
                if (at(i) >= VECTORS) break;
                float y[8];
                for (int j = 0; j < 8; j++) {
                    const float *gamma = (const float *)affine.gamma[i];
                    const float *beta = (const float *)affine.beta[i];
                    y[j] = (value[b][i][j] - mean) * scale * gamma[j] + beta[j];
                }
                ((uint4 *)x)[b * VECTORS + at(i)] =
                    uint4{pair(y[0], y[1]), pair(y[2], y[3]), pair(y[4], y[5]), pair(y[6], y[7])};
            }
        }
        __syncthreads();
    }

    // How many columns a warp has.
    __device__ static float columns(int warp) {
        int vectors = 0;
        for (int i = 0; i < EACH; i++) vectors += most(0, least(32, VECTORS - i * THREADS - warp * 32));
        return 8.0f * vectors;
    }
};

// A span of keys and values of a head of a sample. Lanes share a row, and a thread has some rows.
struct Span {
    static constexpr int LANES = D / 8, STEP = THREADS / LANES, ROWS = SPAN / STEP;
    static_assert(SPAN % STEP == 0, "whole rows of threads");
    uint4 k[ROWS], v[ROWS];

    __device__ static int head(int item) { return item % (B * H); }
    __device__ static int key(int item, int r) {
        return item / (B * H) * SPAN + threadIdx.x / LANES + r * STEP;
    }
    __device__ static long long place(int item, int r) {
        return ((long long)head(item) * N + key(item, r)) * D + threadIdx.x % LANES * 8;
    }

    // All but the new key and value.
    __device__ void ask(const Block &block, int item, const int *pos) {
        if (item >= B * H * S) return;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (key(item, r) < pos[head(item) / H]) {
                k[r] = fetch((const uint4 *)(block.k_cache + place(item, r)));
                v[r] = fetch((const uint4 *)(block.v_cache + place(item, r)));
            }
    }

    __device__ static void prefetch(const Block &block, int item, const int *pos) {
        if (item >= B * H * S || threadIdx.x % 2) return;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (key(item, r) < pos[head(item) / H]) {
                ::prefetch(block.k_cache + place(item, r));
                ::prefetch(block.v_cache + place(item, r));
            }
    }

    // Send its part of the head's output, not yet divided by the sum of probabilities, with their
    // largest score and that sum.
    __device__ void attend(int item, const int *pos, Mailbox &box, float (*parts)[D + 2]) {
        int b = head(item) / H, last = pos[b], span = item / (B * H);
        if (span * SPAN > last) return;
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = threadIdx.x % LANES;
        const u32 *packed = box.qkv + (b * 3 * C + head(item) % H * D + group * 8) / 2;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (key(item, r) == last) k[r] = receive(packed + C / 2), v[r] = receive(packed + C);
        float q[8], score[ROWS], top = -1e30f, total = 0, o[8] = {};
        unpack(receive(packed), q);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float each[8], sum = 0;
            unpack(k[r], each);
            for (int j = 0; j < 8; j++) sum += q[j] * each[j];
            for (int step = LANES / 2; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            score[r] = key(item, r) <= last ? sum * (rsqrtf(D) * LOG2_E) : -1e30f;
            top = fmaxf(top, score[r]);
        }
        top = warp_max(top);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (key(item, r) > last) continue;
            float each[8], p = exp2f(score[r] - top);
            unpack(v[r], each);
            total += p;
            for (int j = 0; j < 8; j++) o[j] += p * each[j];
        }
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) {
            total += __shfl_xor_sync(~0u, total, step);
            for (int j = 0; j < 8; j++) o[j] += __shfl_xor_sync(~0u, o[j], step);
        }
        if (lane < LANES)
            for (int j = 0; j < 8; j++) parts[warp][group * 8 + j] = o[j];
        if (lane == 0) parts[warp][D] = top, parts[warp][D + 1] = total;
        __syncthreads();
        if (threadIdx.x >= D) return;
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, parts[w][D]);
        float sum = total = 0;
        for (int w = 0; w < WARPS; w++) {
            float weight = exp2f(parts[w][D] - top);
            sum += weight * parts[w][threadIdx.x], total += weight * parts[w][D + 1];
        }
        int at = head(item) * S + span;
        send(box.spans + at * D + threadIdx.x, sum);
        if (threadIdx.x == 0) send(box.tops + 2 * at, top), send(box.tops + 2 * at + 1, total);
    }
};

// x [B, PART] = columns of the attention's output, out of the spans' parts.
template <int PART>
__device__ void join(const Mailbox &box, int first, int columns, const int *pos, u16 *x) {
    for (int i = threadIdx.x; i < B * columns / 4; i += THREADS) {
        int b = i / (columns / 4), c = first + i % (columns / 4) * 4, head = b * H + c / D;
        const u32 *parts = box.spans + head * S * D + c % D, *tops = box.tops + head * S * 2;
        float sum[4] = {}, top = -1e30f, total = 0;
        int spans = pos[b] / SPAN + 1;
        for (int s = 0; s < spans; s += TOGETHER) {
            uint4 o[TOGETHER];
            uint2 m[TOGETHER];
            bool waiting;
            do {
                waiting = false;
#pragma unroll
                for (int j = 0; j < TOGETHER; j++) {
                    int at = least(s + j, spans - 1);
                    o[j] = peek4(parts + at * D), m[j] = peek2(tops + at * 2);
                }
#pragma unroll
                for (int j = 0; j < TOGETHER; j++) waiting |= missing(o[j]) || missing(m[j]);
            } while (waiting);
            float before = top;
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) top = fmaxf(top, __uint_as_float(m[j].x));
            float fade = exp2f(before - top);
            total *= fade;
            for (int k = 0; k < 4; k++) sum[k] *= fade;
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                float weight = s + j < spans ? exp2f(__uint_as_float(m[j].x) - top) : 0.0f;
                total += weight * __uint_as_float(m[j].y);
                sum[0] += weight * __uint_as_float(o[j].x), sum[1] += weight * __uint_as_float(o[j].y);
                sum[2] += weight * __uint_as_float(o[j].z), sum[3] += weight * __uint_as_float(o[j].w);
            }
        }
        uint2 four{pair(sum[0] / total, sum[1] / total), pair(sum[2] / total, sum[3] / total)};
        *(uint2 *)(x + b * PART + c - first) = four;
    }
    __syncthreads();
}

// x [B, PART] = columns of [B, F], which arrive in pairs.
template <int PART>
__device__ void collect(const u32 *pairs, int first, int columns, u16 *x) {
    for (int i = threadIdx.x; i < B * columns / 8; i += THREADS) {
        int b = i / (columns / 8), c = i % (columns / 8) * 8;
        *(uint4 *)(x + b * PART + c) = receive(pairs + (b * F + first + c) / 2);
    }
    __syncthreads();
}

// Logits [B, V]: a warp takes ROWS rows of the table at a time, and asks for the next ones.
struct Head {
    static constexpr int EACH = up(VECTORS, 32), ROWS = most(1, 12 / EACH);
    uint4 rows[ROWS][EACH];

    __device__ static int first() { return (blockIdx.x * WARPS + threadIdx.x / 32) * ROWS; }

    __device__ void ask(const u16 *wte, int row) {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                long long at = least(row + r, V - 1);
                int vector = least(threadIdx.x % 32 + 32 * i, VECTORS - 1);
                rows[r][i] = fetch((const uint4 *)(wte + at * C) + vector);
            }
    }

    __device__ Head(const u16 *wte) { ask(wte, first()); }

    __device__ void multiply(const u16 *wte, const u16 *x, u16 *logits) {
        int lane = threadIdx.x % 32;
        for (int row = first(); row < V; row += BLOCKS * WARPS * ROWS) {
            Head now = *this;
            ask(wte, row + BLOCKS * WARPS * ROWS);
            float sums[ROWS][B] = {};
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                int vector = lane + 32 * i;
                if (vector >= VECTORS) break;
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    float w[8];
                    unpack(now.rows[r][i], w);
#pragma unroll
                    for (int b = 0; b < B; b++) {
                        float a[8];
                        unpack(((const uint4 *)x)[b * VECTORS + vector], a);
                        for (int j = 0; j < 8; j++) sums[r][b] += a[j] * w[j];
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int b = 0; b < B; b++) {
                    float sum = warp_sum(sums[r][b]);
                    if (lane == 0 && row + r < V) logits[(long long)b * V + row + r] = rounded(sum);
                }
        }
    }
};

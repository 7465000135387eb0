// What every thread block has whole: the residual stream and its norm. And the head, at its end.

// Columns of the stream and its norm that a thread has: 4 at a time, in EACH places.
constexpr int VECTORS = C / 4, EACH = up(VECTORS, THREADS);
constexpr int NORM_WARPS = least(WARPS, up(VECTORS, 32));

// The weights of a norm, and the bias of what is added before it.
struct Affine {
    uint4 gamma[EACH], beta[EACH];
    uint2 bias[EACH];

    __device__ void ask(const float *gammas, const float *betas, const u16 *biases = nullptr) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int at = threadIdx.x + i * THREADS;
            if (at >= VECTORS) break;
            gamma[i] = fetch((const uint4 *)gammas + at);
            beta[i] = fetch((const uint4 *)betas + at);
            if (biases) bias[i] = fetch((const uint2 *)biases + at);
        }
    }
};

// The residual stream [B, C], which every thread block has whole.
struct Stream {
    float4 value[B][EACH];

    __device__ static int at(int i) { return threadIdx.x + i * THREADS; }

    // Embeddings of tokens and positions.
    __device__ void start(const long long *ids, const u16 *wte, const u16 *wpe, const int *pos) {
#pragma unroll
        for (int b = 0; b < B; b++)
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                value[b][i] = float4{0, 0, 0, 0};
                if (at(i) >= VECTORS) break;
                uint2 token = fetch((const uint2 *)(wte + ids[b] * C) + at(i));
                uint2 place = fetch((const uint2 *)(wpe + (long long)pos[b] * C) + at(i));
                value[b][i].x = as_bfloat16(low(token.x) + low(place.x));
                value[b][i].y = as_bfloat16(high(token.x) + high(place.x));
                value[b][i].z = as_bfloat16(low(token.y) + low(place.y));
                value[b][i].w = as_bfloat16(high(token.y) + high(place.y));
            }
    }

    // Add a branch, whose parts [SPLIT, B, C] arrive, and its bias.
    __device__ void add(const u32 *branch, const Affine &affine) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (at(i) >= VECTORS) break;
            uint4 words[B][SPLIT];
            bool waiting;
            do {
                waiting = false;
#pragma unroll
                for (int n = 0; n < B * SPLIT; n++)
                    words[n / SPLIT][n % SPLIT] =
                        peek4(branch + (n % SPLIT * B + n / SPLIT) * C + at(i) * 4);
#pragma unroll
                for (int n = 0; n < B * SPLIT; n++) waiting |= missing(words[n / SPLIT][n % SPLIT]);
            } while (waiting);
            uint2 bias = affine.bias[i];
#pragma unroll
            for (int b = 0; b < B; b++) {
                float4 sum = floats(words[b][0]), &h = value[b][i];
#pragma unroll
                for (int s = 1; s < SPLIT; s++) {
                    float4 more = floats(words[b][s]);
                    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
                }
                h.x = as_bfloat16(h.x + as_bfloat16(sum.x) + low(bias.x));
                h.y = as_bfloat16(h.y + as_bfloat16(sum.y) + high(bias.x));
                h.z = as_bfloat16(h.z + as_bfloat16(sum.z) + low(bias.y));
                h.w = as_bfloat16(h.w + as_bfloat16(sum.w) + high(bias.y));
            }
        }
    }

    // x [B, C] = its layernorm. Warps find mean and squares of their own columns, and put them
    // together (Chan et al., 1979), which takes one wait of the thread block for two.
    __device__ void normalise(const Affine &affine, float eps, u16 *x, float2 (*moments)[WARPS]) {
        int warp = threadIdx.x / 32;
        if (warp < NORM_WARPS)
#pragma unroll
            for (int b = 0; b < B; b++) {
                float total = 0, squares = 0;
                for (int i = 0; i < EACH; i++) {
                    float4 h = value[b][i];
                    total += h.x + h.y + (h.z + h.w);
                }
                float mean = warp_sum(total) * (1.0f / columns(warp));
                for (int i = 0; i < EACH; i++) {
                    if (at(i) >= VECTORS) break;
                    float4 h = value[b][i];
                    h.x -= mean, h.y -= mean, h.z -= mean, h.w -= mean;
                    squares += h.x * h.x + h.y * h.y + (h.z * h.z + h.w * h.w);
                }
                squares = warp_sum(squares);
                if (threadIdx.x % 32 == 0) moments[b][warp] = float2{mean, squares};
            }
        __syncthreads();
#pragma unroll
        for (int b = 0; b < B && warp < NORM_WARPS; b++) {
            float mean = 0, squares = 0;
#pragma unroll
            for (int w = 0; w < NORM_WARPS; w++) mean += moments[b][w].x * (columns(w) / C);
#pragma unroll
            for (int w = 0; w < NORM_WARPS; w++) {
                float from = moments[b][w].x - mean;
                squares += moments[b][w].y + from * from * columns(w);
            }
            float scale = rsqrtf(squares * (1.0f / C) + eps);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                if (at(i) >= VECTORS) break;
                float4 h = value[b][i], g = floats(affine.gamma[i]), k = floats(affine.beta[i]);
                ((uint2 *)x)[b * VECTORS + at(i)] = uint2{
                    pair((h.x - mean) * scale * g.x + k.x, (h.y - mean) * scale * g.y + k.y),
                    pair((h.z - mean) * scale * g.z + k.z, (h.w - mean) * scale * g.w + k.w)
                };
            }
        }
        __syncthreads();
    }

    // How many columns a warp has.
    __device__ static constexpr float columns(int warp) {
        if (EACH == 1 && VECTORS % 32 == 0) return 128.0f;
        int vectors = 0;
        for (int i = 0; i < EACH; i++)
            vectors += most(0, least(32, VECTORS - i * THREADS - warp * 32));
        return 4.0f * vectors;
    }
};

// Logits [B, V]: a warp takes ROWS rows of the table at a time, and asks for the next ones.
struct Head {
    static constexpr int WIDE = C / 8, EACH = up(WIDE, 32), ROWS = most(1, 12 / EACH);
    uint4 rows[ROWS][EACH];

    __device__ static int first() { return (blockIdx.x * WARPS + threadIdx.x / 32) * ROWS; }

    __device__ void ask(const u16 *wte, int row) {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                long long at = least(row + r, V - 1);
                int vector = least(threadIdx.x % 32 + 32 * i, WIDE - 1);
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
                if (vector >= WIDE) break;
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    float w[8];
                    unpack(now.rows[r][i], w);
#pragma unroll
                    for (int b = 0; b < B; b++) {
                        float a[8];
                        unpack(((const uint4 *)x)[b * WIDE + vector], a);
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

// Attention, in spans of keys that are put together by whoever needs the result.

// A span of keys and values of a head of a sample. Lanes share a row, and a thread has some rows.
struct Span {
    static constexpr int LANES = D / 8, STEP = THREADS / LANES, ROWS = SPAN / STEP;
    static_assert(SPAN % STEP == 0, "whole rows of threads");
    uint4 k[ROWS][THREADS], v[ROWS][THREADS];

    __device__ static int head(int item) { return item % (B * H); }
    // The key of this thread's first row.
    __device__ static int first(int item) { return item / (B * H) * SPAN + threadIdx.x / LANES; }

    // Begin to copy all but the new key and value, in a group with what is asked for next.
    __device__ void ask(const Block &block, int N, int item, const int *pos) {
        if (item >= B * H * S) return;
        int key = first(item), last = pos[head(item) / H];
        long long at = ((long long)head(item) * N + key) * D + threadIdx.x % LANES * 8;
#pragma unroll 1
        for (int r = 0; r < ROWS && key + r * STEP < last; r++) {
            copy(&k[r][threadIdx.x], block.k_cache + at + r * STEP * D);
            copy(&v[r][threadIdx.x], block.v_cache + at + r * STEP * D);
        }
    }

    // Have it brought to L2.
    __device__ static void bring(const Block &block, int N, int item, const int *pos) {
        if (threadIdx.x < THREADS - 32 || item >= B * H * S) return;
        int start = item / (B * H) * SPAN, keys = least(SPAN, pos[head(item) / H] - start);
        if (keys <= 0) return;
        long long at = ((long long)head(item) * N + start) * D;
        prefetch(block.k_cache + at, keys * D * 2);
        prefetch(block.v_cache + at, keys * D * 2);
    }

    // Send its part of the head's output, not yet divided by the sum of probabilities, with their
    // largest score and that sum.
    __device__ void attend(int item, const int *pos, Mailbox &box, float (*parts)[D + 2]) {
        int b = head(item) / H, last = pos[b], span = item / (B * H), key = first(item);
        if (span * SPAN > last) return;
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = threadIdx.x % LANES;
        const u32 *packed = box.qkv + (b * 3 * C + head(item) % H * D + group * 8) / 2;
        if (last >= key && (last - key) % STEP == 0 && last - key < SPAN) {
            int r = (last - key) / STEP;
            k[r][threadIdx.x] = receive(packed + C / 2), v[r][threadIdx.x] = receive(packed + C);
        }
        float q[8], score[ROWS], top = -1e30f, total = 0, o[8] = {};
        unpack(receive(packed), q);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float each[8], sum = 0;
            unpack(k[r][threadIdx.x], each);
            for (int j = 0; j < 8; j++) sum += q[j] * each[j];
            for (int step = LANES / 2; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            score[r] = key + r * STEP <= last ? sum * (rsqrtf(D) * LOG2_E) : -1e30f;
            top = fmaxf(top, score[r]);
        }
        for (int step = LANES; step < 32; step *= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (key + r * STEP > last) break;
            float each[8], p = exp2f(score[r] - top);
            unpack(v[r][threadIdx.x], each);
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
        for (int c = threadIdx.x; c < D + 8; c += THREADS) {
            float most = -1e30f, sum = 0, sums = 0;
            for (int w = 0; w < WARPS; w++) most = fmaxf(most, parts[w][D]);
            for (int w = 0; w < WARPS; w++) {
                float weight = exp2f(parts[w][D] - most);
                sum += weight * parts[w][least(c, D - 1)], sums += weight * parts[w][D + 1];
            }
            send(box.spans[head(item) * S + span] + c, c < D ? sum : c % 2 ? sums : most);
        }
    }
};

// x [B, PART] = columns of the attention's output, out of the spans' parts.
template <int PART>
__device__ void join(const Mailbox &box, int first, int columns, const int *pos, u16 *x) {
    for (int i = threadIdx.x; i < B * columns / 4; i += THREADS) {
        int b = i / (columns / 4), c = first + i % (columns / 4) * 4, head = b * H + c / D;
        const u32 (*parts)[D + 8] = box.spans + head * S;
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
                    const u32 *part = parts[least(s + j, spans - 1)];
                    o[j] = peek4(part + c % D), m[j] = peek2(part + D);
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
                float4 value = floats(o[j]);
                total += weight * __uint_as_float(m[j].y);
                sum[0] += weight * value.x, sum[1] += weight * value.y;
                sum[2] += weight * value.z, sum[3] += weight * value.w;
            }
        }
        float scale = __fdividef(1.0f, total);
        *(uint2 *)(x + b * PART + c - first) =
            uint2{pair(sum[0] * scale, sum[1] * scale), pair(sum[2] * scale, sum[3] * scale)};
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


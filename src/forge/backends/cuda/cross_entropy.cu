// Cross-entropy of rows of bfloat16 logits, each overwritten by its gradient: the twin of `_rows`
// in loss.py, which reads a row from memory twice. Here a row is read once: the bulk copy engine
// brings it to shared memory while the block still works on the row before, and it then stays in
// registers.
//
// A block takes every gridDim.x-th row. THREADS times VECTORS vectors of eight logits hold a row.

using bits16 = unsigned short;
using bits32 = unsigned int;
using bits64 = unsigned long long;

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr bits32 LOWEST = 0xff80ff80u;  // a pair of bfloat16, both -infinity
constexpr int WARPS = THREADS / 32;

__device__ float low(bits32 pair) { return __uint_as_float(pair << 16); }
__device__ float high(bits32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ bits32 pack(float low, float high) {
  bits32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ bits32 larger(bits32 a, bits32 b) {
  bits32 pair;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

__device__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ bits32 shared_address(const void* p) { return (bits32)__cvta_generic_to_shared(p); }

// Start the copy of a row; `arrived` completes when its bytes are there.
__device__ void fetch(void* row, const bits16* source, bits32 bytes, bits64* arrived) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(arrived)),
               "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(shared_address(row)),
      "l"(source), "r"(bytes), "r"(shared_address(arrived))
      : "memory");
}

__device__ void wait(bits64* arrived, bits32 phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(arrived)),
      "r"(phase)
      : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    cross_entropy(bits16* logits, const long long* targets, const float* weight, float* losses,
                  int rows, int classes, int stride, int ignore_index) {
  extern __shared__ __align__(128) unsigned char buffers[];
  __shared__ __align__(8) bits64 arrived[2];
  __shared__ float maxima[WARPS], sums[WARPS];
  const int thread = threadIdx.x;
  const bits32 bytes = stride * 2;

  if (thread == 0) {
    for (int i = 0; i < 2; i++)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&arrived[i])));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int i = 0; i < 2; i++) {
      const int row = blockIdx.x + i * gridDim.x;
      if (row < rows) fetch(buffers + i * bytes, logits + (bits64)row * stride, bytes, &arrived[i]);
    }
  }
  __syncthreads();

  int slot = 0;
  bits32 phase = 0;
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    uint4* buffer = (uint4*)(buffers + slot * bytes);
    const bool counts = targets[row] != ignore_index;
    const int target = counts ? (int)targets[row] : 0;
    wait(&arrived[slot], phase);
    const float chosen = low(((bits16*)buffer)[target]);

    // The row to registers, and its maximum.
    uint4 held[VECTORS];
    bits32 top = LOWEST;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int i = thread + v * THREADS;
      uint4 x = make_uint4(LOWEST, LOWEST, LOWEST, LOWEST);
      if (8 * i < stride) x = buffer[i];
      if (8 * i + 8 > classes) {
        bits32* pairs = (bits32*)&x;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int c = 8 * i + 2 * j;
          if (c >= classes) pairs[j] = (pairs[j] & 0xffff0000u) | 0x0000ff80u;
          if (c + 1 >= classes) pairs[j] = (pairs[j] & 0x0000ffffu) | 0xff800000u;
        }
      }
      held[v] = x;
      top = larger(top, larger(larger(x.x, x.y), larger(x.z, x.w)));
    }
    float maximum = fmaxf(low(top), high(top));
#pragma unroll
    for (int o = 16; o; o >>= 1) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, o));
    if (thread % 32 == 0) maxima[thread / 32] = maximum;
    // All have read the buffer before the copy engine writes to it again.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const int next = row + 2 * gridDim.x;
    if (thread == 0 && next < rows)
      fetch(buffer, logits + (bits64)next * stride, bytes, &arrived[slot]);
    maximum = maxima[0];
#pragma unroll
    for (int i = 1; i < WARPS; i++) maximum = fmaxf(maximum, maxima[i]);

    // The powers, in place of the logits, and their sum.
    const float base = maximum * LOG2_E;
    float sum = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      bits32* pairs = (bits32*)&held[v];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float a = power_of_2(fmaf(low(pairs[j]), LOG2_E, -base));
        const float b = power_of_2(fmaf(high(pairs[j]), LOG2_E, -base));
        sum += a + b;
        pairs[j] = pack(a, b);
      }
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    if (thread % 32 == 0) sums[thread / 32] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += sums[i];

    // weight (softmax - one-hot); the target's, which cancels, from the logit itself.
    const float factor = counts ? *weight : 0.0f;
    const float share = factor / sum;
    if (thread == 0) losses[row] = counts ? (base + __log2f(sum)) * LN_2 - chosen : 0.0f;
    uint4* gradient = (uint4*)(logits + (bits64)row * stride);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int i = thread + v * THREADS;
      bits32* pairs = (bits32*)&held[v];
#pragma unroll
      for (int j = 0; j < 4; j++) pairs[j] = pack(low(pairs[j]) * share, high(pairs[j]) * share);
      if (8 * i < stride) gradient[i] = held[v];
      if (i == target / 8) {
        const float power = power_of_2(fmaf(chosen, LOG2_E, -base));
        ((bits16*)gradient)[target] = (bits16)pack(fmaf(power, share, -factor), 0.0f);
      }
    }
    slot ^= 1;
    phase ^= slot == 0;
  }
}

// The noise of `sum_noise.py` on a GPU: a thread rounds one coordinate of a sum to the grid and adds 2^FINER_BITS X + Y.
// X and Y are fine Gaussian draws (`cpsgd.mechanisms.fine_gaussian`), each from the first 44 bytes of a block of ChaCha20
// (RFC 8439): 128 bits that are compared with a table, and 28 bytes that are added up. `device_noise.py` defines the
// upper-case names.

__device__ __forceinline__ u32 turned(u32 x, int by) { return x << by | x >> (32 - by); }

__device__ __forceinline__ void quarter(u32& a, u32& b, u32& c, u32& d) {
  a += b, d = turned(d ^ a, 16);
  c += d, b = turned(b ^ c, 12);
  a += b, d = turned(d ^ a, 8);
  c += d, b = turned(b ^ c, 7);
}

// Writes the block of a counter; `part` is the first word of the nonce, and the others are zero.
__device__ __forceinline__ void block_of(const u32 (&key)[8], u32 counter, u32 part, u32 (&x)[16]) {
  const u32 start[16] = {0x61707865u, 0x3320646Eu, 0x79622D32u, 0x6B206574u, key[0],  key[1], key[2], key[3],
                         key[4],      key[5],      key[6],      key[7],      counter, part,   0u,     0u};
#pragma unroll
  for (int i = 0; i < 16; i++) x[i] = start[i];
#pragma unroll 2
  for (int round = 0; round < 10; round++) {
    quarter(x[0], x[4], x[8], x[12]), quarter(x[1], x[5], x[9], x[13]);
    quarter(x[2], x[6], x[10], x[14]), quarter(x[3], x[7], x[11], x[15]);
    quarter(x[0], x[5], x[10], x[15]), quarter(x[1], x[6], x[11], x[12]);
    quarter(x[2], x[7], x[8], x[13]), quarter(x[3], x[4], x[9], x[14]);
  }
#pragma unroll
  for (int i = 0; i < 16; i++) x[i] += start[i];
}

// Returns a draw from a block. `table` has `count` thresholds, their high halves and then their low ones. The number of
// steps does not depend on what is drawn.
__device__ __forceinline__ int draw(const u32 (&x)[16], const u64* __restrict__ table, int count) {
  const u64 low = (u64)x[1] << 32 | x[0], high = (u64)x[3] << 32 | x[2];
  int reached = 0;
  for (int step = FIRST_STEP; step; step /= 2) {
    const int tried = reached + step, place = min(tried, count) - 1;
    const u64 above = __ldg(table + place), below = __ldg(table + count + place);
    if (tried <= count && (high > above || (high == above && low >= below))) reached = tried;
  }
  u32 pairs = 0;
#pragma unroll
  for (int i = 4; i < 4 + UNIFORMS / 4; i++) pairs += (x[i] & 0x00FF00FFu) + (x[i] >> 8 & 0x00FF00FFu);
  return (reached - count / 2) * 256 + (int)(pairs & 0xFFFFu) + (int)(pairs >> 16) - UNIFORMS * 255 / 2;
}

// Writes (round(sums / step) + noise) step / divisor. The key is eight words.
extern "C" __global__ void noisy(
    const double* __restrict__ sums, float* __restrict__ out, int dim, double step, double divisor,
    const u64* __restrict__ coarse, int coarse_count, const u64* __restrict__ fine, int fine_count,
    int k0, int k1, int k2, int k3, int k4, int k5, int k6, int k7
) {
  const u32 place = blockIdx.x * blockDim.x + threadIdx.x;
  if (place >= (u32)dim) return;
  const u32 key[8] = {(u32)k0, (u32)k1, (u32)k2, (u32)k3, (u32)k4, (u32)k5, (u32)k6, (u32)k7};
  u32 words[16];
  block_of(key, place, 0u, words);
  const int first = draw(words, coarse, coarse_count);
  block_of(key, place, 1u, words);
  const int noise = first * (1 << FINER_BITS) + draw(words, fine, fine_count);
  double point = sums[place] / step;
  if (point != point) point = 0.0;
  point = rint(fmin(fmax(point, -MOST), MOST));
  out[place] = (float)((point + noise) * step / divisor);
}

// Adds up the integers of clients that add noise of earlier rounds, clipped, and of this one, and round at random
// (`cpsgd.correlated.client_sums`). A thread has eight coordinates, an eighth of a vector apart, of some clients. Noise is
// drawn again from the counter (place, client) under the key of its round.

// Returns 2^23 + a number below 2^23. In float32 that is exact, and takes no conversion.
__device__ __forceinline__ float above_2_23(u32 number) { return __uint_as_float(0x4B000000u | number); }

// Adds eight Gaussian numbers of this deviation, by Box and Muller's method. Each word gives two of them: 20 bits for
// their radius, of at most 5.4 deviations, and one of 4096 directions.
__device__ __forceinline__ void add_normals(const u32* keys, u32 place, u32 client, float deviation, float (&x)[8]) {
  constexpr float DIRECTION = 0x1.921fb6p-10f;  // 2π/4096
  u32 words[4];
  philox<7>({__ldg(keys), __ldg(keys + 1)}, place, client, 0, words);
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const float uniform = __fmaf_rn(above_2_23(words[k] >> 12), 0x1p-20f, 0x1p-21f - 8.0f);  // in (0, 1)
    const float angle = __fmaf_rn(above_2_23(words[k] & 0xFFF), DIRECTION, -(8388608.0f + 2048.0f) * DIRECTION);
    // -2 ln u is -2 ln 2 log2 u.
    const float radius = deviation * root_of(fmaxf(0.0f, -0x1.62e43p+0f * log2_of(uniform)));
    float sine, cosine;
    __sincosf(angle, &sine, &cosine);
    x[2 * k] = __fmaf_rn(radius, cosine, x[2 * k]);
    x[2 * k + 1] = __fmaf_rn(radius, sine, x[2 * k + 1]);
  }
}

// `keys` and `deviations` are those of `ages` earlier rounds and of this one; a last key is for rounding. `unit` is the
// grid's in steps, `inherited` the bound on earlier rounds' noise, and integers are at most twice `largest`.
extern "C" __global__ void messages(
    const float* __restrict__ rows, int stride, int dim, int count, int clients, u64* __restrict__ sums, int first,
    const u32* __restrict__ keys, const float* __restrict__ deviations, int ages, double unit, double inherited,
    double largest
) {
  const u32 eighth = (dim + 7) / 8, place = blockIdx.x * blockDim.x + threadIdx.x;
  if (place >= eighth) return;
  const float most = (float)inherited, middle = (float)largest;
  const int begin = blockIdx.y * clients, end = min(count, begin + clients);
  u32 totals[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 1
  for (int row = begin; row < end; row++) {
    float x[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int age = 0; age < ages; age++) add_normals(keys + 2 * age, place, first + row, __ldg(deviations + age), x);
#pragma unroll
    for (int k = 0; k < 8; k++) x[k] = fminf(fmaxf(x[k], -most), most);
    add_normals(keys + 2 * ages, place, first + row, __ldg(deviations + ages), x);
    u32 words[4];
    philox<7>({__ldg(keys + 2 * ages + 2), __ldg(keys + 2 * ages + 3)}, place, first + row, 0, words);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const u32 coordinate = place + k * eighth;
      const float point = coordinate < dim ? rows[(u64)row * stride + coordinate] : 0.0f;
      const float number = x[k] + rintf(fminf(fmaxf(point, -(float)LIMIT), (float)LIMIT)) * (float)unit + middle;
      // The nearest integer to number + u - 1/2, u uniform in (0, 1), is `number` rounded up with its fraction's chance.
      const u32 half = (k & 1 ? words[k / 2] >> 15 : words[k / 2] << 1 & 0x1FFFF) | 1;
      const float moved = number + __fmaf_rn(above_2_23(half), 0x1p-17f, -64.5f);
      totals[k] += __float_as_uint(fminf(fmaxf(moved, 0.0f), 2.0f * middle) + 8388608.0f) - 0x4B000000u;
    }
  }
#pragma unroll
  for (int k = 0; k < 8; k++)
    if (place + k * eighth < dim) atomicAdd(sums + place + k * eighth, (u64)totals[k]);
}

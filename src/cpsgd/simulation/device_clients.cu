// Adds up the integers of clients that add noise of earlier rounds, clipped, and of this one, and round at random
// (`cpsgd.correlated.client_sums`). A thread has four coordinates, a quarter of a vector apart, of some clients. Noise is
// drawn again from the counter (place, client) under the key of its round.

// Adds four Gaussian numbers of this deviation, by Box and Muller's method.
__device__ __forceinline__ void add_normals(const u32* keys, u32 place, u32 client, float deviation, float (&x)[4]) {
  u32 words[4];
  philox({__ldg(keys), __ldg(keys + 1)}, place, client, 0, words);
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    // Uniform in (0, 1], and an angle.
    const float uniform = ((float)(words[k] >> 8) + 0.5f) * 0x1p-24f, angle = (float)(int)words[k + 1] * 0x1.921fb6p-30f;
    const float radius = deviation * sqrtf(fmaxf(0.0f, -2.0f * __logf(uniform)));
    float sine, cosine;
    __sincosf(angle, &sine, &cosine);
    x[k] = __fmaf_rn(radius, cosine, x[k]);
    x[k + 1] = __fmaf_rn(radius, sine, x[k + 1]);
  }
}

// `keys` and `deviations` are those of `ages` earlier rounds and of this one; a last key is for rounding. `unit` is the
// grid's in steps, `inherited` the bound on earlier rounds' noise, and integers are at most twice `largest`.
extern "C" __global__ void messages(
    const float* __restrict__ rows, int stride, int dim, int count, int clients, u64* __restrict__ sums, int first,
    const u32* __restrict__ keys, const float* __restrict__ deviations, int ages, double unit, double inherited,
    double largest
) {
  const u32 quarter = (dim + 3) / 4, place = blockIdx.x * blockDim.x + threadIdx.x;
  if (place >= quarter) return;
  const float most = (float)inherited, middle = (float)largest;
  const int begin = blockIdx.y * clients, end = min(count, begin + clients);
  u32 totals[4] = {0, 0, 0, 0};
#pragma unroll 1
  for (int row = begin; row < end; row++) {
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int age = 0; age < ages; age++) add_normals(keys + 2 * age, place, first + row, __ldg(deviations + age), x);
#pragma unroll
    for (int k = 0; k < 4; k++) x[k] = fminf(fmaxf(x[k], -most), most);
    add_normals(keys + 2 * ages, place, first + row, __ldg(deviations + ages), x);
    u32 words[4];
    philox({__ldg(keys + 2 * ages + 2), __ldg(keys + 2 * ages + 3)}, place, first + row, 0, words);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const u32 coordinate = place + k * quarter;
      const float point = coordinate < dim ? rows[(u64)row * stride + coordinate] : 0.0f;
      const float number = x[k] + rintf(fminf(fmaxf(point, -(float)LIMIT), (float)LIMIT)) * (float)unit + middle;
      const float below = floorf(number), up = (float)(words[k] >> 8) * 0x1p-24f < number - below ? 1.0f : 0.0f;
      totals[k] += (u32)fminf(fmaxf(below + up, 0.0f), 2.0f * middle);
    }
  }
#pragma unroll
  for (int k = 0; k < 4; k++)
    if (place + k * quarter < dim) atomicAdd(sums + place + k * quarter, (u64)totals[k]);
}

// Samples of infinite data sets and gradients of dense layers, each written once and nothing else. `cuda.py` defines the
// upper-case names.

#ifdef SAMPLES
// A pixel's shade, 0 outside the image.
__device__ __forceinline__ float shade(const unsigned char* image, int row, int column) {
  return row >= 0 && row < SIDE && column >= 0 && column < SIDE ? (float)image[row * SIDE + column] : 0.0f;
}

// Deformed and moved images, shades divided by 255, and their labels. A block has a sample.
extern "C" __global__ void samples(
    const unsigned char* __restrict__ images, const long long* __restrict__ classes, const float* __restrict__ fields,
    const long long* __restrict__ moves, const long long* __restrict__ numbers, int test, int train,
    float* __restrict__ features, long long* __restrict__ labels
) {
  const u64 sample = blockIdx.x;
  const long long number = numbers[sample];
  // As `recipe` of the infinite data sets: 64 bits that wrap around still hold the product modulo 2^32.
  const long long base = (number - test) % train, first = ((u64)number * 131071 & 0xFFFFFFFFull) % 1521;
  const long long second = (first + 1 + 2 * number) % 1522;
  if (threadIdx.x == 0) labels[sample] = classes[base];
  const int down = (int)moves[2 * (first % 9)], right = (int)moves[2 * (first % 9) + 1];
  const unsigned char* image = images + base * (SIDE * SIDE);
  for (int pixel = threadIdx.x; pixel < SIDE * SIDE; pixel += blockDim.x) {
    // The pixel's place before the image was moved.
    const int row = pixel / SIDE - down, column = pixel % SIDE - right, place = row * SIDE + column;
    float value = 0.0f;
    if (row >= 0 && row < SIDE && column >= 0 && column < SIDE) {
      const float across = shade(image, row, column + 1) - shade(image, row, column - 1);
      const float along = shade(image, row + 1, column) - shade(image, row - 1, column);
      const float a = __fmul_rn(across, fields[first * (SIDE * SIDE) + place]);
      const float b = __fmul_rn(along, fields[second * (SIDE * SIDE) + place]);
      value = truncf(fminf(fmaxf((float)image[place] - (a - b), 0.0f), 255.0f));
    }
    features[sample * (SIDE * SIDE) + pixel] = __fdiv_rn(value, 255.0f);
  }
}
#endif

#ifdef OUTER
// A layer's gradient: `back` times `incoming` for the weights, followed by `back` for the bias. A block has a row's
// BLOCK coordinates.
extern "C" __global__ void outer(const float* __restrict__ back, const float* __restrict__ incoming, float* out, int stride) {
  const u32 parts = (WIDTH * DEPTH + WIDTH + BLOCK - 1) / BLOCK, row = blockIdx.x / parts;
  const u32 begin = blockIdx.x % parts * BLOCK;
#pragma unroll 8
  for (u32 place = begin + threadIdx.x; place < begin + BLOCK; place += 256) {
    if (place >= WIDTH * DEPTH + WIDTH) break;
    const bool weight = place < WIDTH * DEPTH;
    const float left = __ldg(back + (u64)row * WIDTH + (weight ? place / DEPTH : place - WIDTH * DEPTH));
    out[(u64)row * stride + place] = weight ? __fmul_rn(left, __ldg(incoming + (u64)row * DEPTH + place % DEPTH)) : left;
  }
}
#endif

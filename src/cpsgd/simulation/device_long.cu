// Vectors of 2^16 coordinates and more, clipped, rotated, rounded and added up in passes over memory. `device_long.py`
// defines the upper-case names, that of one kernel among them, and puts `device_rounding.cu` first.
//
// A transform of 2^LOG points is one over the 13 lowest bits of coordinates (`low`, and `finish`, which also rounds) and
// one over the others (`high`); the two commute. With r > 0 coordinates beyond the first 2^LOG the rotation is low, high,
// an exchange of r coordinates, high, low: the middle three are one pass, so that a vector is read three times and
// written twice. The rows are overwritten. Clipping comes last, as its norm is known when everything was read once.
//
// A block of 256 threads holds a tile of 2^13 numbers, 32 per thread, that e counts. With t = 32 · warp + lane, register
// r of thread t is number
//     A: 1024 warp + 32 r + lane     B: 1024 warp + 32 lane + r     C: PLACE(r) + t
// Those three are for neighbours in memory: A has bits 5-9 of e within a thread, B bits 0-4, C bits 10-12, 8 and 9. For
// tiles of few neighbours, 2^COLUMNS each from places 2^FIRST apart, the layouts are
//     D: 256 r + t                   E: 1024 warp + 256 (lane / 8) + 8 r + lane % 8
// with bits 8-12 and 3-7 within a thread.

#define TILE 8192
#define SIZE (1u << LOG)
#define TILES (SIZE / TILE)

// A number times ±2^(-LOG/2), as the sign of its coordinate says.
__device__ __forceinline__ float flipped(float x, const u32* __restrict__ signs, u32 place) {
  return __fmul_rn(x, __uint_as_float(NORMALISE ^ (__ldg(signs + place / 32) << (31 - place % 32) & 0x80000000u)));
}

// The transform over bits 0-12 of a tile, from layout A to C; bits 8 and 9 are left to C. All of a block must be here
// before anybody uses the buffer again.
__device__ __forceinline__ void transform(float (&x)[32], float* buffer, u32 warp, u32 lane) {
  float* own = buffer + warp * 1024;
  butterflies<0, 3>(x);
  // Columns of rows of 32 are permuted, so that rows and columns both lie in 32 banks.
#pragma unroll
  for (int r = 0; r < 32; r++) own[r * 32 + (lane ^ r)] = x[r];
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 32; r++) x[r] = own[lane * 32 + (r ^ lane)];
  butterflies(x);
#pragma unroll
  for (int r = 0; r < 32; r++) own[lane * 32 + (r ^ lane)] = x[r];
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 32; r++) {
    const u32 line = PLACE(r) / 32 + warp;
    x[r] = buffer[line * 32 + (lane ^ line % 32)];
  }
  butterflies(x);
}

// The sum of a block's numbers, known to thread 0. They are added up in the same order every time.
__device__ __forceinline__ float block_sum(float part, float* parts, u32 t) {
  for (int distance = 16; distance; distance /= 2) part += __shfl_xor_sync(0xFFFFFFFFu, part, distance);
  if (t % 32 == 0) parts[t / 32] = part;
  __syncthreads();
  float total = 0.0f;
  if (t == 0)
    for (int warp = 0; warp < THREADS / 32; warp++) total += parts[warp];
  return total;
}

#ifdef LOW
// One pass over bits 0-12. FORWARD: numbers are divided by the bound that norms are clipped to (multiplied by `inverse`),
// their squares are added up, and they get signs. Otherwise they get signs afterwards if LAST.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    low(float* __restrict__ rows, int stride, const u32* __restrict__ signs, float* squares, double inverse) {
  __shared__ float buffer[TILE];
  const u32 t = threadIdx.x, warp = t / 32, lane = t % 32, tile = blockIdx.x % TILES, row = blockIdx.x / TILES;
  float* base = rows + (u64)row * stride + tile * TILE;
  float x[32];
#pragma unroll
  for (int r = 0; r < 32; r++) x[r] = base[warp * 1024 + r * 32 + lane];
#if FORWARD
  const float factor = (float)inverse;
  float sum = 0.0f;
#pragma unroll
  for (int r = 0; r < 32; r++) {
    x[r] = __fmul_rn(x[r], factor);
    sum += x[r] * x[r];
    x[r] = flipped(x[r], signs, tile * TILE + warp * 1024 + r * 32 + lane);
  }
  sum = block_sum(sum, buffer, t);
  if (t == 0) squares[row * (2 * TILES) + tile] = sum;
  __syncthreads();
#endif
  transform(x, buffer, warp, lane);
#pragma unroll
  for (int r = 0; r < 32; r++) {
#if !FORWARD && LAST
    x[r] = flipped(x[r], signs, tile * TILE + PLACE(r) + t);
#endif
    base[PLACE(r) + t] = x[r];
  }
}
#endif

#ifdef HIGH
#define COLUMNS (13 - BITS)
// Where number e of a tile is, beside where the tile begins.
#define THERE(e) (((e) >> COLUMNS << FIRST) + ((e) & ((1 << COLUMNS) - 1)))

// Butterflies over the numbers that are 2^FIRST and more apart, from layout D to E, or in D where it has all of them.
__device__ __forceinline__ void there(float (&x)[32], float* buffer, u32 t, u32 far) {
  butterflies<(COLUMNS > 8 ? COLUMNS - 8 : 0), 5>(x);
#if COLUMNS < 8
  // Bits 3 and 4 are permuted, so that both layouts lie in 32 banks.
#pragma unroll
  for (int r = 0; r < 32; r++) buffer[(r * 256 + t) ^ (r % 4 * 8)] = x[r];
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 32; r++) x[r] = buffer[(far + r * 8) ^ (far / 256 % 4 * 8)];
  butterflies<COLUMNS - 3, 5>(x);
#endif
}

// And back, over the same bits.
__device__ __forceinline__ void back_again(float (&x)[32], float* buffer, u32 t, u32 far) {
#if COLUMNS < 8
  butterflies<COLUMNS - 3, 5>(x);
  // Each thread overwrites what it alone has read.
#pragma unroll
  for (int r = 0; r < 32; r++) buffer[(far + r * 8) ^ (far / 256 % 4 * 8)] = x[r];
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 32; r++) x[r] = buffer[(r * 256 + t) ^ (r % 4 * 8)];
#endif
  butterflies<(COLUMNS > 8 ? COLUMNS - 8 : 0), 5>(x);
}

// One pass over BITS bits of coordinates, from bit FIRST on. EXCHANGE: numbers are exchanged for those beyond the first
// 2^LOG, with signs before it or (FORWARD) after it, and there is a second transform over the same bits. FORWARD with
// ALONE: signs come first, as no pass came before. In both the squares of numbers not seen before are added up.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    high(float* __restrict__ rows, int stride, int rest, const u32* __restrict__ signs, float* squares, double inverse) {
  __shared__ float buffer[TILE];
  const u32 t = threadIdx.x, tile = blockIdx.x % TILES, row = blockIdx.x / TILES;
  const u32 below = tile % (1u << (FIRST - COLUMNS)), above = tile >> (FIRST - COLUMNS);
  const u32 begin = (above << (FIRST + BITS)) + (below << COLUMNS);
  const u32 near = begin + THERE(t), far = t / 32 * 1024 + t % 32 / 8 * 256 + t % 8;
  float* base = rows + (u64)row * stride;
  float x[32];
#pragma unroll
  for (int r = 0; r < 32; r++) x[r] = base[near + THERE(r * 256)];
#if FORWARD
  const float factor = (float)inverse;
  float sum = 0.0f;
#endif
#if FORWARD && ALONE
#pragma unroll
  for (int r = 0; r < 32; r++) {
    x[r] = __fmul_rn(x[r], factor);
    sum += x[r] * x[r];
    x[r] = flipped(x[r], signs, near + THERE(r * 256));
  }
#endif
  there(x, buffer, t, far);
#if EXCHANGE
#if COLUMNS < 8
  const u32 start = begin + THERE(far);
#define STEP 8
#else
  const u32 start = near;
#define STEP 256
#endif
  // Eight at a time, loads before stores: there are no registers for more.
#pragma unroll
  for (int part = 0; part < 32; part += 8) {
    float* own = base + opaque(start);
    float other[8];
#pragma unroll
    for (int r = 0; r < 8; r++) {
      const u32 there = THERE((part + r) * STEP);
      other[r] = start + there < rest ? (own + SIZE)[there] : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < 8; r++) {
      const u32 there = THERE((part + r) * STEP);
      float& number = x[part + r];
#if !FORWARD
      number = flipped(number, signs + SIZE / 32, start + there);
#endif
      if (start + there < rest) {
        (own + SIZE)[there] = number;
#if FORWARD
        number = __fmul_rn(other[r], factor);
        sum += number * number;
#else
        number = other[r];
#endif
      }
#if FORWARD
      number = flipped(number, signs + SIZE / 32, start + there);
#endif
    }
  }
  back_again(x, buffer, t, far);
#elif COLUMNS < 8
  // Only to where it came from.
#pragma unroll
  for (int r = 0; r < 32; r++) buffer[(far + r * 8) ^ (far / 256 % 4 * 8)] = x[r];
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 32; r++) x[r] = buffer[(r * 256 + t) ^ (r % 4 * 8)];
#endif
#pragma unroll
  for (int r = 0; r < 32; r++) (base + opaque(near))[THERE(r * 256)] = x[r];
#if FORWARD && (EXCHANGE || ALONE)
  __syncthreads();
  sum = block_sum(sum, buffer, t);
  if (t == 0) squares[row * (2 * TILES) + TILES + tile] = sum;
#endif
}
#endif

#ifdef SCALES
// What rotated vectors are multiplied by: `unit`, over their length where that is more than 1; 0 for those that are
// broken. A warp has a client, whose squares are in `parts` parts.
extern "C" __global__ void scales(const float* __restrict__ squares, float* found, int count, int parts, double unit) {
  const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= count) return;
  double total = 0.0;
  for (int part = lane; part < parts; part += 32) total += squares[(u64)row * parts + part];
  for (int distance = 16; distance; distance /= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, distance);
  const double length = sqrt(total);
  if (lane == 0) found[row] = length < LONGEST ? (float)(length > 1.0 ? unit / length : unit) : 0.0f;  // NaN is not less
}
#endif

#ifdef FINISH
// The last pass: over bits 0-12 of the first 2^LOG coordinates and none for the others; then numbers are multiplied by
// their row's scale, and rounded and added to the sums, or (WRITE) written. A block takes pieces of work, each a tile of
// one in `splits` rows.
extern "C" __global__ void __launch_bounds__(THREADS, 3) finish(
    float* __restrict__ rows, int stride, int rest, const float* __restrict__ scales, int count, int splits,
    u64* __restrict__ sums, int first, const u32* __restrict__ keys, const u32* __restrict__ exact, uint2* late
) {
  extern __shared__ float buffer[];
  const u32 t = threadIdx.x, warp = t / 32, lane = t % 32;
  const u32 tiles = TILES + (rest + TILE - 1) / TILE, end = SIZE + rest;
#if !WRITE
  u32* totals = (u32*)(buffer + TILE) + t;
  const Keys key = {keys[0], keys[1]};
  for (int word = 0; word < 8; word++) totals[word * THREADS] = 0;
  Draws draws;
#if QUANTILES
  u32* bounds = (u32*)(buffer + TILE) + 8 * THREADS;
  for (u32 entry = t; entry < 2 * (LIMIT + 1); entry += THREADS) {
    const u32* pair = exact + (entry % (LIMIT + 1) * COINS + entry / (LIMIT + 1) * 2) * 8;
    bounds[entry] = pair[0] | pair[8] << 16;
  }
  draws = {(u32)__cvta_generic_to_shared(bounds), late + (u64)blockIdx.x * LATE};
  if (t == 0) late_count = 0;
#endif
  if (t == 0) zero = 0;
  __syncthreads();
#endif
#pragma unroll 1
  for (u32 work = blockIdx.x; work < tiles * splits; work += gridDim.x) {
    // Neighbours work on the same rows.
    const u32 tile = work % tiles, begin = tile * TILE;
    const bool head = tile < TILES;
#if !WRITE
    int unflushed = 0;
#endif
#pragma unroll 1
    for (u32 row = work / tiles; row < count; row += splits) {
      float* base = rows + (u64)row * stride + begin;
      const float scale = __ldg(scales + row);
      float x[32];
      if (head) {
#pragma unroll
        for (int r = 0; r < 32; r++) x[r] = base[warp * 1024 + r * 32 + lane];
        transform(x, buffer, warp, lane);
      } else {
#pragma unroll
        for (int r = 0; r < 32; r++) x[r] = begin + PLACE(r) + t < end ? base[PLACE(r) + t] : 0.0f;
        // As the transform does: everybody has looked at the draws put off before there are more.
        __syncthreads();
      }
#pragma unroll
      for (int r = 0; r < 32; r++) x[r] = scale == 0.0f ? 0.0f : __fmul_rn(x[r], scale);
#if WRITE
#pragma unroll
      for (int r = 0; r < 32; r++)
        if (begin + PLACE(r) + t < end) base[PLACE(r) + t] = x[r];
#else
      round_part<32>(x, totals, begin, 0, t, (u32)first + row, key, draws);
      if (++unflushed == FLUSH || row + splits >= count) {
        unflushed = 0;
#pragma unroll
        for (int r = 0; r < 32; r += 4) {
          const u32 total = totals[r / 4 * THREADS];
          totals[r / 4 * THREADS] = 0;
#pragma unroll
          for (int k = 0; k < 4; k++) {
            const u32 place = begin + PLACE(r + k) + t;
            if (place < end && (total >> (8 * k) & 255)) atomicAdd(sums + place, (u64)(total >> (8 * k) & 255));
          }
        }
      }
#endif
      __syncthreads();
#if QUANTILES && !WRITE
      // All of a tile's must find room.
      if (late_count > LATE - TILE) draw_late(draws, exact, sums, t, key, begin, end);
#endif
    }
#if QUANTILES && !WRITE
    draw_late(draws, exact, sums, t, key, begin, end);
#endif
  }
}
#endif

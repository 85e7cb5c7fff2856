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
//
// Memory is slow to answer: a thread asks for all it needs at the beginning, with room for it in registers or in shared
// memory. So it is with signs: lane r has those of register r of all lanes of its warp, a bit each.

#define TILE 8192
#define SIZE (1u << LOG)
#define TILES (SIZE / TILE)

// Multiplies register r by ±2^(-LOG/2), with signs by the bits of lane r.
__device__ __forceinline__ float flipped(float x, u32 bits, int r, u32 lane) {
  const u32 word = __shfl_sync(0xFFFFFFFFu, bits, r);
  return __fmul_rn(x, __uint_as_float(NORMALISE ^ (word << (31 - lane) & 0x80000000u)));
}

// Transforms bits 0-12 of a tile, from layout A to C; bits 8 and 9 are left to C. All threads of the block must be
// done before one uses the buffer again.
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

// Returns the sum of a block's numbers to thread 0. They are added up in the same order every time.
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
// One pass over bits 0-12. FORWARD: numbers are divided by the bound that norms are clipped to (multiplied by `inverse`,
// the bits of a float), their squares are added up, and they get signs. Otherwise they get signs afterwards if LAST.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    low(float* __restrict__ rows, int stride, const u32* __restrict__ signs, float* squares, u32 inverse) {
  __shared__ float buffer[TILE];
  const u32 t = threadIdx.x, warp = t / 32, lane = t % 32, tile = blockIdx.x % TILES, row = blockIdx.x / TILES;
  float* base = rows + (u64)row * stride + tile * TILE;
  float x[32];
#pragma unroll
  for (int r = 0; r < 32; r++) x[r] = base[warp * 1024 + r * 32 + lane];
#if FORWARD
  const u32 bits = __ldg(signs + tile * (TILE / 32) + t);
  const float factor = __uint_as_float(inverse);
  float sum = 0.0f;
#pragma unroll
  for (int r = 0; r < 32; r++) {
    x[r] = __fmul_rn(x[r], factor);
    sum += x[r] * x[r];
    x[r] = flipped(x[r], bits, r, lane);
  }
  sum = block_sum(sum, buffer, t);
  if (t == 0) squares[row * (2 * TILES) + tile] = sum;
  __syncthreads();
#elif LAST
  const u32 bits = __ldg(signs + (tile * TILE + PLACE(lane)) / 32 + warp);
#endif
  transform(x, buffer, warp, lane);
#pragma unroll
  for (int r = 0; r < 32; r++) {
#if !FORWARD && LAST
    x[r] = flipped(x[r], bits, r, lane);
#endif
    base[PLACE(r) + t] = x[r];
  }
}
#endif

#ifdef HIGH
#define COLUMNS (13 - BITS)
// Offset of number e of a tile from the tile's first number.
#define THERE(e) (((e) >> COLUMNS << FIRST) + ((e) & ((1 << COLUMNS) - 1)))
// Places of layouts D and E in shared memory; bits 3 and 4 are permuted, so that both lie in 32 banks.
#define NEAR(r) (((r) * 256 + t) ^ ((r) % 4 * 8))
#define FAR(r) ((far + (r) * 8) ^ (far / 256 % 4 * 8))

// One pass over BITS bits of coordinates, from bit FIRST on. EXCHANGE: numbers are exchanged for those beyond the first
// 2^LOG, with signs before it or (FORWARD) after it, and there is a second transform over the same bits. FORWARD with
// ALONE: signs come first, as no pass came before. In both the squares of numbers not seen before are added up.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    high(float* __restrict__ rows, int stride, int rest, const unsigned char* __restrict__ signs, float* squares, u32 inverse) {
  extern __shared__ float buffer[];
  const u32 t = threadIdx.x, warp = t / 32, lane = t % 32, tile = blockIdx.x % TILES, row = blockIdx.x / TILES;
  const u32 below = tile % (1u << (FIRST - COLUMNS)), above = tile >> (FIRST - COLUMNS);
  const u32 begin = (above << (FIRST + BITS)) + (below << COLUMNS);
  const u32 near = begin + THERE(t), far = warp * 1024 + lane / 8 * 256 + lane % 8;
  float* base = rows + (u64)row * stride;
  float x[32];
#if EXCHANGE || ALONE
  const u32 signs_begin = (EXCHANGE ? SIZE : 0) + begin + THERE(warp * 32) + THERE(lane * 256);
  u32 bits = 0;
#pragma unroll
  for (int part = 0; part < 4; part++) bits |= (u32)__ldg(signs + (signs_begin + THERE(part * 8)) / 8) << (8 * part);
  const float factor = __uint_as_float(inverse);
  float sum = 0.0f;
#endif
#if EXCHANGE
  // The numbers that this thread exchanges.
  float *other = buffer + TILE + t, *beyond = base + SIZE + near;
  const int left = rest - (int)near;
#pragma unroll
  for (int r = 0; r < 32; r++)
    if (THERE(r * 256) < left) fetch(other + r * THREADS, beyond + THERE(r * 256));
#endif
#if EXCHANGE && COLUMNS < 8
#pragma unroll
  for (int r = 0; r < 32; r++) x[r] = (base + begin + THERE(far))[THERE(r * 8)];
#else
#pragma unroll
  for (int r = 0; r < 32; r++) x[r] = (base + near)[THERE(r * 256)];
#endif
#if EXCHANGE
#if COLUMNS < 8
  butterflies<COLUMNS - 3, 5>(x);
#pragma unroll
  for (int r = 0; r < 32; r++) buffer[FAR(r)] = x[r];
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 32; r++) x[r] = buffer[NEAR(r)];
#endif
  butterflies<(COLUMNS > 8 ? COLUMNS - 8 : 0), 5>(x);
  wait_for_fetches();
#pragma unroll
  for (int r = 0; r < 32; r++) {
#if !FORWARD
    x[r] = flipped(x[r], bits, r, lane);
#endif
    if (THERE(r * 256) < left) {
      beyond[THERE(r * 256)] = x[r];
      x[r] = other[r * THREADS];
#if FORWARD
      x[r] = __fmul_rn(x[r], factor);
      sum += x[r] * x[r];
#endif
    }
#if FORWARD
    x[r] = flipped(x[r], bits, r, lane);
#endif
  }
#elif ALONE
#pragma unroll
  for (int r = 0; r < 32; r++) {
    x[r] = __fmul_rn(x[r], factor);
    sum += x[r] * x[r];
    x[r] = flipped(x[r], bits, r, lane);
  }
#endif
  butterflies<(COLUMNS > 8 ? COLUMNS - 8 : 0), 5>(x);
#if COLUMNS < 8
  // Each thread overwrites what it alone has read.
#pragma unroll
  for (int r = 0; r < 32; r++) buffer[NEAR(r)] = x[r];
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 32; r++) x[r] = buffer[FAR(r)];
  butterflies<COLUMNS - 3, 5>(x);
#pragma unroll
  for (int r = 0; r < 32; r++) (base + begin + THERE(opaque(far)))[THERE(r * 8)] = x[r];
#else
#pragma unroll
  for (int r = 0; r < 32; r++) (base + opaque(near))[THERE(r * 256)] = x[r];
#endif
#if FORWARD && (EXCHANGE || ALONE)
  __syncthreads();
  sum = block_sum(sum, buffer, t);
  if (t == 0) squares[row * (2 * TILES) + TILES + tile] = sum;
#endif
}
#endif

#ifdef SCALES
// Computes the factors of rotated vectors: `unit`, over the length if that is more than 1; 0 if a vector is not finite
// or too long. A warp has a client, whose squares are in `parts` parts.
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
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) finish(
    float* __restrict__ rows, int stride, int rest, const float* __restrict__ scales, int count, int splits,
    u64* __restrict__ sums, int first, const u32* __restrict__ keys, const u32* __restrict__ exact, uint2* late
) {
  extern __shared__ float buffer[];
  const u32 t = threadIdx.x, warp = t / 32, lane = t % 32;
  const u32 tiles = TILES + (rest + TILE - 1) / TILE, end = SIZE + rest;
#if !WRITE
  u32* totals = (u32*)(buffer + TILE) + t;
  const Keys key = {keys[0], keys[1]};
  for (int word = 0; word < SUM_WORDS(32); word++) totals[word * THREADS] = 0;
  Draws draws;
#if QUANTILES
  u32* bounds = (u32*)(buffer + TILE) + SUM_WORDS(32) * THREADS;
  for (u32 entry = t; entry < 2 * (LIMIT + 1); entry += THREADS) {
    const u32* pair = exact + (entry / 2 * COINS + entry % 2 * 2) * 8;
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
    // Neighbouring blocks work on the same rows.
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
        if (begin + TILE <= end) {
#pragma unroll
          for (int r = 0; r < 32; r++) x[r] = base[PLACE(r) + t];
        } else {
#pragma unroll
          for (int r = 0; r < 32; r++) x[r] = begin + PLACE(r) + t < end ? base[PLACE(r) + t] : 0.0f;
        }
        // As in the transform: all threads have seen the postponed draws before there are more.
        __syncthreads();
      }
#pragma unroll
      for (int r = 0; r < 32; r++) x[r] = scale == 0.0f ? 0.0f : __fmul_rn(x[r], scale);
#if WRITE
#pragma unroll
      for (int r = 0; r < 32; r++)
        if (begin + PLACE(r) + t < end) base[PLACE(r) + t] = x[r];
#else
      round_part<TILE>(x, totals, begin, 0, t, (u32)first + row, key, draws);
      if (++unflushed == FLUSH || row + splits >= count) {
        unflushed = 0;
#pragma unroll
        for (int r = 0; r < 32; r += WIDE ? 1 : 4) {
          const u32 total = totals[SUM_WORDS(r) * THREADS];
          totals[SUM_WORDS(r) * THREADS] = 0;
#pragma unroll
          for (int k = 0; k < (WIDE ? 1 : 4); k++) {
            const u32 place = begin + PLACE(r + k) + t, part = WIDE ? total : total >> (8 * k) & 255;
            if (place < end && part) atomicAdd(sums + place, (u64)part);
          }
        }
      }
#endif
      __syncthreads();
#if QUANTILES && !WRITE
      // There must be room for all postponed draws of a tile.
      if (late_count > LATE - TILE) draw_late(draws, exact, sums, t, key, begin, end);
#endif
    }
#if QUANTILES && !WRITE
    draw_late(draws, exact, sums, t, key, begin, end);
#endif
  }
}
#endif

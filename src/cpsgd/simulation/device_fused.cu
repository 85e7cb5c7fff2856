// Clients' vectors of 2^13 <= d < 2^16 coordinates, clipped, rotated, rounded and added up by one kernel: the vectors
// never leave the multiprocessor. `device_cuda.py` defines the upper-case names, that of one kernel among them, says what
// the arguments are, and puts `device_instructions.cu` and `device_rounding.cu` first. It was written for d = 51,370, the
// paper's network, and is tuned for TILE_LOG = 15.
//
// A block takes one client after another and holds 2^TILE_LOG numbers in registers, 32 per thread. With
// t = 32 · warp + lane, register r of thread t is coordinate
//     A: 32 t + r          B: 1024 warp + 32 r + lane          C: PLACE(r) + t
// so that the butterflies of bits 0-4 are within a thread in A, those of bits 5-9 in B and the others in C.
// A to B stays within a warp; B to C and C to A go through the whole block. Sums of rounded numbers are bytes, four to
// a word, of the thread that has the coordinate in C; they are added to global memory before one can overflow. WIDE ones
// find no room in a multiprocessor: each block has its own in global memory, so few that they stay in its cache.

#define SIZE (1 << TILE_LOG)
#define HEAD_WORDS SUM_WORDS(32)
// Words of a thread for coordinates beyond the first 2^TILE_LOG, in layout C.
#define TAIL_WORDS (TILE_LOG == 15 ? SUM_WORDS((REST + THREADS - 1) / THREADS) : REST > 0 ? HEAD_WORDS : 0)
// The register of which only some threads hold one of these coordinates, or none.
#define LAST_PART ((REST + THREADS - 1) / THREADS - 1)
#define LAST (LAST_PART / (1 << (15 - TILE_LOG)) + LAST_PART % (1 << (15 - TILE_LOG)) * (1 << (TILE_LOG - 10)))
#define CHUNKS 4096  // groups of 16 coordinates below 2^16

// Multiplies each thread's numbers by ±2^(-TILE_LOG/2), in layout A.
__device__ __forceinline__ void flip(float (&x)[32], u32 signs) {
#pragma unroll
  for (int r = 0; r < 32; r++) x[r] = __fmul_rn(x[r], __uint_as_float(NORMALISE ^ (signs << (31 - r) & 0x80000000u)));
}

// Transforms from layout A to C. No thread may still read the buffer outside of its own warp's part.
__device__ __forceinline__ void transform(float (&x)[32], float* buffer, u32 warp, u32 lane) {
  float* own = buffer + warp * 1024;
  const u32 begin = (u32)__cvta_generic_to_shared(own);
  butterflies(x);
  // Within rows of 32 the columns are permuted, so that rows and columns both lie in 32 banks.
  const u32 line = fresh(begin + lane * 132);
#pragma unroll
  for (int r = 0; r < 32; r++) put(line ^ (4 * r), x[r]);
  __syncwarp();
  const u32 column = fresh(begin + lane * 4);
#pragma unroll
  for (int r = 0; r < 32; r++) x[r] = take(column ^ (132 * r));
  butterflies(x);
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 32; r++) own[r * 32 + lane] = x[r];
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 32; r++) x[r] = buffer[PLACE(r) + warp * 32 + lane];
  butterflies<0, TILE_LOG - 10>(x);
  __syncthreads();
}

// From layout C to A, of registers from FIRST on. Afterwards each warp has read its own part, and nothing else.
template <int FIRST>
__device__ __forceinline__ void regroup(float (&x)[32], float* buffer, u32 warp, u32 lane) {
#pragma unroll
  for (int r = FIRST; r < 32; r++) buffer[PLACE(r) + warp * 32 + (lane ^ (PLACE(r) / 32 % 32 + warp))] = x[r];
  __syncthreads();
  const u32 line = fresh((u32)__cvta_generic_to_shared(buffer + warp * 1024) + lane * 132);
#pragma unroll
  for (int r = 0; r < 32; r++) x[r] = take(line ^ (4 * r));
  __syncwarp();
}

// Adds the sums to global memory, and starts them again.
__device__ __forceinline__ void flush(u32* totals, u64* sums, u32 t) {
#if WIDE
  // Blocks begin at different sums, so that they do not wait for each other.
  for (int number = 0; number < HEAD_WORDS + TAIL_WORDS; number++) {
    const u32 word = (number + blockIdx.x) % (HEAD_WORDS + TAIL_WORDS), r = word % 32;
    const u32 place = word / 32 * SIZE + PLACE(r) + t, total = read_far(totals + word * THREADS);
    totals[word * THREADS] = 0;
    if (place < SIZE + REST) atomicAdd(sums + place, (u64)total);
  }
#else
  for (int word = 0; word < HEAD_WORDS + TAIL_WORDS; word++) {
    const u32 total = totals[word * THREADS], part = word / HEAD_WORDS, first = word % HEAD_WORDS * 4;
    totals[word * THREADS] = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const u32 place = PLACE(first + k) + t;
      if (place < (part ? REST : SIZE) && (total >> (8 * k) & 255))
        atomicAdd(sums + part * SIZE + place, (u64)(total >> (8 * k) & 255));
    }
  }
#endif
}

#if PRODUCTS
// Computes coordinates from factors in shared memory, 16 at a time where they are one factor times neighbours.
__device__ __forceinline__ void multiply(
    float (&x)[32], const float* factors, const u32* chunks, const u32* pairs, u32 chunk, float scale
) {
  const uint2 found = *(const uint2*)(chunks + chunk);
#pragma unroll
  for (int part = 0; part < 2; part++) {
    const u32 both = part ? found.y : found.x;
    if (both < 0xFFFFFFFEu) {
      const float left = factors[both & 0xFFFF];
      const float4* right = (const float4*)(factors + (both >> 16));
#pragma unroll
      for (int s = 0; s < 4; s++) {
        const float4 four = right[s];
        x[16 * part + 4 * s] = __fmul_rn(__fmul_rn(left, four.x), scale);
        x[16 * part + 4 * s + 1] = __fmul_rn(__fmul_rn(left, four.y), scale);
        x[16 * part + 4 * s + 2] = __fmul_rn(__fmul_rn(left, four.z), scale);
        x[16 * part + 4 * s + 3] = __fmul_rn(__fmul_rn(left, four.w), scale);
      }
    } else if (both == 0xFFFFFFFEu) {
#pragma unroll
      for (int s = 0; s < 16; s++) {
        const u32 pair = __ldg(pairs + s * CHUNKS + chunk + part);
        if (pair != 0xFFFFFFFFu)
          x[16 * part + s] = __fmul_rn(__fmul_rn(factors[pair & 0xFFFF], factors[pair >> 16]), scale);
      }
    }
  }
  // Vectors that are not finite have scale 0 and become zero, even if they hold NaN; no other scale is 0.
  if (scale == 0.0f) {
#pragma unroll
    for (int r = 0; r < 32; r++) x[r] = 0.0f;
  }
}
#endif

#ifdef ENCODE
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) encode(
#if PRODUCTS
    const float* __restrict__ factors, const u32* __restrict__ chunks, const u32* __restrict__ pairs,
#else
    const float* __restrict__ rows, int stride,
#endif
    const float* __restrict__ scales,
    const u32* __restrict__ signs, u64* __restrict__ sums, int count, int first, const u32* __restrict__ keys
#if QUANTILES
    , const u32* __restrict__ exact, uint2* late
#elif WIDE
    , u32* wide
#endif
) {
  extern __shared__ float memory[];
  float* buffer = memory + (-(u32)__cvta_generic_to_shared(memory) & 4095) / 4;
  const u32 t = threadIdx.x, warp = t / 32, lane = t % 32;
#if WIDE
  u32* totals = wide + (u64)blockIdx.x * ((HEAD_WORDS + TAIL_WORDS) * THREADS) + t;
  float* factor = buffer + SIZE;
#else
  u32* totals = (u32*)(buffer + SIZE) + t;
  float* factor = buffer + SIZE + (HEAD_WORDS + TAIL_WORDS) * THREADS;
#endif
  const Keys key = {keys[0], keys[1]};
  for (int word = 0; word < HEAD_WORDS + TAIL_WORDS; word++) totals[word * THREADS] = 0;
  float x[32];
  // Blocks start one after the other; all at once they would wait for each other.
  int unflushed = blockIdx.x % FLUSH;
#if PRODUCTS
  if (blockIdx.x < count)
    for (u32 f = t; f < FACTORS; f += THREADS) factor[f + (f / 32) * 4] = factors[(u64)blockIdx.x * FACTORS + f];
#endif
  Draws draws;
#if QUANTILES
  u32* bounds = (u32*)(factor + FACTORS_END);
  for (u32 entry = t; entry < 2 * (LIMIT + 1); entry += THREADS) {
    const u32* pair = exact + (entry / 2 * COINS + entry % 2 * 2) * 8;
    bounds[entry] = pair[0] | pair[8] << 16;
  }
  draws = {(u32)__cvta_generic_to_shared(bounds), late + (u64)blockIdx.x * LATE};
  if (t == 0) late_count = 0;
#endif
  if (t == 0) zero = 0;
  __syncthreads();
#pragma unroll 1
  for (int row = blockIdx.x; row < count; row += gridDim.x) {
    const u32 client = (u32)first + row;
    const float scale = __ldg(scales + row);
#if PRODUCTS
    multiply(x, factor, chunks, pairs, 2 * t, scale);
#else
    const float* base = rows + (u64)row * stride;
    if (row + gridDim.x < count)
      for (u32 place = 32 * t; place < SIZE + REST; place += 32 * THREADS)
        prefetch(base + (u64)gridDim.x * stride + place);
#pragma unroll
    for (int r = 0; r < 32; r++) x[r] = base[PLACE(r) + t];
#pragma unroll
    for (int r = 0; r < 32; r++) x[r] = scale == 0.0f ? 0.0f : __fmul_rn(x[r], scale);
    regroup<0>(x, buffer, warp, lane);
#endif
    flip(x, __ldg(signs + t));
    transform(x, buffer, warp, lane);
#if REST > 0
    // Some threads' last number is beyond the last coordinate: it is rounded, too, but never added to the sums.
    const float last = x[LAST];
    round_part<REST>(x, totals + HEAD_WORDS * THREADS, SIZE, SIZE, t, client, key, draws);
    x[LAST] = last;
#if !PRODUCTS
#pragma unroll
    for (int r = 0; r < 32; r++) {
      const u32 place = PLACE(r) + opaque(t);
      if (PLACE(r) < REST && (r != LAST || place < REST))
        x[r] = scale == 0.0f ? 0.0f : __fmul_rn(base[SIZE + place], scale);
    }
    regroup<0>(x, buffer, warp, lane);
#else
    // All numbers of the first part are replaced.
    regroup<TILE_LOG == 15 ? REST / 1024 : 0>(x, buffer, warp, lane);
    if (t < (REST + 31) / 32) multiply(x, factor, chunks, pairs, SIZE / 16 + 2 * t, scale);
#endif
    flip(x, __ldg(signs + SIZE / 32 + t));
    transform(x, buffer, warp, lane);
#endif
#if PRODUCTS
    // The last use of these factors was before the transform's last barrier.
    const int next = row + gridDim.x;
    if (next < count)
      for (u32 f = t; f < FACTORS; f += THREADS) factor[f + (f / 32) * 4] = factors[(u64)next * FACTORS + f];
#endif
    round_part<SIZE>(x, totals, 0, 0, t, client, key, draws);
    if (++unflushed == FLUSH) {
      flush(totals, sums, t);
      unflushed = 0;
    }
    __syncthreads();
#if QUANTILES
    // There must be room for all postponed draws of a client.
    if (late_count > LATE - 2 * SIZE) draw_late(draws, exact, sums, t, key, 0, SIZE + REST);
#endif
  }
  if (unflushed) flush(totals, sums, t);
#if QUANTILES
  draw_late(draws, exact, sums, t, key, 0, SIZE + REST);
#endif
}
#endif

#ifdef LENGTHS
// Returns the factor of a vector: `unit`, over its length if that is more than 1; 0 if it is not finite or too long.
__device__ __forceinline__ float scale_of(double length, double unit) {
  return length < LONGEST ? (float)(length > 1.0 ? unit / length : unit) : 0.0f;  // NaN is not less
}

#if PRODUCTS
// The squared length of all products of two vectors is the product of their squared lengths. A warp has a client.
extern "C" __global__ void lengths(const float* __restrict__ factors, const int* __restrict__ ends, float* scales,
                                   int count, int layers, double bound, double unit) {
  const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= count) return;
  const float* own = factors + (u64)row * FACTORS;
  double squares = 0.0;
  int begin = 0;
  for (int layer = 0; layer < layers; layer++) {
    double product = 1.0;
    for (int side = 0; side < 2; side++) {
      const int end = ends[2 * layer + side];
      double part = 0.0;
      for (int f = begin + lane; f < end; f += 32) part += (double)own[f] * own[f];
      for (int distance = 16; distance; distance /= 2) part += __shfl_xor_sync(0xFFFFFFFFu, part, distance);
      // Biases count as weights of an input of 1.
      product *= side ? part : part + 1.0;
      begin = end;
    }
    squares += product;
  }
  if (lane == 0) scales[row] = scale_of(sqrt(squares) / bound, unit);
}
#else
// A block has a client.
extern "C" __global__ void lengths(const float* __restrict__ rows, int stride, float* scales, double bound, double unit) {
  __shared__ float parts[8];
  const float* own = rows + (u64)blockIdx.x * stride;
  const float inverse = (float)(1.0 / bound);
  float squares = 0.0f;
#pragma unroll 8
  for (u32 place = threadIdx.x; place < SIZE + REST; place += 256) {
    const float value = own[place] * inverse;
    squares += value * value;
  }
  for (int distance = 16; distance; distance /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, distance);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = squares;
  __syncthreads();
  if (threadIdx.x == 0) {
    double total = 0.0;
    for (int part = 0; part < 8; part++) total += parts[part];
    scales[blockIdx.x] = scale_of(sqrt(total), unit);
  }
}
#endif
#endif

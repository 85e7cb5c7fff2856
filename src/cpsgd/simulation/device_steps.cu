// The steps of a round, each a kernel of its own, for vectors and integers that no kernel does all at once: `rotate` clips
// and rotates rows of less than 2^16 coordinates in place, `sum` rounds rows of any length and adds them up, `toss` adds
// fair coins to sums, and `back` rotates a mean back. `device_cuda.py` defines the upper-case names.
//
// A row of 2^LOG numbers, and less than that beyond them, belongs to THREADS threads with REGISTERS numbers each. With
// t = 32 · warp + lane, register r of thread t is coordinate
//     B: 1024 warp + 32 r + lane          C: PLACE(r) + t
// Butterflies of bits 0-4 are between the lanes of a warp, those of bits 5-9 within a thread in B and the others in C.
// Up to 2^10 numbers belong to one warp, and B is C.

#define SIZE (1 << LOG)
// Rows of less than 32 numbers leave lanes idle.
#define THERE (LOG >= 5 || t < SIZE)

#if defined(ROTATE) || defined(BACK)
typedef float Numbers[REGISTERS];

// Signs of the second transform begin at bit 2^LOG, or 16 if that is more.
#define SECOND_WORD (SIZE / 32)
#define SECOND_BIT (LOG < 5 ? 16 : 0)

// Transforms from layout B to C. No thread may still read the buffer.
__device__ __forceinline__ void transform(Numbers& x, float* buffer, u32 t) {
  const u32 warp = t / 32, lane = t % 32;
#pragma unroll
  for (int bit = 0; bit < (LOG < 5 ? LOG : 5); bit++) {
    // The product with ±1 is exact, so that this is an addition or a subtraction, in one instruction.
    const float side = lane >> bit & 1 ? -1.0f : 1.0f;
#pragma unroll
    for (int r = 0; r < REGISTERS; r++)
      x[r] = __fmaf_rn(x[r], side, __shfl_xor_sync(0xFFFFFFFFu, x[r], 1 << bit));
  }
  butterflies<0, (LOG < 5 ? 0 : LOG < 10 ? LOG - 5 : 5)>(x);
#if LOG > 10
  float *own = buffer + warp * 1024 + lane, *all = buffer + t;
#pragma unroll
  for (int r = 0; r < REGISTERS; r++) own[r * 32] = x[r];
  __syncthreads();
#pragma unroll
  for (int r = 0; r < REGISTERS; r++) x[r] = all[PLACE(r)];
  butterflies<0, LOG - 10>(x);
  __syncthreads();
#endif
}

// From layout C to B.
__device__ __forceinline__ void regroup(Numbers& x, float* buffer, u32 t) {
#if LOG > 10
  float *own = buffer + t / 32 * 1024 + t % 32, *all = buffer + t;
#pragma unroll
  for (int r = 0; r < REGISTERS; r++) all[PLACE(r)] = x[r];
  __syncthreads();
#pragma unroll
  for (int r = 0; r < REGISTERS; r++) x[r] = own[r * 32];
  __syncthreads();
#endif
}

// Returns a number times ±2^(-LOG/2), as a bit of a word says.
__device__ __forceinline__ float flipped(float x, u32 word, u32 bit) {
  return __fmul_rn(x, __uint_as_float(NORMALISE ^ (word << (31 - bit & 31) & 0x80000000u)));
}

// Multiplies each number by ±2^(-LOG/2), in layout B. A warp's words follow each other; they are read in pairs.
__device__ __forceinline__ void flip(Numbers& x, const u32* signs, u32 bit) {
#if LOG > 5
#pragma unroll
  for (int r = 0; r < REGISTERS; r += 2) {
    const uint2 pair = __ldg((const uint2*)(signs + r));
    x[r] = flipped(x[r], pair.x, bit), x[r + 1] = flipped(x[r + 1], pair.y, bit);
  }
#else
  x[0] = flipped(x[0], __ldg(signs), bit);
#endif
}
#endif

#ifdef ROTATE
// Blocks that share a multiprocessor, as registers allow.
#define BLOCKS ((REGISTERS == 32 ? 1024 : REGISTERS == 16 ? 1536 : 2048) / (THREADS * PACK))

__shared__ float row_factor;

// Returns the factor of a row with these squares: `unit`, over its length if that is more than 1; 0 if it is not finite
// or too long.
__device__ __forceinline__ float factor_of(float squares, double unit) {
  if (squares <= 1.0f) return (float)unit;
  return squares < LONGEST * LONGEST ? (float)(unit * rsqrt((double)squares)) : 0.0f;  // NaN is not less
}

// Returns a row's factor to all of its threads, of which each has some of the squares.
__device__ __forceinline__ float factor_of_row(float part, float* buffer, double unit, u32 t) {
  for (int distance = 16; distance; distance /= 2) part += __shfl_xor_sync(0xFFFFFFFFu, part, distance);
#if LOG > 10
  if (t % 32 == 0) buffer[t / 32] = part;
  __syncthreads();
  if (t == 0) {
    part = 0.0f;
    for (int warp = 0; warp < THREADS / 32; warp++) part += buffer[warp];
    row_factor = factor_of(part, unit);
  }
  __syncthreads();
  return row_factor;
#else
  return factor_of(part, unit);
#endif
}

// Clips rows to norm `bound`, multiplies them by `unit` and rotates them. A block has PACK rows. The numbers beyond the
// first 2^LOG wait in shared memory if there is room (STAGED), and are read a second time if not.
extern "C" __global__ void __launch_bounds__(THREADS * PACK, BLOCKS) rotate(
    float* rows, int stride, int rest, int count, const u32* __restrict__ signs, double bound, double unit
) {
  extern __shared__ float buffer[];
  const u32 t = threadIdx.x % THREADS, row = blockIdx.x * PACK + threadIdx.x / THREADS;
  if (row >= count) return;
  const u32 warp = t / 32, lane = t % 32;
  float *base = rows + (u64)row * stride, *own = base + warp * 1024 + lane, *beyond = base + SIZE + t;
  float* waiting = buffer + (LOG > 10 ? SIZE : 0) + threadIdx.x / THREADS * rest + t;
  const int left = rest - (int)t;
  const float inverse = (float)(1.0 / bound);
#if STAGED
#pragma unroll 4
  for (int place = 0; place < left; place += THREADS) fetch(waiting + place, beyond + place);
#endif
  Numbers x;
#pragma unroll
  for (int r = 0; r < REGISTERS; r++) x[r] = THERE ? own[r * 32] : 0.0f;
  float squares = 0.0f;
#pragma unroll
  for (int r = 0; r < REGISTERS; r++) {
    const float value = x[r] * inverse;
    squares += value * value;
  }
#if STAGED
  wait_for_fetches();
#else
  waiting = beyond;
#endif
#pragma unroll 4
  for (int place = 0; place < left; place += THREADS) {
    const float value = waiting[place] * inverse;
    squares += value * value;
  }
  const float factor = factor_of_row(squares, buffer, unit, t);
#pragma unroll
  for (int r = 0; r < REGISTERS; r++) x[r] = factor == 0.0f ? 0.0f : __fmul_rn(x[r], factor);
  if (factor == 0.0f)
    for (int place = 0; place < left; place += THREADS) waiting[place] = 0.0f;
  flip(x, signs + warp * 32, lane);
  transform(x, buffer, t);
  if (rest) {
#pragma unroll
    for (int r = 0; r < REGISTERS; r++)
      if (PLACE(r) < left) {
        const float other = waiting[PLACE(r)];
        beyond[PLACE(r)] = x[r];
        x[r] = __fmul_rn(other, factor);
      }
    regroup(x, buffer, t);
    flip(x, signs + SECOND_WORD + warp * 32, lane + SECOND_BIT);
    transform(x, buffer, t);
  }
#pragma unroll
  for (int r = 0; r < REGISTERS; r++)
    if (THERE) base[PLACE(r) + t] = x[r];
}
#endif

#ifdef BACK
// Rotates one vector back, in place, by one block.
extern "C" __global__ void __launch_bounds__(THREADS) back(float* vector, int rest, const u32* __restrict__ signs) {
  extern __shared__ float buffer[];
  const u32 t = threadIdx.x, warp = t / 32, lane = t % 32;
  float *own = vector + warp * 1024 + lane, *beyond = vector + SIZE + t;
  const int left = rest - (int)t;
  Numbers x;
#pragma unroll
  for (int r = 0; r < REGISTERS; r++) x[r] = THERE ? own[r * 32] : 0.0f;
  if (rest) {
    transform(x, buffer, t);
#pragma unroll
    for (int r = 0; r < REGISTERS; r++)
      x[r] = flipped(x[r], __ldg(signs + SECOND_WORD + PLACE(r) / 32 + warp), lane + SECOND_BIT);
#pragma unroll
    for (int r = 0; r < REGISTERS; r++)
      if (PLACE(r) < left) {
        const float other = beyond[PLACE(r)];
        beyond[PLACE(r)] = x[r];
        x[r] = other;
      }
    regroup(x, buffer, t);
  }
  transform(x, buffer, t);
#pragma unroll
  for (int r = 0; r < REGISTERS; r++)
    if (THERE) vector[PLACE(r) + t] = flipped(x[r], __ldg(signs + PLACE(r) / 32 + warp), lane);
}
#endif

#ifdef SUM
// Coordinates of a thread, 1024 apart: a counter has four words, and coins that are tossed one by one take half a word.
#define SLABS (COINS > 0 && COINS <= FEW_COINS ? 8 : 4)

// Returns the nearest point of the grid, within the limit, plus OFFSET.
__device__ __forceinline__ u32 point_of(float x) {
  if (LIMIT < 4194304) return __float_as_uint(nearest(x)) + (OFFSET - 0x4B400000u);
  return (u32)__float2int_rn(fminf(fmaxf(x, -(float)LIMIT), (float)LIMIT)) + OFFSET;
}

// Adds the integers of one client to a thread's sums; `counter` is that of its coordinates.
__device__ __forceinline__ void draw_points(const u32 (&points)[SLABS], u32 (&totals)[SLABS], u32 counter, u32 client, Keys key) {
  u32 words[4] = {0, 0, 0, 0};
#if COINS == 0
  if (FRACTION > 0 || SAMPLED) philox(key, counter, client, ROUNDING, words);
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const u32 drawn = (points[k] + ((words[k] & 0xFFFF) >> (16 - FRACTION))) >> FRACTION;
    totals[k] += SAMPLED ? ((words[k] >> 16) < RATE ? 2 * drawn : 1) : drawn;
  }
#elif COINS <= FEW_COINS
#pragma unroll 1
  for (u32 coin = 0; coin < COINS; coin++) {
    philox(key, counter, client, TOSSES + coin, words);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      totals[k] += (points[k] + (words[k] & 0xFFFF)) >> 16;
      totals[k + 4] += (points[k + 4] + (words[k] >> 16)) >> 16;
    }
  }
#else
  // Digit by digit: of the 16-bit numbers that agree with a point so far, those with 0 where it has 1 are below it.
  int left[4] = {COINS, COINS, COINS, COINS};
#pragma unroll 1
  for (u32 digit = 0; digit < 16; digit++) {
    int ones[4] = {0, 0, 0, 0};
    const int most = max(max(left[0], left[1]), max(left[2], left[3]));
#pragma unroll 1
    for (int number = 0; 32 * number < most; number++) {
      philox(key, counter, client, TOSSES + 16 * number + digit, words);
#pragma unroll
      for (int k = 0; k < 4; k++)  // the first bits of a word, as many as numbers still agree
        ones[k] += __popc(words[k] & __funnelshift_lc(0xFFFFFFFFu, 0u, max(left[k] - 32 * number, 0)));
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const bool one = points[k] >> (15 - digit) & 1;
      totals[k] += one ? left[k] - ones[k] : 0;
      left[k] = one ? ones[k] : left[k] - ones[k];
    }
  }
#endif
}

// Rounds rows and adds them up. A thread has one counter's coordinates of `clients` rows, a block 128 counters. Rows of
// less than 1024 coordinates have as many counters.
extern "C" __global__ void __launch_bounds__(128) sum(
    const float* __restrict__ rows, int stride, u32 dim, int count, int clients, u64* sums, int first,
    const u32* __restrict__ keys
) {
  const u32 width = dim < 1024 ? dim : 1024, counters = (dim + 1024 * SLABS - 1) / (1024 * SLABS) * width;
  const u32 blocks = (counters + 127) / 128, number = blockIdx.x % blocks * 128 + threadIdx.x;
  if (number >= counters) return;
  const u32 group = number / width, place = number % width, begin = group * (1024 * SLABS) + place;
  const int start = blockIdx.x / blocks * clients, end = min(start + clients, count);
  const Keys key = {keys[0], keys[1]};
  u32 totals[SLABS];
#pragma unroll
  for (int k = 0; k < SLABS; k++) totals[k] = 0;
  constexpr int at_once = COINS ? 1 : 4;
#pragma unroll at_once
  for (int row = start; row < end; row++) {
    const float* base = rows + (u64)row * stride + begin;
    u32 points[SLABS];
#pragma unroll
    for (int k = 0; k < SLABS; k++) points[k] = point_of(begin + k * 1024 < dim ? base[k * 1024] : 0.0f);
    draw_points(points, totals, group * 1024 + place, (u32)first + row, key);
  }
#pragma unroll
  for (int k = 0; k < SLABS; k++)
    if (begin + k * 1024 < dim) atomicAdd(sums + begin + k * 1024, (u64)totals[k]);
}
#endif

#ifdef TOSS
// Adds the ones among `trials` random bits to each of the sums. A thread has 64 of a coordinate's counters.
extern "C" __global__ void toss(u64* __restrict__ sums, int dim, int trials, const u32* __restrict__ keys) {
  const Keys key = {keys[0], keys[1]};
  const u32 place = blockIdx.x * blockDim.x + threadIdx.x;
  const int begin = blockIdx.y * 64;
  u32 ones = 0;
#pragma unroll 2
  for (int number = begin; number < begin + 64 && 128 * number < trials; number++) {
    u32 words[4];
    philox(key, place, number, COIN_WORDS, words);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int left = trials - 128 * number - 32 * k;
      ones += __popc(left >= 32 ? words[k] : left > 0 ? words[k] & ((1u << left) - 1) : 0);
    }
  }
  if (place < dim) atomicAdd(sums + place, (u64)ones);
}
#endif

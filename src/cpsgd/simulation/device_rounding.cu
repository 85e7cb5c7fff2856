// Code that all kernels share: random words, butterflies, and the rounding of a thread's 32 numbers to integers that are
// added to its sums.
//
// A block has THREADS = 2^(TILE_LOG - 5) threads, and each holds 32 of 2^TILE_LOG numbers. Register r of thread t holds
// coordinate `first` + PLACE(r) + t when it is rounded. There `first` is a multiple of 8192 and TILE_LOG is at least 13,
// so that registers 8 i, ..., 8 i + 7 are 1024 coordinates apart and take the words of one counter. Sums are bytes, four
// to a word; or (WIDE) words, for integers that would fill a byte too soon.

#define THREADS (1 << (TILE_LOG - 5))
#define PLACE(r) (((r) % (1 << (TILE_LOG - 10)) << 10) + ((r) / (1 << (TILE_LOG - 10)) << (TILE_LOG - 5)))

struct Keys { u32 low, high; };

// Seven rounds are enough to pass every test of randomness that its authors tried (Salmon et al., SC 2011); ten are usual.
template <int ROUNDS = 10>
__device__ __forceinline__ void philox(Keys key, u32 c0, u32 c1, u32 c2, u32 (&words)[4]) {
  u32 w0 = c0, w1 = c1, w2 = c2, w3 = 0;
  u32 k0 = key.low, k1 = key.high;
#pragma unroll
  for (int round = 0; round < ROUNDS; round++) {
    u64 a = (u64)w0 * 0xD2511F53u, b = (u64)w2 * 0xCD9E8D57u;
    w0 = (u32)(b >> 32) ^ w1 ^ k0;
    w1 = (u32)b;
    w2 = (u32)(a >> 32) ^ w3 ^ k1;
    w3 = (u32)a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = w0, words[1] = w1, words[2] = w2, words[3] = w3;
}

// Butterflies over bits BEGIN, ..., END - 1 of the number of a register.
template <int BEGIN = 0, int END = 5, int COUNT>
__device__ __forceinline__ void butterflies(float (&x)[COUNT]) {
#pragma unroll
  for (int distance = 1 << BEGIN; distance < 1 << END; distance *= 2)
#pragma unroll
    for (int r = 0; r < COUNT; r++)
      if (!(r & distance)) {
        float a = x[r], b = x[r | distance];
        x[r] = a + b;
        x[r | distance] = a - b;
      }
}

// Returns the nearest point of the grid, within the limit, plus 3 · 2^22: float32 numbers of this size are integers.
__device__ __forceinline__ float nearest(float x) {
  return fminf(fmaxf(x, -(float)LIMIT), (float)LIMIT) + 12582912.0f;
}

#if QUANTILES
// A coin of a client is forced with probability |g| / 2^15, to show what the sign of its grid point g says, and fair
// otherwise. How many are forced is drawn by inversion: as many as there are k with U >= C[k], where C[k] is the
// probability of at most k and U is uniform, both as integers of 15 + 7 · 32 bits, in which C is exact. Most often the
// first 15 bits of U and of the four smallest C decide; the few other draws are postponed, each with three neighbours.
struct Draws {
  u32 table;    // where the first 15 bits are in shared memory, 8 bytes for each |g|
  uint2* late;  // postponed draws of a block: place, |g| and sign; and the client
};

__shared__ u32 late_count;

// |g|, plus the bits of 3 · 2^22.
__device__ __forceinline__ u32 size_of(float x) {
  return __float_as_uint(fminf(fabsf(x), (float)LIMIT) + 12582912.0f);
}

// Heads of one client in one coordinate, by a random word: bytes 0 and 2 are the first bits of U, and the bits of MASK
// in bytes 1 and 3 are fair coins. Sets a bit of 0x80008000 in `unsure` where more bits of U must be looked at. `origin`
// is where the table would begin if |g| began with the bits of 0.
__device__ __forceinline__ u32 draw(float x, u32 word, u32 origin, u32& unsure) {
  const uint2 bounds = take_pair(origin + (size_of(x) << 3));
  // Both halves are compared at once, with C[0] and C[1], and with C[2] and C[3]: bits 15 and 31 are 1 if U is not less.
  const u32 both = __byte_perm(word, 0, 0x2020) | 0x80008000u, some = both - bounds.x, more = both - bounds.y;
  const u32 forced = (some & 0x80008000u) | ((more >> 1) & 0x40004000u);
  // If U - 1 is less and U is not, they are equal. U is unsure, too, if it is not less than C[3].
  unsure |= some & ~(some - 0x00010001u);
  unsure |= more & ~(more - 0x80000001u);
  // If the point is negative, heads and tails are exchanged.
  return __popc(flip_masked<MASK>((word & MASK) | forced, __float_as_int(x) >> 31));
}

// Completes postponed draws, with all bits. Forced coins are bits of MASK, in an order that begins with the usual four.
// Places count from coordinate `base`; there are `end` coordinates.
__device__ void draw_late(Draws draws, const u32* exact, u64* sums, u32 t, Keys key, u32 base, u32 end) {
  __syncthreads();
#pragma unroll 1
  for (u32 entry = t; entry < late_count; entry += THREADS) {
    const uint2 late = draws.late[entry];
    const u32 place = base + (late.x & 0xFFFF), size = late.x >> 16 & 0x7FFF;
    u32 words[4], more[2][4];
    philox(key, place / 4096 * 1024 + place % 1024, late.y, TOSSES, words);
    philox(key, place, late.y, TOSSES + 1, more[0]);
    philox(key, place, late.y, TOSSES + 2, more[1]);
    const u32 word = words[place / 1024 % 4], first = __byte_perm(word, 0, 0x4420) & 0x7FFF;
    u32 forced = 0, others = MASK & ~0xC000C000u;
#pragma unroll 1
    for (u32 k = 0; k < COINS; k++) {
      const u32* bound = exact + (size * COINS + k) * 8;
      bool below = first < bound[0], decided = first != bound[0];
#pragma unroll
      for (int i = 0; i < 7; i++) {
        const u32 own = more[i / 4][i % 4], its = bound[i + 1];
        below = decided ? below : own < its;
        decided = decided || own != its;
      }
      if (below) break;
      if (k < 4)
        forced |= (k < 2 ? 0x8000u : 0x4000u) << (k % 2 * 16);
      else
        forced |= others & -others, others &= others - 1;
    }
    const u32 turned = late.x >> 31 ? MASK : 0;
    if (place < end) atomicAdd(sums + place, (u64)__popc(((word & MASK) | forced) ^ turned));
  }
  __syncthreads();
  if (t == 0) late_count = 0;
  __syncthreads();
}
#else
struct Draws {};
#endif

// The number of words that hold a thread's sums of `count` coordinates.
#define SUM_WORDS(count) (WIDE ? (count) : ((count) + 3) / 4)

#define QUARTER(r) (PLACE(r) / 4096 * 1024 + PLACE(r) % 1024)
#define EIGHTH(r) (PLACE(r) / 8192 * 1024 + PLACE(r) % 1024)

// Adds to one of the sums that only this thread uses.
__device__ __forceinline__ void add_to(u32* sum, u32 value) {
#if FAR_SUMS
  add_far(sum, value);
#else
  *sum += value;
#endif
}

// Whether a thread's register may hold one of the first END numbers of a tile. Of 4 or 8 registers that share a counter
// the first ones do.
#define INSIDE(r) (PLACE(r) < END)

// Rounds a thread's share of the first END numbers of a tile and adds the integers to its sums. The numbers are lost.
// Postponed draws are stored with places from `local` on.
template <int END>
__device__ __forceinline__ void round_part(
    float (&x)[32], u32* totals, u32 first, u32 local, u32 t, u32 client, Keys key, Draws draws
) {
#if QUANTILES
  const u32 origin = fresh(draws.table - (0x4B400000u << 3)), here = fresh(local + t);
#pragma unroll
  for (int r = 0; r < 32; r += 4) {
    if (!INSIDE(r)) continue;
    u32 words[4], total = 0, unsure = 0;
    philox(key, opaque(first / 4 + QUARTER(r) + t), client, TOSSES, words);
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (INSIDE(r + k)) total += draw(x[r + k], words[k], origin, unsure) << (8 * k);
    if (unsure & 0x80008000u) {
      // All four draws are postponed: finding the unsure one would take registers that are needed elsewhere.
      const int four = INSIDE(r + 3) ? 4 : INSIDE(r + 2) ? 3 : INSIDE(r + 1) ? 2 : 1;
      uint2* late = draws.late + count_up(&late_count, four);
#pragma unroll
      for (int k = 0; k < four; k++) {
        const u32 size = size_of(x[r + k]) - 0x4B400000u, sign = __float_as_uint(x[r + k]) & 0x80000000u;
        late[k] = make_uint2((here + PLACE(r + k)) | size << 16 | sign, client);
      }
    } else
      totals[r / 4 * THREADS] += total;
  }
#elif COINS == 0
#pragma unroll
  for (int r = 0; r < 32; r += 4) {
    if (!INSIDE(r)) continue;
    u32 words[4] = {0, 0, 0, 0}, total = 0;
    if (FRACTION > 0 || SAMPLED) philox(key, opaque(first / 4 + QUARTER(r) + t), client, ROUNDING, words);
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (INSIDE(r + k)) {
        u32 point = __float_as_uint(nearest(x[r + k])) + (OFFSET - 0x4B400000u);
        u32 drawn = (point + ((words[k] & 0xFFFF) >> (16 - FRACTION))) >> FRACTION;
        if (SAMPLED) drawn = (words[k] >> 16) < RATE ? 2 * drawn : 1;
        if (WIDE)
          add_to(totals + (r + k) * THREADS, drawn);
        else
          total += drawn << (8 * k);
      }
    if (!WIDE) totals[r / 4 * THREADS] += total;
  }
#else
#pragma unroll
  for (int r = 0; r < 32; r += 8) {
    if (!INSIDE(r)) continue;
    // A coin shows heads if u + point >= 2^16, u being 16 random bits: if (2^23 + u) - (2^23 + 65535 - point) >= 1. All
    // of these are integers and exact, and the difference is cut to 0 or 1.
    float heads[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
      heads[k] = 0.0f;
      if (INSIDE(r + k)) x[r + k] = (8388608.0f + 65535.0f - OFFSET) - (nearest(x[r + k]) - 12582912.0f);
    }
#pragma unroll 1
    for (u32 coin = 0; coin < COINS; coin++) {
      u32 words[4];
      philox(key, opaque(first / 8 + EIGHTH(r) + t), client, TOSSES + coin, words);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if (INSIDE(r + k)) heads[k] += __saturatef(__uint_as_float((words[k] & 0xFFFF) | 0x4B000000u) - x[r + k]);
        if (INSIDE(r + k + 4))
          heads[k + 4] += __saturatef(__uint_as_float(__byte_perm(words[k], 0x4B00u, 0x5432)) - x[r + k + 4]);
      }
    }
#pragma unroll
    for (int k = 0; k < 8; k += 4)
      if (INSIDE(r + k)) {
        // Bytes 0 and 1, and 2 and 3, of a word: the last bits of numbers from 2^23 on.
        float low = 8388608.0f + heads[k] + 256.0f * heads[k + 1], high = 8388608.0f + heads[k + 2] + 256.0f * heads[k + 3];
        totals[(r + k) / 4 * THREADS] += __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x5410);
      }
  }
#endif
}

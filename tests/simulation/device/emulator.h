// Runs CUDA kernels on a processor, for tests: blocks one after another, and a block's threads in turns, each until it waits
// for the others. All threads of a block must wait equally often. Takes the place of `device_instructions.cu`.

// C's header of mathematics, and few others: every kernel is compiled with them, and C++'s take longer than a kernel.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <utility>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

template <class T> T max(T a, T b) { return a < b ? b : a; }
template <class T> T min(T a, T b) { return b < a ? b : a; }
typedef uint32_t u32;
typedef unsigned long long u64;
struct uint2 { u32 x, y; };
struct float4 { float x, y, z, w; };
struct Index { u32 x, y, z; };

Index threadIdx, blockIdx, blockDim, gridDim;
alignas(4096) float memory[1 << 16];

namespace emulator {
constexpr u32 MOST = 1024, STACK = 1 << 15;
ucontext_t scheduler, threads[MOST];
bool done[MOST];
u32 running;
// What threads show each other; two, as the next may be written before all have read the last.
u32 shown[2][MOST];
int turn[MOST];
char stacks[MOST][STACK];

inline void wait() {
  const u32 own = running;
  swapcontext(&threads[own], &scheduler);
}

template <class T>
T from_lane(T value, u32 lane) {
  const u32 own = running;
  u32* const table = shown[turn[own]];
  turn[own] ^= 1;
  memcpy(&table[own], &value, 4);
  wait();
  T found;
  memcpy(&found, &table[own / 32 * 32 + lane], 4);
  return found;
}

template <class... A, size_t... I>
void apply(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*(std::decay_t<A>*)arguments[I]...);
}

void** kernel_arguments;
void run_thread();

inline void run_block() {
  const u32 count = blockDim.x;
  for (u32 t = 0; t < count; t++) {
    done[t] = false, turn[t] = 0, shown[0][t] = shown[1][t] = 0;
    getcontext(&threads[t]);
    threads[t].uc_stack.ss_sp = stacks[t];
    threads[t].uc_stack.ss_size = STACK;
    threads[t].uc_link = &scheduler;
    makecontext(&threads[t], run_thread, 0);
  }
  for (bool active = true; active;) {
    active = false;
    for (u32 t = 0; t < count; t++)
      if (!done[t]) {
        running = t;
        threadIdx = {t, 0, 0};
        swapcontext(&scheduler, &threads[t]);
        active = active || !done[t];
      }
  }
}
}  // namespace emulator

inline void __syncthreads() { emulator::wait(); }
inline void __syncwarp() { emulator::wait(); }
template <class T> T __shfl_sync(u32, T value, int lane) { return emulator::from_lane(value, lane); }
inline float __shfl_xor_sync(u32, float value, int distance) {
  return emulator::from_lane(value, emulator::running % 32 ^ distance);
}
inline double __shfl_xor_sync(u32, double value, int distance) {
  u32 half[2];
  memcpy(half, &value, 8);
  for (u32& part : half) part = emulator::from_lane(part, emulator::running % 32 ^ distance);
  memcpy(&value, half, 8);
  return value;
}
template <class T> T __ldg(const T* source) { return *source; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline void __sincosf(float x, float* sine, float* cosine) { *sine = sinf(x), *cosine = cosf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline u32 __float_as_uint(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
inline int __float_as_int(float x) { return (int)__float_as_uint(x); }
inline float __uint_as_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
inline int __float2int_rn(float x) { return (int)rintf(x); }
inline int __popc(u32 bits) { return __builtin_popcount(bits); }
inline u32 __funnelshift_lc(u32 low, u32 high, u32 shift) { return (u32)((((u64)high << 32 | low) << min(shift, 32u)) >> 32); }
inline u32 __byte_perm(u32 a, u32 b, u32 chosen) {
  u32 found = 0;
  for (int i = 0; i < 4; i++) found |= (u32)(((u64)b << 32 | a) >> (chosen >> (4 * i) & 7) * 8 & 255) << (8 * i);
  return found;
}
template <class T> T atomicAdd(T* target, T value) { T before = *target; *target += value; return before; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }

// Addresses of shared memory count from `memory`.
inline u32 __cvta_generic_to_shared(const void* place) { return (u32)((const char*)place - (const char*)memory); }
inline char* shared_place(u32 address) { return (char*)memory + (int)address; }

u32 zero;
inline u32 opaque(u32 value) { return value; }
inline u32 fresh(u32 value) { return value + zero; }
inline void put(u32 address, float value) { *(float*)shared_place(address) = value; }
inline float take(u32 address) { return *(float*)shared_place(address); }
inline uint2 take_pair(u32 address) { return *(uint2*)shared_place(address); }
inline u32 count_up(u32* counter, u32 count) { return atomicAdd(counter, count); }
template <u32 MASK_BITS> u32 flip_masked(u32 a, u32 b) { return a ^ (b & MASK_BITS); }
inline void add_far(u32* sum, u32 value) { *sum += value; }
inline u32 read_far(const u32* sum) { return *sum; }
inline float log2_of(float x) { return log2f(x); }
inline float root_of(float x) { return sqrtf(x); }
inline void prefetch(const float*) {}
inline void fetch(float* target, const float* source) { *target = *source; }
inline void wait_for_fetches() {}

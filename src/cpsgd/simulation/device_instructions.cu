// Instructions that CUDA C++ has no function for. The tests' emulator (tests/simulation/device/emulator.h) replaces this
// file, and nothing else, to run the kernels on a processor.

typedef unsigned int u32;
typedef unsigned long long u64;

// Returns the same number, hidden from the compiler, which would otherwise precompute more than registers can hold.
__device__ __forceinline__ u32 opaque(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

__shared__ u32 zero;

// Does the same for the assembler, which would otherwise keep 32 addresses: `zero` might change.
__device__ __forceinline__ u32 fresh(u32 value) {
  u32 nothing;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(nothing) : "r"((u32)__cvta_generic_to_shared(&zero)));
  return value + nothing;
}

// Writes to shared memory by its own addresses. A buffer that begins at a multiple of 4096 bytes has its columns permuted
// by an exclusive or.
__device__ __forceinline__ void put(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ float take(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint2 take_pair(u32 address) {
  uint2 pair;
  asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(pair.x), "=r"(pair.y) : "r"(address));
  return pair;
}

// Adds to a counter in shared memory and returns its old value.
__device__ __forceinline__ u32 count_up(u32* counter, u32 count) {
  u32 number;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;"
               : "=r"(number)
               : "r"((u32)__cvta_generic_to_shared(counter)), "r"(count)
               : "memory");
  return number;
}

// Returns a ^ (b & MASK), in one instruction.
template <u32 MASK_BITS>
__device__ __forceinline__ u32 flip_masked(u32 a, u32 b) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0x78;" : "=r"(result) : "r"(a), "r"(b), "n"(MASK_BITS));
  return result;
}

// Returns the logarithm to base 2 or the root of a normal number, within a few units of the last place.
__device__ __forceinline__ float log2_of(float x) {
  asm("lg2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}

__device__ __forceinline__ float root_of(float x) {
  asm("sqrt.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}

// Adds to global memory and waits for nothing.
__device__ __forceinline__ void add_far(u32* sum, u32 value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(sum), "r"(value) : "memory");
}

// Reads what `add_far` has written.
__device__ __forceinline__ u32 read_far(const u32* sum) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(sum) : "memory");
  return value;
}

__device__ __forceinline__ void prefetch(const float* source) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
}

// Starts to copy a number to shared memory, for the same thread.
__device__ __forceinline__ void fetch(float* target, const float* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((u32)__cvta_generic_to_shared(target)), "l"(source));
}

// Waits for all that this thread has fetched.
__device__ __forceinline__ void wait_for_fetches() { asm volatile("cp.async.wait_all;" ::: "memory"); }

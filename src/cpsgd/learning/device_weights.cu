// Norms of examples' gradients, their weights, and weighted copies for the sums, by one launch: a block has one example.
// An example's squared norm is that of its rows, |b|² (|a|² + 1) for factors b and a of a dense layer, the 1 for a bias,
// and that of what is `beside` if there is a `rest`. `device_weights.py` defines SOURCES and TARGETS (the parameters), COUNT, and for each tensor WIDTHS and KINDS.

#define ROW 0
#define BACK 1       // b of a layer without a bias; its a comes next
#define BACK_BIAS 2  // b of a layer with a bias
#define INPUT 3      // a
#define WARPS 8

__shared__ double parts[COUNT][WARPS];
__shared__ double weight;

extern "C" __global__ void __launch_bounds__(32 * WARPS) weigh(
    PARAMETERS, const double* beside, int rest, double* norms, double* weights, int counted, double most, double scale
) {
  const float* const sources[COUNT] = {SOURCES};
  double* const targets[COUNT] = {TARGETS};
  const int widths[COUNT] = {WIDTHS}, kinds[COUNT] = {KINDS};
  const u32 example = blockIdx.x, t = threadIdx.x;
#pragma unroll
  for (int k = 0; k < COUNT; k++) {
    const float* source = sources[k] + (u64)example * widths[k];
    double squares = 0.0;
    for (int place = t; place < widths[k]; place += 32 * WARPS) squares += (double)source[place] * source[place];
    for (int distance = 16; distance; distance /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, distance);
    if (t % 32 == 0) parts[k][t / 32] = squares;
  }
  __syncthreads();
  if (t == 0) {
    double total = rest ? beside[example] * beside[example] : 0.0, back = 0.0;
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
      double squares = 0.0;
      for (int warp = 0; warp < WARPS; warp++) squares += parts[k][warp];
      if (kinds[k] == ROW) total += squares;
      if (kinds[k] == INPUT) total += back * (squares + (kinds[k > 0 ? k - 1 : 0] == BACK_BIAS ? 1.0 : 0.0));
      back = squares;
    }
    const double norm = sqrt(total);
    norms[example] = norm;
    weight = norm < INFINITY_BITS ? (example < (u32)counted ? fmin(most / norm, scale) : 0.0) : -1.0;  // NaN is not less
    weights[example] = fmax(weight, 0.0);
  }
  __syncthreads();
  const double own = weight;
#pragma unroll
  for (int k = 0; k < COUNT; k++) {
    const u64 begin = (u64)example * widths[k];
    const double factor = kinds[k] == INPUT ? 1.0 : own;
    for (int place = t; place < widths[k]; place += 32 * WARPS)
      targets[k][begin + place] = own < 0.0 ? 0.0 : sources[k][begin + place] * factor;
  }
}

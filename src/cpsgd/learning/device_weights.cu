// Norms and weights of examples' gradients (`weigh`), and the weighted sums (`add_up`), for all layers at once.
// An example's squared norm is that of its rows, |b|² (|a|² + 1) for factors b and a of a dense layer, the 1 for a bias,
// and that of what is `beside` if there is a `rest`. `device_weights.py` defines SOURCES (the parameters), COUNT, and for each tensor WIDTHS, KINDS, and the PLACES of its sums.

#define ROW 0
#define BACK 1       // b of a layer without a bias; its a comes next
#define BACK_BIAS 2  // b of a layer with a bias
#define INPUT 3      // a

#ifdef WEIGH
#define WARPS 8

__shared__ double parts[COUNT][WARPS];

// A block has one example.
extern "C" __global__ void __launch_bounds__(32 * WARPS) weigh(
    PARAMETERS, const double* beside, int rest, double* norms, int examples, int counted, double most, double scale
) {
  const float* const sources[COUNT] = {SOURCES};
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
    norms[examples + example] = norm < INFINITY_BITS && example < (u32)counted ? fmin(most / norm, scale) : 0.0;
  }
}
#endif

#ifdef ADD_UP
#define THREADS 64
#define ACROSS 8             // threads in a row of a tile; each has SHARE x SHARE of its numbers, ACROSS apart
#define SHARE (TILE / ACROSS)
#define STEP 32              // examples at a time
#define LOADS (STEP * TILE / THREADS)

__shared__ double backs[STEP][TILE + 1], inputs[STEP][TILE + 1];

// Returns a number of an example times a weight, or 0 for an example whose norm is not finite.
__device__ __forceinline__ double weighed(float value, double norm, double weight) {
  return norm < INFINITY_BITS ? (double)value * weight : 0.0;
}

// A block adds a tile of Σ w b ⊗ (a, 1), or 2 TILE numbers of Σ w row, to `total`.
extern "C" __global__ void __launch_bounds__(THREADS) add_up(
    PARAMETERS, const double* norms, int examples, double* total
) {
  const float* const sources[COUNT] = {SOURCES};
  const int widths[COUNT + 1] = {WIDTHS}, kinds[COUNT] = {KINDS}, starts[COUNT + 1] = {STARTS};
  const int places[COUNT] = {PLACES}, bias_places[COUNT] = {BIAS_PLACES};
  const double* const weights = norms + examples;
  const int t = threadIdx.x;
  int k = 0;
  while ((int)blockIdx.x >= starts[k + 1]) k++;
  const int tile = blockIdx.x - starts[k], width = widths[k];
  const float* const back = sources[k];
  if (kinds[k] == ROW) {
    const int place = tile * 2 * TILE + t;
    if (place >= width) return;
    double sum = 0.0;
#pragma unroll 16
    for (int n = 0; n < examples; n++) sum += weighed(back[(u64)n * width + place], norms[n], weights[n]);
    total[places[k] + place] += sum;
    return;
  }
  const float* const input = sources[k + 1 < COUNT ? k + 1 : k];
  const int depth = widths[k + 1], bias = kinds[k] == BACK_BIAS, across = (depth + bias + TILE - 1) / TILE;
  const int row = tile / across * TILE, column = tile % across * TILE;
  const int tx = t % ACROSS, ty = t / ACROSS;
  double sums[SHARE][SHARE] = {};
  for (int first = 0; first < examples; first += STEP) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int n = (t + i * THREADS) / TILE, own = (t + i * THREADS) % TILE, example = first + n;
      double b = 0.0, a = 0.0;
      if (example < examples) {
        const double norm = norms[example];
        if (row + own < width) b = weighed(back[(u64)example * width + row + own], norm, weights[example]);
        if (column + own < depth) a = weighed(input[(u64)example * depth + column + own], norm, 1.0);
        if (column + own == depth) a = bias;
      }
      backs[n][own] = b, inputs[n][own] = a;
    }
    __syncthreads();
#pragma unroll 8
    for (int n = 0; n < STEP; n++) {
      double a[SHARE];
#pragma unroll
      for (int j = 0; j < SHARE; j++) a[j] = inputs[n][tx + j * ACROSS];
#pragma unroll
      for (int i = 0; i < SHARE; i++) {
        const double b = backs[n][ty + i * ACROSS];
#pragma unroll
        for (int j = 0; j < SHARE; j++) sums[i][j] += b * a[j];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
#pragma unroll
    for (int j = 0; j < SHARE; j++) {
      const int r = row + ty + i * ACROSS, c = column + tx + j * ACROSS;
      if (r < width && c < depth) total[places[k] + (u64)r * depth + c] += sums[i][j];
      if (r < width && c == depth && bias) total[bias_places[k] + r] += sums[i][j];
    }
  }
}
#endif

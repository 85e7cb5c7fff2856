// Norms and weights of examples' gradients (`weigh`), and the weighted sums (`add_up`), for all
// layers at once. An example's squared norm is that of its rows, |b|² (|a|² + 1) for factors b and
// a of a dense layer, the 1 for a bias, and that of what is `beside` if there is a `rest`.
// `device_weights.py` defines SOURCES (the parameters), COUNT, and for each tensor WIDTHS, KINDS,
// and the PLACES of its sums.

#define ROW 0
#define BACK 1       // b of a layer without a bias; its a comes next
#define BACK_BIAS 2  // b of a layer with a bias
#define INPUT 3      // a

#ifdef WEIGH
#define WARPS 8

__shared__ double parts[COUNT][WARPS];

// A block has one example.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    weigh(PARAMETERS, const double* beside, int rest, double* norms, int examples, int counted,
          double most, double scale) {
  const float* const sources[COUNT] = {SOURCES};
  const int widths[COUNT] = {WIDTHS}, kinds[COUNT] = {KINDS};
  const u32 example = blockIdx.x, t = threadIdx.x;
#pragma unroll
  for (int k = 0; k < COUNT; k++) {
    const float* source = sources[k] + (u64)example * widths[k];
    double squares = 0.0;
    for (int place = t; place < widths[k]; place += 32 * WARPS)
      squares += (double)source[place] * source[place];
    for (int distance = 16; distance; distance /= 2)
      squares += __shfl_xor_sync(0xFFFFFFFFu, squares, distance);
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
      if (kinds[k] == INPUT)
        total += back * (squares + (kinds[k > 0 ? k - 1 : 0] == BACK_BIAS ? 1.0 : 0.0));
      back = squares;
    }
    const double norm = sqrt(total);
    norms[example] = norm;
    norms[examples + example] =
        norm < INFINITY_BITS && example < (u32)counted ? fmin(most / norm, scale) : 0.0;
  }
}
#endif

#ifdef ADD_UP
#define THREADS 64
#define ACROSS 8  // threads in a row of a tile; each has SHARE x SHARE of its numbers, ACROSS apart
#define SHARE (TILE / ACROSS)
#define STEP 32  // examples at a time
#define LOADS (STEP * TILE / THREADS)

__device__ const int widths[COUNT + 1] = {WIDTHS}, kinds[COUNT] = {KINDS},
                                    starts[COUNT + 1] = {STARTS};
__device__ const int places[COUNT] = {PLACES}, bias_places[COUNT] = {BIAS_PLACES};
__shared__ double backs[STEP][TILE + 1], inputs[STEP][TILE + 1], factors[STEP];

// A block adds a tile of Σ w b ⊗ (a, 1), or 2 TILE numbers of Σ w row, over SLICE examples to
// `total`. Loads have no conditions, so that many are under way at once; what they read in vain is
// not used.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_up(PARAMETERS, const double* norms, int examples, double* total) {
  const float* const sources[COUNT] = {SOURCES};
  const double* const weights = norms + examples;
  const int t = threadIdx.x, begin = blockIdx.y * SLICE, end = min(examples, begin + SLICE);
  int k = 0;
  while ((int)blockIdx.x >= starts[k + 1]) k++;
  const int tile = blockIdx.x - starts[k], width = widths[k];
  const float* const back = sources[k];
  if (kinds[k] == ROW) {
    const int place = tile * 2 * TILE + t;
    if (place >= width) return;
    double sum = 0.0;
#pragma unroll 16
    for (int n = begin; n < end; n++) {
      const double value = back[(u64)n * width + place], weight = weights[n];
      sum += norms[n] < INFINITY_BITS ? value * weight : 0.0;
    }
    atomicAdd(total + places[k] + place, sum);
    return;
  }
  const float* const input = sources[k + 1 < COUNT ? k + 1 : k];
  const int depth = widths[k + 1], bias = kinds[k] == BACK_BIAS,
            across = (depth + bias + TILE - 1) / TILE;
  const int row = tile / across * TILE, column = tile % across * TILE;
  const int tx = t % ACROSS, ty = t / ACROSS, own = t % TILE;
  const int back_place = min(row + own, width - 1), input_place = min(column + own, depth - 1);
  double sums[SHARE][SHARE] = {};
  for (int first = begin; first < end; first += STEP) {
    float b[LOADS], a[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const u64 example = min(first + t / TILE + i * (THREADS / TILE), examples - 1);
      b[i] = back[example * width + back_place], a[i] = input[example * depth + input_place];
    }
    if (t < STEP) {  // -1 for an example that is not finite, or not there
      const int example = min(first + t, examples - 1);
      factors[t] = first + t < end && norms[example] < INFINITY_BITS ? weights[example] : -1.0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int n = t / TILE + i * (THREADS / TILE);
      const double factor = factors[n];
      backs[n][own] = factor >= 0.0 && row + own < width ? b[i] * factor : 0.0;
      inputs[n][own] = column + own < depth    ? (factor >= 0.0 ? (double)a[i] : 0.0)
                       : column + own == depth ? bias
                                               : 0;
    }
    __syncthreads();
#pragma unroll 8
    for (int n = 0; n < STEP; n++) {
      double inner[SHARE];
#pragma unroll
      for (int j = 0; j < SHARE; j++) inner[j] = inputs[n][tx + j * ACROSS];
#pragma unroll
      for (int i = 0; i < SHARE; i++) {
        const double outer = backs[n][ty + i * ACROSS];
#pragma unroll
        for (int j = 0; j < SHARE; j++) sums[i][j] += outer * inner[j];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
#pragma unroll
    for (int j = 0; j < SHARE; j++) {
      const int r = row + ty + i * ACROSS, c = column + tx + j * ACROSS;
      if (r < width && c < depth) atomicAdd(total + places[k] + (u64)r * depth + c, sums[i][j]);
      if (r < width && c == depth && bias) atomicAdd(total + bias_places[k] + r, sums[i][j]);
    }
  }
}
#endif

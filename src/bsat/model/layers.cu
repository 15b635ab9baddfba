// What lies between the matrix products of a training step, fused: M models at once, each with its own batch.
//
// Activations are (M, R, d), R = B n rows. Parameters of all models lie in one (M, stride) buffer; a pointer to one of
// them is that of the first model, and `stride` leads to the next. Sums over rows come in two steps, always in the same
// order: blocks leave partial sums in double precision, and the kernel that needs them collects them.

#include "noise.cuh"

// Blocks are (lanes of columns, lanes of rows); the grid is (groups of columns, chunks of rows, M).
struct Tile {
    int column, member, chunks;
    long long base; // of the model's activations
    __device__ Tile(int rows, int columns) {
        column = blockIdx.x * blockDim.x + threadIdx.x;
        member = blockIdx.z;
        chunks = gridDim.y;
        base = (long long)member * rows * columns;
    }
};

// The sums of a and b of each column over the block's rows; in the first row of threads.
__device__ void add_block(double& a, double& b) {
    __shared__ double sums[2][256];
    const int me = threadIdx.y * blockDim.x + threadIdx.x;
    __syncthreads();
    sums[0][me] = a;
    sums[1][me] = b;
    __syncthreads();
    if (threadIdx.y == 0)
        for (int y = 1; y < blockDim.y; y++) {
            a += sums[0][y * blockDim.x + threadIdx.x];
            b += sums[1][y * blockDim.x + threadIdx.x];
        }
}

// Leaves the block's sums in `partial`, (M, chunks, 2, columns).
__device__ void leave(double a, double b, int columns, double* partial) {
    const Tile tile(0, 0);
    add_block(a, b);
    if (threadIdx.y == 0 && tile.column < columns) {
        double* at = partial + ((long long)tile.member * tile.chunks + blockIdx.y) * 2 * columns + tile.column;
        at[0] = a;
        at[columns] = b;
    }
}

// Adds up what `chunks` blocks left; in the first row of threads.
__device__ void collect(double& a, double& b, int columns, const double* partial, int chunks) {
    const Tile tile(0, 0);
    a = b = 0.0;
    if (tile.column < columns) {
#pragma unroll 8
        for (int chunk = threadIdx.y; chunk < chunks; chunk += blockDim.y) {
            const double* at = partial + ((long long)tile.member * chunks + chunk) * 2 * columns + tile.column;
            a += __ldcg(at);
            b += __ldcg(at + columns);
        }
    }
    add_block(a, b);
}

// The sums that a kernel left, as the gradient of a parameter. The grid is (groups of columns, 1, M).
extern "C" __global__ void add_left(const double* partial, float* out, int columns, int chunks, int stride) {
    const Tile tile(0, 0);
    double sum, none;
    collect(sum, none, columns, partial, chunks);
    if (threadIdx.y == 0 && tile.column < columns) out[(long long)tile.member * stride + tile.column] = (float)sum;
}

// Sums over the rows of x (M, rows, columns). The grid is (groups of columns, 1, M).
extern "C" __global__ void add_rows(const float* x, float* out, int rows, int columns, int stride) {
    const Tile tile(rows, columns);
    double sum = 0.0, none = 0.0;
    if (tile.column < columns) {
#pragma unroll 8
        for (int row = threadIdx.y; row < rows; row += blockDim.y) sum += x[tile.base + (long long)row * columns + tile.column];
    }
    add_block(sum, none);
    if (threadIdx.y == 0 && tile.column < columns) out[(long long)tile.member * stride + tile.column] = (float)sum;
}

// The sum of one number of each of a power of two threads, in an order of its own but always the same; thread 0 has it.
__device__ double gather(double mine) {
    __shared__ double all[256];
    __syncthreads();
    all[threadIdx.x] = mine;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) all[threadIdx.x] += all[threadIdx.x + half];
    }
    return all[0];
}

// ------------------------------------------------------------------------------------------------------------ batches

// The batch of every model: tokens, positions, and targets in units of the window's own level and spread. A block is
// one window of one model. `bank` says whose tokens a model reads; `order` (M or 1, order_stride) which windows, those
// from *done on.
extern "C" __global__ void take(const float* values, const float* positions, const float* levels, const float* series,
                                const long long* starts, const long long* order, const int* bank, const int* done,
                                float* out_values, float* out_positions, float* out_levels, float* out_targets,
                                int windows, int order_stride, int cells, int tokens, int moving, int lookback,
                                int horizon) {
    const int b = blockIdx.x, B = gridDim.x, member = blockIdx.y;
    const long long window = order[(long long)member * order_stride + *done + b];
    const long long from = (long long)bank[member] * windows + window, to = (long long)member * B + b;
    for (int i = threadIdx.x; i < cells; i += blockDim.x) out_values[to * cells + i] = values[from * cells + i];
    for (int i = threadIdx.x; i < tokens; i += blockDim.x)
        out_positions[to * tokens + i] = positions[(moving ? from : (long long)bank[member]) * tokens + i];
    const float mean = levels[2 * from], deviation = levels[2 * from + 1];
    if (threadIdx.x == 0) {
        out_levels[2 * to] = mean;
        out_levels[2 * to + 1] = deviation;
    }
    const float* future = series + starts[from] + lookback;
    for (int i = threadIdx.x; i < horizon; i += blockDim.x)
        out_targets[to * horizon + i] = (future[i] - mean) / deviation;
}

// How many targets of each model's batch were observed. One block a model.
extern "C" __global__ void count(const float* targets, int* seen, int numbers) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < numbers; i += blockDim.x) sum += !isnan(targets[(long long)blockIdx.x * numbers + i]);
    sum = gather(sum);
    if (threadIdx.x == 0) seen[blockIdx.x] = (int)sum;
}

// Squared errors of a window of a model (a block), in the unit of the scaled series, and the gradient of their mean.
// `forecast` lacks the head's bias. `squares` is (M, B, 2): their sum, and how many. Missing targets count nothing.
extern "C" __global__ void compare(const float* forecast, const float* bias, const float* targets, const float* levels,
                                   const int* seen, float* grad, double* squares, int horizon, int stride) {
    const int b = blockIdx.x, B = gridDim.x, member = blockIdx.y;
    const long long at = (long long)member * B + b;
    const float deviation = levels[2 * at + 1];
    double sum = 0.0, there = 0.0;
    const float factor = seen != nullptr ? 2.f / seen[member] : 2.f / ((float)B * horizon);
    for (int i = threadIdx.x; i < horizon; i += blockDim.x) {
        const float target = targets[at * horizon + i];
        const bool known = !isnan(target);
        const float ahead = forecast[at * horizon + i] + bias[(long long)member * stride + i];
        const float error = known ? deviation * (ahead - target) : 0.f;
        sum += (double)error * error;
        there += known;
        if (grad != nullptr) grad[at * horizon + i] = factor * deviation * error;
    }
    sum = gather(sum);
    there = gather(there);
    if (threadIdx.x == 0) {
        squares[2 * at] = sum;
        squares[2 * at + 1] = there;
    }
}

// The end of a training step: adds the batch's loss times its windows to each model's total, and counts on. A block a
// model.
extern "C" __global__ void finish(const double* squares, double* totals, int* step, int* done, int B) {
    double sum = 0.0, seen = 0.0;
    for (int b = threadIdx.x; b < B; b += blockDim.x) {
        sum += squares[2 * ((long long)blockIdx.x * B + b)];
        seen += squares[2 * ((long long)blockIdx.x * B + b) + 1];
    }
    sum = gather(sum);
    seen = gather(seen);
    if (threadIdx.x == 0) {
        totals[blockIdx.x] += sum / seen * B;
        if (blockIdx.x == 0) {
            *step += 1;
            *done += B;
        }
    }
}

// The end of an evaluation step: sums (M, 3) of squared errors in the data's unit, of the scaled ones, and their count.
extern "C" __global__ void tally(const double* squares, const long long* order, const int* rows, const double* unit,
                                 double* sums, const int* done, int B) {
    double in_unit = 0.0, scaled = 0.0, seen = 0.0;
    for (int b = threadIdx.x; b < B; b += blockDim.x) {
        const double* at = squares + 2 * ((long long)blockIdx.x * B + b);
        const double deviation = unit[rows[order[*done + b]]];
        in_unit += at[0] * deviation * deviation;
        scaled += at[0];
        seen += at[1];
    }
    in_unit = gather(in_unit);
    scaled = gather(scaled);
    seen = gather(seen);
    if (threadIdx.x == 0) {
        sums[3 * blockIdx.x] += in_unit;
        sums[3 * blockIdx.x + 1] += scaled;
        sums[3 * blockIdx.x + 2] += seen;
    }
}

extern "C" __global__ void advance(int* done, int B) { *done += B; }

// ---------------------------------------------------------------------------------------------------------- embedding

// x = drop(x + bias + rank). rank may be null.
extern "C" __global__ void embed(float* x, const float* bias, const float* rank, const int* seeds, const int* step,
                                 const float* drop, int rows, int d, int tokens, int stride) {
    const int member = blockIdx.y;
    const Drop keep(seeds, step, drop, 0, member);
    const unsigned size = (unsigned)rows * d;
    float* mine = x + (long long)member * size;
    const long long shift = (long long)member * stride;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) {
        const int c = i % d, token = i / d % tokens;
        float value = mine[i] + bias[shift + c];
        if (rank != nullptr) value += rank[shift + token * d + c];
        mine[i] = value * keep(i);
    }
}

// grad = drop(grad); sums over slices of the windows, (M, slices, tokens d), make the gradient of rank. The grid is
// (cells, slices, M).
extern "C" __global__ void embed_grad(float* grad, float* sums, const int* seeds, const int* step, const float* drop,
                                      int B, int cells) {
    const int member = blockIdx.z, slices = gridDim.y, cell = blockIdx.x * blockDim.x + threadIdx.x;
    if (cell >= cells) return;
    const Drop keep(seeds, step, drop, 0, member);
    float* mine = grad + (long long)member * B * cells;
    float sum = 0.f;
#pragma unroll 4
    for (int b = blockIdx.y; b < B; b += slices) {
        const unsigned i = (unsigned)b * cells + cell;
        const float value = mine[i] * keep(i);
        mine[i] = value;
        sum += value;
    }
    sums[((long long)member * slices + blockIdx.y) * cells + cell] = sum;
}

// -------------------------------------------------------------------------------------------------------------- rotary

// qkv (M, R, 3 d) += bias; then queries and keys are turned by position times base^exponent. log_base may be null.
extern "C" __global__ void rotate(float* qkv, const float* bias, const float* positions, const float* log_base, int rows,
                                  int d, int pairs, int stride, int base_stride) {
    const int member = blockIdx.y, half = d / 2;
    const float* add = bias + (long long)member * stride;
    const float base = log_base != nullptr ? log_base[(long long)member * base_stride] : 0.f;
    // A thread takes a pair of queries, the pair of keys at the same place, and two values.
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * half; i += gridDim.x * blockDim.x) {
        const int row = i / half, c = i % half;
        float* at = qkv + ((long long)member * rows + row) * 3 * d;
        float sin = 0.f, cos = 1.f;
        if (log_base != nullptr)
            sincosf(positions[(long long)member * rows + row] * expf(-base * (c % pairs) / pairs), &sin, &cos);
        for (int part = 0; part < 3; part++) {
            const int one = part * d + c, two = one + half;
            const float a = at[one] + add[one], b = at[two] + add[two];
            at[one] = part < 2 ? a * cos - b * sin : a;
            at[two] = part < 2 ? a * sin + b * cos : b;
        }
    }
}

// grad (M, R, 3 d) is turned back. Of each pair, seven sums are left in partial (M, chunks, 7, d / 2): those of its six
// gradients, and one for log_base. The grid's columns are the pairs.
extern "C" __global__ void rotate_grad(float* __restrict__ grad, const float* __restrict__ qkv, const float* positions,
                                       const float* log_base, double* partial, int rows, int d, int pairs,
                                       int base_stride) {
    __shared__ double sums[7][256];
    const int half = d / 2, c = blockIdx.x * blockDim.x + threadIdx.x, member = blockIdx.z, chunks = gridDim.y;
    const int me = threadIdx.y * blockDim.x + threadIdx.x;
    const float base = log_base != nullptr ? log_base[(long long)member * base_stride] : 0.f;
    const float exponent = -(float)(c % pairs) / pairs, speed = expf(base * exponent);
    double total[7] = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
    if (c < half) {
#pragma unroll 2
        for (int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += chunks * blockDim.y) {
            const long long at = ((long long)member * rows + row) * 3 * d;
            float sin = 0.f, cos = 1.f, angle = 0.f;
            if (log_base != nullptr) {
                angle = positions[(long long)member * rows + row] * speed;
                sincosf(angle, &sin, &cos);
            }
            float turn = 0.f;
#pragma unroll
            for (int part = 0; part < 3; part++) {
                const long long one = at + part * d + c, two = one + half;
                float da = grad[one], db = grad[two];
                if (part < 2) {
                    turn += db * qkv[one] - da * qkv[two];
                    const float back = da * cos + db * sin;
                    db = db * cos - da * sin;
                    da = back;
                    grad[one] = da;
                    grad[two] = db;
                }
                total[2 * part] += da;
                total[2 * part + 1] += db;
            }
            total[6] += (double)turn * angle * exponent;
        }
    }
#pragma unroll
    for (int k = 0; k < 7; k++) sums[k][me] = total[k];
    __syncthreads();
    // A row of threads adds up one of the sums each.
    for (int k = threadIdx.y; k < 7; k += blockDim.y) {
        double sum = 0.0;
        for (int y = 0; y < blockDim.y; y++) sum += sums[k][y * blockDim.x + threadIdx.x];
        if (c < half) partial[(((long long)member * chunks + blockIdx.y) * 7 + k) * half + c] = sum;
    }
}

// What it left, as the gradients of the bias and, if it is not null, of log_base. A block is a model.
extern "C" __global__ void rotate_left(const double* partial, float* bias_grad, float* base_grad, int d, int chunks,
                                       int stride) {
    const int half = d / 2, member = blockIdx.x;
    double turns = 0.0;
    for (int e = threadIdx.x; e < 7 * half; e += blockDim.x) {
        const int k = e / half, pair = e % half;
        const double* at = partial + (long long)member * chunks * 7 * half + e;
        double sum = 0.0;
#pragma unroll 16
        for (int chunk = 0; chunk < chunks; chunk++) sum += at[(long long)chunk * 7 * half];
        if (k < 6)
            bias_grad[(long long)member * stride + (k / 2) * d + (k % 2) * half + pair] = (float)sum;
        else
            turns += sum;
    }
    turns = gather(turns);
    if (threadIdx.x == 0 && base_grad != nullptr) base_grad[(long long)member * stride] = (float)turns;
}

// ---------------------------------------------------------------------------------------------------------- batch norm

#define EPSILON 1e-5f
#define MOMENTUM 0.1

// z = x + drop(y + bias), into y, and sums of it and of its squares.
extern "C" __global__ void norm_sums(const float* __restrict__ x, float* __restrict__ y, const float* bias,
                                     double* partial, const int* seeds, const int* step, const float* drop, int site,
                                     int rows, int d, int stride) {
    const Tile tile(rows, d);
    const Drop keep(seeds, step, drop, site, tile.member);
    double sum = 0.0, squares = 0.0;
    if (tile.column < d) {
        const float add = bias[(long long)tile.member * stride + tile.column];
#pragma unroll 4
        for (int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += tile.chunks * blockDim.y) {
            const unsigned i = (unsigned)row * d + tile.column;
            const float z = x[tile.base + i] + (y[tile.base + i] + add) * keep(i);
            y[tile.base + i] = z;
            sum += z;
            squares += (double)z * z;
        }
    }
    leave(sum, squares, d, partial);
}

// out = (z - mean) * inverse deviation * weight + shift. Mean and inverse deviation over the rows go to stats (M, 2, d),
// and mean and variance into the running ones, as torch does it.
extern "C" __global__ void norm_apply(const float* __restrict__ z, const double* partial, int chunks, float* stats,
                                      float* running_mean, float* running_var, const float* weight, const float* shift,
                                      float* __restrict__ out, int rows, int d, int stride, int running_stride) {
    __shared__ float means[32], inverses[32];
    const Tile tile(rows, d);
    double sum, squares;
    collect(sum, squares, d, partial, chunks);
    if (threadIdx.y == 0 && tile.column < d) {
        const double mean = sum / rows, variance = fmax(squares / rows - mean * mean, 0.0);
        means[threadIdx.x] = (float)mean;
        inverses[threadIdx.x] = (float)(1.0 / sqrt(variance + (double)EPSILON));
        if (blockIdx.y == 0) {
            float* at = stats + (long long)tile.member * 2 * d + tile.column;
            at[0] = means[threadIdx.x];
            at[d] = inverses[threadIdx.x];
            float* m = running_mean + (long long)tile.member * running_stride + tile.column;
            float* v = running_var + (long long)tile.member * running_stride + tile.column;
            *m = (float)((1.0 - MOMENTUM) * *m + MOMENTUM * mean);
            *v = (float)((1.0 - MOMENTUM) * *v + MOMENTUM * variance * rows / (rows - 1.0));
        }
    }
    __syncthreads();
    if (tile.column >= d) return;
    const long long p = (long long)tile.member * stride + tile.column;
    const float mean = means[threadIdx.x], factor = inverses[threadIdx.x] * weight[p], level = shift[p];
#pragma unroll 4
    for (int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += tile.chunks * blockDim.y) {
        const long long i = tile.base + (long long)row * d + tile.column;
        out[i] = (z[i] - mean) * factor + level;
    }
}

// The same with the running statistics, of x + y + bias, into y.
extern "C" __global__ void norm_still(const float* x, float* y, const float* bias, const float* running_mean,
                                      const float* running_var, const float* weight, const float* shift, int rows,
                                      int d, int stride, int running_stride) {
    const int member = blockIdx.y;
    const unsigned size = (unsigned)rows * d;
    const long long base = (long long)member * size;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) {
        const int c = i % d;
        const long long p = (long long)member * stride + c, r = (long long)member * running_stride + c;
        const float z = x[base + i] + y[base + i] + bias[p];
        y[base + i] = (z - running_mean[r]) * rsqrtf(running_var[r] + EPSILON) * weight[p] + shift[p];
    }
}

// Sums for the gradients of shift and weight.
extern "C" __global__ void norm_grad_sums(const float* __restrict__ grad, const float* __restrict__ z,
                                          const float* stats, double* partial, int rows, int d) {
    const Tile tile(rows, d);
    double sum = 0.0, product = 0.0;
    if (tile.column < d) {
        const float* at = stats + (long long)tile.member * 2 * d + tile.column;
        const float mean = at[0], inverse = at[d];
#pragma unroll 4
        for (int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += tile.chunks * blockDim.y) {
            const long long i = tile.base + (long long)row * d + tile.column;
            sum += grad[i];
            product += (double)grad[i] * ((z[i] - mean) * inverse);
        }
    }
    leave(sum, product, d, partial);
}

// The gradient of z into grad (that of x), drop of it into y_grad, and sums for that of the bias into `left`; also the
// gradients of weight and shift, from what `chunks` blocks left in `partial`.
extern "C" __global__ void norm_grad(float* __restrict__ grad, const float* __restrict__ z, const float* stats,
                                     const float* weight, const double* partial, int chunks, float* weight_grad,
                                     float* shift_grad, float* __restrict__ y_grad, double* left, const int* seeds,
                                     const int* step, const float* drop, int site, int rows, int d, int stride) {
    __shared__ float levels[32], tilts[32];
    const Tile tile(rows, d);
    const Drop keep(seeds, step, drop, site, tile.member);
    const long long p = (long long)tile.member * stride + tile.column;
    double sum, none;
    collect(sum, none, d, partial, chunks);
    if (threadIdx.y == 0 && tile.column < d) {
        levels[threadIdx.x] = (float)(sum / rows);
        tilts[threadIdx.x] = (float)(none / rows);
        if (blockIdx.y == 0) {
            shift_grad[p] = (float)sum;
            weight_grad[p] = (float)none;
        }
    }
    __syncthreads();
    sum = none = 0.0;
    if (tile.column < d) {
        const float* at = stats + (long long)tile.member * 2 * d + tile.column;
        const float mean = at[0], inverse = at[d], factor = weight[p] * inverse;
        const float level = levels[threadIdx.x], tilt = tilts[threadIdx.x] * inverse;
#pragma unroll 4
        for (int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += tile.chunks * blockDim.y) {
            const unsigned i = (unsigned)row * d + tile.column;
            const long long j = tile.base + i;
            const float change = factor * (grad[j] - level - (z[j] - mean) * tilt), kept = change * keep(i);
            grad[j] = change;
            y_grad[j] = kept;
            sum += kept;
        }
    }
    // Without dropout the norm takes the bias out again: its gradient is 0, and AdamW would make steps of what rounding
    // leaves of that.
    leave(keep.least == 0 ? 0.0 : sum, 0.0, d, left);
}

// -------------------------------------------------------------------------------------------------------- feed-forward

__device__ float phi(float x) { return 0.5f * (1.f + erff(x * 0.70710678118654752f)); }

// out = drop(gelu(u + bias)). The mask goes by column first, so that it is the same whatever the width is padded to.
extern "C" __global__ void gelu(const float* u, const float* bias, float* out, const int* seeds, const int* step,
                                const float* drop, int site, int rows, int width, int stride) {
    const Tile tile(rows, width);
    if (tile.column >= width) return;
    const Drop keep(seeds, step, drop, site, tile.member);
    const float add = bias[(long long)tile.member * stride + tile.column];
#pragma unroll 4
    for (int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += tile.chunks * blockDim.y) {
        const long long i = tile.base + (long long)row * width + tile.column;
        const float x = u[i] + add;
        out[i] = x * phi(x) * keep((unsigned)tile.column * rows + row);
    }
}

// grad becomes that of u; out is made once more; sums for that of the bias go to `left`.
extern "C" __global__ void gelu_grad(float* __restrict__ grad, const float* __restrict__ u, const float* bias,
                                     float* __restrict__ out, double* left, const int* seeds, const int* step,
                                     const float* drop, int site, int rows, int width, int stride) {
    const Tile tile(rows, width);
    const Drop keep(seeds, step, drop, site, tile.member);
    double sum = 0.0, none = 0.0;
    if (tile.column < width) {
        const float add = bias[(long long)tile.member * stride + tile.column];
#pragma unroll 4
        for (int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += tile.chunks * blockDim.y) {
            const long long i = tile.base + (long long)row * width + tile.column;
            const float x = u[i] + add, share = phi(x), kept = keep((unsigned)tile.column * rows + row);
            const float change = grad[i] * kept * (share + x * 0.3989422804014327f * expf(-0.5f * x * x));
            out[i] = x * share * kept;
            grad[i] = change;
            sum += change;
        }
    }
    leave(sum, none, width, left);
}

// --------------------------------------------------------------------------------------------------------------- head

// The matrix (M B, n, n) that evaluates each window's spline at n uniform times: row t has `width` numbers from column
// first[t] on. A block is one window of one model.
extern "C" __global__ void basis(const int* first, const float* weights, const long long* order, const int* bank,
                                 const int* done, float* out, int windows, int order_stride, int tokens, int width) {
    const int b = blockIdx.x, B = gridDim.x, member = blockIdx.y;
    const long long window = order[(long long)member * order_stride + *done + b];
    const long long from = ((long long)bank[member] * windows + window) * tokens;
    float* to = out + ((long long)member * B + b) * tokens * tokens;
    for (int i = threadIdx.x; i < tokens * tokens; i += blockDim.x) {
        const int t = i / tokens, k = i % tokens - first[from + t];
        to[i] = k >= 0 && k < width ? weights[(from + t) * width + k] : 0.f;
    }
}

// ---------------------------------------------------------------------------------------------------------- optimizer

// Sums of squared gradients, (M, chunks). The grid is (chunks, M).
extern "C" __global__ void norms(const float* grad, double* partial, int size) {
    double sum = 0.0;
    const float* mine = grad + (long long)blockIdx.y * size;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x)
        sum += (double)mine[i] * mine[i];
    sum = gather(sum);
    if (threadIdx.x == 0) partial[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

// AdamW with each model's own rate and decay, after clipping the norm of its gradient to 1; the last `free` parameters
// do not decay. *step is the number of steps before this one. At least `chunks` threads.
extern "C" __global__ void adamw(float* theta, const float* grad, float* first, float* second, const double* partial,
                                 const float* rates, const float* decays, const int* step, int size, int free,
                                 int chunks) {
    __shared__ float shared_clip;
    const int member = blockIdx.y;
    const double sum = gather(threadIdx.x < chunks ? partial[member * chunks + threadIdx.x] : 0.0);
    if (threadIdx.x == 0) shared_clip = (float)fmin(1.0, 1.0 / (sqrt(sum) + 1e-6));
    __syncthreads();
    const float clip = shared_clip, rate = rates[member];
    const double t = *step + 1;
    const float correction1 = (float)(1.0 - pow(0.9, t)), correction2 = (float)sqrt(1.0 - pow(0.999, t));
    const long long base = (long long)member * size;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) {
        const float g = grad[base + i] * clip;
        float p = theta[base + i];
        if (i < size - free) p -= rate * decays[member] * p;
        const float m = first[base + i] + 0.1f * (g - first[base + i]);
        const float v = 0.999f * second[base + i] + 0.001f * g * g;
        first[base + i] = m;
        second[base + i] = v;
        theta[base + i] = p - rate / correction1 * m / (sqrtf(v) / correction2 + 1e-8f);
    }
}

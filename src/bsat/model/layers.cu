// What lies between the matrix products of a training step, fused: M models at once, each with its own batch.
//
// Activations are (M, R, d), R = B n rows. Parameters of all models lie in one (M, stride) buffer; a pointer to one of
// them is that of the first model, and `stride` leads to the next. Sums over rows come in two steps, always in the same
// order: blocks leave partial sums in double precision, and the kernel that needs them collects them.
//
// With BRIEF, activations and their gradients are kept in 16 bits; parameters and all arithmetic are float32 still. Then
// products do more themselves (product16.cu).

#include "noise.cuh"
#include "tensor.cuh"

#if BRIEF
typedef bf16 act;
typedef float few; // sums of a few numbers
#else
typedef float act;
typedef double few;
#endif

// Two neighbouring numbers; the first has an even index.
struct Two {
    float a, b;
};

__device__ __forceinline__ Two get(const float* from) {
    const float2 both = *(const float2*)from;
    return {both.x, both.y};
}
__device__ __forceinline__ Two get(const bf16* from) {
    const unsigned both = *(const unsigned*)from;
    return {lower(both), upper(both)};
}
__device__ __forceinline__ void put(float* to, float a, float b) { *(float2*)to = make_float2(a, b); }
__device__ __forceinline__ void put(bf16* to, float a, float b) { *(unsigned*)to = pack(a, b); }

// Blocks are (lanes of columns, lanes of rows); the grid is (groups of columns, chunks of rows, M). EACH is how many
// neighbouring columns a thread takes.
template <int EACH> struct Tile {
    int column, member, chunks;
    long long base; // of the model's activations
    __device__ Tile(int rows, int columns) {
        column = EACH * (blockIdx.x * blockDim.x + threadIdx.x);
        member = blockIdx.z;
        chunks = gridDim.y;
        base = (long long)member * rows * columns;
    }
};

// The sums of COUNT numbers over the block's rows of threads; [k][x] is that of number k in the threads' column x.
template <int COUNT> __device__ const double (*add_block(const double (&mine)[COUNT]))[256] {
    __shared__ double all[COUNT][256];
    const int x = threadIdx.x;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < COUNT; k++) all[k][threadIdx.y * blockDim.x + x] = mine[k];
    __syncthreads();
    for (int k = threadIdx.y; k < COUNT; k += blockDim.y) {
        double sum = 0.0;
        for (int y = 0; y < blockDim.y; y++) sum += all[k][y * blockDim.x + x];
        all[k][x] = sum;
    }
    __syncthreads();
    return all;
}

// Leaves the block's sums of two numbers, for each of a thread's two columns, in `partial`, (M, chunks, 2, columns).
__device__ void leave(few a0, few a1, few b0, few b1, int columns, double* partial) {
    const Tile<2> tile(0, 0);
    const double mine[4] = {(double)a0, (double)a1, (double)b0, (double)b1};
    const double(*all)[256] = add_block(mine);
    double* at = partial + ((long long)tile.member * tile.chunks + blockIdx.y) * 2 * columns + tile.column;
    for (int k = threadIdx.y; k < 4; k += blockDim.y)
        if (tile.column < columns) at[k / 2 * columns + k % 2] = all[k][threadIdx.x];
}

// Adds up what `chunks` blocks left: [k][x], k = 0, 1 of the first number, 2, 3 of the second.
__device__ const double (*collect(int columns, const double* partial, int chunks))[256] {
    const Tile<2> tile(0, 0);
    double mine[4] = {0.0, 0.0, 0.0, 0.0};
    if (tile.column < columns) {
#pragma unroll 8
        for (int chunk = threadIdx.y; chunk < chunks; chunk += blockDim.y) {
            const double* at = partial + ((long long)tile.member * chunks + chunk) * 2 * columns + tile.column;
            const double2 one = __ldcg((const double2*)at), two = __ldcg((const double2*)(at + columns));
            mine[0] += one.x;
            mine[1] += one.y;
            mine[2] += two.x;
            mine[3] += two.y;
        }
    }
    return add_block(mine);
}

// The sums that a kernel left, as the gradient of a parameter. The grid is (groups of columns, 1, M).
extern "C" __global__ void add_left(const double* partial, float* out, int columns, int chunks, int stride) {
    const Tile<2> tile(0, 0);
    const double(*all)[256] = collect(columns, partial, chunks);
    if (threadIdx.y < 2 && tile.column < columns)
        out[(long long)tile.member * stride + tile.column + threadIdx.y] = (float)all[threadIdx.y][threadIdx.x];
}

// Sums over the rows of x (M, rows, columns). The grid is (groups of columns, 1, M).
template <class number> __device__ void sum_rows(const number* x, float* out, int rows, int columns, int stride) {
    const Tile<1> tile(rows, columns);
    double sum[1] = {0.0};
    if (tile.column < columns) {
#pragma unroll 8
        for (int row = threadIdx.y; row < rows; row += blockDim.y)
            sum[0] += (float)x[tile.base + (long long)row * columns + tile.column];
    }
    const double(*all)[256] = add_block(sum);
    if (threadIdx.y == 0 && tile.column < columns)
        out[(long long)tile.member * stride + tile.column] = (float)all[0][threadIdx.x];
}

extern "C" __global__ void add_rows(const float* x, float* out, int rows, int columns, int stride) {
    sum_rows(x, out, rows, columns, stride);
}

extern "C" __global__ void add_acts(const act* x, float* out, int rows, int columns, int stride) {
    sum_rows(x, out, rows, columns, stride);
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
                                   const int* seen, act* grad, double* squares, int horizon, int stride) {
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

// out = drop(x + bias + rank). rank may be null.
extern "C" __global__ void embed(const float* x, const float* bias, const float* rank, act* out, const int* seeds,
                                 const int* step, const float* drop, int rows, int d, int tokens, int stride) {
    const int member = blockIdx.y;
    const Drop keep(seeds, step, drop, 0, member);
    const unsigned size = (unsigned)rows * d;
    const long long base = (long long)member * size, shift = (long long)member * stride;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) {
        const int c = i % d, token = i / d % tokens;
        float value = x[base + i] + bias[shift + c];
        if (rank != nullptr) value += rank[shift + token * d + c];
        out[base + i] = value * keep(i);
    }
}

// grad = drop(grad); sums over slices of the windows, (M, slices, tokens d), make the gradient of rank. The grid is
// (cells, slices, M).
extern "C" __global__ void embed_grad(act* grad, float* sums, const int* seeds, const int* step, const float* drop,
                                      int B, int cells) {
    const int member = blockIdx.z, slices = gridDim.y, cell = blockIdx.x * blockDim.x + threadIdx.x;
    if (cell >= cells) return;
    const Drop keep(seeds, step, drop, 0, member);
    act* mine = grad + (long long)member * B * cells;
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

// With BRIEF to some 1e-6, for angles up to some thousands.
__device__ __forceinline__ void turn(float angle, float* sin, float* cos) {
#if BRIEF
    const float turns = rintf(angle * 0.15915494f);
    __sincosf(fmaf(turns, 1.7484555e-7f, fmaf(turns, -6.2831855f, angle)), sin, cos);
#else
    sincosf(angle, sin, cos);
#endif
}

// Neighbouring pairs that a thread turns; with BRIEF, d is a multiple of 16.
#if BRIEF
#define EACH 2
__device__ __forceinline__ void load(float (&to)[2], const act* from) {
    const Two both = get(from);
    to[0] = both.a;
    to[1] = both.b;
}
__device__ __forceinline__ void save(act* to, const float (&from)[2]) { put(to, from[0], from[1]); }
#else
#define EACH 1
__device__ __forceinline__ void load(float (&to)[1], const act* from) { to[0] = *from; }
__device__ __forceinline__ void save(act* to, const float (&from)[1]) { *to = from[0]; }
#endif

// qkv (M, R, 3 d) += bias, which may be null; then queries and keys are turned by position times base^exponent, unless
// log_base is null.
extern "C" __global__ void rotate(act* qkv, const float* bias, const float* positions, const float* log_base, int rows,
                                  int d, int pairs, int stride, int base_stride) {
    const int member = blockIdx.y, half = d / 2, across = half / EACH;
    const float* add = bias == nullptr ? nullptr : bias + (long long)member * stride;
    const float base = log_base != nullptr ? log_base[(long long)member * base_stride] : 0.f;
    // A thread takes pairs of queries, the pairs of keys at the same place, and if there is a bias the values there.
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * across; i += gridDim.x * blockDim.x) {
        const int row = i / across, c = i % across * EACH;
        act* at = qkv + ((long long)member * rows + row) * 3 * d;
        float sin[EACH], cos[EACH], a[EACH], b[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            sin[e] = 0.f, cos[e] = 1.f;
            if (log_base != nullptr)
                turn(positions[(long long)member * rows + row] * expf(-base * ((c + e) % pairs) / pairs), &sin[e], &cos[e]);
        }
        for (int part = 0; part < (add == nullptr ? 2 : 3); part++) {
            const int one = part * d + c, two = one + half;
            load(a, at + one);
            load(b, at + two);
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                if (add != nullptr) {
                    a[e] += add[one + e];
                    b[e] += add[two + e];
                }
                if (part == 2) continue;
                const float turned = a[e] * cos[e] - b[e] * sin[e];
                b[e] = a[e] * sin[e] + b[e] * cos[e];
                a[e] = turned;
            }
            save(at + one, a);
            save(at + two, b);
        }
    }
}

// grad (M, R, 3 d) is turned back. Of each pair, seven sums are left in partial (M, chunks, 7, d / 2): those of its six
// gradients, and one for log_base. The grid's columns are the pairs, EACH of them together.
extern "C" __global__ void rotate_grad(act* __restrict__ grad, const act* __restrict__ qkv, const float* positions,
                                       const float* log_base, double* partial, int rows, int d, int pairs,
                                       int base_stride) {
    const Tile<EACH> tile(rows, d);
    const int half = d / 2, c = tile.column, member = tile.member;
    const float base = log_base != nullptr ? log_base[(long long)member * base_stride] : 0.f;
    float exponent[EACH], speed[EACH];
    few total[7][EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        exponent[e] = -(float)((c + e) % pairs) / pairs;
        speed[e] = expf(base * exponent[e]);
        for (int k = 0; k < 7; k++) total[k][e] = 0;
    }
    if (c < half) {
#pragma unroll 2
        for (int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += tile.chunks * blockDim.y) {
            const long long at = ((long long)member * rows + row) * 3 * d;
            float sin[EACH], cos[EACH], angle[EACH], torque[EACH], da[EACH], db[EACH], a[EACH], b[EACH];
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                sin[e] = angle[e] = torque[e] = 0.f, cos[e] = 1.f;
                if (log_base != nullptr) {
                    angle[e] = positions[(long long)member * rows + row] * speed[e];
                    turn(angle[e], &sin[e], &cos[e]);
                }
            }
#pragma unroll
            for (int part = 0; part < 3; part++) {
                const long long one = at + part * d + c, two = one + half;
                load(da, grad + one);
                load(db, grad + two);
                if (part < 2 && log_base != nullptr) {
                    load(a, qkv + one);
                    load(b, qkv + two);
#pragma unroll
                    for (int e = 0; e < EACH; e++) {
                        torque[e] += db[e] * a[e] - da[e] * b[e];
                        const float back = da[e] * cos[e] + db[e] * sin[e];
                        db[e] = db[e] * cos[e] - da[e] * sin[e];
                        da[e] = back;
                    }
                    save(grad + one, da);
                    save(grad + two, db);
                }
#pragma unroll
                for (int e = 0; e < EACH; e++) {
                    total[2 * part][e] += da[e];
                    total[2 * part + 1][e] += db[e];
                }
            }
#pragma unroll
            for (int e = 0; e < EACH; e++) total[6][e] += (few)torque[e] * angle[e] * exponent[e];
        }
    }
    double mine[7 * EACH];
#pragma unroll
    for (int k = 0; k < 7 * EACH; k++) mine[k] = total[k / EACH][k % EACH];
    const double(*all)[256] = add_block(mine);
    double* at = partial + ((long long)member * tile.chunks + blockIdx.y) * 7 * half + c;
    for (int k = threadIdx.y; k < 7 * EACH; k += blockDim.y)
        if (c < half) at[k / EACH * half + k % EACH] = all[k][threadIdx.x];
}

// What it left, as the gradients of the bias and, if it is not null, of log_base. Blocks are (32, 8); the grid is
// (groups of the bias's numbers, and one block for log_base; 1; M).
extern "C" __global__ void rotate_left(const double* partial, float* bias_grad, float* base_grad, int d, int chunks,
                                       int stride) {
    const int half = d / 2, member = blockIdx.z, e = blockIdx.x * 32 + threadIdx.x;
    const double* mine = partial + (long long)member * chunks * 7 * half;
    const bool turns = blockIdx.x == gridDim.x - 1;
    if (turns && base_grad == nullptr) return;
    double sum[1] = {0.0};
    if (turns) {
        for (int pair = threadIdx.x; pair < half; pair += 32)
#pragma unroll 8
            for (int chunk = threadIdx.y; chunk < chunks; chunk += 8) sum[0] += mine[(chunk * 7LL + 6) * half + pair];
    } else if (e < 6 * half) {
#pragma unroll 8
        for (int chunk = threadIdx.y; chunk < chunks; chunk += 8) sum[0] += mine[chunk * 7LL * half + e];
    }
    const double(*all)[256] = add_block(sum);
    if (threadIdx.y > 0) return;
    if (!turns) {
        if (e < 6 * half) {
            const int k = e / half;
            bias_grad[(long long)member * stride + k / 2 * d + k % 2 * half + e % half] = (float)all[0][threadIdx.x];
        }
    } else if (threadIdx.x == 0) {
        double total = 0.0;
        for (int x = 0; x < 32; x++) total += all[0][x];
        base_grad[(long long)member * stride] = (float)total;
    }
}

// ---------------------------------------------------------------------------------------------------------- batch norm

#define EPSILON 1e-5f
#define MOMENTUM 0.1

#if !BRIEF
// z = x + drop(y + bias), into y, and sums of it and of its squares.
extern "C" __global__ void norm_sums(const act* __restrict__ x, act* __restrict__ y, const float* bias,
                                     double* partial, const int* seeds, const int* step, const float* drop, int site,
                                     int rows, int d, int stride) {
    const Tile<2> tile(rows, d);
    const Drop keep(seeds, step, drop, site, tile.member);
    few sum_a = 0, sum_b = 0, squares_a = 0, squares_b = 0;
    if (tile.column < d) {
        const float* add = bias + (long long)tile.member * stride + tile.column;
        const float add_a = add[0], add_b = add[1];
#pragma unroll 4
        for (int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += tile.chunks * blockDim.y) {
            const unsigned i = (unsigned)row * d + tile.column;
            const Two one = get(x + tile.base + i), two = get(y + tile.base + i);
            const float a = one.a + (two.a + add_a) * keep(i), b = one.b + (two.b + add_b) * keep(i + 1);
            put(y + tile.base + i, a, b);
            sum_a += a;
            sum_b += b;
            squares_a += (few)a * a;
            squares_b += (few)b * b;
        }
    }
    leave(sum_a, sum_b, squares_a, squares_b, d, partial);
}
#endif

// From these sums, mean and inverse deviation over the rows, to stats (M, 2, d); mean and variance also go into the
// running ones, as torch does it. The grid is (groups of columns, 1, M).
extern "C" __global__ void norm_stats(const double* partial, int chunks, float* stats, float* running_mean,
                                      float* running_var, int rows, int d, int running_stride) {
    const Tile<2> tile(rows, d);
    const double(*all)[256] = collect(d, partial, chunks);
    if (threadIdx.y >= 2 || tile.column >= d) return;
    const int c = tile.column + threadIdx.y;
    const double mean = all[threadIdx.y][threadIdx.x] / rows;
    const double variance = fmax(all[2 + threadIdx.y][threadIdx.x] / rows - mean * mean, 0.0);
    float* at = stats + (long long)tile.member * 2 * d + c;
    at[0] = (float)mean;
    at[d] = (float)(1.0 / sqrt(variance + (double)EPSILON));
    float* m = running_mean + (long long)tile.member * running_stride + c;
    float* v = running_var + (long long)tile.member * running_stride + c;
    *m = (float)((1.0 - MOMENTUM) * *m + MOMENTUM * mean);
    *v = (float)((1.0 - MOMENTUM) * *v + MOMENTUM * variance * rows / (rows - 1.0));
}

// out = (z - mean) * inverse deviation * weight + shift.
extern "C" __global__ void norm_apply(const act* __restrict__ z, const float* stats, const float* weight,
                                      const float* shift, act* __restrict__ out, int rows, int d, int stride) {
    const Tile<2> tile(rows, d);
    if (tile.column >= d) return;
    const float* at = stats + (long long)tile.member * 2 * d + tile.column;
    const long long p = (long long)tile.member * stride + tile.column;
    const float mean_a = at[0], mean_b = at[1], factor_a = at[d] * weight[p], factor_b = at[d + 1] * weight[p + 1];
    const float level_a = shift[p], level_b = shift[p + 1];
#pragma unroll 4
    for (int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += tile.chunks * blockDim.y) {
        const long long i = tile.base + (long long)row * d + tile.column;
        const Two both = get(z + i);
        put(out + i, (both.a - mean_a) * factor_a + level_a, (both.b - mean_b) * factor_b + level_b);
    }
}

// The same with the running statistics, of x + y + bias, into y.
extern "C" __global__ void norm_still(const act* x, act* y, const float* bias, const float* running_mean,
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
extern "C" __global__ void norm_grad_sums(const act* __restrict__ grad, const act* __restrict__ z, const float* stats,
                                          double* partial, int rows, int d) {
    const Tile<2> tile(rows, d);
    few sum_a = 0, sum_b = 0, product_a = 0, product_b = 0;
    if (tile.column < d) {
        const float* at = stats + (long long)tile.member * 2 * d + tile.column;
        const float mean_a = at[0], mean_b = at[1], inverse_a = at[d], inverse_b = at[d + 1];
#pragma unroll 4
        for (int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += tile.chunks * blockDim.y) {
            const long long i = tile.base + (long long)row * d + tile.column;
            const Two flow = get(grad + i), both = get(z + i);
            sum_a += flow.a;
            sum_b += flow.b;
            product_a += (few)flow.a * ((both.a - mean_a) * inverse_a);
            product_b += (few)flow.b * ((both.b - mean_b) * inverse_b);
        }
    }
    leave(sum_a, sum_b, product_a, product_b, d, partial);
}

// Those gradients, and for `norm_grad` their share of a row, (M, 2, d). The grid is (groups of columns, 1, M).
extern "C" __global__ void norm_grad_stats(const double* partial, int chunks, float* shares, float* weight_grad,
                                           float* shift_grad, int rows, int d, int stride) {
    const Tile<2> tile(rows, d);
    const double(*all)[256] = collect(d, partial, chunks);
    if (threadIdx.y >= 2 || tile.column >= d) return;
    const int c = tile.column + threadIdx.y;
    const double sum = all[threadIdx.y][threadIdx.x], product = all[2 + threadIdx.y][threadIdx.x];
    float* at = shares + (long long)tile.member * 2 * d + c;
    at[0] = (float)(sum / rows);
    at[d] = (float)(product / rows);
    shift_grad[(long long)tile.member * stride + c] = (float)sum;
    weight_grad[(long long)tile.member * stride + c] = (float)product;
}

// The gradient of z into grad (that of x), drop of it into y_grad, and sums for that of the bias into `left`.
extern "C" __global__ void norm_grad(act* __restrict__ grad, const act* __restrict__ z, const float* stats,
                                     const float* weight, const float* shares, act* __restrict__ y_grad, double* left,
                                     const int* seeds, const int* step, const float* drop, int site, int rows, int d,
                                     int stride) {
    const Tile<2> tile(rows, d);
    const Drop keep(seeds, step, drop, site, tile.member);
    few sum_a = 0, sum_b = 0;
    if (tile.column < d) {
        const long long p = (long long)tile.member * stride + tile.column, q = (long long)tile.member * 2 * d + tile.column;
        const float mean_a = stats[q], mean_b = stats[q + 1], inverse_a = stats[q + d], inverse_b = stats[q + d + 1];
        const float factor_a = weight[p] * inverse_a, factor_b = weight[p + 1] * inverse_b;
        const float level_a = shares[q], level_b = shares[q + 1];
        const float tilt_a = shares[q + d] * inverse_a, tilt_b = shares[q + d + 1] * inverse_b;
#pragma unroll 4
        for (int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += tile.chunks * blockDim.y) {
            const unsigned i = (unsigned)row * d + tile.column;
            const Two flow = get(grad + tile.base + i), both = get(z + tile.base + i);
            const float a = factor_a * (flow.a - level_a - (both.a - mean_a) * tilt_a);
            const float b = factor_b * (flow.b - level_b - (both.b - mean_b) * tilt_b);
            const float kept_a = a * keep(i), kept_b = b * keep(i + 1);
            put(grad + tile.base + i, a, b);
            put(y_grad + tile.base + i, kept_a, kept_b);
            sum_a += kept_a;
            sum_b += kept_b;
        }
    }
    // Without dropout the norm takes the bias out again: its gradient is 0, and AdamW would make steps of what rounding
    // leaves of that.
    if (keep.least == 0) sum_a = sum_b = 0;
    leave(sum_a, sum_b, 0, 0, d, left);
}

// -------------------------------------------------------------------------------------------------------- feed-forward

#if !BRIEF
// The share of a standard normal below x, and its density there.
struct Normal {
    float share, density;
    __device__ __forceinline__ Normal(float x) {
        share = 0.5f * (1.f + erff(x * 0.70710678118654752f));
        density = 0.3989422804014327f * expf(-0.5f * x * x);
    }
};

// out = drop(gelu(u + bias)). The mask goes by column first, so that it is the same whatever the width is padded to.
extern "C" __global__ void gelu(const act* u, const float* bias, act* out, const int* seeds, const int* step,
                                const float* drop, int site, int rows, int width, int stride) {
    const Tile<2> tile(rows, width);
    if (tile.column >= width) return;
    const Drop keep(seeds, step, drop, site, tile.member);
    const float* add = bias + (long long)tile.member * stride + tile.column;
    const float add_a = add[0], add_b = add[1];
#pragma unroll 4
    for (int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += tile.chunks * blockDim.y) {
        const long long i = tile.base + (long long)row * width + tile.column;
        const unsigned k = (unsigned)tile.column * rows + row;
        const Two both = get(u + i);
        const float a = both.a + add_a, b = both.b + add_b;
        put(out + i, a * Normal(a).share * keep(k), b * Normal(b).share * keep(k + rows));
    }
}

// grad becomes that of u; out is made once more; sums for the gradient of the bias go to `left`.
extern "C" __global__ void gelu_grad(act* __restrict__ grad, const act* __restrict__ u, const float* bias,
                                     act* __restrict__ out, double* left, const int* seeds, const int* step,
                                     const float* drop, int site, int rows, int width, int stride) {
    const Tile<2> tile(rows, width);
    const Drop keep(seeds, step, drop, site, tile.member);
    few sum_a = 0, sum_b = 0;
    if (tile.column < width) {
        const float* add = bias + (long long)tile.member * stride + tile.column;
        const float add_a = add[0], add_b = add[1];
#pragma unroll 4
        for (int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += tile.chunks * blockDim.y) {
            const long long i = tile.base + (long long)row * width + tile.column;
            const unsigned k = (unsigned)tile.column * rows + row;
            const Two both = get(u + i), flow = get(grad + i);
            const float a = both.a + add_a, b = both.b + add_b, kept_a = keep(k), kept_b = keep(k + rows);
            const Normal of_a(a), of_b(b);
            const float change_a = flow.a * kept_a * (of_a.share + a * of_a.density);
            const float change_b = flow.b * kept_b * (of_b.share + b * of_b.density);
            put(out + i, a * of_a.share * kept_a, b * of_b.share * kept_b);
            put(grad + i, change_a, change_b);
            sum_a += change_a;
            sum_b += change_b;
        }
    }
    leave(sum_a, sum_b, 0, 0, width, left);
}
#endif

// --------------------------------------------------------------------------------------------------------------- head

// The matrix (M B, n, n) that evaluates each window's spline at n uniform times: row t has `width` numbers from column
// first[t] on. A block is one window of one model.
extern "C" __global__ void basis(const int* first, const float* weights, const long long* order, const int* bank,
                                 const int* done, act* out, int windows, int order_stride, int tokens, int width) {
    const int b = blockIdx.x, B = gridDim.x, member = blockIdx.y;
    const long long window = order[(long long)member * order_stride + *done + b];
    const long long from = ((long long)bank[member] * windows + window) * tokens;
    act* to = out + ((long long)member * B + b) * tokens * tokens;
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

// Parameters in 16 bits, for products of them.
extern "C" __global__ void shorten(const float* theta, bf16* out, int size) {
    const long long base = (long long)blockIdx.y * size;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x)
        out[base + i] = theta[base + i];
}

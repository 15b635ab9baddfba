// Matrix products of M models at once, C = A B or C += A B, of bfloat16 on tensor cores, with float32 sums.
//
// How the work is cut depends on the shapes of one model's matrices alone, so a model's result is the same to the last
// bit whoever is computed beside it. A block takes TALL rows and WIDE columns, (128, 128), (128, 64), (64, 64) or
// (64, 32). A product of great depth is cut into slices along it, which go to `partial` and are added up by
// `product_sum`.
//
// With `limits`, a model's rows (along = 1), columns (2) or depth (3) end at limits[model], a multiple of 8: what lies
// beyond is neither read nor written.

#include "tensor.cuh"

#define DEEP 32 // how much of the depth is a stage
// A warp takes WARP_ROWS rows and 32 columns; as many blocks as are RESIDENT should find room on a multiprocessor.
#if WIDE == 128
#define THREADS 256
#define RESIDENT 2
#define STAGES 3
#define WARP_ROWS 64
#elif TALL == 128
#define THREADS 128
#define RESIDENT 4
#define STAGES 3
#define WARP_ROWS 64
#elif WIDE == 64
#define THREADS 128
#define RESIDENT 5
#define STAGES 4
#define WARP_ROWS 32
#else
#define THREADS 128
#define RESIDENT 8
#define STAGES 4
#define WARP_ROWS 16
#endif
#define WARP_COLUMNS 32
#define WARPS_ACROSS (WIDE / WARP_COLUMNS)
#define DOWN (WARP_ROWS / 16)
#define ACROSS (WARP_COLUMNS / 8)

// Where a line's 8 numbers from `at` on are in shared memory: shifted so that 8 lines at the same `at` touch all banks.
template <int LONG> __device__ __forceinline__ int place(int line, int at) {
    return line * LONG + (at ^ (LONG >= 64 ? line % 8 : line / 2 % 4) * 8);
}

// Tiles of LINES lines, LONG long, from global to shared memory, one after another along the depth; zeros beyond the
// ends. DOWNWARD: the next tile is below, else to the right. EIGHTS: lines are whole pieces of 16 bytes.
template <int LINES, int LONG, bool DOWNWARD, bool EIGHTS> struct Load {
    static const int STEP = THREADS / (LONG / 8), COUNT = LINES / STEP;
    static_assert(STEP % 8 == 0 && LINES % STEP == 0, "a thread's lines lie alike");
    const bf16* from;
    int stride, line, at, left;

    // The side that is not the depth goes from `start` to `end`.
    __device__ __forceinline__ Load(const bf16* matrix, int stride, int depth0, int start, int end) : stride(stride) {
        line = EIGHTS ? threadIdx.x / (LONG / 8) : 0;
        at = EIGHTS ? threadIdx.x % (LONG / 8) * 8 : 0;
        from = matrix + (long long)((DOWNWARD ? depth0 : start) + line) * stride + (DOWNWARD ? start : depth0) + at;
        left = end - start - (DOWNWARD ? at : line);
    }

    // `rest`: how much of the depth is still to come.
    __device__ __forceinline__ void next(bf16* to, int rest) {
        if (EIGHTS) {
            to += place<LONG>(line, at);
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const bool there = DOWNWARD ? left > 0 && line + i * STEP < rest : i * STEP < left && at < rest;
                send(to + i * STEP * LONG, from + i * STEP * stride, there);
            }
        } else {
#pragma unroll 8
            for (int v = threadIdx.x; v < LINES * LONG; v += THREADS) {
                const int l = v / LONG, c = v % LONG;
                const bool there = (DOWNWARD ? l : c) < rest && (DOWNWARD ? c : l) < left;
                to[place<LONG>(l, c / 8 * 8) + c % 8].bits = there ? from[l * stride + c].bits : (unsigned short)0;
            }
        }
        from += DOWNWARD ? DEEP * stride : DEEP;
    }
};

// Four threads in a row with four words each: word i of thread t becomes word t of thread i.
__device__ __forceinline__ void turn(unsigned (&w)[4]) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool high = threadIdx.x & bit;
#pragma unroll
        for (int p = 0; p < 2; p++) {
            const int one = bit == 1 ? 2 * p : p, two = one + bit;
            const unsigned got = __shfl_xor_sync(0xffffffffu, high ? w[one] : w[two], bit);
            if (high)
                w[one] = got;
            else
                w[two] = got;
        }
    }
}

// A thread's sums, two neighbours at a time: `each(row, column, first, second)`.
template <class Each> __device__ __forceinline__ void walk(float (&sums)[DOWN][ACROSS][4], int m0, int n0, Each each) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < DOWN; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
                each(m0 + 16 * i + 8 * h + g, n0 + 8 * j + 2 * t, sums[i][j][2 * h], sums[i][j][2 * h + 1]);
}

template <class T>
__device__ __forceinline__ void store(float (&sums)[DOWN][ACROSS][4], T* C, int stride, int m0, int n0, int rows,
                                      int columns, bool add) {
    walk(sums, m0, n0, [=](int m, int n, float x, float y) {
        T* at = C + (long long)m * stride + n;
        if (m < rows && n < columns) at[0] = add ? at[0] + x : x;
        if (m < rows && n + 1 < columns) at[1] = add ? at[1] + y : y;
    });
}

// Pairs of float32 at even places.
__device__ __forceinline__ void store_pairs(float (&sums)[DOWN][ACROSS][4], float* C, int stride, int m0, int n0,
                                            int rows, int columns, bool add) {
    walk(sums, m0, n0, [=](int m, int n, float x, float y) {
        if (m >= rows || n >= columns) return;
        float2* at = (float2*)(C + (long long)m * stride + n);
        if (add) {
            const float2 before = *at;
            x += before.x;
            y += before.y;
        }
        *at = make_float2(x, y);
    });
}

// Eight bfloat16 at a time, at places that are multiples of 8: a thread t of four has the whole of its columns 8 t...
__device__ __forceinline__ void store_eights(float (&sums)[DOWN][ACROSS][4], bf16* C, int stride, int m0, int n0,
                                             int rows, int columns, bool add) {
    static_assert(ACROSS == 4, "four threads, four words");
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, n = n0 + 8 * t;
    C += (long long)(m0 + g) * stride + n;
    rows = n < columns ? rows - m0 - g : 0;
    if (add) {
        int4 before[DOWN][2];
#pragma unroll
        for (int i = 0; i < DOWN; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                before[i][h] = make_int4(0, 0, 0, 0);
                if (16 * i + 8 * h < rows) before[i][h] = *(const int4*)(C + (long long)(16 * i + 8 * h) * stride);
            }
#pragma unroll
        for (int i = 0; i < DOWN; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                unsigned w[4] = {(unsigned)before[i][h].x, (unsigned)before[i][h].y, (unsigned)before[i][h].z,
                                 (unsigned)before[i][h].w};
                turn(w);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    sums[i][j][2 * h] += lower(w[j]);
                    sums[i][j][2 * h + 1] += upper(w[j]);
                }
            }
    }
#pragma unroll
    for (int i = 0; i < DOWN; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            unsigned w[4];
#pragma unroll
            for (int j = 0; j < 4; j++) w[j] = pack(sums[i][j][2 * h], sums[i][j][2 * h + 1]);
            turn(w);
            const int4 all = make_int4((int)w[0], (int)w[1], (int)w[2], (int)w[3]);
            if (16 * i + 8 * h < rows) *(int4*)(C + (long long)(16 * i + 8 * h) * stride) = all;
        }
}

// TURN_A: A is stored by column, as (depth, rows); TURN_B: B is stored by column, as (columns, depth).
// EIGHTS: lines of A and B are whole pieces of 16 bytes. aligned: those of C are, too (8 bytes will do for float32).
// full: C is of float32, else of bfloat16.
template <bool TURN_A, bool TURN_B, bool EIGHTS>
__device__ __forceinline__ void product(const bf16* A, const bf16* B, void* C, float* partial, const float* bias,
                                        const int* limits, int rows, int columns, int depth, int a_stride, int b_stride,
                                        int c_stride, int a_model, int b_model, int c_model, int bias_model, int along,
                                        int slice, int aligned, int full, int add) {
    static_assert(TALL / WARP_ROWS * WARPS_ACROSS * 32 == THREADS, "warps cover the tile");
    const int A_LINES = TURN_A ? DEEP : TALL, A_LONG = TURN_A ? TALL : DEEP;
    const int B_LINES = TURN_B ? WIDE : DEEP, B_LONG = TURN_B ? DEEP : WIDE;
    __shared__ __align__(128) bf16 a_tiles[STAGES][TALL * DEEP], b_tiles[STAGES][WIDE * DEEP];
    const int tiles_across = (columns + WIDE - 1) / WIDE, tile = blockIdx.x, model = blockIdx.z;
    const int row0 = tile / tiles_across * TALL, column0 = tile % tiles_across * WIDE, from = blockIdx.y * slice;
    const bool sliced = gridDim.y > 1;
    partial += ((long long)model * gridDim.y + blockIdx.y) * rows * (columns + columns % 2);
    const int partial_stride = columns + columns % 2;
    if (limits) {
        const int limit = limits[model];
        if (along == 1) rows = min(rows, limit);
        if (along == 2) columns = min(columns, limit);
        if (along == 3) depth = min(depth, limit);
        if (row0 >= rows || column0 >= columns || (sliced && from >= depth)) return;
    }
    const int end = min(from + slice, depth);
    A += (long long)model * a_model;
    B += (long long)model * b_model;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_row = warp / WARPS_ACROSS * WARP_ROWS, warp_column = warp % WARPS_ACROSS * WARP_COLUMNS;
    const int m0 = row0 + warp_row, n0 = column0 + warp_column;
    const bool idle = m0 >= rows || n0 >= columns;

    Load<A_LINES, A_LONG, TURN_A, EIGHTS> a_load(A, a_stride, from, row0, rows);
    Load<B_LINES, B_LONG, !TURN_B, EIGHTS> b_load(B, b_stride, from, column0, columns);
    const auto stage = [&](int k, int at) {
        if (k < end) {
            a_load.next(a_tiles[at], end - k);
            b_load.next(b_tiles[at], end - k);
        }
        seal();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) stage(from + s * DEEP, s);

    float sums[DOWN][ACROSS][4];
#pragma unroll
    for (int j = 0; j < ACROSS; j++) {
        const int n = n0 + 8 * j + lane % 4 * 2;
        const float* b = bias && !sliced ? bias + (long long)model * bias_model + n : nullptr;
        const float x = b && n < columns ? b[0] : 0.f, y = b && n + 1 < columns ? b[1] : 0.f;
#pragma unroll
        for (int i = 0; i < DOWN; i++) {
            sums[i][j][0] = sums[i][j][2] = x;
            sums[i][j][1] = sums[i][j][3] = y;
        }
    }

    // Which row of which of four matrices (8, 8) this thread points at: `low` and `high` are its place among the four.
    const int i8 = lane % 8, low = lane / 8 % 2 * 8, high = lane / 16 * 8;
    int now = 0, next = STAGES - 1;
    for (int k = from; k < end; k += DEEP) {
        arrive<STAGES - 2>();
        __syncthreads();
        stage(k + (STAGES - 1) * DEEP, next);
        if (!idle) {
            const bf16 *a_now = a_tiles[now], *b_now = b_tiles[now];
#pragma unroll
            for (int kk = 0; kk < DEEP; kk += 16) {
                unsigned a[DOWN][4], b[ACROSS / 2][4];
#pragma unroll
                for (int j = 0; j < ACROSS / 2; j++) {
                    const int n = warp_column + 16 * j + high;
                    fetch<!TURN_B>(b[j], b_now + (TURN_B ? place<B_LONG>(n + i8, kk + low)
                                                         : place<B_LONG>(kk + low + i8, n)));
                }
#pragma unroll
                for (int i = 0; i < DOWN; i++) {
                    const int m = warp_row + 16 * i + low;
                    fetch<TURN_A>(a[i], a_now + (TURN_A ? place<A_LONG>(kk + high + i8, m)
                                                        : place<A_LONG>(m + i8, kk + high)));
                }
#pragma unroll
                for (int i = 0; i < DOWN; i++)
#pragma unroll
                    for (int j = 0; j < ACROSS; j++) {
                        const unsigned both[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
                        multiply(sums[i][j], a[i], both);
                    }
            }
        }
        now = now + 1 == STAGES ? 0 : now + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
    }

    if (idle) return;
    float* C32 = (float*)C + (long long)model * c_model;
    bf16* C16 = (bf16*)C + (long long)model * c_model;
    if (sliced)
        store_pairs(sums, partial, partial_stride, m0, n0, rows, columns, false);
    else if (full && aligned)
        store_pairs(sums, C32, c_stride, m0, n0, rows, columns, add);
    else if (full)
        store(sums, C32, c_stride, m0, n0, rows, columns, add);
    else if (aligned)
        store_eights(sums, C16, c_stride, m0, n0, rows, columns, add);
    else
        store(sums, C16, c_stride, m0, n0, rows, columns, add);
}

#define PARAMETERS                                                                                                     \
    const bf16 *A, const bf16 *B, void *C, float *partial, const float *bias, const int *limits, int rows,             \
        int columns, int depth, int a_stride, int b_stride, int c_stride, int a_model, int b_model, int c_model,       \
        int bias_model, int along, int slice, int aligned, int full, int add
#define ARGUMENTS                                                                                                      \
    A, B, C, partial, bias, limits, rows, columns, depth, a_stride, b_stride, c_stride, a_model, b_model, c_model,     \
        bias_model, along, slice, aligned, full, add

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) product_nn(PARAMETERS) {
    product<false, false, true>(ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(THREADS) product_nn_odd(PARAMETERS) {
    product<false, false, false>(ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) product_nt(PARAMETERS) {
    product<false, true, true>(ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(THREADS) product_nt_odd(PARAMETERS) {
    product<false, true, false>(ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) product_tn(PARAMETERS) {
    product<true, false, true>(ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(THREADS) product_tn_odd(PARAMETERS) {
    product<true, false, false>(ARGUMENTS);
}

// Adds up the slices of each model, in order. The grid is (blocks, M).
extern "C" __global__ void product_sum(const float* partial, void* C, const float* bias, const int* limits, int rows,
                                       int columns, int depth, int c_stride, int c_model, int bias_model, int along,
                                       int slice, int slices, int full, int add) {
    const int model = blockIdx.y, stride = columns + columns % 2, size = rows * stride;
    const float* from = partial + (long long)model * slices * size;
    const int all = rows * columns, across = columns;
    if (limits) {
        const int limit = limits[model];
        if (along == 1) rows = min(rows, limit);
        if (along == 2) columns = min(columns, limit);
        if (along == 3) slices = (min(depth, limit) + slice - 1) / slice;
    }
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < all; i += gridDim.x * blockDim.x) {
        const int m = i / across, n = i % across;
        if (m >= rows || n >= columns) continue;
        float sum = 0.f;
#pragma unroll 16
        for (int s = 0; s < slices; s++) sum += from[(long long)s * size + m * stride + n];
        if (bias) sum += bias[(long long)model * bias_model + n];
        const long long at = (long long)model * c_model + (long long)m * c_stride + n;
        if (full) {
            float* to = (float*)C + at;
            *to = add ? *to + sum : sum;
        } else {
            bf16* to = (bf16*)C + at;
            *to = add ? *to + sum : sum;
        }
    }
}

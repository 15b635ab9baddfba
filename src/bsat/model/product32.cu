// Matrix products of M models at once, C = A B or C += A B, on tensor cores and as exact as float32.
//
// A float32 is the sum of two numbers that a tensor core takes (TF32), but for a rest of 2^-22; three of the four
// products of such halves give theirs, and the sums are float32. How the work is cut depends on the shapes of one
// model's matrices alone, so a model's result is the same to the last bit whoever is computed beside it.
//
// A block takes TALL rows and WIDE (64, 32 or 16) columns with four warps. A product of great depth is cut into slices
// along it, which go to `partial` and are added up by `product_sum`.

#define TALL 64
#define DEEP 16 // how much of the depth is in shared memory at once
#define WARPS_ACROSS (WIDE >= 32 ? 2 : 1)
#define WARP_ROWS (TALL * WARPS_ACROSS / 4)
#define WARP_COLUMNS (WIDE / WARPS_ACROSS)
#define DOWN (WARP_ROWS / 16)
#define ACROSS (WARP_COLUMNS / 8)

// The part of x that a tensor core sees.
__device__ float coarse(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// d (16, 8) += a (16, 8) b (8, 8), each spread over the 32 threads of a warp as the instruction wants it.
__device__ void multiply(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
#ifdef __CUDA_ARCH__
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
#else
    __shared__ float all_a[4][16][8], all_b[4][8][8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    for (int e = 0; e < 4; e++) all_a[warp][g + e % 2 * 8][t + e / 2 * 4] = coarse(a[e]);
    for (int e = 0; e < 2; e++) all_b[warp][t + e * 4][g] = coarse(b[e]);
    __syncwarp();
    for (int e = 0; e < 4; e++)
        for (int k = 0; k < 8; k++) d[e] += all_a[warp][g + e / 2 * 8][k] * all_b[warp][k][2 * t + e % 2];
    __syncwarp();
#endif
}

// Numbers of a tile of LINES lines, LONG long, on their way from global to shared memory.
template <int LINES, int LONG> struct Load {
    static const int COUNT = (LINES * LONG / 4 + 128 - 1) / 128;
    float4 held[COUNT];

    __device__ void fetch(const float* from, long long stride, int line0, int lines, int at0, int end, int aligned) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int v = threadIdx.x + i * 128, line = v / (LONG / 4), at = at0 + v % (LONG / 4) * 4;
            float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
            if (line < LINES && line0 + line < lines && at < end) {
                const float* p = from + (line0 + line) * stride + at;
                if (aligned) {
                    x = *(const float4*)p;
                } else {
                    x.x = p[0];
                    if (at + 1 < end) x.y = p[1];
                    if (at + 2 < end) x.z = p[2];
                    if (at + 3 < end) x.w = p[3];
                }
            }
            held[i] = x;
        }
    }

    __device__ void put(float* to, int stride) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int v = threadIdx.x + i * 128, line = v / (LONG / 4), at = v % (LONG / 4) * 4;
            if (line < LINES) *(float4*)(to + line * stride + at) = held[i];
        }
    }
};

// TURN_A: A is stored by column, as (depth, rows); TURN_B: B is stored by column, as (columns, depth).
template <bool TURN_A, bool TURN_B>
__device__ void product(const float* A, const float* B, float* C, float* partial, int rows, int columns,
                        int depth, int a_stride, int b_stride, int c_stride, int a_model, int b_model, int c_model,
                        int slice, int aligned, int add) {
    // Distances of lines in shared memory that spread a warp's reads over all banks.
    const int a_line = TURN_A ? TALL + 8 : DEEP + 4, b_line = TURN_B ? DEEP + 4 : WIDE + 8;
    __shared__ __align__(16) float a_tile[2][TURN_A ? DEEP * (TALL + 8) : TALL * (DEEP + 4)];
    __shared__ __align__(16) float b_tile[2][TURN_B ? WIDE * (DEEP + 4) : DEEP * (WIDE + 8)];
    const int tiles_across = (columns + WIDE - 1) / WIDE, tile = blockIdx.x, model = blockIdx.z;
    const int row0 = tile / tiles_across * TALL, column0 = tile % tiles_across * WIDE;
    const int from = blockIdx.y * slice, end = min(from + slice, depth);
    A += (long long)model * a_model;
    B += (long long)model * b_model;
    C += (long long)model * c_model;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int warp_row = warp / WARPS_ACROSS * WARP_ROWS, warp_column = warp % WARPS_ACROSS * WARP_COLUMNS;
    float sums[DOWN][ACROSS][4];
#pragma unroll
    for (int i = 0; i < DOWN; i++)
#pragma unroll
        for (int j = 0; j < ACROSS; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[i][j][e] = 0.f;

    Load<TURN_A ? DEEP : TALL, TURN_A ? TALL : DEEP> a_load;
    Load<TURN_B ? WIDE : DEEP, TURN_B ? DEEP : WIDE> b_load;
    int now = 0;
    for (int k = from; k < end + DEEP; k += DEEP) { // one round more than there are tiles: fetch, then compute
        if (k < end) {
            if (TURN_A)
                a_load.fetch(A, a_stride, k, end, row0, rows, aligned);
            else
                a_load.fetch(A, a_stride, row0, rows, k, end, aligned);
            if (TURN_B)
                b_load.fetch(B, b_stride, column0, columns, k, end, aligned);
            else
                b_load.fetch(B, b_stride, k, end, column0, columns, aligned);
        }
        if (k > from) {
            const float *a_now = a_tile[now], *b_now = b_tile[now];
            // A tensor core does not round its sums but cuts them off, so they are kept short.
            float some[DOWN][ACROSS][4];
#pragma unroll
            for (int i = 0; i < DOWN; i++)
#pragma unroll
                for (int j = 0; j < ACROSS; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) some[i][j][e] = 0.f;
#pragma unroll
            for (int kk = 0; kk < DEEP; kk += 8) {
                float a_high[DOWN][4], a_low[DOWN][4], b_high[ACROSS][2], b_low[ACROSS][2];
#pragma unroll
                for (int i = 0; i < DOWN; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int m = warp_row + 16 * i + g + e % 2 * 8, c = kk + t + e / 2 * 4;
                        const float x = a_now[TURN_A ? c * a_line + m : m * a_line + c];
                        a_high[i][e] = coarse(x);
                        a_low[i][e] = x - a_high[i][e];
                    }
#pragma unroll
                for (int j = 0; j < ACROSS; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int n = warp_column + 8 * j + g, c = kk + t + e * 4;
                        const float x = b_now[TURN_B ? n * b_line + c : c * b_line + n];
                        b_high[j][e] = coarse(x);
                        b_low[j][e] = x - b_high[j][e];
                    }
#pragma unroll
                for (int i = 0; i < DOWN; i++)
#pragma unroll
                    for (int j = 0; j < ACROSS; j++) {
                        multiply(some[i][j], a_low[i], b_high[j]);
                        multiply(some[i][j], a_high[i], b_low[j]);
                        multiply(some[i][j], a_high[i], b_high[j]);
                    }
            }
#pragma unroll
            for (int i = 0; i < DOWN; i++)
#pragma unroll
                for (int j = 0; j < ACROSS; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) sums[i][j][e] += some[i][j][e];
            now ^= 1;
        }
        if (k < end) {
            a_load.put(a_tile[now], a_line);
            b_load.put(b_tile[now], b_line);
        }
        __syncthreads();
    }

    // Two neighbouring columns at a time.
    const bool sliced = gridDim.y > 1, pairs = aligned && c_stride % 2 == 0;
    if (sliced) C = partial + ((long long)model * gridDim.y + blockIdx.y) * rows * columns;
    const int stride = sliced ? columns : c_stride;
#pragma unroll
    for (int i = 0; i < DOWN; i++)
#pragma unroll
        for (int j = 0; j < ACROSS; j++)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int m = row0 + warp_row + 16 * i + g + e / 2 * 8, n = column0 + warp_column + 8 * j + 2 * t;
                if (m >= rows || n >= columns) continue;
                float* at = C + (long long)m * stride + n;
                float x = sums[i][j][e], y = sums[i][j][e + 1];
                if (pairs) {
                    if (add && !sliced) {
                        const float2 before = *(const float2*)at;
                        x += before.x;
                        y += before.y;
                    }
                    *(float2*)at = make_float2(x, y);
                } else {
                    at[0] = add && !sliced ? at[0] + x : x;
                    if (n + 1 < columns) at[1] = add && !sliced ? at[1] + y : y;
                }
            }
}

#define PARAMETERS                                                                                                     \
    const float *A, const float *B, float *C, float *partial, int rows, int columns, int depth,          \
        int a_stride, int b_stride, int c_stride, int a_model, int b_model, int c_model, int slice, int aligned, int add
#define ARGUMENTS                                                                                                      \
    A, B, C, partial, rows, columns, depth, a_stride, b_stride, c_stride, a_model, b_model, c_model, slice,   \
        aligned, add

extern "C" __global__ void __launch_bounds__(128) product_nn(PARAMETERS) { product<false, false>(ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128) product_nt(PARAMETERS) { product<false, true>(ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128) product_tn(PARAMETERS) { product<true, false>(ARGUMENTS); }

// Adds up the slices of each model, in order. The grid is (blocks, M).
extern "C" __global__ void product_sum(const float* partial, float* C, int rows, int columns, int c_stride, int c_model,
                                       int slices, int add) {
    const int size = rows * columns;
    const float* from = partial + (long long)blockIdx.y * slices * size;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) {
        float sum = 0.f;
#pragma unroll 8
        for (int s = 0; s < slices; s++) sum += from[(long long)s * size + i];
        float* at = C + (long long)blockIdx.y * c_model + (long long)(i / columns) * c_stride + i % columns;
        *at = add ? *at + sum : sum;
    }
}

// Matrix products of M models at once, C = A B or C += A B, of bfloat16 on tensor cores, with float32 sums.
//
// How the work is cut depends on the shapes of one model's matrices alone, so a model's result is the same to the last
// bit whoever is computed beside it. A block takes TALL rows and WIDE columns, (128, 128), (128, 64), (64, 64) or
// (64, 32). A product of great depth is cut into slices along it, which go to `partial` and are added up by
// `product_sum`.
//
// With `limits`, a model's rows (along = 1), columns (2) or depth (3) end at limits[model], a multiple of 8: what lies
// beyond is neither read nor written.
//
// What follows a product in a network is done here where its sums are still at hand (`Gelu` and the like): memory would
// have to be read and written once more for it. Such products have no slices.

#include "noise.cuh"
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

// A thread's of a warp, as `multiply` has them.
typedef float Sums[DOWN][ACROSS][4];
typedef unsigned Words[4];

// That of the thread's row r, of 2 DOWN that are 8 apart, and of the eight columns j, column e of its two.
__device__ __forceinline__ float& at(Sums& sums, int r, int j, int e) { return sums[r / 2][j][r % 2 * 2 + e]; }

// Where in C a block begins, where a warp, and where the model ends. idle: the warp has nothing.
struct Place {
    int model, row0, column0, m0, n0, rows, columns;
    bool idle;
};

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

// Where a thread's pieces of 8 bfloat16 lie in a matrix like C: of 2 DOWN rows, 8 apart, at a multiple of 8. Between
// memory and `Words`, four threads exchange theirs: word j is what lies beside the sums of the eight columns j.
struct Pieces {
    long long at;
    int stride, left;

    __device__ __forceinline__ Pieces(const Place& place, long long model, int stride) : stride(stride) {
        static_assert(ACROSS == 4, "four threads, four words");
        const int m = place.m0 + threadIdx.x % 32 / 4, n = place.n0 + threadIdx.x % 4 * 8;
        at = place.model * model + (long long)m * stride + n;
        left = n < place.columns ? place.rows - m : 0;
    }
    __device__ __forceinline__ int4 load(const bf16* from, int r) const {
        return 8 * r < left ? *(const int4*)(from + at + (long long)(8 * r) * stride) : make_int4(0, 0, 0, 0);
    }
    static __device__ __forceinline__ void open(Words& w, int4 piece) {
        w[0] = (unsigned)piece.x, w[1] = (unsigned)piece.y, w[2] = (unsigned)piece.z, w[3] = (unsigned)piece.w;
        turn(w);
    }
    __device__ __forceinline__ void save(bf16* to, int r, Words& w) const {
        turn(w);
        const int4 all = make_int4((int)w[0], (int)w[1], (int)w[2], (int)w[3]);
        if (8 * r < left) *(int4*)(to + at + (long long)(8 * r) * stride) = all;
    }
};

// A thread's sums, two neighbours at a time: `each(row, column, first, second)`.
template <class Each> __device__ __forceinline__ void walk(Sums& sums, const Place& place, Each each) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < DOWN; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
                each(place.m0 + 16 * i + 8 * h + g, place.n0 + 8 * j + 2 * t, sums[i][j][2 * h], sums[i][j][2 * h + 1]);
}

template <class T>
__device__ __forceinline__ void store(Sums& sums, T* C, int stride, const Place& place, bool add) {
    walk(sums, place, [=](int m, int n, float x, float y) {
        T* at = C + (long long)m * stride + n;
        if (m < place.rows && n < place.columns) at[0] = add ? at[0] + x : x;
        if (m < place.rows && n + 1 < place.columns) at[1] = add ? at[1] + y : y;
    });
}

// Pairs of float32 at even places.
__device__ __forceinline__ void store_pairs(Sums& sums, float* C, int stride, const Place& place, bool add) {
    walk(sums, place, [=](int m, int n, float x, float y) {
        if (m >= place.rows || n >= place.columns) return;
        float2* at = (float2*)(C + (long long)m * stride + n);
        if (add) {
            const float2 before = *at;
            x += before.x;
            y += before.y;
        }
        *at = make_float2(x, y);
    });
}

// Eight bfloat16 at a time.
__device__ __forceinline__ void store_eights(Sums& sums, bf16* C, const Pieces& pieces, bool add) {
    if (add) {
        int4 before[2 * DOWN];
#pragma unroll
        for (int r = 0; r < 2 * DOWN; r++) before[r] = pieces.load(C, r);
#pragma unroll
        for (int r = 0; r < 2 * DOWN; r++) {
            Words w;
            Pieces::open(w, before[r]);
#pragma unroll
            for (int j = 0; j < ACROSS; j++) {
                at(sums, r, j, 0) += lower(w[j]);
                at(sums, r, j, 1) += upper(w[j]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2 * DOWN; r++) {
        Words w;
#pragma unroll
        for (int j = 0; j < ACROSS; j++) w[j] = pack(at(sums, r, j, 0), at(sums, r, j, 1));
        pieces.save(C, r, w);
    }
}

// What becomes of the sums: they are C, or added to it, or a slice of it. rows, columns: of all of C.
// aligned: lines of C are whole pieces of 16 bytes (8 will do for float32). full: C is of float32, else of bfloat16.
struct Plain {
    static const bool WHOLE = false;
    void* C;
    float* partial;
    int rows, columns, stride, c_model;
    bool aligned, full, add;

    __device__ __forceinline__ void operator()(Sums& sums, const Place& place, float*) const {
        if (place.idle) return;
        const int even = columns + columns % 2;
        float* C32 = (float*)C + (long long)place.model * c_model;
        bf16* C16 = (bf16*)C + (long long)place.model * c_model;
        if (gridDim.y > 1) {
            float* slice = partial + ((long long)place.model * gridDim.y + blockIdx.y) * rows * even;
            store_pairs(sums, slice, even, place, false);
        } else if (full && aligned)
            store_pairs(sums, C32, stride, place, add);
        else if (full)
            store(sums, C32, stride, place, add);
        else if (aligned)
            store_eights(sums, (bf16*)C, Pieces(place, c_model, stride), add);
        else
            store(sums, C16, stride, place, add);
    }
};

// -------------------------------------------------------------------------------------------- what follows a product
//
// All matrices here are like C, (M, rows, columns) of bfloat16 without gaps; columns are a multiple of 8. Of each,
// pieces are under way while those of two rows before are worked on.

// Goes over a thread's rows with those of COUNT other matrices: `each(r, its words)`.
template <int COUNT, class Each>
__device__ __forceinline__ void beside(const bf16* const (&others)[COUNT], const Pieces& pieces, Each each) {
    int4 ahead[2][COUNT];
#pragma unroll
    for (int v = 0; v < 2 * COUNT; v++) ahead[v / COUNT][v % COUNT] = pieces.load(others[v % COUNT], v / COUNT);
#pragma unroll
    for (int r = 0; r < 2 * DOWN; r++) {
        Words w[COUNT];
#pragma unroll
        for (int o = 0; o < COUNT; o++) {
            Pieces::open(w[o], ahead[r % 2][o]);
            if (r + 2 < 2 * DOWN) ahead[r % 2][o] = pieces.load(others[o], r + 2);
        }
        each(r, w);
    }
}

// Sums over rows of COUNT numbers a column: [8 k + 2 j + e] is that of number k, and of the eight columns j, column e of
// the thread's two.
template <int COUNT> struct Totals {
    float mine[8 * COUNT];

    __device__ __forceinline__ Totals() {
#pragma unroll
        for (int f = 0; f < 8 * COUNT; f++) mine[f] = 0.f;
    }

    __device__ __forceinline__ void add(int k, int j, float first, float second) {
        mine[8 * k + 2 * j] += first;
        mine[8 * k + 2 * j + 1] += second;
    }

    // The block's go to left (M, tiles down, 2, columns), also those beyond the model's own columns. For all threads.
    __device__ __forceinline__ void leave(const Place& place, float* shared, double* left, int columns) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
        // Over the eight rows of threads. Each exchange halves what a thread goes on with.
#pragma unroll
        for (int step = 0; step < 3; step++) {
            const int bit = 16 >> step, half = 4 * COUNT >> step;
            const bool high = lane & bit;
#pragma unroll
            for (int f = 0; f < 4 * COUNT; f++) {
                if (f >= half) continue;
                const float got = __shfl_xor_sync(0xffffffffu, high ? mine[f] : mine[f + half], bit);
                mine[f] = (high ? mine[f + half] : mine[f]) + got;
            }
        }
        __syncthreads(); // nobody reads tiles any more
        float* to = shared + warp / WARPS_ACROSS * COUNT * WIDE + warp % WARPS_ACROSS * WARP_COLUMNS;
#pragma unroll
        for (int c = 0; c < COUNT; c++) {
            const int f = g * COUNT + c;
            to[f / 8 * WIDE + f % 8 / 2 * 8 + 2 * t + f % 2] = mine[c];
        }
        __syncthreads();
        static_assert(COUNT * WIDE <= THREADS, "a thread for each sum");
        const int k = threadIdx.x / WIDE, column = place.column0 + threadIdx.x % WIDE;
        if (k >= COUNT || column >= columns) return;
        double sum = 0.0;
#pragma unroll
        for (int w = 0; w < TALL / WARP_ROWS; w++) sum += shared[w * COUNT * WIDE + threadIdx.x];
        const long long tile = (long long)place.model * ((place.rows + TALL - 1) / TALL) + place.row0 / TALL;
        left[(2 * tile + k) * columns + column] = sum;
    }
};

// Coarse, and without a look at numbers below the least: those are 0.
__device__ __forceinline__ float power_of_two(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}
__device__ __forceinline__ float reciprocal(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.f / x;
#endif
}

// The share of a standard normal below x, to 2e-7 (Abramowitz and Stegun, 7.1.26), and its density there.
struct Normal {
    float share, density;
    __device__ __forceinline__ Normal(float x) {
        const float fall = power_of_two(-0.72134752f * x * x), t = reciprocal(1.f + 0.23164189f * fabsf(x));
        float tail = ((0.530702714f * t - 0.726576013f) * t + 0.710706871f) * t - 0.142248368f;
        tail = (tail * t + 0.127414796f) * t * fall;
        share = x < 0.f ? tail : 1.f - tail;
        density = 0.3989422804014327f * fall;
    }
};

struct Masks {
    const int *seeds, *step;
    const float* drop;
    int site;
    __device__ __forceinline__ Drop of(int model) const { return Drop(seeds, step, drop, site, model); }
};

// u = the sums, unless u is null, and out = drop(gelu(u)). The mask goes by column first, so that it is the same
// whatever the width is padded to.
struct Gelu {
    static const bool WHOLE = false;
    bf16 *u, *out;
    Masks masks;
    int rows, columns;

    __device__ __forceinline__ void operator()(Sums& sums, const Place& place, float*) const {
        if (place.idle) return;
        const Pieces pieces(place, (long long)rows * columns, columns);
        const Drop keep = masks.of(place.model);
        const unsigned first = (unsigned)(place.n0 + threadIdx.x % 4 * 2) * rows + place.m0 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int r = 0; r < 2 * DOWN; r++) {
            Words w, bent;
#pragma unroll
            for (int j = 0; j < ACROSS; j++) {
                w[j] = pack(at(sums, r, j, 0), at(sums, r, j, 1));
                const unsigned k = first + 8 * j * rows + 8 * r;
                const float a = lower(w[j]), b = upper(w[j]); // as the gradient will find them
                bent[j] = pack(a * Normal(a).share * keep.straight(k), b * Normal(b).share * keep.straight(k + rows));
            }
            if (u != nullptr) pieces.save(u, r, w);
            pieces.save(out, r, bent);
        }
    }
};

// The sums are the gradient of its out; out = that of u, and sums of it are left. Beyond the last row, and the model's
// own columns, all is 0.
struct GeluGrad {
    static const bool WHOLE = true;
    const bf16* u;
    bf16* out;
    double* left;
    Masks masks;
    int rows, columns;

    __device__ __forceinline__ void operator()(Sums& sums, const Place& place, float* shared) const {
        Totals<1> total;
        if (!place.idle) {
            const Pieces pieces(place, (long long)rows * columns, columns);
            const Drop keep = masks.of(place.model);
            const unsigned first = (unsigned)(place.n0 + threadIdx.x % 4 * 2) * rows + place.m0 + threadIdx.x % 32 / 4;
            const bf16* others[1] = {u};
            beside(others, pieces, [&](int r, const Words(&w)[1]) {
                Words changes;
#pragma unroll
                for (int j = 0; j < ACROSS; j++) {
                    const unsigned k = first + 8 * j * rows + 8 * r;
                    const float a = lower(w[0][j]), b = upper(w[0][j]);
                    const Normal of_a(a), of_b(b);
                    const float x = at(sums, r, j, 0) * keep.straight(k) * (of_a.share + a * of_a.density);
                    const float y = at(sums, r, j, 1) * keep.straight(k + rows) * (of_b.share + b * of_b.density);
                    changes[j] = pack(x, y);
                    total.add(0, j, x, y);
                }
                pieces.save(out, r, changes);
            });
        }
        total.leave(place, shared, left, columns);
    }
};

// out = x + drop(the sums), and sums of it and of its squares are left.
struct Norm {
    static const bool WHOLE = true;
    const bf16* x;
    bf16* out;
    double* left;
    Masks masks;
    int rows, columns;

    __device__ __forceinline__ void operator()(Sums& sums, const Place& place, float* shared) const {
        Totals<2> total;
        if (!place.idle) {
            const Pieces pieces(place, (long long)rows * columns, columns);
            const Drop usual = masks.of(place.model);
            const int m = place.m0 + threadIdx.x % 32 / 4;
            const unsigned first = (unsigned)m * columns + place.n0 + threadIdx.x % 4 * 2;
            const bf16* others[1] = {x};
            beside(others, pieces, [&](int r, const Words(&w)[1]) {
                Drop keep = usual;
                if (m + 8 * r >= rows) keep.scale = 0.f; // nothing of the bias
                Words both;
#pragma unroll
                for (int j = 0; j < ACROSS; j++) {
                    const unsigned k = first + 8 * r * columns + 8 * j;
                    const float a = lower(w[0][j]) + at(sums, r, j, 0) * keep.straight(k);
                    const float b = upper(w[0][j]) + at(sums, r, j, 1) * keep.straight(k + 1);
                    both[j] = pack(a, b);
                    total.add(0, j, a, b);
                    total.add(1, j, a * a, b * b);
                }
                pieces.save(out, r, both);
            });
        }
        total.leave(place, shared, left, columns);
    }
};

// flow += the sums: the gradient of a norm's result. Sums of it are left, and of its products with what the norm had
// made of z; stats (M, 2, columns) are its mean and inverse deviation. Beyond the last row, all is 0.
struct Flow {
    static const bool WHOLE = true;
    bf16* flow;
    const bf16* z;
    const float* stats;
    double* left;
    int rows, columns;

    __device__ __forceinline__ void operator()(Sums& sums, const Place& place, float* shared) const {
        Totals<2> total;
        if (!place.idle) {
            const Pieces pieces(place, (long long)rows * columns, columns);
            const bf16* others[2] = {flow, z};
            beside(others, pieces, [&](int r, const Words(&w)[2]) {
                Words after;
#pragma unroll
                for (int j = 0; j < ACROSS; j++) {
                    after[j] = pack(lower(w[0][j]) + at(sums, r, j, 0), upper(w[0][j]) + at(sums, r, j, 1));
                    const float a = lower(after[j]), b = upper(after[j]); // as others will find them
                    total.add(0, j, a, b);
                    total.add(1, j, a * lower(w[1][j]), b * upper(w[1][j]));
                }
                pieces.save(flow, r, after);
            });
            // Only now, for want of registers. A mean far from 0 takes digits here, but took more when z was rounded.
            const float *mean = stats + (long long)place.model * 2 * columns, *inverse = mean + columns;
#pragma unroll
            for (int f = 0; f < 8; f++) {
                const int n = place.n0 + f / 2 * 8 + threadIdx.x % 4 * 2 + f % 2;
                if (n < columns) total.mine[8 + f] = (total.mine[8 + f] - mean[n] * total.mine[f]) * inverse[n];
            }
        }
        total.leave(place, shared, left, columns);
    }
};

// ------------------------------------------------------------------------------------------------------------ products

#define FACTORS                                                                                                        \
    const bf16 *A, const bf16 *B, const float *bias, const int *limits, int rows, int columns, int depth,              \
        int a_stride, int b_stride, int a_model, int b_model, int bias_model, int along
#define GIVEN                                                                                                          \
    A, B, bias, limits, rows, columns, depth, a_stride, b_stride, a_model, b_model, bias_model, along

// TURN_A: A is stored by column, as (depth, rows); TURN_B: B is stored by column, as (columns, depth).
// EIGHTS: lines of A and B are whole pieces of 16 bytes. Finish: what is done with the sums; if it is WHOLE, by all
// threads of all blocks, whatever the limits.
template <bool TURN_A, bool TURN_B, bool EIGHTS, class Finish>
__device__ __forceinline__ void product(FACTORS, int slice, const Finish& finish) {
    static_assert(TALL / WARP_ROWS * WARPS_ACROSS * 32 == THREADS, "warps cover the tile");
    const int A_LINES = TURN_A ? DEEP : TALL, A_LONG = TURN_A ? TALL : DEEP;
    const int B_LINES = TURN_B ? WIDE : DEEP, B_LONG = TURN_B ? DEEP : WIDE;
    __shared__ __align__(128) bf16 a_tiles[STAGES][TALL * DEEP], b_tiles[STAGES][WIDE * DEEP];
    const int tiles_across = (columns + WIDE - 1) / WIDE, tile = blockIdx.x, model = blockIdx.z;
    const int row0 = tile / tiles_across * TALL, column0 = tile % tiles_across * WIDE, from = blockIdx.y * slice;
    const bool sliced = gridDim.y > 1;
    if (limits) {
        const int limit = limits[model];
        if (along == 1) rows = min(rows, limit);
        if (along == 2) columns = min(columns, limit);
        if (along == 3) depth = min(depth, limit);
        if (row0 >= rows || column0 >= columns || (sliced && from >= depth)) {
            if (!Finish::WHOLE) return;
            depth = 0;
        }
    }
    const int end = min(from + slice, depth);
    A += (long long)model * a_model;
    B += (long long)model * b_model;

    // Told by one thread to the others, the compiler knows that a warp is idle as one: no shuffle is written twice.
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
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

    finish(sums, Place{model, row0, column0, m0, n0, rows, columns, idle}, (float*)a_tiles);
}

#define PARAMETERS                                                                                                     \
    FACTORS, int slice, void *C, float *partial, int c_stride, int c_model, int aligned, int full, int add
#define ARGUMENTS                                                                                                      \
    GIVEN, slice, Plain { C, partial, rows, columns, c_stride, c_model, (bool)aligned, (bool)full, (bool)add }
#define MASKS const int *seeds, const int *step, const float *drop, int site

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

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) product_nt_gelu(FACTORS, bf16* u, bf16* out, MASKS) {
    product<false, true, true>(GIVEN, depth, Gelu{u, out, {seeds, step, drop, site}, rows, columns});
}
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    product_nn_gelu_grad(FACTORS, const bf16* u, bf16* out, double* left, MASKS) {
    product<false, false, true>(GIVEN, depth, GeluGrad{u, out, left, {seeds, step, drop, site}, rows, columns});
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    product_nt_norm(FACTORS, const bf16* x, bf16* out, double* left, MASKS) {
    product<false, true, true>(GIVEN, depth, Norm{x, out, left, {seeds, step, drop, site}, rows, columns});
}
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    product_nn_flow(FACTORS, bf16* flow, const bf16* z, const float* stats, double* left) {
    product<false, false, true>(GIVEN, depth, Flow{flow, z, stats, left, rows, columns});
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

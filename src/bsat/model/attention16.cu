// `attention32.cu` with numbers of 16 bits on tensor cores: the same attention with residual scores, and its gradient.
//
// A block is some rows of PACKED heads of one window of one model; a warp is 16 tokens of a head, and meets the others
// TILE at a time in shared memory. DEPTH, WIDTH (of a head, a multiple of 8) and PACKED are constants. What goes into a
// product is bfloat16; sums and all else are float32. qkv is (M, B, n, 3 d): queries, keys, values; within queries and
// keys the first halves of all heads come first.

#include "noise.cuh"
#include "tensor.cuh"

#define UP(n, to) (((n) + (to)-1) / (to) * (to))
#define SUM (DEPTH * WIDTH)
#define HALF (WIDTH / 2)
#define RUN (HALF % 8 == 0 ? 8 : 4) // numbers of a half that can be copied at once
#define PARTS (SUM <= 128 ? 1 : 2)  // a gradient's; the registers hold one at once
#define ALL UP(SUM, 16 * PARTS)     // with zeros behind, for products of 16
#define PART (ALL / PARTS)
#define WIDE UP(WIDTH, 16)
#define TILE 48
#define MOST 512                                  // tokens
#define ROWS (PACKED > 1 ? TILE : UP(MOST, TILE)) // several heads are packed only if a tile holds all tokens
#define THREADS 192
#define BYTES (TILE * (ALL + 8 + WIDE + 8) * 2 * PACKED)       // of a tile
#define STAGES (PACKED == 1 && 2 * BYTES + 8 * ROWS <= 48000 ? 2 : 1) // tiles held at once, one of them under way
#define LOG2E 1.4426950408889634f
#define FAR 1e30f

// Blocks of attend and of attend_grad that a processor shall hold: they take 80 registers of a thread if there are four
// of them, 96 if three, 168 if two. Where it is tight a few spill into memory, but not those of the products.
#if ALL + WIDE <= 48
#define BLOCKS 4
#define GRAD_BLOCKS 4
#elif ALL + WIDE <= 80
#define BLOCKS 4
#define GRAD_BLOCKS 3
#elif ALL + WIDE <= 160
#define BLOCKS 3
#define GRAD_BLOCKS 2
#else
#define BLOCKS 2
#define GRAD_BLOCKS 1
#endif
#define EVERYONE 0xffffffffu

// Rows 8 numbers longer than they need to be: `fetch` then meets every bank of the shared memory once.
struct Tiles {
    bf16 side[STAGES][PACKED][TILE][ALL + 8];
    bf16 rows[STAGES][PACKED][TILE][WIDE + 8];
};

// 2 to the power of x.
__device__ __forceinline__ float power(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

// `send` of COUNT numbers, 8 or 4.
template <int COUNT> __device__ __forceinline__ void send_some(bf16* to, const bf16* from, bool there) {
    if (COUNT == 8) {
        send(to, from, there);
        return;
    }
#ifdef __CUDA_ARCH__
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(at), "l"(from), "r"(there ? 8 : 0) : "memory");
#else
    *(int2*)to = there ? *(const int2*)from : make_int2(0, 0);
#endif
}

// One side of a head, queries or keys of all layers, of one token; c counts along SUM.
struct Side {
    const bf16 *layer0, *layer1, *layer2, *layer3;
    int d, shift; // 0 for queries, d for keys

    __device__ const bf16* layer(int i) const { return i == 0 ? layer0 : i == 1 ? layer1 : i == 2 ? layer2 : layer3; }
    __device__ const bf16* at(long long row, int head, int c) const {
        const int own = c % WIDTH, second = own >= HALF;
        return layer(c / WIDTH) + row * 3 * d + shift + second * (d / 2) + head * HALF + own - second * HALF;
    }
};

// Rows in which a head has WIDTH numbers side by side.
struct Rows {
    const bf16* first;
    int stride;

    __device__ const bf16* at(long long row, int head, int c) const { return first + row * stride + head * WIDTH + c; }
};

// Which rows of what a thread has to do with.
struct Place {
    int n, heads, head0, p, head, g, t, i; // i and i + 8 are its rows
    bool live;                             // whether its warp has any row at all
    long long row;                         // the window's first
    long long stat;                        // the same among numbers (M, B, heads, n), of its head
    unsigned corner;                       // `stat` within the model

    __device__ Place(int n, int heads, int group) : n(n), heads(heads) {
        const int warp = threadIdx.x / 32, per = blockDim.x / 32 / PACKED, blocks = (n + 16 * per - 1) / (16 * per);
        const int first = (group % blocks * per + warp % per) * 16;
        head0 = group / blocks * PACKED;
        p = warp / per;
        head = head0 + p;
        g = threadIdx.x % 32 / 4;
        t = threadIdx.x % 4;
        i = first + g;
        live = first < n;
        const long long window = (long long)blockIdx.z * gridDim.y + blockIdx.y;
        row = window * n;
        stat = (window * heads + head) * n;
        corner = (unsigned)(blockIdx.y * heads + head) * n;
    }
};

// The numbers that no fill ever touches.
__device__ void clear(Tiles& tiles) {
    for (int e = threadIdx.x; e < STAGES * PACKED * TILE; e += blockDim.x) {
        bf16 *side = tiles.side[0][0][0] + e * (ALL + 8), *rows = tiles.rows[0][0][0] + e * (WIDE + 8);
#pragma unroll
        for (int c = SUM; c < ALL; c += 8) *(int4*)(side + c) = make_int4(0, 0, 0, 0);
#pragma unroll
        for (int c = WIDTH; c < WIDE; c += 8) *(int4*)(rows + c) = make_int4(0, 0, 0, 0);
    }
}

// Tokens j0 ... on their way to shared memory; zeros for those that are not there. Heads are side by side in memory,
// so those of a block are copied together.
__device__ __forceinline__ void fill(Tiles& tiles, int stage, const Side& side, const Rows& rows, const Place& place,
                                     int j0) {
    const int run = PACKED * HALF / RUN, all = run * 2 * DEPTH;
    for (int e = threadIdx.x; e < TILE * all; e += blockDim.x) {
        const int p = e % run / (HALF / RUN), c = e % (HALF / RUN) * RUN + e / run % (2 * DEPTH) * HALF, j = e / all;
        const bool there = j0 + j < place.n;
        const bf16* from = side.at(place.row + (there ? j0 + j : 0), place.head0 + p, c);
        send_some<RUN>(&tiles.side[stage][p][j][c], from, there);
    }
    const int wide = PACKED * WIDTH / 8;
    for (int e = threadIdx.x; e < TILE * wide; e += blockDim.x) {
        const int p = e % wide / (WIDTH / 8), c = e % (WIDTH / 8) * 8, j = e / wide;
        const bool there = j0 + j < place.n;
        const bf16* from = rows.at(place.row + (there ? j0 + j : 0), place.head0 + p, c);
        send(&tiles.rows[stage][p][j][c], from, there);
    }
    seal();
}

// The first COUNT numbers of rows i and i + 8, as the left side of products. A thread reads four in a row of one half
// of 16, and its neighbour of the other; then they trade.
template <int COUNT, int PIECES, class From>
__device__ __forceinline__ void read(unsigned (&a)[PIECES][4], const From& from, const Place& place) {
    const int t = place.t;
    const bool even = t % 2 == 0;
#pragma unroll
    for (int k = 0; k < PIECES; k++) {
        const int c = 16 * k + t % 2 * 8 + t / 2 * 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int2 both = make_int2(0, 0);
            if (place.i + 8 * r < place.n && c < COUNT)
                both = *(const int2*)from.at(place.row + place.i + 8 * r, place.head, c);
            const int got = __shfl_xor_sync(EVERYONE, even ? both.y : both.x, 1);
            a[k][r] = (unsigned)(even ? both.x : got);
            a[k][2 + r] = (unsigned)(even ? got : both.y);
        }
    }
}

// The way back, for what products leave: numbers `first` ... of rows i and i + 8, as far as there are COUNT, times
// `scale`, written or added.
template <int COUNT, int PIECES, class To>
__device__ __forceinline__ void write(const float (&d)[PIECES][4], const To& to, const Place& place, int first,
                                      float scale0, float scale1, int add) {
    const int t = place.t;
    const bool even = t % 2 == 0;
#pragma unroll
    for (int k = 0; k < PIECES; k += 2) {
        const int c = first + 8 * k + t % 2 * 8 + t / 2 * 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float scale = r == 0 ? scale0 : scale1;
            const float *left = &d[k][2 * r], *right = &d[k + 1][2 * r];
            const float got0 = __shfl_xor_sync(EVERYONE, even ? right[0] : left[0], 1);
            const float got1 = __shfl_xor_sync(EVERYONE, even ? right[1] : left[1], 1);
            float x0 = (even ? left[0] : got0) * scale, x1 = (even ? left[1] : got1) * scale;
            float x2 = (even ? got0 : right[0]) * scale, x3 = (even ? got1 : right[1]) * scale;
            if (place.i + 8 * r >= place.n || c >= COUNT) continue;
            int2* at = (int2*)to.at(place.row + place.i + 8 * r, place.head, c);
            if (add) {
                const int2 old = *at;
                x0 += lower(old.x), x1 += upper(old.x), x2 += lower(old.y), x3 += upper(old.y);
            }
            *at = make_int2((int)pack(x0, x1), (int)pack(x2, x3));
        }
    }
}

// Two products with the same left side, of 16 columns together.
__device__ __forceinline__ void multiply_both(float (&d0)[4], float (&d1)[4], const unsigned (&a)[4],
                                              const unsigned (&b)[4]) {
    const unsigned left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
    multiply(d0, a, left);
    multiply(d1, a, right);
}

// The right side for them: numbers c ... c + 15 of rows j ... j + 15, the rows along the columns of the product,
template <int LONG>
__device__ __forceinline__ void fetch_across(unsigned (&b)[4], const bf16 (&from)[TILE][LONG], int j, int c) {
    const int lane = threadIdx.x % 32;
    fetch<false>(b, &from[j + lane / 16 * 8 + lane % 8][c + lane / 8 % 2 * 8]);
}

// or summed over.
template <int LONG>
__device__ __forceinline__ void fetch_along(unsigned (&b)[4], const bf16 (&from)[TILE][LONG], int j, int c) {
    const int lane = threadIdx.x % 32;
    fetch<true>(b, &from[j + lane % 16][c + lane / 16 * 8]);
}

// What two products left, as the left side of the next.
__device__ __forceinline__ void turn(unsigned (&a)[4], const float (&d0)[4], const float (&d1)[4]) {
    a[0] = pack(d0[0], d0[1]);
    a[1] = pack(d0[2], d0[3]);
    a[2] = pack(d1[0], d1[1]);
    a[3] = pack(d1[2], d1[3]);
}

template <int PIECES> __device__ __forceinline__ void zero(float (&d)[PIECES][4]) {
#pragma unroll
    for (int k = 0; k < PIECES; k++) d[k][0] = d[k][1] = d[k][2] = d[k][3] = 0.f;
}

// Over the four threads that hold a row.
__device__ __forceinline__ float add_up(float x) {
    x += __shfl_xor_sync(EVERYONE, x, 1);
    return x + __shfl_xor_sync(EVERYONE, x, 2);
}

__device__ __forceinline__ float highest(float x) {
    x = fmaxf(x, __shfl_xor_sync(EVERYONE, x, 1));
    return fmaxf(x, __shfl_xor_sync(EVERYONE, x, 2));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attend(const bf16* qkv0, const bf16* qkv1, const bf16* qkv2, const bf16* qkv3, bf16* out, float* spread,
       const int* seeds, const int* step, const float* drop, int site, int n, int heads) {
    __shared__ __align__(16) Tiles tiles;
    const int d = heads * WIDTH;
    const Place place(n, heads, blockIdx.x);
    const int t = place.t, p = place.p, end = PACKED > 1 ? TILE : n; // packed: a single tile
    const Drop keep(seeds, step, drop, site, blockIdx.z);
    const Side queries{qkv0, qkv1, qkv2, qkv3, d, 0}, keys{qkv0, qkv1, qkv2, qkv3, d, d};
    const Rows values{keys.layer(DEPTH - 1) + 2 * d, 3 * d}, mixed{out, d};
    const float scale = rsqrtf((float)WIDTH) * LOG2E;
    unsigned q[ALL / 16][4];
    float sum[WIDE / 8][4], top[2] = {-FAR, -FAR}, total[2] = {0.f, 0.f};
    fill(tiles, 0, keys, values, place, 0);
    clear(tiles);
    read<SUM>(q, queries, place);
    zero(sum);
    for (int j0 = 0; j0 < end; j0 += TILE) {
        const int stage = STAGES == 2 ? j0 / TILE % 2 : 0;
        if (STAGES == 2 && j0 + TILE < end) {
            fill(tiles, 1 - stage, keys, values, place, j0 + TILE);
            arrive<1>();
        } else
            arrive<0>();
        __syncthreads();
        if (place.live) {
            float score[TILE / 8][4];
            zero(score);
#pragma unroll
            for (int k = 0; k < ALL / 16; k++)
#pragma unroll
                for (int m = 0; m < TILE / 8; m += 2) {
                    unsigned b[4];
                    fetch_across(b, tiles.side[stage][p], 8 * m, 16 * k);
                    multiply_both(score[m], score[m + 1], q[k], b);
                }
            if (n - j0 < TILE) {
#pragma unroll
                for (int m = 0; m < TILE / 8; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (j0 + 8 * m + 2 * t + e % 2 >= n) score[m][e] = -FAR;
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float high = -FAR;
#pragma unroll
                for (int m = 0; m < TILE / 8; m++) high = fmaxf(high, fmaxf(score[m][2 * r], score[m][2 * r + 1]));
                high = fmaxf(top[r], highest(high) * scale);
                const float shrink = power(top[r] - high);
                top[r] = high;
                total[r] *= shrink;
#pragma unroll
                for (int c = 0; c < WIDE / 8; c++) {
                    sum[c][2 * r] *= shrink;
                    sum[c][2 * r + 1] *= shrink;
                }
#pragma unroll
                for (int m = 0; m < TILE / 8; m++)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; e++) {
                        score[m][e] = power(score[m][e] * scale - high);
                        total[r] += score[m][e];
                    }
            }
            if (keep.least != 0) { // `keep`, but for its scale, which the end brings
                const unsigned first = (place.corner + place.i) * n + j0 + 2 * t + keep.key;
#pragma unroll
                for (int m = 0; m < TILE / 8; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (mix(first + e / 2 * 8 * n + 8 * m + e % 2) < keep.least) score[m][e] = 0.f;
            }
#pragma unroll
            for (int m = 0; m < TILE / 8; m += 2) {
                unsigned a[4], b[4];
                turn(a, score[m], score[m + 1]);
#pragma unroll
                for (int c = 0; c < WIDE / 8; c += 2) {
                    fetch_along(b, tiles.rows[stage][p], 8 * m, 8 * c);
                    multiply_both(sum[c], sum[c + 1], a, b);
                }
            }
        }
        __syncthreads();
        if (STAGES == 1 && j0 + TILE < end) fill(tiles, 0, keys, values, place, j0 + TILE);
    }
    if (!place.live) return;
    total[0] = add_up(total[0]);
    total[1] = add_up(total[1]);
    write<WIDTH>(sum, mixed, place, 0, keep.scale / total[0], keep.scale / total[1], 0);
    if (spread != nullptr && t == 0) {
#pragma unroll
        for (int r = 0; r < 2; r++)
            if (place.i + 8 * r < n) spread[place.stat + place.i + 8 * r] = top[r] + log2f(total[r]);
    }
}

// The gradients of one side: of queries, or of keys and values. `self` and `own` are this side's numbers, `other` and
// `theirs` those of the tokens that it meets: `own` and `theirs` are the output's gradients of queries, and the values
// of keys. `logs` and `deltas` are of the queries met.
template <bool KEYS>
__device__ __forceinline__ void
gradients(Tiles& tiles, float (&logs)[PACKED][ROWS], float (&deltas)[PACKED][ROWS], const Side& self, const Side& other,
          const Rows& own, const Rows& theirs, const Rows& mixed, const float* spread, const Side& slopes,
          const Rows& value_slopes, const Place& place, const Drop& keep, int add) {
    const int n = place.n, t = place.t, p = place.p, end = PACKED > 1 ? TILE : n;
    const float root = rsqrtf((float)WIDTH), scale = root * LOG2E;
    unsigned mine[ALL / 16][4], beside[WIDE / 16][4];
    float log[2] = {FAR, FAR}, delta[2] = {0.f, 0.f}; // FAR leaves no weight
    fill(tiles, 0, other, theirs, place, 0);
    clear(tiles);
    read<SUM>(mine, self, place);
    read<WIDTH>(beside, own, place);
    if (KEYS) {
        for (int e = threadIdx.x; e < PACKED * UP(n, TILE); e += blockDim.x) {
            const int i = e % UP(n, TILE), q = e / UP(n, TILE);
            float dot = 0.f;
            if (i < n) {
#pragma unroll
                for (int c = 0; c < WIDTH; c += 4) {
                    const int2 a = *(const int2*)theirs.at(place.row + i, place.head0 + q, c);
                    const int2 b = *(const int2*)mixed.at(place.row + i, place.head0 + q, c);
                    dot += lower(a.x) * lower(b.x) + upper(a.x) * upper(b.x);
                    dot += lower(a.y) * lower(b.y) + upper(a.y) * upper(b.y);
                }
            }
            deltas[q][i] = dot;
            logs[q][i] = i < n ? spread[place.stat + (q - p) * n + i] : FAR;
        }
    } else {
        unsigned held[WIDE / 16][4];
        read<WIDTH>(held, mixed, place);
#pragma unroll
        for (int k = 0; k < WIDE / 16; k++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                delta[e % 2] += lower(beside[k][e]) * lower(held[k][e]) + upper(beside[k][e]) * upper(held[k][e]);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            delta[r] = add_up(delta[r]);
            if (place.i + 8 * r < n) log[r] = spread[place.stat + place.i + 8 * r];
        }
    }
#pragma unroll 1
    for (int part = 0; part < ALL; part += PART) {
        float slope[PART / 8][4], flow[WIDE / 8][4];
        zero(slope);
        zero(flow);
        if (part > 0) fill(tiles, 0, other, theirs, place, 0);
        for (int j0 = 0; j0 < end; j0 += TILE) {
            const int stage = STAGES == 2 ? j0 / TILE % 2 : 0;
            if (STAGES == 2 && j0 + TILE < end) {
                fill(tiles, 1 - stage, other, theirs, place, j0 + TILE);
                arrive<1>();
            } else
                arrive<0>();
            __syncthreads();
            const int count = place.live ? min(TILE, n - j0) : 0;
#pragma unroll 1
            for (int j = 0; j < count; j += 16) {
                float share[2][4], inflow[2][4];
                zero(share);
                zero(inflow);
                unsigned a[4], b[4];
#pragma unroll
                for (int k = 0; k < ALL / 16; k++) {
                    fetch_across(b, tiles.side[stage][p], j, 16 * k);
                    multiply_both(share[0], share[1], mine[k], b);
                }
#pragma unroll
                for (int k = 0; k < WIDE / 16; k++) {
                    fetch_across(b, tiles.rows[stage][p], j, 16 * k);
                    multiply_both(inflow[0], inflow[1], beside[k], b);
                }
                const int at = j0 + j + 2 * t; // the first of the tokens met
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int k = at + 8 * m + e % 2;
                        share[m][e] = power(share[m][e] * scale - (KEYS ? logs[p][k] : log[e / 2]));
                        if (!KEYS && k >= n) share[m][e] = 0.f;
                    }
                if (keep.least != 0) {
                    const unsigned down = KEYS ? 1 : n, right = KEYS ? n : 1;
                    const unsigned first = place.corner * n + place.i * down + at * right + keep.key;
#pragma unroll
                    for (int m = 0; m < 2; m++)
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            if (mix(first + e / 2 * 8 * down + (8 * m + e % 2) * right) < keep.least) {
                                inflow[m][e] = 0.f;
                                if (KEYS) share[m][e] = -share[m][e]; // marks it, and takes no register
                            }
                }
                if (KEYS) {
                    float kept[2][4];
#pragma unroll
                    for (int e = 0; e < 8; e++) kept[e / 4][e % 4] = fmaxf(share[e / 4][e % 4], 0.f);
                    turn(a, kept[0], kept[1]);
#pragma unroll
                    for (int k = 0; k < WIDE / 8; k += 2) {
                        fetch_along(b, tiles.rows[stage][p], j, 8 * k);
                        multiply_both(flow[k], flow[k + 1], a, b);
                    }
                }
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float less = KEYS ? deltas[p][at + 8 * m + e % 2] : delta[e / 2];
                        share[m][e] = fabsf(share[m][e]) * (inflow[m][e] * keep.scale - less);
                    }
                turn(a, share[0], share[1]);
#pragma unroll
                for (int k = 0; k < PART / 8; k += 2) {
                    fetch_along(b, tiles.side[stage][p], j, part + 8 * k);
                    multiply_both(slope[k], slope[k + 1], a, b);
                }
            }
            __syncthreads();
            if (STAGES == 1 && j0 + TILE < end) fill(tiles, 0, other, theirs, place, j0 + TILE);
        }
        if (place.live) {
            write<SUM>(slope, slopes, place, part, root, root, add);
            if (KEYS && part == 0) write<WIDTH>(flow, value_slopes, place, 0, keep.scale, keep.scale, 0);
        }
    }
}

// The gradients of queries and keys of all DEPTH layers, written to grad0 ..., or added to what is there (`add`), and
// of the values of the last of them. `spread` is the logarithm (to base 2) of each softmax's denominator. Half of the
// blocks see their tokens as queries, the others as keys and values.
extern "C" __global__ void __launch_bounds__(THREADS, GRAD_BLOCKS)
attend_grad(const bf16* qkv0, const bf16* qkv1, const bf16* qkv2, const bf16* qkv3, bf16* grad0, bf16* grad1,
            bf16* grad2, bf16* grad3, const bf16* out, const bf16* grad, const float* spread, const int* seeds,
            const int* step, const float* drop, int site, int n, int heads, int add) {
    __shared__ __align__(16) Tiles tiles;
    __shared__ float logs[PACKED][ROWS], deltas[PACKED][ROWS];
    const int d = heads * WIDTH;
    const Place place(n, heads, blockIdx.x / 2);
    const Drop keep(seeds, step, drop, site, blockIdx.z);
    const Side queries{qkv0, qkv1, qkv2, qkv3, d, 0}, keys{qkv0, qkv1, qkv2, qkv3, d, d};
    const Side query_grads{grad0, grad1, grad2, grad3, d, 0}, key_grads{grad0, grad1, grad2, grad3, d, d};
    const Rows values{keys.layer(DEPTH - 1) + 2 * d, 3 * d}, value_grads{key_grads.layer(DEPTH - 1) + 2 * d, 3 * d};
    const Rows mixed{out, d}, flows{grad, d};
    if (blockIdx.x % 2 == 0)
        gradients<false>(tiles, logs, deltas, queries, keys, flows, values, mixed, spread, query_grads, value_grads,
                         place, keep, add);
    else
        gradients<true>(tiles, logs, deltas, keys, queries, values, flows, mixed, spread, key_grads, value_grads, place,
                        keep, add);
}

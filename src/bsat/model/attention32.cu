// Attention with residual scores, and its gradient, without ever storing a score.
//
// The scores of layer l are those of layer l - 1 plus its own q k': the same as one product of the queries and keys of
// all layers so far, laid side by side (DEPTH of them). So a layer needs no (n, n) matrix from the one before it.
//
// A block is PACKED heads of one window of one model, a thread is one of n tokens of a head. DEPTH, WIDTH (of a head),
// TILE (tokens held in shared memory at once) and PACKED are constants. qkv is (M, B, n, 3 d): queries, keys, values;
// within queries and keys the first halves of all heads come first.

#include "noise.cuh"

#define SUM (DEPTH * WIDTH)
#define HALVES (WIDTH % 2 == 0 ? 2 : 1)
#define HALF (WIDTH / HALVES)
#define STEP(n) ((n) % 4 == 0 ? 4 : (n) % 2 == 0 ? 2 : 1)
#define PART (SUM <= 64 ? SUM : WIDTH) // how much of a gradient the registers hold at once
#define LOG2E 1.4426950408889634f
#if MOST > 256 // more threads than can have all the registers they would like
#define LARGE(blocks) __launch_bounds__(MOST, blocks)
#define SMALL(threads)
#else
#define LARGE(blocks)
#define SMALL(threads) __launch_bounds__(threads)
#endif

// COUNT numbers at once.
template <int COUNT> __device__ void copy(float* to, const float* from) {
    if (COUNT == 4)
        *(float4*)to = *(const float4*)from;
    else if (COUNT == 2)
        *(float2*)to = *(const float2*)from;
    else
        *to = *from;
}

// One side of a head, queries or keys of all layers, of one token; c counts along SUM.
struct Side {
    const float *layer0, *layer1, *layer2, *layer3;
    int d, shift; // 0 for queries, d for keys

    __device__ const float* layer(int i) const { return i == 0 ? layer0 : i == 1 ? layer1 : i == 2 ? layer2 : layer3; }
    __device__ float* at(long long row, int head, int c) const {
        const int own = c % WIDTH;
        return (float*)layer(c / WIDTH) + row * 3 * d + shift + own / HALF * (d / HALVES) + head * HALF + own % HALF;
    }
};

template <int COUNT> __device__ float dot(const float* a, const float* b) {
    float part[4] = {0.f, 0.f, 0.f, 0.f}; // four chains: one would wait for its own additions
#pragma unroll
    for (int c = 0; c < COUNT; c++) part[c % 4] += a[c] * b[c];
    return (part[0] + part[1]) + (part[2] + part[3]);
}

// Tokens j0 ... of PACKED heads into shared memory.
__device__ void fill_side(float (*to)[TILE][SUM], const Side& side, long long row, int head, int heads, int j0,
                          int count, float scale) {
    const int run = STEP(HALF);
    for (int e = threadIdx.x; e < PACKED * count * (SUM / run); e += blockDim.x) {
        const int c = e % (SUM / run) * run, j = e / (SUM / run) % count, p = e / (SUM / run) / count;
        if (head + p >= heads) continue;
        __align__(16) float held[run];
        copy<run>(held, side.at(row + j0 + j, head + p, c));
#pragma unroll
        for (int k = 0; k < run; k++) to[p][j][c + k] = held[k] * scale;
    }
}

// The same for rows of `stride` numbers in which a head has WIDTH in a row.
__device__ void fill_rows(float (*to)[TILE][WIDTH], const float* from, int stride, long long row, int head, int heads,
                          int j0, int count) {
    const int run = STEP(WIDTH);
    for (int e = threadIdx.x; e < PACKED * count * (WIDTH / run); e += blockDim.x) {
        const int c = e % (WIDTH / run) * run, j = e / (WIDTH / run) % count, p = e / (WIDTH / run) / count;
        if (head + p < heads)
            copy<run>(&to[p][j][c], from + (row + j0 + j) * stride + (head + p) * WIDTH + c);
    }
}

__device__ void read_side(float* to, const Side& side, long long row, int head, float scale) {
#pragma unroll
    for (int c = 0; c < SUM; c += STEP(HALF)) copy<STEP(HALF)>(to + c, side.at(row, head, c));
#pragma unroll
    for (int c = 0; c < SUM; c++) to[c] *= scale;
}

__device__ void write_part(const float* from, const Side& side, long long row, int head, int part, int add) {
#pragma unroll
    for (int c = 0; c < PART; c += STEP(HALF)) {
        __align__(16) float held[STEP(HALF)];
        float* at = side.at(row, head, part + c);
        if (add) copy<STEP(HALF)>(held, at);
#pragma unroll
        for (int k = 0; k < STEP(HALF); k++) held[k] = add ? held[k] + from[c + k] : from[c + k];
        copy<STEP(HALF)>(at, held);
    }
}

template <bool OUT> __device__ void row_of(float* a, float* b) {
#pragma unroll
    for (int c = 0; c < WIDTH; c += STEP(WIDTH)) OUT ? copy<STEP(WIDTH)>(b + c, a + c) : copy<STEP(WIDTH)>(a + c, b + c);
}

extern "C" __global__ void LARGE(1)
attend(const float* qkv0, const float* qkv1, const float* qkv2, const float* qkv3, float* out, float* spread,
       const int* seeds, const int* step, const float* drop, int site, int n, int heads) {
    __shared__ __align__(16) float keys[PACKED][TILE][SUM];
    __shared__ __align__(16) float values[PACKED][TILE][WIDTH];
    const int window = blockIdx.y, B = gridDim.y, member = blockIdx.z, d = heads * WIDTH;
    const int i = threadIdx.x % n, mine = threadIdx.x / n, head0 = blockIdx.x * PACKED, head = head0 + mine;
    const bool there = mine < PACKED && head < heads;
    const int p = there ? mine : 0;
    const long long row = ((long long)member * B + window) * n;
    const Drop keep(seeds, step, drop, site, member);
    const unsigned first = ((unsigned)(window * heads + head) * n + i) * n;
    const Side queries{qkv0, qkv1, qkv2, qkv3, d, 0}, others{qkv0, qkv1, qkv2, qkv3, d, d};
    __align__(16) float q[SUM], sum[WIDTH];
    read_side(q, queries, row + i, there ? head : 0, rsqrtf((float)WIDTH) * LOG2E);
#pragma unroll
    for (int c = 0; c < WIDTH; c++) sum[c] = 0.f;
    float top = -1e30f, total = 0.f;
    for (int j0 = 0; j0 < n; j0 += TILE) {
        const int count = min(TILE, n - j0);
        __syncthreads();
        fill_side(keys, others, row, head0, heads, j0, count, 1.f);
        fill_rows(values, others.layer(DEPTH - 1) + 2 * d, 3 * d, row, head0, heads, j0, count);
        __syncthreads();
        for (int j = 0; j < count; j += 4) { // four keys at a time, so that four chains are under way
            float score[4];
#pragma unroll
            for (int k = 0; k < 4; k++) score[k] = j + k < count ? dot<SUM>(q, keys[p][j + k]) : -1e30f;
            const float high = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
            if (high > top) {
                const float shrink = exp2f(top - high);
                total *= shrink;
#pragma unroll
                for (int c = 0; c < WIDTH; c++) sum[c] *= shrink;
                top = high;
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float weight = exp2f(score[k] - top);
                total += weight;
                const float kept = weight * keep(first + j0 + j + k);
                if (j + k < count) {
#pragma unroll
                    for (int c = 0; c < WIDTH; c++) sum[c] += kept * values[p][j + k][c];
                }
            }
        }
    }
    if (there) {
        const float inverse = 1.f / total;
#pragma unroll
        for (int c = 0; c < WIDTH; c++) sum[c] *= inverse;
        row_of<true>(sum, out + (row + i) * d + head * WIDTH);
        if (spread != nullptr) spread[(((long long)member * B + window) * heads + head) * n + i] = top + log2f(total);
    }
}

// The gradients of queries and keys of all DEPTH layers, written to grad0 ..., or added to what is there (`add`), and
// of the values of the last of them. `spread` is the logarithm (to base 2) of each softmax's denominator. Half of the
// blocks see their tokens as queries, the others as keys and values.
extern "C" __global__ void SMALL(MOST) LARGE(1)
attend_grad(const float* qkv0, const float* qkv1, const float* qkv2, const float* qkv3, float* grad0, float* grad1,
            float* grad2, float* grad3, const float* out, const float* grad, const float* spread, const int* seeds,
            const int* step, const float* drop, int site, int n, int heads, int add) {
    __shared__ __align__(16) float side[PACKED][TILE][SUM];    // keys, then queries
    __shared__ __align__(16) float other[PACKED][TILE][WIDTH]; // values, then the output's gradients
    __shared__ float logs[PACKED][TILE], deltas[MOST];
    const int window = blockIdx.y, B = gridDim.y, member = blockIdx.z, d = heads * WIDTH;
    const int i = threadIdx.x % n, mine = threadIdx.x / n, head0 = blockIdx.x / 2 * PACKED;
    const bool there = mine < PACKED && head0 + mine < heads;
    const int p = there ? mine : 0, head = head0 + p;
    const long long row = ((long long)member * B + window) * n;
    const long long stat = (((long long)member * B + window) * heads + head0) * n;
    const Drop keep(seeds, step, drop, site, member);
    const unsigned corner = (unsigned)(window * heads + head) * n;
    const Side queries{qkv0, qkv1, qkv2, qkv3, d, 0}, keys{qkv0, qkv1, qkv2, qkv3, d, d};
    const Side query_grads{grad0, grad1, grad2, grad3, d, 0}, key_grads{grad0, grad1, grad2, grad3, d, d};
    const float* own = keys.layer(DEPTH - 1) + 2 * d;
    const float root = rsqrtf((float)WIDTH), scale = root * LOG2E;
    __align__(16) float self[SUM], slope[PART], weights[WIDTH], value[WIDTH];

    row_of<false>(weights, (float*)grad + (row + i) * d + head * WIDTH);
    row_of<false>(value, (float*)out + (row + i) * d + head * WIDTH);
    const float delta = dot<WIDTH>(weights, value);

    if (blockIdx.x % 2 == 0) { // as a query: its own gradient
        const float own_log = spread[stat + p * n + i];
        read_side(self, queries, row + i, head, scale);
        for (int part = 0; part < SUM; part += PART) {
#pragma unroll
            for (int c = 0; c < PART; c++) slope[c] = 0.f;
            for (int j0 = 0; j0 < n; j0 += TILE) {
                const int count = min(TILE, n - j0);
                __syncthreads();
                fill_side(side, keys, row, head0, heads, j0, count, 1.f);
                fill_rows(other, own, 3 * d, row, head0, heads, j0, count);
                __syncthreads();
#pragma unroll 1
                for (int j = 0; j < count; j++) {
                    const float score = dot<SUM>(self, side[p][j]), inflow = dot<WIDTH>(weights, other[p][j]);
                    const float kept = keep((corner + i) * n + j0 + j);
                    const float change = exp2f(score - own_log) * (inflow * kept - delta) * root;
                    const float* key = side[p][j] + part;
#pragma unroll
                    for (int c = 0; c < PART; c++) slope[c] += change * key[c];
                }
            }
            if (there) write_part(slope, query_grads, row + i, head, part, add);
        }
        return;
    }

    // As a key and a value: the gradients of both.
    if (there) deltas[p * n + i] = delta;
    read_side(self, keys, row + i, head, 1.f);
    row_of<false>(value, (float*)own + (row + i) * 3 * d + head * WIDTH);
    for (int part = 0; part < SUM; part += PART) {
#pragma unroll
        for (int c = 0; c < PART; c++) slope[c] = 0.f;
#pragma unroll
        for (int c = 0; c < WIDTH; c++) weights[c] = 0.f;
        for (int j0 = 0; j0 < n; j0 += TILE) {
            const int count = min(TILE, n - j0);
            __syncthreads();
            fill_side(side, queries, row, head0, heads, j0, count, scale);
            fill_rows(other, grad, d, row, head0, heads, j0, count);
            for (int e = threadIdx.x; e < PACKED * count; e += blockDim.x)
                if (head0 + e / count < heads)
                    logs[e / count][e % count] = spread[stat + e / count * n + j0 + e % count];
            __syncthreads();
#pragma unroll 1
            for (int j = 0; j < count; j++) {
                const float score = dot<SUM>(self, side[p][j]), inflow = dot<WIDTH>(value, other[p][j]);
                const float share = exp2f(score - logs[p][j]), kept = keep((corner + j0 + j) * n + i);
                const float change = share * (inflow * kept - deltas[p * n + j0 + j]) * (1.f / LOG2E);
                const float flow = share * kept, *query = side[p][j] + part;
#pragma unroll
                for (int c = 0; c < PART; c++) slope[c] += change * query[c];
#pragma unroll
                for (int c = 0; c < WIDTH; c++) weights[c] += flow * other[p][j][c];
            }
        }
        if (there) write_part(slope, key_grads, row + i, head, part, add);
    }
    if (there) row_of<true>(weights, (float*)key_grads.layer(DEPTH - 1) + (row + i) * 3 * d + 2 * d + head * WIDTH);
}

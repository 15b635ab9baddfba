// Attention with residual scores, and its gradient, without ever storing a score.
//
// The scores of layer l are those of layer l - 1 plus its own q k': the same as one product of the queries and keys of
// all layers so far, laid side by side (DEPTH of them). So a layer needs no (n, n) matrix from the one before it.
//
// A block is one head of one window of one model, a thread is one of its n tokens; blockDim.x >= n. DEPTH, WIDTH (of a
// head) and TILE (tokens held in shared memory at once) are constants. qkv is (M, B, n, 3 d): queries, keys, values.

#define SUM (DEPTH * WIDTH)
#define HALVES (WIDTH % 2 == 0 ? 2 : 1)
#define LOG2E 1.4426950408889634f

#include "noise.cuh"

// Where element c of a head's query (or key, d further) stands: first halves of all heads come first.
__device__ int place(int c, int head, int d) {
    const int half = WIDTH / HALVES;
    return (c / half) * (d / HALVES) + head * half + c % half;
}

__device__ const float* pick(int layer, const float* a, const float* b, const float* c, const float* e) {
    return layer == 0 ? a : layer == 1 ? b : layer == 2 ? c : e;
}

extern "C" __global__ void attend(const float* __restrict__ qkv0, const float* __restrict__ qkv1,
                                  const float* __restrict__ qkv2, const float* __restrict__ qkv3, float* out,
                                  float* spread, const int* seeds, const int* step, const float* drop, int site, int n,
                                  int heads) {
    __shared__ __align__(16) float keys[TILE][SUM];
    __shared__ __align__(16) float values[TILE][WIDTH];
    const int head = blockIdx.x, window = blockIdx.y, B = gridDim.y, member = blockIdx.z, d = heads * WIDTH;
    const int i = threadIdx.x;
    const long long row = ((long long)member * B + window) * n;
    const Drop keep(seeds, step, drop, site, member);
    const unsigned first = ((unsigned)(window * heads + head) * n + i) * n;
    const float* own = pick(DEPTH - 1, qkv0, qkv1, qkv2, qkv3);
    float q[SUM], sum[WIDTH];
    const float scale = rsqrtf((float)WIDTH) * LOG2E;
#pragma unroll
    for (int c = 0; c < SUM; c++) {
        const float* layer = pick(c / WIDTH, qkv0, qkv1, qkv2, qkv3);
        q[c] = i < n ? layer[(row + i) * 3 * d + place(c % WIDTH, head, d)] * scale : 0.f;
    }
#pragma unroll
    for (int c = 0; c < WIDTH; c++) sum[c] = 0.f;
    float top = -1e30f, total = 0.f;
    for (int j0 = 0; j0 < n; j0 += TILE) {
        const int count = min(TILE, n - j0);
        __syncthreads();
        for (int e = threadIdx.x; e < count * SUM; e += blockDim.x) {
            const int j = e / SUM, c = e % SUM;
            const float* layer = pick(c / WIDTH, qkv0, qkv1, qkv2, qkv3);
            keys[j][c] = layer[(row + j0 + j) * 3 * d + d + place(c % WIDTH, head, d)];
        }
        for (int e = threadIdx.x; e < count * WIDTH; e += blockDim.x)
            values[e / WIDTH][e % WIDTH] = own[(row + j0 + e / WIDTH) * 3 * d + 2 * d + head * WIDTH + e % WIDTH];
        __syncthreads();
        for (int j = 0; j < count; j++) {
            float score = 0.f;
#pragma unroll
            for (int c = 0; c < SUM; c++) score += q[c] * keys[j][c];
            if (score > top) {
                const float shrink = exp2f(top - score);
                total *= shrink;
#pragma unroll
                for (int c = 0; c < WIDTH; c++) sum[c] *= shrink;
                top = score;
            }
            const float weight = exp2f(score - top);
            total += weight;
            const float kept = weight * keep(first + j0 + j);
#pragma unroll
            for (int c = 0; c < WIDTH; c++) sum[c] += kept * values[j][c];
        }
    }
    if (i < n) {
        const float inverse = 1.f / total;
#pragma unroll
        for (int c = 0; c < WIDTH; c++) out[(row + i) * d + head * WIDTH + c] = sum[c] * inverse;
        if (spread != nullptr) spread[(((long long)member * B + window) * heads + head) * n + i] = top + log2f(total);
    }
}

// The gradients of queries and keys of all DEPTH layers, written to grad0 ..., or added to what is there (`add`), and
// of the values of the last of them. `spread` is the logarithm (to base 2) of each softmax's denominator.
extern "C" __global__ void attend_grad(const float* __restrict__ qkv0, const float* __restrict__ qkv1,
                                       const float* __restrict__ qkv2, const float* __restrict__ qkv3, float* grad0,
                                       float* grad1, float* grad2, float* grad3, const float* __restrict__ out,
                                       const float* __restrict__ grad, const float* __restrict__ spread,
                                       const int* seeds, const int* step, const float* drop, int site, int n,
                                       int heads, int add) {
    __shared__ __align__(16) float side[TILE][SUM];    // keys, then queries
    __shared__ __align__(16) float other[TILE][WIDTH]; // values, then the output's gradients
    __shared__ float logs[TILE], deltas[MOST];
    const int head = blockIdx.x, window = blockIdx.y, B = gridDim.y, member = blockIdx.z, d = heads * WIDTH;
    const int i = threadIdx.x;
    const bool there = i < n;
    const long long row = ((long long)member * B + window) * n;
    const long long stat = (((long long)member * B + window) * heads + head) * n;
    const Drop keep(seeds, step, drop, site, member);
    const unsigned corner = (unsigned)(window * heads + head) * n;
    const float* own = pick(DEPTH - 1, qkv0, qkv1, qkv2, qkv3);
    const float root = rsqrtf((float)WIDTH), scale = root * LOG2E;
    float mine[SUM], slope[SUM], weights[WIDTH];

    // As a query: its own gradient.
#pragma unroll
    for (int c = 0; c < SUM; c++) {
        const float* layer = pick(c / WIDTH, qkv0, qkv1, qkv2, qkv3);
        mine[c] = there ? layer[(row + i) * 3 * d + place(c % WIDTH, head, d)] * scale : 0.f;
        slope[c] = 0.f;
    }
    float delta = 0.f;
#pragma unroll
    for (int c = 0; c < WIDTH; c++) {
        weights[c] = there ? grad[(row + i) * d + head * WIDTH + c] : 0.f;
        delta += there ? weights[c] * out[(row + i) * d + head * WIDTH + c] : 0.f;
    }
    const float own_log = there ? spread[stat + i] : 0.f;
    deltas[i] = delta;
    for (int j0 = 0; j0 < n; j0 += TILE) {
        const int count = min(TILE, n - j0);
        __syncthreads();
        for (int e = threadIdx.x; e < count * SUM; e += blockDim.x) {
            const int j = e / SUM, c = e % SUM;
            const float* layer = pick(c / WIDTH, qkv0, qkv1, qkv2, qkv3);
            side[j][c] = layer[(row + j0 + j) * 3 * d + d + place(c % WIDTH, head, d)];
        }
        for (int e = threadIdx.x; e < count * WIDTH; e += blockDim.x)
            other[e / WIDTH][e % WIDTH] = own[(row + j0 + e / WIDTH) * 3 * d + 2 * d + head * WIDTH + e % WIDTH];
        __syncthreads();
        for (int j = 0; j < count; j++) {
            float score = 0.f, inflow = 0.f;
#pragma unroll
            for (int c = 0; c < SUM; c++) score += mine[c] * side[j][c];
#pragma unroll
            for (int c = 0; c < WIDTH; c++) inflow += weights[c] * other[j][c];
            const float change =
                exp2f(score - own_log) * (inflow * keep((corner + i) * n + j0 + j) - delta) * root;
#pragma unroll
            for (int c = 0; c < SUM; c++) slope[c] += change * side[j][c];
        }
    }
#pragma unroll
    for (int c = 0; c < SUM; c++) {
        float* layer = (float*)pick(c / WIDTH, grad0, grad1, grad2, grad3);
        const long long at = (row + i) * 3 * d + place(c % WIDTH, head, d);
        if (there) layer[at] = add ? layer[at] + slope[c] : slope[c];
    }

    // As a key and a value: the gradients of both.
#pragma unroll
    for (int c = 0; c < SUM; c++) {
        const float* layer = pick(c / WIDTH, qkv0, qkv1, qkv2, qkv3);
        mine[c] = there ? layer[(row + i) * 3 * d + d + place(c % WIDTH, head, d)] : 0.f;
        slope[c] = 0.f;
    }
    float value[WIDTH];
#pragma unroll
    for (int c = 0; c < WIDTH; c++) {
        value[c] = there ? own[(row + i) * 3 * d + 2 * d + head * WIDTH + c] : 0.f;
        weights[c] = 0.f;
    }
    for (int j0 = 0; j0 < n; j0 += TILE) {
        const int count = min(TILE, n - j0);
        __syncthreads();
        for (int e = threadIdx.x; e < count * SUM; e += blockDim.x) {
            const int j = e / SUM, c = e % SUM;
            const float* layer = pick(c / WIDTH, qkv0, qkv1, qkv2, qkv3);
            side[j][c] = layer[(row + j0 + j) * 3 * d + place(c % WIDTH, head, d)] * scale;
        }
        for (int e = threadIdx.x; e < count * WIDTH; e += blockDim.x)
            other[e / WIDTH][e % WIDTH] = grad[(row + j0 + e / WIDTH) * d + head * WIDTH + e % WIDTH];
        for (int e = threadIdx.x; e < count; e += blockDim.x) logs[e] = spread[stat + j0 + e];
        __syncthreads();
        for (int j = 0; j < count; j++) {
            float score = 0.f, inflow = 0.f;
#pragma unroll
            for (int c = 0; c < SUM; c++) score += mine[c] * side[j][c];
#pragma unroll
            for (int c = 0; c < WIDTH; c++) inflow += value[c] * other[j][c];
            const float share = exp2f(score - logs[j]), kept = keep((corner + j0 + j) * n + i);
            const float change = share * (inflow * kept - deltas[j0 + j]) * (1.f / LOG2E);
#pragma unroll
            for (int c = 0; c < SUM; c++) slope[c] += change * side[j][c];
#pragma unroll
            for (int c = 0; c < WIDTH; c++) weights[c] += share * kept * other[j][c];
        }
    }
    if (there) {
#pragma unroll
        for (int c = 0; c < SUM; c++) {
            float* layer = (float*)pick(c / WIDTH, grad0, grad1, grad2, grad3);
            const long long at = (row + i) * 3 * d + d + place(c % WIDTH, head, d);
            layer[at] = add ? layer[at] + slope[c] : slope[c];
        }
        float* last = (float*)pick(DEPTH - 1, grad0, grad1, grad2, grad3);
#pragma unroll
        for (int c = 0; c < WIDTH; c++) last[(row + i) * 3 * d + 2 * d + head * WIDTH + c] = weights[c];
    }
}

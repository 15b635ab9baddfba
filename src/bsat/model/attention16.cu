// `attention32.cu` with numbers of 16 bits on tensor cores: the same attention with residual scores, and its gradient.
//
// A block is some rows of PACKED heads of one window of one model; a warp is 16 tokens of a head, and meets the others
// TILE at a time in shared memory. DEPTH, WIDTH (of a head, even) and PACKED are constants. What goes into a product is
// bfloat16; sums and all else are float32. qkv is (M, B, n, 3 d): queries, keys, values; within queries and keys the
// first halves of all heads come first.
//
// The gradient does not find out again what is known: `attend` leaves which weights were dropped, and `attend_grad`
// the gradients of the scores, in pieces of 16 queries and 16 keys. WHOLE is the number of keys (a multiple of 16) if a
// block of `attend_grad` has all of a head: then it makes the gradients of queries too, and no score's leaves the
// processor. Otherwise it is 0, and `attend_grad_queries` makes them.

#include "noise.cuh"
#include "tensor.cuh"

#define UP(n, to) (((n) + (to)-1) / (to) * (to))
#define SUM (DEPTH * WIDTH)
#define HALF (WIDTH / 2)
#define RUN (HALF % 8 == 0 ? 8 : HALF % 4 == 0 ? 4 : HALF % 2 == 0 ? 2 : 1) // numbers of a half copied at once
#define ROW_RUN (WIDTH % 8 == 0 ? 8 : WIDTH % 4 == 0 ? 4 : 2)               // and of a whole
#define PARTS (SUM <= 128 ? 1 : 2) // a gradient's; the registers hold one at once
#define ALL UP(SUM, 16 * PARTS)    // with zeros behind, for products of 16
#define PART (ALL / PARTS)
#define WIDE UP(WIDTH, 16)
#define COLUMNS (UP(SUM, 8) / 8) // products that give them all, 8 each
#define PART_COLUMNS (PARTS == 1 ? COLUMNS : PART / 8)
#define ROW_COLUMNS (UP(WIDTH, 8) / 8)
#define TILE 48
#define MOST 512 // tokens
#define ROWS (PACKED > 1 ? TILE : UP(WHOLE > 0 ? WHOLE : MOST, TILE)) // packed only if a tile holds all tokens
#define THREADS 192
#define GRAD_THREADS (WHOLE > 0 ? WHOLE * 2 * PACKED : THREADS)
#define GRAD_WARPS (GRAD_THREADS / 32)
#define LONG (ALL + WIDE + 8) // of a row in shared memory, 8 more than it needs: `fetch` then meets every bank once
#define SHORT (ALL + 8)       // without values
#define BYTES(row) (TILE * (row) * 2 * PACKED)
#define STAGES_OF(row, beside) (PACKED == 1 && 2 * BYTES(row) + (beside) <= 48 * 1024 ? 2 : 1) // tiles held at once,
#define STAGES STAGES_OF(LONG, 0)                                                              // one under way
#define SHORT_STAGES STAGES_OF(SHORT, 0)
#define HELD (WHOLE * PACKED * (ALL + TILE) * 2) // bytes of keys, and of slopes with the queries of a tile
#define GRAD_STAGES (0 < WHOLE && WHOLE <= TILE ? 1 : STAGES_OF(LONG, GRAD_WARPS * TILE * 4 + 8 * ROWS + HELD))
#define LOG2E 1.4426950408889634f
#define FAR 1e30f

// Blocks of attend, attend_grad and attend_grad_queries that a processor shall hold, of THREADS: they take 64 registers
// of a thread if there are five of them, 80 if four, 96 if three, 168 if two.
#if ALL + WIDE <= 32
#define BLOCKS 4
#define GRAD_BLOCKS 4
#define QUERY_BLOCKS 5
#elif ALL + WIDE <= 48
#define BLOCKS 4
#define GRAD_BLOCKS 4
#define QUERY_BLOCKS 4
#elif ALL + WIDE <= 80
#define BLOCKS 4
#define GRAD_BLOCKS 3
#define QUERY_BLOCKS 4
#elif ALL + WIDE <= 160
#define BLOCKS 3
#define GRAD_BLOCKS 2
#define QUERY_BLOCKS 3
#else
#define BLOCKS 2
#define GRAD_BLOCKS 1
#define QUERY_BLOCKS 2
#endif
#define AGAIN (WHOLE > 0 && ALL + WIDE > 48) // a warp fetches its keys each time, for want of registers
#define EVERYONE 0xffffffffu

// Some tokens in shared memory: ALL numbers of queries or keys, and maybe WIDE of something else.
template <int ROW> struct Tile {
    bf16 at[PACKED][TILE][ROW];
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

// `send` of COUNT numbers: 8, 4, 2, or 1, which is there at once.
template <int COUNT> __device__ __forceinline__ void send_some(bf16* to, const bf16* from, bool there) {
    if (COUNT == 8) {
        send(to, from, there);
        return;
    }
    if (COUNT == 1) {
        to->bits = there ? from->bits : 0;
        return;
    }
#ifdef __CUDA_ARCH__
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    if (COUNT == 4)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(at), "l"(from), "r"(there ? 8 : 0)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(from), "r"(there ? 4 : 0)
                     : "memory");
#else
    copy_later(to, from, there ? 2 * COUNT : 0, 2 * COUNT);
#endif
}

// One side of a head, queries or keys of all layers, of one token; c counts along SUM.
struct Side {
    static constexpr int together = RUN;
    const bf16 *layer0, *layer1, *layer2, *layer3;
    int d, shift; // 0 for queries, d for keys

    __device__ int stride() const { return 3 * d; }
    __device__ const bf16* layer(int i) const {
        const bf16* found = layer0;
        if (DEPTH > 1 && i > 0) found = layer1;
        if (DEPTH > 2 && i > 1) found = layer2;
        if (DEPTH > 3 && i > 2) found = layer3;
        return found;
    }
    __device__ const bf16* at(long long row, int head, unsigned c) const {
        const int own = c % WIDTH, second = own >= HALF;
        return layer(c / WIDTH) + row * 3 * d + shift + second * (d / 2) + head * HALF + own - second * HALF;
    }
};

// Rows in which a head has WIDTH numbers side by side.
struct Rows {
    static constexpr int together = ROW_RUN;
    const bf16* first;
    int apart;

    __device__ int stride() const { return apart; }
    __device__ const bf16* at(long long row, int head, int c) const { return first + row * apart + head * WIDTH + c; }
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

    // Among pieces of 16 tokens and 16 tokens, (M, B, heads, n / 16, n / 16).
    __device__ long long piece(int down, int right) const {
        const int pieces = (n + 15) / 16;
        return ((((long long)blockIdx.z * gridDim.y + blockIdx.y) * heads + head) * pieces + down) * pieces + right;
    }
};

// Zeros for what no copy ever touches: numbers `first` ... `end` of a row.
template <int ROW> __device__ __forceinline__ void clear(Tile<ROW>* tiles, int count, int first, int end) {
    for (int e = threadIdx.x; e < count * PACKED * TILE; e += blockDim.x)
#pragma unroll
        for (int c = first; c < end; c += 2) *(unsigned*)(tiles[0].at[0][0] + e * ROW + c) = 0;
}

// What a thread copies of a tile: COUNT numbers of some tokens, always the same ones where that can be. Heads are side
// by side in memory, so those of a block are copied together: RUNS of a token.
template <int ROW, int COUNT, int RUNS> struct Copy {
    static constexpr bool same = RUNS <= 32; // a block may have no more threads than that
    const bf16* from;                        // of the window's first token
    int to, j, step, stride;

    // Tokens j0 ... are on their way from here on; zeros for those that are not there. `find` says where the
    // e-th copy of a token goes, and where it comes from.
    template <class Find> __device__ __forceinline__ void go(Tile<ROW>& tile, int n, int j0, const Find& find) const {
        bf16* room = tile.at[0][0];
        if (same) {
            for (int k = j; k < TILE; k += step)
                send_some<COUNT>(room + to + k * ROW, from + (j0 + k) * stride, j0 + k < n);
        } else {
            for (int e = threadIdx.x; e < TILE * RUNS; e += blockDim.x) {
                const int k = e / RUNS;
                int where;
                const bf16* start = find(e % RUNS, where);
                send_some<COUNT>(room + where + k * ROW, start + (j0 + k) * stride, j0 + k < n);
            }
        }
    }
    template <class Find> __device__ __forceinline__ Copy(int stride, const Find& find) : stride(stride) {
        step = blockDim.x / RUNS;
        j = same && threadIdx.x < step * RUNS ? threadIdx.x / RUNS : TILE;
        from = find(threadIdx.x % RUNS, to);
#ifdef __CUDA_ARCH__
        asm("" : "+l"(from)); // a register from here on, and not a sum that is made again for every tile
#endif
    }
};

// Of queries or keys,
template <int ROW> struct SideCopy {
    static constexpr int run = PACKED * HALF / RUN;
    struct Find {
        const Side& side;
        const Place& place;
        __device__ const bf16* operator()(int e, int& to) const {
            const int p = e % run / (HALF / RUN), c = e % (HALF / RUN) * RUN + e / run * HALF;
            to = p * TILE * ROW + c;
            return side.at(place.row, place.head0 + p, c);
        }
    } find;
    Copy<ROW, RUN, run * 2 * DEPTH> copy;
    __device__ __forceinline__ SideCopy(const Side& side, const Place& place)
        : find{side, place}, copy(3 * side.d, find) {}
    __device__ __forceinline__ void operator()(Tile<ROW>& tile, int j0) const { copy.go(tile, find.place.n, j0, find); }
};

// and of what is beside them.
struct RowCopy {
    static constexpr int run = WIDTH / ROW_RUN;
    struct Find {
        const Rows& rows;
        const Place& place;
        __device__ const bf16* operator()(int e, int& to) const {
            const int p = e / run, c = e % run * ROW_RUN;
            to = p * TILE * LONG + ALL + c;
            return rows.at(place.row, place.head0 + p, c);
        }
    } find;
    Copy<LONG, ROW_RUN, PACKED * run> copy;
    __device__ __forceinline__ RowCopy(const Rows& rows, const Place& place)
        : find{rows, place}, copy(rows.apart, find) {}
    __device__ __forceinline__ void operator()(Tile<LONG>& tile, int j0) const {
        copy.go(tile, find.place.n, j0, find);
    }
};

// Four numbers `c` ... of the tokens of a window, as far as there are COUNT; c can be divided by 4.
template <int COUNT, class From> struct Four {
    static constexpr int run = From::together < 4 ? From::together : 4;
    const bf16* at[4 / run]; // of the first token
    int stride, c;

    Four() = default;
    __device__ __forceinline__ Four(const From& from, const Place& place, int head, int c)
        : stride(from.stride()), c(c) {
#pragma unroll
        for (int e = 0; e < 4; e += run) at[e / run] = from.at(place.row, head, c + e < COUNT ? c + e : 0);
    }
    // Those of token i; zeros behind. No branch: several are on their way at once.
    __device__ __forceinline__ int2 read(int i) const {
        unsigned x[4] = {0, 0, 0, 0};
#pragma unroll
        for (int e = 0; e < 4; e += run) {
            const bf16* from = at[e / run] + i * stride;
            const bool there = c + e < COUNT;
            if (run == 4) {
                const int2 both = *(const int2*)from;
                return make_int2(there ? both.x : 0, there ? both.y : 0);
            }
            x[e] = run == 2 ? *(const unsigned*)from : from->bits;
            if (!there) x[e] = 0;
        }
        return make_int2((int)(x[0] | x[1] << 16), (int)(x[2] | x[3] << 16));
    }
    __device__ __forceinline__ void write(int i, int2 both) const {
#pragma unroll
        for (int e = 0; e < 4; e += run) {
            if (c + e >= COUNT) continue;
            bf16* to = (bf16*)at[e / run] + i * stride;
            const unsigned two = (unsigned)(e < 2 ? both.x : both.y);
            if (run == 4)
                *(int2*)to = both;
            else if (run == 2)
                *(unsigned*)to = two;
            else
                to->bits = (unsigned short)(two >> e % 2 * 16);
        }
    }
};

// What a thread reads and writes of the 16 numbers `first` ... of rows i and i + 8, as far as there are COUNT: four of
// each, of one half, and its neighbour those of the other.
template <int COUNT, class From> struct Fours {
    Four<COUNT, From> where;
    int i, n;

    Fours() = default;
    __device__ __forceinline__ Fours(const From& from, const Place& place, int first)
        : where(from, place, place.head, first + place.t % 2 * 8 + place.t / 2 * 4), i(place.i), n(place.n) {}

    // A row that is not there is read as the first: nobody writes what comes of it, but it is as finite as the rest.
    __device__ __forceinline__ void read(int2 (&found)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) found[r] = where.read(i + 8 * r < n ? i + 8 * r : 0);
    }

    // What was there before, if it shall be added to.
    __device__ __forceinline__ void read_before(int2 (&before)[2], int add) const {
        before[0] = before[1] = make_int2(0, 0);
        if (add) read(before);
    }

    // What two products left (`left` and `right`), times `scale`, added to what was there before.
    __device__ __forceinline__ void write(const int2 (&before)[2], const float (&left)[4], const float (&right)[4],
                                          float scale0, float scale1) const {
        const bool even = threadIdx.x % 2 == 0;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float scale = r == 0 ? scale0 : scale1;
            const float left0 = left[2 * r], left1 = left[2 * r + 1], right0 = right[2 * r], right1 = right[2 * r + 1];
            const float got0 = __shfl_xor_sync(EVERYONE, even ? right0 : left0, 1);
            const float got1 = __shfl_xor_sync(EVERYONE, even ? right1 : left1, 1);
            const int2 old = before[r];
            const float x0 = (even ? left0 : got0) * scale + lower(old.x);
            const float x1 = (even ? left1 : got1) * scale + upper(old.x);
            const float x2 = (even ? got0 : right0) * scale + lower(old.y);
            const float x3 = (even ? got1 : right1) * scale + upper(old.y);
            if (i + 8 * r < n) where.write(i + 8 * r, make_int2((int)pack(x0, x1), (int)pack(x2, x3)));
        }
    }
};

// The first COUNT numbers of rows i and i + 8, as the left side of products: neighbours trade what they read.
template <int COUNT, int PIECES, class From>
__device__ __forceinline__ void read(unsigned (&a)[PIECES][4], const From& from, const Place& place) {
    const bool even = place.t % 2 == 0;
    int2 found[PIECES][2];
#pragma unroll
    for (int k = 0; k < PIECES; k++) Fours<COUNT, From>(from, place, 16 * k).read(found[k]);
#pragma unroll
    for (int k = 0; k < PIECES; k++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int2 both = found[k][r];
            const int got = __shfl_xor_sync(EVERYONE, even ? both.y : both.x, 1);
            a[k][r] = (unsigned)(even ? both.x : got);
            a[k][2 + r] = (unsigned)(even ? got : both.y);
        }
}

// The way back, for what products leave: numbers `first` ... of rows i and i + 8, as far as there are COUNT, times
// `scale`, written or added.
template <int COUNT, int PIECES, class To>
__device__ __forceinline__ void write(const float (&d)[PIECES][4], const To& to, const Place& place, int first,
                                      float scale0, float scale1, int add) {
    constexpr int pairs = (PIECES + 1) / 2, together = pairs < 4 ? pairs : 4; // as registers allow
#pragma unroll
    for (int k0 = 0; k0 < pairs; k0 += together) {
        int2 before[together][2];
#pragma unroll
        for (int k = 0; k < together; k++)
            Fours<COUNT, To>(to, place, first + 16 * (k0 + k)).read_before(before[k], add);
#pragma unroll
        for (int k = k0; k < k0 + together && k < pairs; k++)
            Fours<COUNT, To>(to, place, first + 16 * k)
                .write(before[k - k0], d[2 * k], d[2 * k + 1 < PIECES ? 2 * k + 1 : 2 * k], scale0, scale1);
    }
}

// Two products with the same left side, of 16 columns together.
__device__ __forceinline__ void multiply_both(float (&d0)[4], float (&d1)[4], const unsigned (&a)[4],
                                              const unsigned (&b)[4]) {
    const unsigned left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
    multiply(d0, a, left);
    multiply(d1, a, right);
}

// Columns k and k + 1 of them; the last may be alone.
template <int PIECES>
__device__ __forceinline__ void multiply_some(float (&d)[PIECES][4], int k, const unsigned (&a)[4],
                                              const unsigned (&b)[4]) {
    const unsigned left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
    multiply(d[k], a, left);
    if (k + 1 < PIECES) multiply(d[k + 1], a, right);
}

// Where a thread points for `fetch`, to get the right side for them, numbers of 16 tokens: with the tokens along the
// columns of the product (and `fetch<false>`),
template <int ROW> __device__ __forceinline__ const bf16* across(const bf16 (&from)[TILE][ROW]) {
    const int lane = threadIdx.x % 32;
    return &from[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8];
}

// or summed over (and `fetch<true>`).
template <int ROW> __device__ __forceinline__ const bf16* along(const bf16 (&from)[TILE][ROW]) {
    const int lane = threadIdx.x % 32;
    return &from[lane % 16][lane / 16 * 8];
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

// `spread` is the logarithm (to base 2) of each softmax's denominator. `gone` has a bit of 1 for each weight dropped:
// 8 words for 16 queries and 16 keys, each of what the warp said of one of the numbers that its threads hold; see
// `attend_grad`. It is written only if there is dropout.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attend(const bf16* qkv0, const bf16* qkv1, const bf16* qkv2, const bf16* qkv3, bf16* out, float* spread,
       unsigned* gone, const int* seeds, const int* step, const float* drop, int site, int n, int heads) {
    __shared__ __align__(16) Tile<LONG> tiles[STAGES];
    const int d = heads * WIDTH;
    const Place place(n, heads, blockIdx.x);
    const int t = place.t, p = place.p, end = PACKED > 1 ? TILE : n; // packed: a single tile
    const Drop keep(seeds, step, drop, site, blockIdx.z);
    const Side queries{qkv0, qkv1, qkv2, qkv3, d, 0}, keys{qkv0, qkv1, qkv2, qkv3, d, d};
    const Rows values{keys.layer(DEPTH - 1) + 2 * d, 3 * d}, mixed{out, d};
    const float scale = rsqrtf((float)WIDTH) * LOG2E;
    const SideCopy<LONG> copy_keys(keys, place);
    const RowCopy copy_values(values, place);
    unsigned q[ALL / 16][4];
    float sum[ROW_COLUMNS][4], top[2] = {-FAR, -FAR}, total[2] = {0.f, 0.f};
    const auto meet = [&](int stage, int j0) {
        copy_keys(tiles[stage], j0);
        copy_values(tiles[stage], j0);
        seal();
    };
    meet(0, 0);
    clear(tiles, STAGES, SUM, ALL);
    clear(tiles, STAGES, ALL + WIDTH, ALL + WIDE);
    read<SUM>(q, queries, place);
    zero(sum);
    for (int j0 = 0; j0 < end; j0 += TILE) {
        const int stage = STAGES == 2 ? j0 / TILE % 2 : 0;
        if (STAGES == 2 && j0 + TILE < end) {
            meet(1 - stage, j0 + TILE);
            arrive<1>();
        } else
            arrive<0>();
        __syncthreads();
        if (place.live) {
            const bf16 *down = along(tiles[stage].at[p]), *right = across(tiles[stage].at[p]);
            float score[TILE / 8][4];
            zero(score);
#pragma unroll
            for (int k = 0; k < ALL / 16; k++)
#pragma unroll
                for (int m = 0; m < TILE / 8; m += 2) {
                    unsigned b[4];
                    fetch<false>(b, right + 8 * m * LONG + 16 * k);
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
                for (int c = 0; c < ROW_COLUMNS; c++) {
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
                for (int m = 0; m < TILE / 8; m += 2) {
                    unsigned votes[8];
#pragma unroll
                    for (int e = 0; e < 8; e++) {
                        const int half = e / 4, at = e % 4;
                        const bool lost = mix(first + at / 2 * 8 * n + 8 * (m + half) + at % 2) < keep.least;
                        if (lost) score[m + half][at] = 0.f;
                        votes[at % 2 * 4 + at / 2 * 2 + half] = vote(lost);
                    }
                    if (threadIdx.x % 32 == 0 && j0 + 8 * m < n) {
                        int4* to = (int4*)(gone + place.piece(place.i / 16, j0 / 16 + m / 2) * 8);
                        to[0] = make_int4((int)votes[0], (int)votes[1], (int)votes[2], (int)votes[3]);
                        to[1] = make_int4((int)votes[4], (int)votes[5], (int)votes[6], (int)votes[7]);
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < TILE / 8; m += 2) {
                unsigned a[4], b[4];
                turn(a, score[m], score[m + 1]);
#pragma unroll
                for (int c = 0; c < ROW_COLUMNS; c += 2) {
                    fetch<true>(b, down + 8 * m * LONG + ALL + 8 * c);
                    multiply_some(sum, c, a, b);
                }
            }
        }
        __syncthreads();
        if (STAGES == 1 && j0 + TILE < end) meet(0, j0 + TILE);
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

#if WHOLE
// The gradients of queries, of one tile at a time: from the slopes of its scores with all keys of a head.
struct Pull {
    static constexpr int keys = WHOLE / 16, right = ALL / 16;            // pieces: of keys, of what is made
    static constexpr int down = WHOLE < TILE ? keys : TILE / 16;
    static constexpr int most = (down * right + keys - 1) / keys;               // made by a warp
    static constexpr int chains = ALL + WIDE <= 48 ? 2 : 1; // sums side by side, as registers allow: less to wait for
    static_assert(PARTS == 1, "there are no slopes for a second part");
    typedef bf16 Piece[256]; // as `put` leaves it
    Piece slopes[PACKED][keys][down];
    Piece numbers[PACKED][keys][right]; // of the keys

    // Calls `make` with each piece that this warp makes of a tile: its number, and where it lies.
    template <class Make> __device__ __forceinline__ void pieces(const Place& place, int j0, const Make& make) const {
        Place there = place;
#pragma unroll
        for (int u = 0; u < most; u++) {
            const int piece = threadIdx.x / 32 % keys + u * keys, j = piece % down, c = right > 1 ? piece / down : 0;
            there.i = j0 + 16 * j + place.g;
            if (j0 + 16 * j < place.n && piece < down * right) make(u, there, j, c);
        }
    }

    // Where the pieces go, and what was there before: it is on its way while others still make slopes.
    struct Goal {
        Fours<SUM, Side> where[most];
        int2 before[most][2];
    };
    __device__ __forceinline__ void aim(Goal& goal, const Side& grads, const Place& place, int j0, int add) const {
        pieces(place, j0, [&](int u, const Place& there, int, int c) {
            goal.where[u] = Fours<SUM, Side>(grads, there, 16 * c);
            goal.where[u].read_before(goal.before[u], add);
        });
    }

    // When all slopes are there: after a barrier.
    __device__ __forceinline__ void make(const Goal& goal, const Place& place, int j0, float scale) const {
        const int lane = threadIdx.x % 32, turned = lane % 8 + lane / 8 % 2 * 16 + lane / 16 * 8;
        const int left = place.n - (WHOLE - 16) - 2 * place.t; // keys from this thread's first in the last piece
        const auto there_are = [](int count) { return count > 1 ? ~0u : count > 0 ? 0xffffu : 0u; };
        const unsigned near = there_are(left), far = there_are(left - 8);
        pieces(place, j0, [&](int u, const Place&, int j, int c) {
            float sum[chains][2][4];
#pragma unroll
            for (int k = 0; k < chains; k++) zero(sum[k]);
#pragma unroll
            for (int k = 0; k < keys; k++) {
                unsigned a[4], b[4];
                fetch<true>(a, slopes[place.p][k][j] + 8 * turned); // queries down, keys to the right
                fetch<true>(b, numbers[place.p][k][c] + 8 * lane);
                if (k == keys - 1) { // nothing of keys that are not there
                    a[0] &= near;
                    a[1] &= near;
                    a[2] &= far;
                    a[3] &= far;
                }
                multiply_both(sum[k % chains][0], sum[k % chains][1], a, b);
            }
#pragma unroll
            for (int e = 0; e < 8 * (chains - 1); e++) sum[0][e / 4][e % 4] += sum[1][e / 4][e % 4];
            goal.where[u].write(goal.before[u], sum[0][0], sum[0][1], scale, scale);
        });
    }
};
#endif

// The gradients of keys of all DEPTH layers, written to grad0 ..., or added to what is there (`add`), and of the values
// of the last of them. A warp has 16 keys and meets all queries. The gradients of scores, but for their scale, go to
// `slopes`: (M, B, heads, n / 16, n / 16) pieces of 16 keys (down) and 16 queries, in the order of the left side of a
// product, 4 words of each thread together; or to `pull`, which then makes the gradients of queries.
constexpr int grad_threads = GRAD_THREADS, grad_blocks = (GRAD_BLOCKS * THREADS + grad_threads / 2) / grad_threads;
extern "C" __global__ void __launch_bounds__(grad_threads, grad_blocks)
attend_grad(const bf16* qkv0, const bf16* qkv1, const bf16* qkv2, const bf16* qkv3, bf16* grad0, bf16* grad1,
            bf16* grad2, bf16* grad3, const bf16* out, const bf16* grad, const float* spread, const unsigned* gone,
            int4* slopes, const int* seeds, const int* step, const float* drop, int site, int n, int heads, int add) {
    __shared__ __align__(16) Tile<LONG> tiles[GRAD_STAGES];
    __shared__ __align__(16) unsigned lost[GRAD_STAGES][GRAD_WARPS][TILE / 16][8];
    // Logarithms of denominators; output times its gradient, over `keep.scale`, which the end brings.
    __shared__ __align__(16) float stats[PACKED][2][ROWS];
#if WHOLE
    __shared__ __align__(16) Pull pull;
    static_assert(sizeof(tiles) + sizeof(lost) + sizeof(stats) + sizeof(pull) <= 48 * 1024, "too much for a block");
#endif
    const int d = heads * WIDTH;
    const Place place(n, heads, blockIdx.x);
    const Drop keep(seeds, step, drop, site, blockIdx.z);
    const Side queries{qkv0, qkv1, qkv2, qkv3, d, 0}, keys{qkv0, qkv1, qkv2, qkv3, d, d};
    const Side key_grads{grad0, grad1, grad2, grad3, d, d};
    const Rows values{keys.layer(DEPTH - 1) + 2 * d, 3 * d}, value_grads{key_grads.layer(DEPTH - 1) + 2 * d, 3 * d};
    const Rows mixed{out, d}, flows{grad, d};
    const int t = place.t, p = place.p, end = PACKED > 1 ? TILE : n, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float scale = rsqrtf((float)WIDTH) * LOG2E, last_scale = keep.scale * rsqrtf((float)WIDTH);
    const SideCopy<LONG> copy_queries(queries, place);
    const RowCopy copy_flows(flows, place);
    const unsigned* said = gone + place.piece(lane / 2, place.i / 16) * 8 + lane % 2 * 4; // of the first tile
    const int pieces = (n + 15) / 16;
    const auto meet = [&](int stage, int j0) {
        copy_queries(tiles[stage], j0);
        copy_flows(tiles[stage], j0);
        if (keep.least != 0 && place.live && lane < TILE / 8 && j0 + lane / 2 * 16 < n)
            send(lost[stage][warp][0] + lane * 4, said + j0 / 2 * pieces, true);
        seal();
    };
    unsigned mine[ALL / 16][4], beside[WIDE / 16][4];
    meet(0, 0);
    clear(tiles, GRAD_STAGES, SUM, ALL);
    clear(tiles, GRAD_STAGES, ALL + WIDTH, ALL + WIDE);
    read<SUM>(mine, keys, place);
#if WHOLE
#pragma unroll
    for (int k = 0; k < ALL / 16; k++) put(pull.numbers[p][place.i / 16][k], mine[k]);
#endif
    read<WIDTH>(beside, values, place);
    for (int e = threadIdx.x; e < PACKED * UP(n, TILE); e += blockDim.x) {
        const int i = e % ROWS, q = e / ROWS;
        float dot = 0.f;
        if (i < n) {
#pragma unroll
            for (int c = 0; c < WIDTH; c += 4) {
                const int2 a = Four<WIDTH, Rows>(flows, place, place.head0 + q, c).read(i);
                const int2 b = Four<WIDTH, Rows>(mixed, place, place.head0 + q, c).read(i);
                dot += lower(a.x) * lower(b.x) + upper(a.x) * upper(b.x);
                dot += lower(a.y) * lower(b.y) + upper(a.y) * upper(b.y);
            }
        }
        stats[q][1][i] = dot / keep.scale;
        stats[q][0][i] = i < n ? spread[place.stat + (q - p) * n + i] : FAR; // leaves no weight
    }
    const unsigned first_bit = 1u << (8 * t + place.g / 2), second_bit = first_bit << 4;
#pragma unroll 1
    for (int part = 0; part < ALL; part += PART) {
        float slope[PART_COLUMNS][4], flow[ROW_COLUMNS][4];
        zero(slope);
        zero(flow);
        [[maybe_unused]] int4* to = slopes + place.piece(place.i / 16, 0) * 32 + lane;
        if (part > 0) meet(0, 0);
        for (int j0 = 0; j0 < end; j0 += TILE) {
            const int stage = GRAD_STAGES == 2 ? j0 / TILE % 2 : 0;
            if (GRAD_STAGES == 2 && j0 + TILE < end) {
                meet(1 - stage, j0 + TILE);
                arrive<1>();
            } else
                arrive<0>();
            __syncthreads();
            const bf16 *down = along(tiles[stage].at[p]), *right = across(tiles[stage].at[p]);
            const float* stat = &stats[p][0][j0 + 2 * t]; // of the first of the queries met
            const unsigned* mark = lost[stage][warp][0] + place.g % 2 * 4;
            const int count = place.live ? min(TILE, n - j0) : 0;
#pragma unroll
            for (int j = 0; j < TILE; j += 16) {
                if (j >= count) break;
                float share[2][4], inflow[2][4];
                zero(share);
                zero(inflow);
                unsigned a[4], b[4];
#pragma unroll
                for (int k = 0; k < ALL / 16; k++) {
#if AGAIN
                    fetch<false>(mine[k], pull.numbers[p][place.i / 16][k] + 8 * lane);
#endif
                    fetch<false>(b, right + j * LONG + 16 * k);
                    multiply_both(share[0], share[1], mine[k], b);
                }
#pragma unroll
                for (int k = 0; k < WIDE / 16; k++) {
                    fetch<false>(b, right + j * LONG + ALL + 16 * k);
                    multiply_both(inflow[0], inflow[1], beside[k], b);
                }
                // From scores to weights, zero if dropped, and from the inflow to the slopes of scores.
                const auto settle = [&](int4 words) {
                    const int own[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        const float2 log = *(const float2*)(stat + j + 8 * m);
                        const float2 less = *(const float2*)(stat + ROWS + j + 8 * m);
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const bool even = e % 2 == 0, out = own[2 * m + e / 2] & (even ? first_bit : second_bit);
                            const float weight = power(share[m][e] * scale - (even ? log.x : log.y));
                            share[m][e] = out ? 0.f : weight;
                            inflow[m][e] = share[m][e] * inflow[m][e] - weight * (even ? less.x : less.y);
                        }
                    }
                };
                // A thread of `attend` had queries g, g + 8 and keys 2t, 2t + 1, 2t + 8, 2t + 9; here it is the other
                // way round. The first four words are of even keys; of those, two are of queries below 8.
                if (keep.least != 0)
                    settle(*(const int4*)(mark + j / 2));
                else
                    settle(make_int4(0, 0, 0, 0));
                turn(a, share[0], share[1]);
#pragma unroll
                for (int k = 0; k < ROW_COLUMNS; k += 2) {
                    fetch<true>(b, down + j * LONG + ALL + 8 * k);
                    multiply_some(flow, k, a, b);
                }
                turn(a, inflow[0], inflow[1]);
#if WHOLE
                put(pull.slopes[p][place.i / 16][j / 16], a);
#else
                if (part == 0) to[j * 2] = make_int4((int)a[0], (int)a[1], (int)a[2], (int)a[3]);
#endif
#pragma unroll
                for (int k = 0; k < PART_COLUMNS; k += 2) {
                    fetch<true>(b, down + j * LONG + part + 8 * k);
                    multiply_some(slope, k, a, b);
                }
            }
            to += TILE * 2;
#if WHOLE
            Pull::Goal goal;
            pull.aim(goal, Side{grad0, grad1, grad2, grad3, d, 0}, place, j0, add);
#endif
            __syncthreads();
            if (GRAD_STAGES == 1 && j0 + TILE < end) meet(0, j0 + TILE);
#if WHOLE
            pull.make(goal, place, j0, last_scale);
#endif
        }
        if (place.live) {
            write<SUM>(slope, key_grads, place, part, last_scale, last_scale, add);
            if (part == 0) write<WIDTH>(flow, value_grads, place, 0, keep.scale, keep.scale, 0);
        }
    }
}

#if !WHOLE
// The gradients of queries of all DEPTH layers, from what `attend_grad` left in `slopes`. A warp has 16 queries.
extern "C" __global__ void __launch_bounds__(THREADS, QUERY_BLOCKS)
attend_grad_queries(const bf16* qkv0, const bf16* qkv1, const bf16* qkv2, const bf16* qkv3, bf16* grad0, bf16* grad1,
                    bf16* grad2, bf16* grad3, const int4* slopes, const float* drop, int n, int heads, int add) {
    __shared__ __align__(16) Tile<SHORT> tiles[SHORT_STAGES];
    const int d = heads * WIDTH;
    const Place place(n, heads, blockIdx.x);
    const Side keys{qkv0, qkv1, qkv2, qkv3, d, d}, query_grads{grad0, grad1, grad2, grad3, d, 0};
    const int p = place.p, end = PACKED > 1 ? TILE : n;
    const float scale = rsqrtf((float)WIDTH) / (1.f - drop[blockIdx.z]);
    const SideCopy<SHORT> copy_keys(keys, place);
    const int4* from = slopes + place.piece(0, place.i / 16) * 32 + threadIdx.x % 32;
    const long long stride = (n + 15) / 16 * 32; // to the next 16 keys
    int4 ahead[TILE / 16];
    const auto load = [&](int j0) { // the pieces of a tile, on their way into registers
#pragma unroll
        for (int m = 0; m < TILE / 16; m++) {
            ahead[m] = make_int4(0, 0, 0, 0);
            if (place.live && j0 + 16 * m < n) ahead[m] = __ldcg(from + (j0 / 16 + m) * stride);
        }
    };
    float slope[COLUMNS][4];
    load(0);
    copy_keys(tiles[0], 0);
    seal();
    clear(tiles, SHORT_STAGES, SUM, UP(SUM, 16));
    zero(slope);
    for (int j0 = 0; j0 < end; j0 += TILE) {
        const int stage = SHORT_STAGES == 2 ? j0 / TILE % 2 : 0;
        if (SHORT_STAGES == 2 && j0 + TILE < end) {
            copy_keys(tiles[1 - stage], j0 + TILE);
            seal();
            arrive<1>();
        } else
            arrive<0>();
        __syncthreads();
        if (place.live) {
            const bf16* down = along(tiles[stage].at[p]);
            int4 piece[TILE / 16];
#pragma unroll
            for (int m = 0; m < TILE / 16; m++) piece[m] = ahead[m];
            if (j0 + TILE < end) load(j0 + TILE);
#pragma unroll
            for (int m = 0; m < TILE / 16; m++) {
                const unsigned a[4] = {flip((unsigned)piece[m].x), flip((unsigned)piece[m].z),
                                       flip((unsigned)piece[m].y), flip((unsigned)piece[m].w)};
#pragma unroll
                for (int k = 0; k < COLUMNS; k += 2) {
                    unsigned b[4];
                    fetch<true>(b, down + 16 * m * SHORT + 8 * k);
                    multiply_some(slope, k, a, b);
                }
            }
        }
        __syncthreads();
        if (SHORT_STAGES == 1 && j0 + TILE < end) {
            copy_keys(tiles[0], j0 + TILE);
            seal();
        }
    }
    if (place.live) write<SUM>(slope, query_grads, place, 0, scale, scale, add);
}
#endif

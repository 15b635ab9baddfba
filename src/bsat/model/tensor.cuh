// What a tensor core takes: numbers of 16 bits, in pieces that a warp holds between its 32 threads.
//
// Where there is no tensor core (the tests, on a CPU) the same is done number by number.

#pragma once

// A float32 without its last 16 bits (bfloat16), rounded to the nearest. It reads and writes like a float.
struct bf16 {
    unsigned short bits;
    __device__ operator float() const { return __uint_as_float((unsigned)bits << 16); }
    __device__ bf16& operator=(float x) {
        bits = (unsigned short)brief(x);
        return *this;
    }
    static __device__ __forceinline__ unsigned brief(float x) {
#ifdef __CUDA_ARCH__
        unsigned both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(0.f), "f"(x));
        return both;
#else
        const unsigned all = __float_as_uint(x);
        if ((all & 0x7fffffffu) > 0x7f800000u) return 0x7fffu; // not a number
        return (all + 0x7fffu + (all >> 16 & 1u)) >> 16;
#endif
    }
};

// Two of them in a word, `first` in the lower half.
__device__ __forceinline__ unsigned pack(float first, float second) {
#ifdef __CUDA_ARCH__
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
#else
    return bf16::brief(first) | bf16::brief(second) << 16;
#endif
}

__device__ __forceinline__ float lower(unsigned both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float upper(unsigned both) { return __uint_as_float(both & 0xffff0000u); }

// d (16, 8) += a (16, 16) b (16, 8). With g = lane / 4 and t = lane % 4, a thread holds
//   of a: the pairs (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), each with the number to its right,
//   of b: the pairs (2t, g), (2t + 8, g), each with the number below it,
//   of d: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef __CUDA_ARCH__
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    __shared__ float all_a[32][16][16], all_b[32][16][8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    for (int e = 0; e < 4; e++) {
        all_a[warp][g + e % 2 * 8][2 * t + e / 2 * 8] = lower(a[e]);
        all_a[warp][g + e % 2 * 8][2 * t + e / 2 * 8 + 1] = upper(a[e]);
    }
    for (int e = 0; e < 2; e++) {
        all_b[warp][2 * t + e * 8][g] = lower(b[e]);
        all_b[warp][2 * t + e * 8 + 1][g] = upper(b[e]);
    }
    __syncwarp();
    for (int e = 0; e < 4; e++)
        for (int k = 0; k < 16; k++) d[e] += all_a[warp][g + e / 2 * 8][k] * all_b[warp][k][2 * t + e % 2];
    __syncwarp();
#endif
}

// Four matrices (8, 8) from shared memory. Thread 8 m + i gives the address of row i of matrix m, 8 numbers in a row,
// aligned to 16 bytes; of each matrix, a thread gets the pair (g, 2t), (g, 2t + 1), or with TURN (2t, g), (2t + 1, g).
template <bool TURN> __device__ __forceinline__ void fetch(unsigned (&out)[4], const bf16* row) {
#ifdef __CUDA_ARCH__
    const unsigned at = (unsigned)__cvta_generic_to_shared(row);
    if (TURN)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(at)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(at)
                     : "memory");
#else
    __shared__ const bf16* rows[32][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    rows[warp][lane] = row;
    __syncwarp();
    for (int m = 0; m < 4; m++) {
        const bf16* const* matrix = rows[warp] + 8 * m;
        const bf16 one = TURN ? matrix[2 * t][g] : matrix[g][2 * t];
        const bf16 two = TURN ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
        out[m] = one.bits | (unsigned)two.bits << 16;
    }
    __syncwarp();
#endif
}

// Four matrices (8, 8), of each of which a thread holds the pair (g, 2t), (g, 2t + 1), to shared memory: one behind the
// other, row by row, so that thread i has row i at to + 8 i for `fetch`. Every bank is met once. Aligned to 16 bytes.
__device__ __forceinline__ void put(bf16* to, const unsigned (&in)[4]) {
    const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     (unsigned)__cvta_generic_to_shared(to + 8 * lane)),
                 "r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3])
                 : "memory");
#else
    for (int m = 0; m < 4; m++) ((unsigned*)to)[32 * m + lane] = in[m];
#endif
}

// A matrix (8, 8) of which a thread holds the pair (g, 2t), (g, 2t + 1), with rows and columns exchanged.
__device__ __forceinline__ unsigned flip(unsigned both) {
#ifdef __CUDA_ARCH__
    unsigned out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(both));
    return out;
#else
    __shared__ unsigned short all[32][8][8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    all[warp][g][2 * t] = (unsigned short)both;
    all[warp][g][2 * t + 1] = (unsigned short)(both >> 16);
    __syncwarp();
    const unsigned out = all[warp][2 * t][g] | (unsigned)all[warp][2 * t + 1][g] << 16;
    __syncwarp();
    return out;
#endif
}

// A bit of each thread of a warp.
__device__ __forceinline__ unsigned vote(bool yes) {
#ifdef __CUDA_ARCH__
    return __ballot_sync(0xffffffffu, yes);
#else
    __shared__ bool all[32][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    all[warp][lane] = yes;
    __syncwarp();
    unsigned votes = 0;
    for (int i = 0; i < 32; i++) votes |= (unsigned)all[warp][i] << i;
    __syncwarp();
    return votes;
#endif
}

// 16 bytes from global to shared memory, or zeros; under way until `arrive`. Both addresses are aligned to 16 bytes.
__device__ __forceinline__ void send(void* to, const void* from, bool there) {
#ifdef __CUDA_ARCH__
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(there ? 16 : 0) : "memory");
#else
    copy_later(to, from, there ? 16 : 0, 16);
#endif
}

// All that was sent since the last `seal` is a group.
__device__ __forceinline__ void seal() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    copies_are_a_group();
#endif
}

// Waits until all groups of this thread but the last LEFT have arrived. A barrier must follow.
template <int LEFT> __device__ __forceinline__ void arrive() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#else
    copy_now(LEFT);
#endif
}

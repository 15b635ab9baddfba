// Dropout without memory: whether a number stays follows from the model's seed, the step, the place in the network and
// its index, so the gradient finds the same mask again. The same bits as `stacked.Noise`.

#pragma once

__device__ unsigned mix(unsigned x) {
    x ^= x >> 16;
    x *= 0x21f0aaadu;
    x ^= x >> 15;
    x *= 0xd35a2d97u;
    return x ^ (x >> 15);
}

struct Drop {
    unsigned key, least;
    float scale;
    __device__ Drop(const int* seeds, const int* step, const float* p, int site, int member) {
        float share = p == nullptr ? 0.f : p[member];
        least = (unsigned)((double)share * 4294967296.0);
        scale = 1.f / (1.f - share);
        key = least == 0 ? 0u : mix(mix(mix((unsigned)seeds[member]) + (unsigned)*step) + (unsigned)site);
    }
    __device__ float operator()(unsigned index) const { return least == 0 ? scale : straight(index); }
    // The same without a branch for those who have no dropout.
    __device__ float straight(unsigned index) const { return mix(index + key) >= least ? scale : 0.f; }
};

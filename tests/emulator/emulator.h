// Enough of CUDA C for kernels/*.cu to be compiled as C++: a block's threads are fibers that take
// turns at its barriers, and one block runs at a time.
//
// What it is not: fast, or a model of memory. A kernel that only works in one order of its threads
// is found by running it in two.

#pragma once

#include <cmath>
#include <cstring>

#define __global__
#define __device__
#define __launch_bounds__(threads)
// One block runs at a time, on one thread of the host.
#define __shared__ static

struct Index {
    unsigned x, y, z;
};
extern Index threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

static inline uint2 make_uint2(unsigned x, unsigned y) {
    return {x, y};
}
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}
static inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}
static inline unsigned min(unsigned a, unsigned b) {
    return a < b ? a : b;
}
static inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline long long __double_as_longlong(double x) {
    long long bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline unsigned long long atomicAdd(unsigned long long *at, unsigned long long more) {
    unsigned long long old = *at;
    *at += more;
    return old;
}

// Lets every other thread of the block get here.
void __syncthreads();

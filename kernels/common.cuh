// Words that the kernels share: integer types, bf16, loops over a grid, sums over a block.
//
// What it is not: a header of CUDA. None is included, so that the PTX is made of the text in this
// folder alone (tools/kernels.py).
//
// Invariant: blocks have THREADS threads, and rows are whole numbers of 16 bytes.
//
//   bf16 -> f32: the same upper bits       f32 -> bf16: to the nearest, ties to even

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 256
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)

// ---- numbers ----

// bf16, in the lower half of `bits`, as f32.
static __device__ inline float wide(u32 bits) {
    return __uint_as_float(bits << 16);
}

// f32 to bf16 in the upper half; the lower half is rubbish.
static __device__ inline u32 narrow(float x) {
    u32 bits = __float_as_uint(x);
    return x != x ? 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1);
}

static __device__ inline u32 pair(float low, float high) {
    return (narrow(low) >> 16) | (narrow(high) & 0xffff0000u);
}

static __device__ inline void unpack4(float *to, uint2 raw) {
    to[0] = wide(raw.x);
    to[1] = __uint_as_float(raw.x & 0xffff0000u);
    to[2] = wide(raw.y);
    to[3] = __uint_as_float(raw.y & 0xffff0000u);
}

static __device__ inline void unpack8(float *to, uint4 raw) {
    unpack4(to, make_uint2(raw.x, raw.y));
    unpack4(to + 4, make_uint2(raw.z, raw.w));
}

static __device__ inline uint2 pack4(const float *x) {
    return make_uint2(pair(x[0], x[1]), pair(x[2], x[3]));
}

static __device__ inline uint4 pack8(const float *x) {
    return make_uint4(pair(x[0], x[1]), pair(x[2], x[3]), pair(x[4], x[5]), pair(x[6], x[7]));
}

static __device__ inline uint2 four_at(const u16 *at) {
    return *(const uint2 *)at;
}

static __device__ inline uint4 eight_at(const u16 *at) {
    return *(const uint4 *)at;
}

// A bijection of 64-bit words (the finish of SplitMix64).
static __device__ inline u64 mixed(u64 word) {
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9ull;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebull;
    return word ^ (word >> 31);
}

// ---- blocks ----

static __device__ inline u64 first(void) {
    return blockIdx.x * (u64)blockDim.x + threadIdx.x;
}

static __device__ inline u64 stride(void) {
    return (u64)gridDim.x * blockDim.x;
}

// Sum over the block's threads in a fixed tree; every thread gets it.
static __device__ float block_sum(float x, float *shared) {
    u32 i = threadIdx.x;
    shared[i] = x;
    __syncthreads();
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        if (i < half) {
            shared[i] += shared[i + half];
        }
        __syncthreads();
    }
    float sum = shared[0];
    __syncthreads();
    return sum;
}

static __device__ float block_max(float x, float *shared) {
    u32 i = threadIdx.x;
    shared[i] = x;
    __syncthreads();
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        if (i < half) {
            shared[i] = fmaxf(shared[i], shared[i + half]);
        }
        __syncthreads();
    }
    float top = shared[0];
    __syncthreads();
    return top;
}

// The kernels of examples/train, but for its matrix products and the mixing over tokens (mix.cu).
//
// What they are not: general. What each computes, and the arguments' meaning, is beside its
// launcher in examples/train/kernel/.
//
// Invariant: every sum is taken in an order that only the sizes fix; nothing is added atomically.
// So equal inputs give equal bits, whatever else the device is doing.
//
//   act, act_back, fill, adam     a thread a few numbers, over the whole grid
//   norm ... cross_entropy        a block a row
//
// Tensors are bf16; moments and losses are f32, and so is all arithmetic.

#include "common.cuh"

// As in examples/train: shape.rs, kernel/mod.rs, kernel/adam.rs, kernel/tally.rs.
#define VOCABULARY 256
#define EPSILON 1e-6f
#define DECAY_MEAN 0.9f
#define DECAY_SQUARE 0.98f
#define ADAM_EPSILON 1e-9f
#define ODD 0x9e3779b97f4a7c15ull

// Reads a thread has under way.
#define AHEAD 8

// ---- activation ----

KERNEL act(const u16 *__restrict__ u, const u16 *__restrict__ x, u16 *__restrict__ a,
           u16 *__restrict__ y, u64 u_bytes, u64 x_bytes) {
    for (u64 i = first(); i < u_bytes / 16; i += stride()) {
        float at[8];
        unpack8(at, eight_at(u + 8 * i));
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float positive = fmaxf(at[k], 0.0f);
            at[k] = positive * positive;
        }
        *(uint4 *)(a + 8 * i) = pack8(at);
    }
    for (u64 i = first(); i < x_bytes / 16; i += stride()) {
        *(uint4 *)(y + 8 * i) = eight_at(x + 8 * i);
    }
}

KERNEL act_back(u16 *__restrict__ u, u16 *__restrict__ d, u64 bytes) {
    for (u64 i = first(); i < bytes / 16; i += stride()) {
        float at[8], slope[8];
        unpack8(at, eight_at(u + 8 * i));
        unpack8(slope, eight_at(d + 8 * i));
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float positive = fmaxf(at[k], 0.0f);
            at[k] = positive * positive;
            slope[k] *= 2.0f * positive;
        }
        *(uint4 *)(u + 8 * i) = pack8(at);
        *(uint4 *)(d + 8 * i) = pack8(slope);
    }
}

// ---- parameters ----

KERNEL fill(u16 *__restrict__ to, u64 seed, float bound, u64 bytes) {
    for (u64 i = first(); i < bytes / 16; i += stride()) {
        float at[8];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            // 24 bits fit a single-precision number exactly. Zero has no sign, so that zeros are
            // zeros of any width: the moments are f32.
            u32 bits = (u32)(mixed(seed ^ mixed(8 * i + k)) >> 40);
            at[k] = bound * ((float)bits / 8388608.0f - 1.0f) + 0.0f;
        }
        *(uint4 *)(to + 8 * i) = pack8(at);
    }
}

// Rounds up with the probability by which `x` is past the lower neighbour: small steps add up in
// the mean, where rounding to the nearest would lose them all. `chance` has 16 bits.
static __device__ inline u32 narrow_by_chance(float x, u32 chance) {
    return x != x ? 0x7fc0u : (__float_as_uint(x) + chance) >> 16;
}

// Moments are f32. The chance is a function of place and step, so a run can be repeated.
KERNEL adam(const u16 *__restrict__ grads, u16 *__restrict__ weights, float *__restrict__ mean,
            float *__restrict__ square, float rate, float correction, u64 bytes, u64 step) {
    for (u64 i = first(); i < bytes / 8; i += stride()) {
        float g[4], w[4], m[4], v[4];
        unpack4(g, four_at(grads + 4 * i));
        unpack4(w, four_at(weights + 4 * i));
        *(float4 *)m = *(const float4 *)(mean + 4 * i);
        *(float4 *)v = *(const float4 *)(square + 4 * i);
        u64 chance = mixed(i + step * ODD);
        u32 bits[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            m[k] = DECAY_MEAN * m[k] + (1.0f - DECAY_MEAN) * g[k];
            v[k] = DECAY_SQUARE * v[k] + (1.0f - DECAY_SQUARE) * g[k] * g[k];
            float moved = w[k] - rate * m[k] / (sqrtf(v[k] * correction) + ADAM_EPSILON);
            bits[k] = narrow_by_chance(moved, (u32)(chance >> (16 * k)) & 0xffff);
        }
        *(float4 *)(mean + 4 * i) = *(const float4 *)m;
        *(float4 *)(square + 4 * i) = *(const float4 *)v;
        *(uint2 *)(weights + 4 * i) = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
    }
}

// ---- both ends ----

KERNEL embed(const u16 *__restrict__ table, const u8 *__restrict__ tokens, u16 *__restrict__ x,
             u32 hidden, u32 count) {
    for (u32 t = blockIdx.x; t < count; t += gridDim.x) {
        const u16 *from = table + (u64)tokens[t] * hidden;
        u16 *to = x + (u64)t * hidden;
        for (u32 c = 8 * threadIdx.x; c < hidden; c += 8 * THREADS) {
            *(uint4 *)(to + c) = eight_at(from + c);
        }
    }
}

// Tokens a block looks at before it adds up the rows of those that are its own.
#define LOOK (16 * THREADS)

// Lists which of the next LOOK tokens are `byte`, in order; returns how many.
static __device__ u32 list(const u8 *tokens, u32 count, u32 byte, u16 *found, u32 *ends) {
    u32 i = threadIdx.x, from = 16 * i, mine = 0;
    for (u32 k = from; k < from + 16 && k < count; k++) {
        mine += tokens[k] == byte;
    }
    ends[i] = mine;
    __syncthreads();
    for (u32 reach = 1; reach < THREADS; reach *= 2) {
        u32 before = i >= reach ? ends[i - reach] : 0;
        __syncthreads();
        ends[i] += before;
        __syncthreads();
    }
    u32 at = ends[i] - mine;
    for (u32 k = from; k < from + 16 && k < count; k++) {
        if (tokens[k] == byte) {
            found[at++] = (u16)k;
        }
    }
    u32 all = ends[THREADS - 1];
    __syncthreads();
    return all;
}

// Block (byte, strip of channels) sums the rows of all tokens that are the byte, in their order.
KERNEL embed_back(const u16 *__restrict__ d, const u8 *__restrict__ tokens,
                  u16 *__restrict__ table_d, u32 hidden, u32 count) {
    __shared__ u16 found[LOOK];
    __shared__ u32 ends[THREADS];
    u32 byte = blockIdx.x, c = 4 * (blockIdx.y * THREADS + threadIdx.x);
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 base = 0; base < count; base += LOOK) {
        u32 all = list(tokens + base, count - base, byte, found, ends);
        for (u32 at = 0; at < all && c < hidden; at += AHEAD) {
            uint2 raw[AHEAD];
#pragma unroll
            for (u32 k = 0; k < AHEAD; k++) {
                u64 row = base + found[at + k < all ? at + k : at];
                raw[k] = at + k < all ? four_at(d + row * hidden + c) : make_uint2(0, 0);
            }
#pragma unroll
            for (u32 k = 0; k < AHEAD; k++) {
                float more[4];
                unpack4(more, raw[k]);
                for (int n = 0; n < 4; n++) {
                    sum[n] += more[n];
                }
            }
        }
        __syncthreads();
    }
    if (c < hidden) {
        *(uint2 *)(table_d + (u64)byte * hidden + c) = pack4(sum);
    }
}

// Sum of the products of two rows, over the block.
static __device__ float dot(const u16 *a, const u16 *b, u32 hidden, float *shared) {
    float sum = 0.0f;
    for (u32 c = 8 * threadIdx.x; c < hidden; c += 8 * THREADS) {
        float x[8], y[8];
        unpack8(x, eight_at(a + c));
        unpack8(y, eight_at(b + c));
        for (int k = 0; k < 8; k++) {
            sum += x[k] * y[k];
        }
    }
    return block_sum(sum, shared);
}

KERNEL norm(const u16 *__restrict__ x, u16 *__restrict__ n, u32 hidden, u32 count) {
    __shared__ float shared[THREADS];
    for (u32 t = blockIdx.x; t < count; t += gridDim.x) {
        const u16 *from = x + (u64)t * hidden;
        u16 *to = n + (u64)t * hidden;
        float inv = 1.0f / sqrtf(dot(from, from, hidden, shared) / (float)hidden + EPSILON);
        for (u32 c = 8 * threadIdx.x; c < hidden; c += 8 * THREADS) {
            float at[8];
            unpack8(at, eight_at(from + c));
            for (int k = 0; k < 8; k++) {
                at[k] *= inv;
            }
            *(uint4 *)(to + c) = pack8(at);
        }
    }
}

KERNEL norm_back(const u16 *__restrict__ n_d, u16 *__restrict__ x, u32 hidden, u32 count) {
    __shared__ float shared[THREADS];
    for (u32 t = blockIdx.x; t < count; t += gridDim.x) {
        const u16 *slope = n_d + (u64)t * hidden;
        u16 *row = x + (u64)t * hidden;
        float inv = 1.0f / sqrtf(dot(row, row, hidden, shared) / (float)hidden + EPSILON);
        float pull = inv * inv * inv * dot(slope, row, hidden, shared) / (float)hidden;
        for (u32 c = 8 * threadIdx.x; c < hidden; c += 8 * THREADS) {
            float at[8], d[8];
            unpack8(at, eight_at(row + c));
            unpack8(d, eight_at(slope + c));
            for (int k = 0; k < 8; k++) {
                at[k] = inv * d[k] - pull * at[k];
            }
            *(uint4 *)(row + c) = pack8(at);
        }
    }
}

// A thread is a byte of the vocabulary.
KERNEL cross_entropy(u16 *__restrict__ logits, const u8 *__restrict__ tokens,
                     float *__restrict__ losses, u32 count) {
    __shared__ float shared[THREADS];
    float share = 1.0f / (float)count;
    for (u32 t = blockIdx.x; t < count; t += gridDim.x) {
        u16 *at = logits + (u64)t * VOCABULARY + threadIdx.x;
        float logit = wide(*at);
        float top = block_max(logit, shared);
        float part = expf(logit - top);
        float sum = block_sum(part, shared);
        float d = part * (share / sum);
        if (threadIdx.x == tokens[t + 1]) {
            losses[t] = logf(sum) - (logit - top);
            d -= share;
        }
        *at = (u16)(narrow(d) >> 16);
    }
}

// ---- hash ----

// A thread is a part: it takes the words p, p + parts, ... Any number of parts sums up alike.
KERNEL checksum(const u64 *__restrict__ words, u64 *__restrict__ parts, u64 bytes) {
    u64 sum = 0;
    for (u64 i = first(); i < bytes / 8; i += AHEAD * stride()) {
        u64 word[AHEAD];
#pragma unroll
        for (u32 k = 0; k < AHEAD; k++) {
            u64 at = i + k * stride();
            word[k] = at < bytes / 8 ? words[at] : 0;
        }
#pragma unroll
        for (u32 k = 0; k < AHEAD; k++) {
            u64 at = i + k * stride();
            sum += at < bytes / 8 ? mixed(word[k] + (at + 1) * ODD) : 0;
        }
    }
    parts[first()] = sum;
}

// One block. The losses are added up in double precision, in a fixed tree.
KERNEL tally(const u64 *__restrict__ parts, const float *__restrict__ losses,
             u64 *__restrict__ state, u32 parts_count, u32 count) {
    __shared__ u64 hashes[THREADS];
    __shared__ double sums[THREADS];
    u32 i = threadIdx.x;
    u64 hash = 0;
    double sum = 0.0;
    for (u32 k = i; k < parts_count; k += THREADS) {
        hash += parts[k];
    }
    for (u32 k = i; k < count; k += THREADS) {
        sum += (double)losses[k];
    }
    hashes[i] = hash;
    sums[i] = sum;
    __syncthreads();
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        if (i < half) {
            hashes[i] += hashes[i + half];
            sums[i] += sums[i + half];
        }
        __syncthreads();
    }
    if (i == 0) {
        state[0] = mixed(state[0] ^ hashes[0]);
        state[1] = (u64)__double_as_longlong(sums[0] / (double)count);
    }
}

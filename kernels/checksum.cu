// Sums of bytes by their words and places, so that what came back can be compared with what left.
//
// What they are not: a checksum of some standard. src/checksum/kernels.rs says what is added.
//
// Invariant: a sum does not depend on the order in which words are added; a last word that is not
// whole is filled up with zeros.
//
//   sum += mixed(word 0, 0) + mixed(word 1, 1) + ..       modulo 2^64, one addition for each block

#include "common.cuh"

static __device__ inline u64 placed(u64 word, u64 index) {
    u64 x = word ^ ((index + 1) * 0x9e3779b97f4a7c15ull);
    x = (x ^ (x >> 32)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 29)) * 0x94d049bb133111ebull;
    return x ^ (x >> 32);
}

// The word at `at`, of at most eight bytes, the little end first.
static __device__ inline u64 word_at(const u8 *at, u64 bytes) {
    u64 word = 0;
    for (u32 i = 0; i < 8 && i < bytes; i++) {
        word |= (u64)at[i] << (8 * i);
    }
    return word;
}

KERNEL lightering_clear(u64 *sums, u64 bytes) {
    for (u64 i = first(); i < bytes / 8; i += stride()) {
        sums[i] = 0;
    }
}

KERNEL lightering_checksum(const u8 *__restrict__ from, u64 *sum, u64 bytes) {
    __shared__ u64 parts[THREADS];
    u32 me = threadIdx.x;
    u64 words = bytes / 8, mine = 0;
    if (((u64)from & 7) == 0) {
#pragma unroll 4
        for (u64 i = first(); i < words; i += stride()) {
            mine += placed(((const u64 *)from)[i], i);
        }
    } else {
        for (u64 i = first(); i < words; i += stride()) {
            mine += placed(word_at(from + 8 * i, 8), i);
        }
    }
    if (first() == 0 && bytes % 8 > 0) {
        mine += placed(word_at(from + 8 * words, bytes % 8), words);
    }
    parts[me] = mine;
    __syncthreads();
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        if (me < half) {
            parts[me] += parts[me + half];
        }
        __syncthreads();
    }
    if (me == 0) {
        atomicAdd(sum, parts[0]);
    }
}

// The crate's own kernels: a pattern that tells each word's place, and its check.
//
// What they are not: fast paths of anything. Stress tests use them to see a byte that went astray.
//
// Invariant: word i is a function of seed and i alone, and the check counts every word that is not.
//
//   fill_pattern   word[i] = mixed(seed ^ mixed(i))      check_pattern   bad += how many differ

#include "common.cuh"

// The word that belongs at place `i`; of the last one only the bytes that there is room for.
static __device__ inline u64 wanted(u64 seed, u64 i) {
    return mixed(seed ^ mixed(i));
}

KERNEL fill_pattern(u64 *__restrict__ to, u64 seed, u64 bytes) {
    for (u64 i = first(); i < bytes / 8; i += stride()) {
        to[i] = wanted(seed, i);
    }
    if (first() < bytes % 8) {
        u64 at = bytes / 8 * 8 + first();
        ((u8 *)to)[at] = (u8)(wanted(seed, bytes / 8) >> (8 * first()));
    }
}

// The counts are added atomically: integers add up alike in any order.
KERNEL check_pattern(const u64 *__restrict__ from, u64 *__restrict__ bad, u64 seed, u64 bytes) {
    u64 count = 0;
    for (u64 i = first(); i < bytes / 8; i += stride()) {
        count += from[i] != wanted(seed, i);
    }
    if (first() == 0 && bytes % 8 > 0) {
        u64 last = 0;
        for (u64 k = 0; k < bytes % 8; k++) {
            last |= (u64)((const u8 *)from)[bytes / 8 * 8 + k] << (8 * k);
        }
        count += last != (wanted(seed, bytes / 8) & ((1ull << (8 * (bytes % 8))) - 1));
    }
    if (count > 0) {
        atomicAdd(bad, count);
    }
}

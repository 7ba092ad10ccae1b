// What examples/overlap runs next to copies, besides matrix products.
//
// What they are not: useful work.
//
// Invariant: neither needs anything that a copy moves.
//
//   busy   integer arithmetic in registers: as long as its rounds      axpy   as long as its bytes
//   noise  what both of them, and products, begin with

#include "common.cuh"

// Each number goes `rounds` steps of a linear congruential generator further.
KERNEL busy(u32 *__restrict__ numbers, u32 rounds) {
    u64 i = first();
    u32 number = numbers[i];
#pragma unroll 1
    for (u32 round = 0; round < rounds; round++) {
        number = number * 1664525u + 1013904223u;
    }
    numbers[i] = number;
}

// y = a x + y, in f32, 16 bytes a thread.
KERNEL axpy(const float *__restrict__ x, float *__restrict__ y, float a, u64 bytes) {
    for (u64 i = first(); i < bytes / 16; i += stride()) {
        float4 add = ((const float4 *)x)[i], sum = ((const float4 *)y)[i];
        sum.x += a * add.x;
        sum.y += a * add.y;
        sum.z += a * add.z;
        sum.w += a * add.w;
        ((float4 *)y)[i] = sum;
    }
}

// Numbers of either sign between a half and one, whether they are read as bf16 or as f32.
KERNEL noise(u32 *__restrict__ to, u64 bytes) {
    for (u64 i = first(); i < bytes / 4; i += stride()) {
        to[i] = ((u32)mixed(i) & 0x807f807fu) | 0x3f003f00u;
    }
}

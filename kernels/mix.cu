// A layer's norm and its causal mixing over tokens, forward and backward, for examples/train.
//
// What they are not: attention. Each channel sees its own last TAPS tokens. What each computes, and
// the arguments' meaning, is in examples/train/kernel/mix.rs.
//
// Invariant: every sum is taken in an order that only the sizes fix; nothing is added atomically.
// So equal inputs give equal bits, whatever else the device is doing.
//
//   thread: 4 channels, marching over tokens      z: the last TAPS rows, in registers, as a ring
//
// Tensors are bf16, the norms and the partial sums f32; so is all arithmetic.

#include "common.cuh"

// As in examples/train: shape.rs, kernel/mod.rs.
#define TAPS 8
#define TILES 16
#define EPSILON 1e-6f

// Tokens that one block takes.
#define RUN 16

// Four numbers of row `t`, or zeros where there is no such row.
static __device__ inline uint2 four_of_row(const u16 *x, int t, u32 tokens, u32 hidden, u32 c) {
    return 0 <= t && t < (int)tokens ? four_at(x + (u64)t * hidden + c) : make_uint2(0, 0);
}

// One over the root mean square of each row, then mixed[t] = sum over k of w[k] * z[t - k]. A block
// takes RUN tokens; the rows before them belong to others, but their norms are needed here too.
KERNEL norm_mix(const u16 *__restrict__ x, const u16 *__restrict__ w, float *__restrict__ inv,
                u16 *__restrict__ out, u32 tokens, u32 hidden) {
    const u32 span = RUN + TAPS - 1;
    __shared__ float parts[span][33];
    __shared__ float scale[span];
    int start = (int)(blockIdx.x * RUN), before = start - (TAPS - 1);
    u32 lane = threadIdx.x % 32;
    for (u32 j = threadIdx.x / 32; j < span; j += THREADS / 32) {
        int t = before + (int)j;
        float sum = 0.0f;
        if (0 <= t && t < (int)tokens) {
            const u16 *row = x + (u64)t * hidden;
#pragma unroll 4
            for (u32 c = 8 * lane; c < hidden; c += 256) {
                float at[8];
                unpack8(at, eight_at(row + c));
                for (int k = 0; k < 8; k++) {
                    sum += at[k] * at[k];
                }
            }
        }
        parts[j][lane] = sum;
    }
    __syncthreads();
    u32 j = threadIdx.x;
    if (j < span) {
        float sum = 0.0f;
        for (int k = 0; k < 32; k++) {
            sum += parts[j][k];
        }
        scale[j] = 1.0f / sqrtf(sum / (float)hidden + EPSILON);
        if (j >= TAPS - 1 && before + (int)j < (int)tokens) {
            inv[before + (int)j] = scale[j];
        }
    }
    __syncthreads();
    for (u32 c = 4 * threadIdx.x; c < hidden; c += 4 * THREADS) {
        // Row start + r lies in z[r % TAPS].
        float weight[TAPS][4], z[TAPS][4];
#pragma unroll
        for (int k = 0; k < TAPS; k++) {
            unpack4(weight[k], four_at(w + (u64)k * hidden + c));
        }
#pragma unroll
        for (int k = 1; k < TAPS; k++) {
            unpack4(z[k], four_of_row(x, start + k - TAPS, tokens, hidden, c));
            for (int n = 0; n < 4; n++) {
                z[k][n] *= scale[k - 1];
            }
        }
#pragma unroll 1
        for (int base = 0; base < RUN; base += TAPS) {
            uint2 raw[TAPS];
#pragma unroll
            for (int r = 0; r < TAPS; r++) {
                raw[r] = four_of_row(x, start + base + r, tokens, hidden, c);
            }
#pragma unroll
            for (int r = 0; r < TAPS; r++) {
                int t = start + base + r;
                float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                unpack4(z[r], raw[r]);
                for (int n = 0; n < 4; n++) {
                    z[r][n] *= scale[base + r + TAPS - 1];
                }
#pragma unroll
                for (int k = 0; k < TAPS; k++) {
                    for (int n = 0; n < 4; n++) {
                        sum[n] += weight[k][n] * z[(r - k) & (TAPS - 1)][n];
                    }
                }
                if (t < (int)tokens) {
                    *(uint2 *)(out + (u64)t * hidden + c) = pack4(sum);
                }
            }
        }
    }
}

// d[t] += the gradient of row t of mixed, brought back through mixing and norm. The first pass sums
// each row's product with x, the second makes the rows anew and uses it.
KERNEL mix_back(const u16 *__restrict__ x, const u16 *__restrict__ w, const float *__restrict__ inv,
                const u16 *__restrict__ mixed_d, u16 *__restrict__ d, u32 tokens, u32 hidden) {
    __shared__ float parts[RUN][THREADS];
    __shared__ float sums[RUN][17];
    __shared__ float scale[RUN];
    __shared__ float pull[RUN];
    int start = (int)(blockIdx.x * RUN);
    u32 i = threadIdx.x;
    for (int r = 0; r < RUN; r++) {
        parts[r][i] = 0.0f;
    }
    if (i < RUN) {
        scale[i] = start + (int)i < (int)tokens ? inv[start + (int)i] : 0.0f;
    }
    __syncthreads();
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
        for (u32 c = 4 * i; c < hidden; c += 4 * THREADS) {
            // Row start + r lies in later[r % TAPS].
            float weight[TAPS][4], later[TAPS][4];
#pragma unroll
            for (int k = 0; k < TAPS; k++) {
                unpack4(weight[k], four_at(w + (u64)k * hidden + c));
                unpack4(later[k], four_of_row(mixed_d, start + k, tokens, hidden, c));
            }
#pragma unroll 1
            for (int base = 0; base < RUN; base += TAPS) {
                uint2 raw[TAPS], raw_x[TAPS];
#pragma unroll
                for (int r = 0; r < TAPS; r++) {
                    int t = start + base + r;
                    raw[r] = four_of_row(mixed_d, t + TAPS, tokens, hidden, c);
                    raw_x[r] = four_of_row(x, t, tokens, hidden, c);
                }
#pragma unroll
                for (int r = 0; r < TAPS; r++) {
                    int t = start + base + r;
                    float z_d[4] = {0.0f, 0.0f, 0.0f, 0.0f}, at[4], sum[4];
#pragma unroll
                    for (int k = 0; k < TAPS; k++) {
                        for (int n = 0; n < 4; n++) {
                            z_d[n] += weight[k][n] * later[(r + k) & (TAPS - 1)][n];
                        }
                    }
                    unpack4(later[r], raw[r]);
                    unpack4(at, raw_x[r]);
                    if (pass == 0) {
                        for (int n = 0; n < 4; n++) {
                            parts[base + r][i] += z_d[n] * at[n];
                        }
                    } else if (t < (int)tokens) {
                        uint2 *to = (uint2 *)(d + (u64)t * hidden + c);
                        unpack4(sum, *to);
                        for (int n = 0; n < 4; n++) {
                            sum[n] += scale[base + r] * z_d[n] - pull[base + r] * at[n];
                        }
                        *to = pack4(sum);
                    }
                }
            }
        }
        if (pass == 0) {
            __syncthreads();
            float sum = 0.0f;
            for (int k = 0; k < 16; k++) {
                sum += parts[i / 16][i % 16 + 16 * k];
            }
            sums[i / 16][i % 16] = sum;
            __syncthreads();
            if (i < RUN) {
                float all = 0.0f;
                for (int k = 0; k < 16; k++) {
                    all += sums[i][k];
                }
                pull[i] = scale[i] * scale[i] * scale[i] * all / (float)hidden;
            }
            __syncthreads();
        }
    }
}

// The weights' gradient over one of TILES runs of tokens: blockIdx.y says which.
KERNEL mix_grad(const u16 *__restrict__ x, const float *__restrict__ inv,
                const u16 *__restrict__ mixed_d, float *__restrict__ partials, u32 tokens,
                u32 hidden) {
    u32 tile = blockIdx.y, each = (tokens + TILES - 1) / TILES;
    int start = (int)min(tile * each, tokens), end = (int)min((tile + 1) * each, tokens);
    for (u32 c = 4 * (u32)first(); c < hidden; c += 4 * (u32)stride()) {
        // Row start + r lies in z[r % TAPS].
        float sum[TAPS][4], z[TAPS][4];
#pragma unroll
        for (int k = 0; k < TAPS; k++) {
            int t = start + k - TAPS;
            float scale = k > 0 && t >= 0 ? inv[t] : 0.0f;
            unpack4(z[k], four_of_row(x, t, tokens, hidden, c));
            for (int n = 0; n < 4; n++) {
                z[k][n] *= scale;
                sum[k][n] = 0.0f;
            }
        }
#pragma unroll 1
        for (int base = start; base < end; base += TAPS) {
            uint2 raw[TAPS], raw_d[TAPS];
            float scale[TAPS];
#pragma unroll
            for (int r = 0; r < TAPS; r++) {
                raw[r] = four_of_row(x, base + r, end, hidden, c);
                raw_d[r] = four_of_row(mixed_d, base + r, end, hidden, c);
                scale[r] = base + r < end ? inv[base + r] : 0.0f;
            }
#pragma unroll
            for (int r = 0; r < TAPS; r++) {
                float d[4];
                unpack4(d, raw_d[r]);
                unpack4(z[r], raw[r]);
                for (int n = 0; n < 4; n++) {
                    z[r][n] *= scale[r];
                }
#pragma unroll
                for (int k = 0; k < TAPS; k++) {
                    for (int n = 0; n < 4; n++) {
                        sum[k][n] += d[n] * z[(r - k) & (TAPS - 1)][n];
                    }
                }
            }
        }
#pragma unroll
        for (int k = 0; k < TAPS; k++) {
            float *to = partials + ((u64)tile * TAPS + k) * hidden + c;
            *(float4 *)to = make_float4(sum[k][0], sum[k][1], sum[k][2], sum[k][3]);
        }
    }
}

KERNEL mix_sum(const float *__restrict__ partials, u16 *__restrict__ grads, u32 width, u32 layers) {
    for (u64 i = first(); i < (u64)layers * width; i += stride()) {
        const float *at = partials + i / width * TILES * width + i % width;
        float sum = 0.0f;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            sum += at[(u64)tile * width];
        }
        grads[i] = (u16)(narrow(sum) >> 16);
    }
}

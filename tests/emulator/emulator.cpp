// Runs the blocks of a kernel one after the other, each thread of a block as a fiber.
//
// What it is not: reentrant. The caller runs one kernel at a time.
//
// Invariant: between two barriers every thread runs, in ascending or in descending order; a barrier
// that some threads reach and others do not is an error.

#include "emulator.h"

#include <csetjmp>
#include <cstdlib>
#include <ucontext.h>

Index threadIdx, blockIdx, blockDim, gridDim;

typedef unsigned long long u64;
// A caller that passes more integers than there are parameters, or more floats, does no harm: on
// the systems this runs on each kind has registers of its own.
typedef void (*Entry)(u64, u64, u64, u64, u64, u64, u64, u64, float, float, float, float);

static const unsigned THREADS_MAX = 1024;
static const size_t STACK_BYTES = 64 * 1024;

struct Fiber {
    jmp_buf at;
    bool done;
    // Made when it is first needed; then the fiber lives on and runs one thread after the other.
    char *stack;
};

static Fiber fibers[THREADS_MAX];
static jmp_buf scheduler;
static unsigned current;
static ucontext_t home;
static Entry entry;
static const u64 *integers;
static const float *floats;

// Back to who resumed the current thread, until that is resumed again.
static void yield() {
    if (_setjmp(fibers[current].at) == 0) {
        _longjmp(scheduler, 1);
    }
}

static void body() {
    for (;;) {
        entry(integers[0], integers[1], integers[2], integers[3], integers[4], integers[5],
              integers[6], integers[7], floats[0], floats[1], floats[2], floats[3]);
        fibers[current].done = true;
        yield();
    }
}

void __syncthreads() {
    yield();
}

// Runs a thread until its next barrier or its end. False where there is no memory for its stack.
static bool resume(unsigned thread) {
    Fiber &fiber = fibers[thread];
    current = thread;
    threadIdx = {thread, 0, 0};
    if (_setjmp(scheduler) != 0) {
        return true;
    }
    if (fiber.stack != nullptr) {
        _longjmp(fiber.at, 1);
    }
    fiber.stack = (char *)malloc(STACK_BYTES);
    if (fiber.stack == nullptr) {
        return false;
    }
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = &home;
    makecontext(&context, body, 0);
    setcontext(&context);
    return false;
}

// Threads that wait for good would wake up in the next kernel: none is run any more.
static const char *broken;

static const char *run_block(unsigned threads, bool descending) {
    for (unsigned i = 0; i < threads; i++) {
        fibers[i].done = false;
    }
    for (;;) {
        unsigned done = 0;
        for (unsigned i = 0; i < threads; i++) {
            unsigned thread = descending ? threads - 1 - i : i;
            if (!resume(thread)) {
                return "out of memory";
            }
            done += fibers[thread].done;
        }
        if (done == threads) {
            return nullptr;
        }
        if (done > 0) {
            return broken = "some threads ended while others wait at a barrier";
        }
    }
}

// `grid` is blocks in x and y, and threads. Returns null, or what went wrong.
extern "C" const char *emulate(void *kernel, const unsigned *grid, const u64 *given_integers,
                               const float *given_floats, int descending) {
    if (broken != nullptr) {
        return broken;
    }
    if (grid[2] > THREADS_MAX) {
        return "too many threads in a block";
    }
    entry = (Entry)kernel;
    integers = given_integers;
    floats = given_floats;
    gridDim = {grid[0], grid[1], 1};
    blockDim = {grid[2], 1, 1};
    unsigned blocks = grid[0] * grid[1];
    for (unsigned i = 0; i < blocks; i++) {
        unsigned block = descending ? blocks - 1 - i : i;
        blockIdx = {block % grid[0], block / grid[0], 0};
        const char *wrong = run_block(grid[2], descending != 0);
        if (wrong != nullptr) {
            return wrong;
        }
    }
    return nullptr;
}

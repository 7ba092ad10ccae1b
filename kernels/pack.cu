// Many small ranges to one, and back: what a copy engine would need a start for each.
//
// What they are not: a copy engine. They run where the device computes, behind what runs there.
//
// Invariant: each item is moved by one team of threads, so no two write one byte; nothing outside
// of the items is read or written. Any address will do; 16 bytes at a time where both have them.
//
//   table   from/to, offset, bytes | from/to, offset, bytes | ...       three words an item
//   pack    [offset] in the block  <-  the item's bytes                 unpack   the other way

#include "common.cuh"

#define TEAM 128
#define BATCH 4

// The loads of a batch are all under way before its first store: the compiler, to whom both might
// be the same bytes, lets none pass a store.
template <typename Word>
static __device__ inline u64 move_words(u8 *to, const u8 *from, u64 bytes, u32 me) {
    const Word *source = (const Word *)from;
    Word *target = (Word *)to;
    u64 count = bytes / sizeof(Word);
#pragma unroll 1
    for (u64 i = me; i < count; i += BATCH * TEAM) {
        Word words[BATCH];
#pragma unroll
        for (u32 k = 0; k < BATCH; ++k) {
            if (i + k * TEAM < count) {
                words[k] = source[i + k * TEAM];
            }
        }
#pragma unroll
        for (u32 k = 0; k < BATCH; ++k) {
            if (i + k * TEAM < count) {
                target[i + k * TEAM] = words[k];
            }
        }
    }
    return count * sizeof(Word);
}

static __device__ inline void move_item(u8 *to, const u8 *from, u64 bytes, u32 me) {
    u64 both = (u64)to | (u64)from, done = 0;
    if ((both & 15) == 0) {
        done = move_words<uint4>(to, from, bytes, me);
    } else if ((both & 3) == 0) {
        done = move_words<u32>(to, from, bytes, me);
    }
#pragma unroll 1
    for (u64 i = done + me; i < bytes; i += TEAM) {
        to[i] = from[i];
    }
}

// The next item's words are asked for before this item is moved: the table may lie in host memory,
// a microsecond away.
struct Item {
    u64 at, offset, bytes;
};

static __device__ inline Item item_at(const u64 *table, u64 i, u64 count) {
    Item item = {0, 0, 0};
    if (i < count) {
        item = {table[3 * i], table[3 * i + 1], table[3 * i + 2]};
    }
    return item;
}

KERNEL lightering_pack(const u64 *__restrict__ table, u8 *block, u64 count) {
    u32 me = threadIdx.x % TEAM;
    u64 i = first() / TEAM, teams = stride() / TEAM;
    for (Item item = item_at(table, i, count); i < count; i += teams) {
        Item next = item_at(table, i + teams, count);
        move_item(block + item.offset, (const u8 *)item.at, item.bytes, me);
        item = next;
    }
}

KERNEL lightering_unpack(const u64 *__restrict__ table, const u8 *block, u64 count) {
    u32 me = threadIdx.x % TEAM;
    u64 i = first() / TEAM, teams = stride() / TEAM;
    for (Item item = item_at(table, i, count); i < count; i += teams) {
        Item next = item_at(table, i + teams, count);
        move_item((u8 *)item.at, block + item.offset, item.bytes, me);
        item = next;
    }
}

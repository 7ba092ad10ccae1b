//! Many small or strided device ranges as one run of bytes: which, where each lies, the kernels.
//!
//! What it is not: it enqueues nothing by itself and waits for nothing.
//!
//! Invariant: no byte is in two items, and each item lies in the allocation it was said to lie in;
//! both are checked before anything is enqueued. Items lie at multiples of 16 bytes in the block.
//!
//! ```text
//!   strips   [row] [row] [row]   [====]   [=]          rows at a stride, or whole ranges
//!   block    [row|row|row|====|=]                      a table says what lies where
//! ```
//!
//! The engine uses it.

use crate::backend::{Arg, Cost, Grid, HostArgs, Kernel, Work};
use crate::error::{Error, Misuse, Result};
use crate::trace::Access;
use crate::unit::{Bytes, DeviceRange, PinnedRange};

const PTX: &str = include_str!("../kernels/ptx/pack.ptx");
const OP: &str = "pack";

/// Gathers: `[Pinned(Read, table), Pinned(Write, block), U64(count), Reached(Read, item)...]`.
pub static PACK: Kernel =
    Kernel { name: "lightering_pack", ptx: Some(PTX), host: Some(pack_host), cost: cost_of_link };

/// Scatters: `[Pinned(Read, table), Read(block), U64(count), Reached(Write, item)...]`.
pub static UNPACK: Kernel = Kernel {
    name: "lightering_unpack",
    ptx: Some(PTX),
    host: Some(unpack_host),
    cost: Cost::of_bytes,
};

/// Bytes of an item's entry in the table: its device address, its place in the block, its length.
pub const ENTRY_BYTES: Bytes = Bytes(24);
/// The most items of one batch.
pub const ITEMS_MAX: usize = 1 << 16;
/// Larger ranges are several items, so that several teams of threads move them.
const ITEM_BYTES_MAX: u64 = 64 << 10;
const ALIGNMENT: u64 = 16;
/// Threads of a block, as the kernels are built for.
const THREADS: u32 = 256;
/// How many times faster than its link a device's memory is, about: what a kernel writes to pinned
/// memory takes the simulated device so much longer.
const LINK_SLOWNESS: f64 = 75.0;

/// Device bytes of one shape: rows of equal length at equal distances, in one allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strip {
    first: DeviceRange,
    rows: u64,
    stride: u64,
}

impl Strip {
    /// A whole range.
    ///
    /// # Errors
    /// `Usage(Empty)` for one without bytes.
    pub fn whole(range: DeviceRange) -> Result<Strip> {
        Strip::rows(range, Bytes::ZERO, range.len(), 1, Bytes::ZERO)
    }

    /// `rows` rows of `row` bytes, the first one `offset` bytes into the allocation `within`, each
    /// further one `stride` bytes behind the one before. With a stride of zero all rows are one: it
    /// moves once.
    ///
    /// # Errors
    /// `Usage(Empty)` where no bytes are meant; `Usage(Overlap)` where rows share bytes without
    /// being one; `Usage(OutOfRange)` where they leave the allocation, or wrap.
    pub fn rows(
        within: DeviceRange,
        offset: Bytes,
        row: Bytes,
        rows: u64,
        stride: Bytes,
    ) -> Result<Strip> {
        if row.is_zero() || rows == 0 {
            return Err(Error::usage(Misuse::Empty, OP));
        }
        let rows = if stride.is_zero() { 1 } else { rows };
        if rows > 1 && stride < row {
            return Err(Error::usage(Misuse::Overlap, OP)
                .detail(format!("rows of {row} at a stride of {stride}")));
        }
        let span = stride.0.checked_mul(rows - 1).and_then(|to| to.checked_add(row.0));
        let outside = || Error::usage(Misuse::OutOfRange, OP).bytes(within.len());
        within.part(offset, Bytes(span.ok_or_else(outside)?))?;
        Ok(Strip { first: within.part(offset, row)?, rows, stride: stride.0 })
    }

    /// Bytes that move.
    pub fn bytes(&self) -> Bytes {
        // It lies in an allocation, so the product fits.
        Bytes(self.first.len().0 * self.rows)
    }

    fn ranges(self) -> impl Iterator<Item = Result<DeviceRange>> {
        (0..self.rows).map(move |row| {
            let at = self.first.at().offset(Bytes(row * self.stride))?;
            DeviceRange::new(at, self.first.len())
        })
    }
}

/// A piece of a batch: device bytes, and where they lie in the block, or in a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// On the device.
    pub range: DeviceRange,
    /// From the block's, or the part's, start.
    pub offset: u64,
}

/// Items that lie in one registration of the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Bytes of the block.
    pub pinned: PinnedRange,
    /// Its first item among those of [`Layout::cut`].
    pub first: usize,
    /// How many.
    pub count: usize,
}

/// Where the bytes of some strips lie in a block. Kept for its room.
#[derive(Debug, Default)]
pub struct Layout {
    items: Vec<Item>,
    /// First and last address of every row, for the check that none overlap.
    spans: Vec<(u64, u64)>,
    /// What two batches of the same layout have in common.
    shape: u64,
}

impl Layout {
    /// Lays the strips out; returns the block's length.
    ///
    /// # Errors
    /// `Usage(Empty)` for no strips; `Usage(Overlap)` where two share bytes; `Usage(TooLarge)` for
    /// more than [`ITEMS_MAX`] items.
    pub fn plan(&mut self, strips: &[Strip]) -> Result<Bytes> {
        self.items.clear();
        self.spans.clear();
        self.shape = 0;
        let mut offset = 0u64;
        for range in strips.iter().flat_map(|strip| strip.ranges()) {
            let range = range?;
            self.spans.push((range.at().0, range.end()));
            // The lengths in their order, mixed; 64 bits of them tell layouts apart.
            self.shape = (self.shape ^ range.len().0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            self.shape ^= self.shape >> 29;
            let mut done = 0;
            while done < range.len().0 {
                let len = (range.len().0 - done).min(ITEM_BYTES_MAX);
                let item = Item { range: range.part(Bytes(done), Bytes(len))?, offset };
                if self.items.len() == ITEMS_MAX {
                    return Err(Error::usage(Misuse::TooLarge, OP)
                        .detail(format!("more than {ITEMS_MAX} items in one batch")));
                }
                self.items.push(item);
                done += len;
                offset += len;
            }
            offset = offset.next_multiple_of(ALIGNMENT);
        }
        if self.items.is_empty() {
            return Err(Error::usage(Misuse::Empty, OP));
        }
        self.spans.sort_unstable();
        if let Some(pair) = self.spans.windows(2).find(|pair| pair[0].1 > pair[1].0) {
            return Err(Error::usage(Misuse::Overlap, OP)
                .detail(format!("the bytes at {:#x} are in two strips", pair[1].0)));
        }
        Ok(Bytes(offset))
    }

    /// Rows of all strips.
    pub fn rows(&self) -> usize {
        self.spans.len()
    }

    /// The items, in the block's order.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// Equal for strips whose rows have equal lengths in the same order.
    pub fn shape(&self) -> u64 {
        self.shape
    }

    /// The device bytes that move.
    pub fn bytes(&self) -> Bytes {
        self.items.iter().map(|item| item.range.len()).sum()
    }

    /// Cuts the items where the block's registrations end. `pinned` are the block's parts in order.
    ///
    /// # Errors
    /// Those of [`DeviceRange::part`].
    pub fn cut(
        &self,
        pinned: &[PinnedRange],
        cut: &mut Vec<Item>,
        parts: &mut Vec<Part>,
    ) -> Result<()> {
        cut.clear();
        parts.clear();
        let (mut start, mut at) = (0u64, 0);
        let mut begun = 0u64;
        for pinned in pinned {
            let (end, first) = (start + pinned.len().0, cut.len());
            while let Some(item) = self.items.get(at) {
                let from = item.offset + begun;
                if from >= end {
                    break;
                }
                let left = item.range.len().0 - begun;
                let len = left.min(end - from);
                let range = item.range.part(Bytes(begun), Bytes(len))?;
                cut.push(Item { range, offset: from - start });
                (at, begun) = if len == left { (at + 1, 0) } else { (at, begun + len) };
            }
            if cut.len() > first {
                parts.push(Part { pinned: *pinned, first, count: cut.len() - first });
            }
            start = end;
        }
        Ok(())
    }
}

/// The table's bytes for some items.
pub fn table(items: &[Item], bytes: &mut Vec<u8>) {
    bytes.clear();
    for item in items {
        for word in [item.range.at().0, item.offset, item.range.len().0] {
            bytes.extend(word.to_le_bytes());
        }
    }
}

/// The arguments of a kernel over some items, whose table lies at `table`.
pub fn args(table: PinnedRange, block: Arg, items: &[Item], access: Access, args: &mut Vec<Arg>) {
    args.clear();
    args.extend([Arg::Pinned(Access::Read, table), block, Arg::U64(items.len() as u64)]);
    args.extend(items.iter().map(|item| Arg::Reached(access, item.range)));
}

/// As many threads as `count` items keep busy, in at most `blocks_max` blocks.
pub fn grid(count: usize, blocks_max: u32) -> Grid {
    let blocks = u32::try_from(count.div_ceil(2)).unwrap_or(u32::MAX);
    Grid::row(blocks.clamp(1, blocks_max.max(1)), THREADS)
}

fn cost_of_link(grid: &Grid, args: &[Arg]) -> Cost {
    let Cost { bytes, .. } = Cost::of_bytes(grid, args);
    Cost { flops: 0.0, bytes: bytes * LINK_SLOWNESS, work: Work::Vector }
}

/// Where the `index`th item lies in the block.
fn entry(args: &HostArgs<'_>, index: usize) -> Result<(usize, usize)> {
    let words = args.read::<u64>(0)?;
    let of = |nth: usize| {
        words.get(3 * index + nth).copied().and_then(|word| usize::try_from(word).ok())
    };
    of(1).zip(of(2)).ok_or_else(|| Error::usage(Misuse::BadKernel, OP).detail("a table too short"))
}

fn bad() -> Error {
    Error::usage(Misuse::BadKernel, OP).detail("an item that is not in its block")
}

fn pack_host(_: &Grid, args: &mut HostArgs<'_>) -> Result<()> {
    let count = args.u64(2)? as usize;
    let block = args.write::<u8>(1)?;
    for index in 0..count {
        let (offset, len) = entry(args, index)?;
        let from = args.read::<u8>(3 + index)?;
        let to = block.get_mut(offset..).and_then(|rest| rest.get_mut(..len)).ok_or_else(bad)?;
        to.copy_from_slice(from.get(..len).ok_or_else(bad)?);
    }
    Ok(())
}

fn unpack_host(_: &Grid, args: &mut HostArgs<'_>) -> Result<()> {
    let count = args.u64(2)? as usize;
    let block = args.read::<u8>(1)?;
    for index in 0..count {
        let (offset, len) = entry(args, index)?;
        let from = block.get(offset..).and_then(|rest| rest.get(..len)).ok_or_else(bad)?;
        let to = args.write::<u8>(3 + index)?;
        to.get_mut(..len).ok_or_else(bad)?.copy_from_slice(from);
    }
    Ok(())
}

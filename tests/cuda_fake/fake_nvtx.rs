//! What a fake driver has besides: copies in batches, and the functions of NVTX, as if it were that
//! library, too.
//!
//! What it is not: a profiler. It writes ranges down among the driver's calls.
//!
//! Invariant: as the driver's functions, each takes the one lock.
//!
//! ```text
//!   nvtxRangePushA("evict x") -> log "begin:evict_x"      nvtxRangePop() -> log "end"
//! ```
//!
//! `fake_libcuda.rs` uses it.

use crate::fake_args::*;
use crate::fake_state::*;

impl State {
    /// Copies of one batch, each between page-locked memory and the device.
    pub(crate) fn batch(
        &mut self,
        [to, from]: [At<u64>; 2],
        sizes: At<usize>,
        count: usize,
        attributes: At<u32>,
        kinds: [usize; 2],
        stream: u64,
    ) -> Result<(), u32> {
        self.stream(stream)?;
        // One kind of copies, from the first one on, without flags; both hints unused. The legacy
        // stream is refused.
        let words = [0, 1, 2, 3, 4, 5].map(|index| attributes.get(index));
        if kinds != [0, 1] || words[1..] != [0; 5] || count == 0 || stream <= 1 {
            return Err(INVALID_VALUE);
        }
        // 1 is the order of the stream.
        assert_eq!(words[0], 1, "sources may be read before the stream gets there");
        for index in 0..count {
            let (to, from, len) = (to.get(index), from.get(index), sizes.get(index));
            self.copy(to, from, len).or_else(|_| self.copy(from, to, len))?;
            At::device(to).copy(At::device(from), len);
        }
        Ok(())
    }
}

export! {
    /// A range of the thread's; less than 0 where no tool listens.
    nvtxRangePushA, (text: Text) -> i32 {
        let state = &mut *state();
        if state.script().tool == 0 {
            return -2;
        }
        let text = text.read();
        state.log.push(format!("begin:{}", text.replace(' ', "_")));
        state.marks.push(text);
        state.marks.len() as i32 - 1
    }
}

export! {
    nvtxRangePop, () -> i32 {
        let state = &mut *state();
        state.log.push("end".to_owned());
        match state.marks.pop() {
            Some(_) => state.marks.len() as i32,
            None => -2,
        }
    }
}

export! {
    /// A range of the process's.
    nvtxRangeStartA, (text: Text) -> u64 {
        let state = &mut *state();
        let number = state.handle();
        state.log.push(format!("start:{}:{number:x}", text.read().replace(' ', "_")));
        number
    }
}

export! {
    nvtxRangeEnd, (number: u64) -> () {
        state().log.push(format!("stop:{number:x}"));
    }
}

//! Counts what several users of one device take of its memory together.
//!
//! What it is not: it changes no request and no answer.
//!
//! Invariant: the count is that of the requests made until now, not of the device's progress: bytes
//! given back in a stream's order count as given back at once.
//!
//! ```text
//!   model  -> Metered -> backend --.
//!                 |                +-- one device         taken: now, most ever
//!   engine -> Metered -> backend --'
//! ```
//!
//! `device` puts it around every backend it opens. A backend counts its own user's bytes alone, and
//! the sum of two users' peaks is no peak: hence this.

use crate::passing::pass_on;
use lightering::backend::{About, Arg, Backend, Fence, Grid, Kernel, Memory, Pinner, Timing};
use lightering::trace::{Actor, Site, Use};
use lightering::{Bytes, DevicePtr, DeviceRange, EventId, PinnedRange, Result, StreamId};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Device bytes taken by all users that share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meter(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    taken: AtomicU64,
    peak: AtomicU64,
}

impl Meter {
    /// Taken now.
    pub(crate) fn taken(&self) -> Bytes {
        Bytes(self.0.taken.load(Ordering::Relaxed))
    }

    /// The most ever taken at once.
    pub(crate) fn peak(&self) -> Bytes {
        Bytes(self.0.peak.load(Ordering::Relaxed))
    }

    fn took(&self, len: Bytes) {
        let before = self.0.taken.fetch_add(len.0, Ordering::Relaxed);
        self.0.peak.fetch_max(before + len.0, Ordering::Relaxed);
    }

    fn gave(&self, len: Bytes) {
        self.0.taken.fetch_sub(len.0, Ordering::Relaxed);
    }
}

/// One user's backend whose allocations a meter counts.
pub(crate) struct Metered {
    inner: Box<dyn Backend>,
    meter: Meter,
    /// What is taken: how much, and on which stream.
    taken: HashMap<DevicePtr, (Bytes, StreamId)>,
}

impl Metered {
    pub(crate) fn new(inner: Box<dyn Backend>, meter: Meter) -> Metered {
        Metered { inner, meter, taken: HashMap::new() }
    }
}

impl Backend for Metered {
    fn alloc_device(&mut self, len: Bytes, on: StreamId) -> Result<DevicePtr> {
        let at = self.inner.alloc_device(len, on)?;
        self.taken.insert(at, (len, on));
        self.meter.took(len);
        Ok(at)
    }

    fn free_device(&mut self, at: DevicePtr, on: StreamId) -> Result<()> {
        self.inner.free_device(at, on)?;
        if let Some((len, _)) = self.taken.remove(&at) {
            self.meter.gave(len);
        }
        Ok(())
    }

    pass_on!(launch);
    pass_on!(rest);
}

impl Drop for Metered {
    /// Gives back what its user did not, because it failed on the way: the next mode needs it.
    fn drop(&mut self) {
        for (at, (len, on)) in self.taken.drain() {
            if self.inner.free_device(at, on).is_ok() {
                self.meter.gave(len);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lightering::backend::sim::{Config, World};

    #[test]
    fn two_users_bytes_are_counted_together() {
        let (world, meter) = (World::new(Config::default()), Meter::default());
        let mut users: Vec<(Metered, StreamId)> = (0..2)
            .map(|_| {
                let sim = world.device(0).unwrap();
                let mut user = Metered::new(Box::new(sim), meter.clone());
                let stream = user.create_stream().unwrap();
                (user, stream)
            })
            .collect();
        let take = |(user, on): &mut (Metered, StreamId)| user.alloc_device(Bytes(1024), *on);
        let a = take(&mut users[0]).unwrap();
        let b = take(&mut users[1]).unwrap();
        assert_eq!((meter.taken(), meter.peak()), (Bytes(2048), Bytes(2048)));
        let (user, on) = &mut users[0];
        user.free_device(a, *on).unwrap();
        assert!(user.free_device(a, *on).is_err(), "gave back twice");
        assert_eq!((meter.taken(), meter.peak()), (Bytes(1024), Bytes(2048)));
        let (user, on) = &mut users[1];
        user.free_device(b, *on).unwrap();
        assert_eq!(meter.taken(), Bytes::ZERO);
    }

    #[test]
    fn a_user_that_failed_leaves_no_byte_taken() {
        let (world, meter) = (World::new(Config::default()), Meter::default());
        let mut user = Metered::new(Box::new(world.device(0).unwrap()), meter.clone());
        let on = user.create_stream().unwrap();
        user.alloc_device(Bytes(4096), on).unwrap();
        drop(user);
        assert_eq!(meter.taken(), Bytes::ZERO);
        let memory = world.device(0).unwrap().memory().unwrap();
        assert_eq!(memory.free, memory.total);
    }
}

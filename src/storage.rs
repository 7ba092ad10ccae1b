//! One storage: device bytes that can be resized to zero and refilled. Its states and what they
//! allow.
//!
//! What it is not: it enqueues nothing. The engine asks the driver; this says what may be asked.
//!
//! Invariant: the table below, and nothing else. `Resident` is a promise to the streams in
//! `readers`: each of them has been ordered behind `ready`.
//!
//! | from | to | by |
//! |---|---|---|
//! | Resident | Evicting | `evict` |
//! | Evicting | Resident | submit failed; or wanted again before the bytes went |
//! | Evicting | Evicted(Host) | the bytes went |
//! | Evicting, bytes gone | Refilling | `refill`: chained behind the copy-out on the device |
//! | Evicted(Host) | Evicted(Disk) | written and verified |
//! | Evicted(Disk) | Evicted(Host) | read and verified |
//! | Evicted | Refilling | `refill`, `prefetch` |
//! | Refilling | Evicted(Host) | prefetch cancelled, target refused, out of memory |
//! | Refilling | Resident | the reader's wait is enqueued |
//! | any | Lost | the device is lost; a checksum failed |
//!
//! A clean host copy makes `evict` pass through Evicting without a copy: there is nothing to move.
//! "The bytes went" while the copy-out still runs is the normal case: a stream was told to wait for
//! it, so the state is Evicted(Host) for whoever asks, and `out` keeps the edge E4 for a refill.
//!
//! ```text
//!              evict             bytes went              refill             wait enqueued
//!   Resident --------> Evicting -----------> Evicted ------------> Refilling -----------> Resident
//!       ^-----------------'  wanted again        ^--------------------'  cancelled
//! ```
//!
//! Policy, prefetch and the engine use it.

use crate::checksum::{Sum, Way};
use crate::copy::End;
use crate::error::{Error, Kind, Misuse, Result};
use crate::handles::Fixed;
use crate::pinned::Block;
use crate::stream::Point;
use crate::unit::{Bytes, DeviceRange, Name, StorageId, StreamId};
use crossbeam_channel::Sender;

/// Where bytes can be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// The device's own memory.
    Device,
    /// Page-locked host memory.
    Host,
    /// A spill file.
    Disk,
}

/// Where a storage's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Residency {
    /// On the device, for the streams that acquired them.
    Resident,
    /// Being copied out; still on the device.
    Evicting,
    /// Not on the device.
    Evicted(Tier),
    /// Being copied in; no stream may read them yet.
    Refilling,
    /// Gone: the device was lost, or what came back was not what left.
    Lost,
}

impl Residency {
    /// Every state.
    pub const ALL: [Residency; 6] = [
        Residency::Resident,
        Residency::Evicting,
        Residency::Evicted(Tier::Host),
        Residency::Evicted(Tier::Disk),
        Residency::Refilling,
        Residency::Lost,
    ];

    /// Does the table allow this step?
    pub fn may_become(self, next: Residency) -> bool {
        use Residency::{Evicted, Evicting, Lost, Refilling, Resident};
        matches!(
            (self, next),
            (Resident, Evicting)
                | (Evicting, Resident | Evicted(Tier::Host))
                | (Evicted(Tier::Host), Evicted(Tier::Disk) | Refilling)
                | (Evicted(Tier::Disk), Evicted(Tier::Host) | Refilling)
                | (Refilling, Evicted(Tier::Host) | Resident)
                | (_, Lost)
        )
    }

    /// Are there device bytes?
    pub fn is_on_device(self) -> bool {
        matches!(self, Residency::Resident | Residency::Evicting | Residency::Refilling)
    }
}

/// Who owns the device bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// The engine allocates and frees them.
    Engine,
    /// A framework does; the engine says when.
    Framework,
    /// The engine maps and unmaps them, at an address that stays.
    Fixed,
}

/// A set of the streams an engine has seen, by their number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamSet(u64);

impl StreamSet {
    /// The most streams a set can name.
    pub const STREAMS_MAX: usize = 64;

    /// The set of one stream.
    pub fn only(index: usize) -> StreamSet {
        let mut set = StreamSet::default();
        set.insert(index);
        set
    }

    /// Adds a stream.
    pub fn insert(&mut self, index: usize) {
        assert!(index < StreamSet::STREAMS_MAX, "the engine numbers at most 64 streams");
        self.0 |= 1 << index;
    }

    /// Is there no stream in it?
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Is the stream in it?
    pub fn has(self, index: usize) -> bool {
        index < StreamSet::STREAMS_MAX && self.0 & (1 << index) != 0
    }

    /// The streams in it, without `index`.
    pub fn without(self, index: usize) -> StreamSet {
        StreamSet(self.0 & !StreamSet::only(index).0)
    }

    /// The streams in it, by number.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..StreamSet::STREAMS_MAX).filter(move |index| self.has(*index))
    }
}

/// Which lane a copy-in was put on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Inward {
    /// That of copies which nobody waits for yet, or whose readers wait for all in front of them.
    Ahead,
    /// That of copies which a reader waits for, and which must not wait for others.
    Urgent,
}

impl Inward {
    /// Whose slots its sums use.
    pub fn way(self) -> Way {
        match self {
            Inward::Ahead => Way::Ahead,
            Inward::Urgent => Way::Urgent,
        }
    }
}

/// A build of the tests with `LIGHTERING_CANARY` set takes the older of two copies for a block's
/// last, to see that the tests find such a slip. No release build does.
const HAS_PLANTED_FAULT: bool =
    cfg!(debug_assertions) && option_env!("LIGHTERING_CANARY").is_some();

/// What the engine keeps of one storage.
#[derive(Debug)]
pub struct Slot {
    /// Its name.
    pub name: Name,
    /// How many bytes it has, wherever they are.
    pub len: Bytes,
    /// Who owns the device bytes.
    pub owner: Owner,
    /// The device bytes, while there are any.
    pub range: Option<DeviceRange>,
    /// Where the address stays: it, and what is mapped there.
    pub fixed: Option<Fixed>,
    /// The host copy; current unless a copy-out into it failed, in which case there is none.
    pub block: Option<Block>,
    /// What the bytes in the block add up to, where that is known or will be.
    pub sum: Option<Sum>,
    /// End of the copy-out that fills the block, until it is known done.
    pub out: Option<End>,
    /// That copy-out read the device bytes there are now, not others from before a copy-in.
    pub out_is_current: bool,
    /// End of the copy-in that filled the device bytes, until it is known done, and its lane.
    pub ready: Option<(Inward, End)>,
    /// Number of the stream it was last evicted from, or taken on; [`Slot::NO_HOME`] before that.
    pub home: usize,
    /// Streams that may have used the device bytes, each ordered behind `ready`.
    pub readers: StreamSet,
    /// Where it stands in the order of readers, for the prefetcher.
    pub place: Option<Place>,
    /// Its place in the queue of those whose device bytes are to go; 0 where it is in none. A place
    /// left in a queue from before it was taken back is thereby nobody's.
    pub ticket: u64,
    /// A writer asked for the bytes and did not get them yet: who brings them home gives the host
    /// copy up.
    pub is_to_be_written: bool,
    /// Its handle is gone; it lives on only until its device bytes may be dropped.
    pub is_dropped: bool,
    residency: Residency,
}

impl Slot {
    /// The home of a storage that no verb named a stream for yet.
    pub const NO_HOME: usize = usize::MAX;

    /// The last copy that uses the block, as far as it is not known done.
    pub fn last_use(&self) -> Option<Point> {
        // A copy-in is ordered behind an older copy-out (E4) and the copy-ins from the block before
        // it (E7), and a copy-out of the bytes it brought behind it (E1): so one stands for all.
        let inward = self.ready.as_ref().map(|(_, end)| &end.point);
        let outward = self.out.as_ref().map(|end| &end.point);
        let out_is_last = self.out_is_current && !HAS_PLANTED_FAULT;
        if out_is_last { outward.or(inward) } else { inward.or(outward) }.cloned()
    }

    /// The last copy-in from the block, as far as it is not known done. One from before the block
    /// was filled came from another.
    pub fn last_copy_in(&self) -> Option<&End> {
        self.ready.as_ref().filter(|_| !self.out_is_current).map(|(_, end)| end)
    }

    /// A copy-out of the device bytes there are now was enqueued. It is ordered behind `ready`,
    /// which stays: a stream that did not use the bytes yet must still be ordered behind it.
    pub fn copied_out(&mut self, end: End) {
        self.out = Some(end);
        self.out_is_current = true;
    }

    /// A copy-in from the block was enqueued.
    pub fn copied_in(&mut self, inward: Inward, end: End) {
        self.ready = Some((inward, end));
        self.out_is_current = false;
    }

    /// The copy-out with this place in its lane is done: its event is not needed any more.
    pub fn landed_out(&mut self, seq: u64) {
        self.out.take_if(|end| end.seq == seq);
    }

    /// The same of a copy-in.
    pub fn landed_in(&mut self, inward: Inward, seq: u64) {
        self.ready.take_if(|(lane, end)| *lane == inward && end.seq == seq);
    }

    /// Bytes are mapped for it, whatever its state.
    pub fn is_mapped(&self) -> bool {
        self.fixed.as_ref().is_some_and(Fixed::is_mapped)
    }

    /// The copy-out that may still be reading the device bytes there are now.
    pub fn out_of_these(&self) -> Option<&End> {
        self.out.as_ref().filter(|_| self.out_is_current)
    }

    /// A storage whose bytes are on the device.
    pub fn resident(name: Name, owner: Owner, range: DeviceRange, home: usize) -> Slot {
        Slot {
            name,
            len: range.len(),
            owner,
            range: Some(range),
            fixed: None,
            block: None,
            sum: None,
            out: None,
            out_is_current: false,
            ready: None,
            home,
            readers: StreamSet::default(),
            place: None,
            ticket: 0,
            is_to_be_written: false,
            is_dropped: false,
            residency: Residency::Resident,
        }
    }

    /// Where the bytes are.
    pub fn residency(&self) -> Residency {
        self.residency
    }

    /// Takes a step of the table.
    ///
    /// # Panics
    /// Where the table does not allow it: the engine checks before it asks the driver.
    pub fn become_(&mut self, next: Residency) {
        assert!(
            self.residency.may_become(next),
            "storage {:?} may not go from {:?} to {next:?}",
            self.name,
            self.residency
        );
        self.residency = next;
        let on_device = next.is_on_device();
        assert!(
            next == Residency::Lost || self.range.is_some() == on_device,
            "state and bytes agree"
        );
    }

    /// Refuses a verb in a state that does not allow it.
    ///
    /// # Errors
    /// `Usage(State)` naming the storage and the state; `Corrupt` where the bytes are lost.
    pub fn refuse(&self, op: &'static str) -> Error {
        let state = match self.residency {
            Residency::Resident => "its bytes are on the device",
            Residency::Evicting => "it is being evicted",
            Residency::Evicted(Tier::Disk) => "its bytes are on disk",
            Residency::Evicted(_) => "its bytes are not on the device",
            Residency::Refilling => "it is being refilled",
            Residency::Lost => "its bytes are lost",
        };
        let error = match self.residency {
            Residency::Lost => Error::new(Kind::Corrupt, op),
            _ => Error::usage(Misuse::State, op),
        };
        error.detail(state).at(self.name).bytes(self.len)
    }

    /// Passes in the one state a verb needs.
    ///
    /// # Errors
    /// As [`Slot::refuse`].
    pub fn must_be(&self, state: Residency, op: &'static str) -> Result<()> {
        if self.residency == state { Ok(()) } else { Err(self.refuse(op)) }
    }
}

/// A handle of one storage. Dropping it, on any thread and in any state, gives the storage up; the
/// engine learns of it at its next verb and keeps what copies in flight still need.
///
/// A framework that drops the handle of device bytes it owns keeps those bytes until
/// `Engine::releasable` names the storage, as it does once for each, or calls `Engine::release`
/// instead of dropping.
#[derive(Debug)]
#[must_use = "dropping a storage's handle gives the storage up"]
pub struct Storage {
    id: StorageId,
    len: Bytes,
    dropped: Option<Sender<StorageId>>,
}

impl Storage {
    /// The handle of `id`, whose drop is told to `dropped`.
    pub(crate) fn new(id: StorageId, len: Bytes, dropped: Sender<StorageId>) -> Storage {
        Storage { id, len, dropped: Some(dropped) }
    }

    /// The name that verbs take.
    pub fn id(&self) -> StorageId {
        self.id
    }

    /// How many bytes it has, wherever they are.
    pub fn len(&self) -> Bytes {
        self.len
    }

    /// Never: a storage has bytes.
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }

    /// Ends the handle without telling; the engine knows already.
    pub(crate) fn disarm(mut self) -> StorageId {
        self.dropped = None;
        self.id
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        if let Some(dropped) = self.dropped.take() {
            // The engine may be gone; then there is nobody left to tell.
            let _ = dropped.send(self.id);
        }
    }
}

/// Where a storage that is away stands in the order of readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Ordinal among the evictions of this pass.
    Left(u32),
    /// Number among those that rest.
    Rests(u64),
}

/// Which storage, and on which stream it was evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Homed {
    /// The storage.
    pub storage: StorageId,
    /// The stream.
    pub stream: StreamId,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unit::DevicePtr;

    fn slot() -> Slot {
        let range = DeviceRange::new(DevicePtr(4096), Bytes(256)).unwrap();
        Slot::resident(Name::new("x"), Owner::Engine, range, 0)
    }

    #[test]
    fn no_state_leads_to_itself_and_lost_leads_nowhere_else() {
        for state in Residency::ALL {
            assert!(state == Residency::Lost || !state.may_become(state), "{state:?}");
            assert!(state.may_become(Residency::Lost));
            assert!(state == Residency::Lost || !Residency::Lost.may_become(state));
        }
    }

    #[test]
    fn the_table_has_exactly_the_ten_steps_of_the_design() {
        let steps = Residency::ALL
            .iter()
            .flat_map(|from| Residency::ALL.iter().map(move |to| (from, to)))
            .filter(|(from, to)| **to != Residency::Lost && from.may_become(**to))
            .count();
        // Evicted(Host) and Evicted(Disk) to Refilling are one row of the table.
        assert_eq!(steps, 9);
    }

    #[test]
    #[should_panic(expected = "may not go from Resident to Refilling")]
    fn a_resident_storage_is_not_refilled() {
        slot().become_(Residency::Refilling);
    }

    #[test]
    fn a_set_names_the_streams_put_in() {
        let mut set = StreamSet::only(3);
        set.insert(63);
        assert_eq!(set.iter().collect::<Vec<_>>(), [3, 63]);
        assert_eq!(set.without(3), StreamSet::only(63));
        assert!(!set.has(64) && !set.has(0));
    }

    #[test]
    fn a_handle_dropped_anywhere_is_heard_of_once() {
        let (tell, heard) = crossbeam_channel::unbounded();
        let mut table = crate::unit::Table::new("storage", 4);
        let id = StorageId(table.insert(()).unwrap());
        let handle = Storage::new(id, Bytes(1), tell.clone());
        std::thread::spawn(move || drop(handle)).join().unwrap();
        assert_eq!(heard.try_recv(), Ok(id));
        assert_eq!(Storage::new(id, Bytes(1), tell).disarm(), id);
        assert!(heard.try_recv().is_err());
    }
}

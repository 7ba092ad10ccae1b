//! Runs by the ten thousand, in processes of their own, each watched from outside: a run that
//! fails, aborts its process or never ends is named by the one line that replays it.
//!
//! What it is not: a judge. Whether a run is right it says itself.
//!
//! Invariant: before a run begins its seed is in the part's file, where it can be read whatever
//! becomes of the process; nothing that a run does can take the word back.
//!
//! ```text
//!   parent --(first, runs)--> part: publishes seed -> run -> publishes seed -> run ... -> sums
//!     `--- reads the file: seed unchanged for PATIENCE, or a bad end? -> the replay line
//! ```

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Runs are made by processes of their own, at most so many each: what a lost device may still
/// touch stays mapped as long as its process, and each processor takes one.
const PART_RUNS: u64 = 50_000;
/// Names the file in which a part says where it is, and begins the line with its sums.
const PART: &str = "LIGHTERING_PART";
/// Set in a process that plays one test.
const ALONE: &str = "LIGHTERING_ALONE";
/// A test's own: `abort 107` or `hang 107` has that run end so.
pub(crate) const PLANTED: &str = "LIGHTERING_PLANTED";
/// A run takes microseconds. One that takes so long, on a machine however busy, is stuck.
const PATIENCE: Duration = Duration::from_secs(60);
/// Enough where a run is stuck on purpose.
const PATIENCE_PLANTED: Duration = Duration::from_secs(5);
/// How often the parent looks.
const LOOK: Duration = Duration::from_millis(5);

/// How to have a run again.
pub(crate) fn replay(seed: u64) -> String {
    format!(
        "replay: LIGHTERING_SEED={seed} LIGHTERING_SCHEDULES=1 \
         cargo test --test schedules replay -- --nocapture"
    )
}

/// Where a part is, for whoever watches it. A seek and a write of eight bytes: no memory
/// is taken, no lock.
struct Place(File);

impl Place {
    fn publish(&mut self, seed: u64) {
        self.0.rewind().unwrap();
        self.0.write_all(&seed.to_le_bytes()).unwrap();
    }

    fn read(&mut self) -> u64 {
        let mut seed = [0; 8];
        self.0.rewind().unwrap();
        self.0.read_exact(&mut seed).unwrap();
        u64::from_le_bytes(seed)
    }
}

/// This process as one that makes a part of the runs.
pub(crate) struct Part {
    place: Place,
    /// What is to become of which run.
    planted: Option<(String, u64)>,
}

impl Part {
    /// `None` where this process is the one that watches.
    pub(crate) fn here() -> Option<Part> {
        let place = Place(File::options().write(true).open(std::env::var_os(PART)?).unwrap());
        let planted = std::env::var(PLANTED).unwrap_or_default();
        let planted = planted.split_once(' ');
        let planted = planted.map(|(way, seed)| (way.to_string(), seed.parse().unwrap()));
        Some(Part { place, planted })
    }

    /// A run begins.
    pub(crate) fn begin(&mut self, seed: u64) {
        self.place.publish(seed);
        match &self.planted {
            Some((way, at)) if way == "abort" && *at == seed => std::process::abort(),
            Some((way, at)) if way == "hang" && *at == seed => loop {
                std::thread::park();
            },
            _ => {}
        }
    }

    /// All of them are done.
    pub(crate) fn hand(self, sums: &str) {
        println!("{PART} {sums}");
    }
}

/// Has other processes make the runs of a test, as many at a time as there are processors; `take`
/// gets what each hands over.
pub(crate) fn all(test: &str, first: u64, count: u64, take: impl FnMut(&str) + Send) {
    let (next, take) = (AtomicU64::new(0), Mutex::new(take));
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(PART_RUNS, Ordering::Relaxed);
                    if at >= count {
                        return;
                    }
                    let sums = part(test, first + at, PART_RUNS.min(count - at));
                    take.lock().unwrap()(&sums);
                }
            });
        }
    });
}

/// Has a process of its own play a test whose runs have no seeds. One that ends its process ends
/// no other test's, least of all the one that would say which seed it was.
pub(crate) fn alone(test: &str, body: fn()) {
    if std::env::var_os(ALONE).is_some() {
        return body();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    print!("{}", String::from_utf8_lossy(&output.stdout));
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {err}", output.status);
}

/// A file that goes when nobody watches any more.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Has another process make runs; the line with the sums of them.
fn part(test: &str, first: u64, runs: u64) -> String {
    let name = format!("lightering-part-{}-{first}", std::process::id());
    let scratch = Scratch(std::env::temp_dir().join(name));
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(true);
    let mut place = Place(options.open(&scratch.0).unwrap());
    place.publish(first);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(PART, &scratch.0)
        .env("LIGHTERING_SEED", first.to_string())
        .env("LIGHTERING_SCHEDULES", runs.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let (out, err) = (reader(out), reader(err));
    let end = watch(&mut child, &mut place);
    let mut wrong = end.clone().err();
    if wrong.is_some() {
        tell(place.read());
    }
    let (out, err) = (out.join().unwrap(), err.join().unwrap());
    let sums = out.lines().find_map(|line| line.strip_prefix(PART));
    if let (None, None) = (sums, &wrong) {
        wrong = Some("no sums".into());
        tell(place.read());
    }
    assert!(wrong.is_none(), "{wrong:?}: {}\n{out}\n{err}", replay(place.read()));
    sums.unwrap_or_default().to_string()
}

/// Says at once how to have the run again, also where the harness keeps what a test prints, and
/// might not come to show it.
fn tell(seed: u64) {
    let _ = writeln!(std::io::stderr(), "{}", replay(seed));
}

fn reader(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Waits for a part as long as it gets on.
fn watch(child: &mut Child, place: &mut Place) -> Result<(), String> {
    let is_planted = std::env::var_os(PLANTED).is_some();
    let patience = if is_planted { PATIENCE_PLANTED } else { PATIENCE };
    let (mut seed, mut since) = (place.read(), Instant::now());
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return if status.success() { Ok(()) } else { Err(status.to_string()) };
        }
        let now = place.read();
        if now != seed {
            (seed, since) = (now, Instant::now());
        } else if since.elapsed() > patience {
            child.kill().unwrap();
            child.wait().unwrap();
            return Err(format!("a run that did not end in {patience:?}"));
        }
        std::thread::sleep(LOOK);
    }
}

//! Every edge is load-bearing: the engine without the wait, or the question, of any one site is
//! caught, and so is the engine that is lied to about the event.
//!
//! The fault guarded against is a wait that nobody needs and nobody misses: one that a later change
//! could drop without any test turning red.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "edges/batches.rs"]
mod batches;
#[path = "edges/fixed.rs"]
mod fixed;
#[path = "edges/plans.rs"]
mod plans;
#[path = "edges/stories.rs"]
mod stories;
mod support;

use lightering::Bytes;
use lightering::backend::sim::{Config, Random};
use lightering::trace::Site;
use stories::{STORIES, Story};
use support::Rig;
use support::broken::{Plan, faults_of};

/// So many random schedules must show a fault again.
const SCHEDULES: u64 = 10_000;
/// In each of the first so many a fault is flagged.
const FLAGGED: u64 = 100;

/// Every road to every site.
fn stories() -> impl Iterator<Item = &'static Story> {
    STORIES.iter().chain(batches::STORIES).chain(fixed::STORIES)
}

/// What one run showed.
struct Shown {
    hazards: Vec<String>,
    wrong: Vec<String>,
    reach: u64,
}

fn run(story: &Story, plan: Option<Plan>, seed: u64) -> Shown {
    let mut config = Config::scheduled(Box::new(Random::new(seed)));
    config.device_bytes = Bytes::kib(64);
    config.faults = (story.faults)();
    let pool = support::quick_pool(story.pool);
    let (mut rig, reach) = Rig::broken(config, pool, (story.options)(), story.streams, plan);
    (story.run)(&mut rig);
    let hazards = rig.hazards();
    let synced = lightering::backend::Backend::sync(&mut rig.sim);
    let mut wrong = rig.wrong.lock().unwrap().clone();
    // Bytes unmapped under their users cost the device.
    wrong.extend(synced.err().map(|lost| lost.to_string()));
    Shown { hazards, wrong, reach: reach.count() }
}

#[test]
fn every_story_is_clean_as_long_as_nothing_is_broken() {
    for story in stories() {
        for seed in 0..300 {
            let shown = run(story, None, seed);
            assert!(shown.hazards.is_empty(), "{}: {:?}", story.name, shown.hazards);
            assert!(shown.wrong.is_empty(), "{}: {:?}", story.name, shown.wrong);
        }
    }
}

/// How one story took one fault.
struct Score {
    reach: u64,
    is_first_flagged: bool,
    /// Of the first [`FLAGGED`] random schedules.
    flagged: u64,
    /// The first random schedule that was flagged, and the first that showed wrong bytes.
    again: Option<u64>,
    bytes: Option<u64>,
}

fn score(story: &Story, plan: Plan) -> Score {
    let first = run(story, Some(plan), 0);
    let mut score = Score {
        reach: first.reach,
        is_first_flagged: !first.hazards.is_empty(),
        flagged: 0,
        again: None,
        bytes: None,
    };
    for seed in 1..=SCHEDULES {
        let shown = run(story, Some(plan), seed);
        if !shown.hazards.is_empty() {
            score.flagged += u64::from(seed <= FLAGGED);
            score.again.get_or_insert(seed);
        }
        if !shown.wrong.is_empty() {
            score.bytes.get_or_insert(seed);
        }
        let is_shown = score.bytes.is_some() || story.unseen.is_some();
        if seed >= FLAGGED && score.again.is_some() && is_shown {
            break;
        }
    }
    score
}

#[test]
fn no_site_can_be_lost_unseen() {
    let mut missed = Vec::new();
    let mut count = 0;
    println!("{:<19} {:<12} reach first of 100  again  bytes", "site", "fault");
    for story in stories() {
        for fault in faults_of(story.site).iter().copied() {
            let score = score(story, Plan { site: story.site, fault });
            let show = |seed: Option<u64>| seed.map_or("-".to_string(), |seed| seed.to_string());
            println!(
                "{:<19} {:<12} {:>5} {:>5} {:>6} {:>6} {:>6}  {}",
                format!("{:?}", story.site),
                format!("{fault:?}"),
                score.reach,
                if score.is_first_flagged { "yes" } else { "NO" },
                score.flagged,
                show(score.again),
                show(score.bytes),
                story.name
            );
            count += 1;
            let is_seen = score.bytes.is_some() || story.unseen.is_some();
            let is_flagged = score.reach > 0 && score.is_first_flagged && score.flagged == FLAGGED;
            if !is_flagged || !is_seen {
                missed.push(format!("{:?} {fault:?}: {}", story.site, story.name));
            }
        }
    }
    println!("{} of {count} losses flagged at first sight", count - missed.len());
    for Story { site, name, unseen, .. } in stories() {
        if let Some(why) = unseen {
            println!("{site:?}: no bytes show that {name}: {why}");
        }
    }
    assert!(missed.is_empty(), "{} lost unseen: {missed:#?}", missed.len());
}

/// The sources that wait and ask.
const SOURCES: &[&str] = &["src/engine", "src/copy.rs", "src/copy", "src/stream.rs"];

fn names(site: Site, path: &std::path::Path) -> bool {
    if path.is_dir() {
        return std::fs::read_dir(path).unwrap().any(|entry| names(site, &entry.unwrap().path()));
    }
    let text = std::fs::read_to_string(path).unwrap();
    let name = format!("Site::{site:?}");
    let ends = |at: usize| !text[at + name.len()..].starts_with(|c: char| c.is_alphanumeric());
    text.match_indices(&name).any(|(at, _)| ends(at))
}

#[test]
fn every_site_is_in_the_engine_and_has_a_story() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    for site in Site::ALL {
        let is_used = SOURCES.iter().any(|source| names(*site, &root.join(source)));
        let has_story = stories().any(|story| story.site == *site);
        assert_eq!(is_used, has_story, "{site:?}: used {is_used}, has a story {has_story}");
    }
}

//! The command line.
//!
//! What it is not: it opens no file and no device, so all it can say is that a word is wrong.
//!
//! Invariant: what it accepts is in range; every refusal is one line that names the option.
//!
//! ```text
//!   words -> parse -> Run(Options) | Help | "--layers 0: must be 1 to 4096"
//! ```
//!
//! `main` uses it.

use crate::shape::Shape;
use lightering::{Bytes, DeviceId};

/// What `--help` prints.
pub(crate) const HELP: &str = "\
Trains a byte-level language model on a text and compares ways of keeping the layers' inputs.

Usage: train [options]

  --text FILE           the text to learn (default: the one shipped in examples/data)
  --device NAME         auto, sim or cuda:N (default: auto)
  --modes LIST          of none, checkpoint, checkpoint+offload, checkpoint+raw, checkpoint+grow,
                        with commas (default: the first three; raw copies as many bytes for
                        nothing; grow reserves no pinned memory: its first step takes it)
  --layers N            residual blocks (default: 6)
  --hidden N            channels of a token, a multiple of 8 (default: 640)
  --tokens N            bytes of text in a step, one stretch (default: 192)
  --steps N             steps in each mode (default: 32)
  --keep-last N         last layers' inputs that stay on the device (default: 1)
  --pinned-bytes SIZE   most pinned host memory, such as 512MiB (default: what the inputs need)
  --prefetch-bytes SIZE how far to bring back ahead of use (default: two layers' inputs)
  --json                one line of JSON a mode on standard output
  --times-only          with --device sim: nothing is computed, and numbers have the two bytes that
                        they have on a GPU, so that any step's times and memory can be predicted
  --model FILE          with --device sim: the device's figures, as the example calibrate prints
  --timeline FILE       times of layers and copies of the mode checkpoint+offload, for Perfetto or
                        chrome://tracing
  --check               look for hazards in all that the engine does; the times are worth nothing
                        then
  --help                this text
";

/// Where the model runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// A real device where there is one, else the simulated one.
    Auto,
    /// The simulated device.
    Sim,
    /// A real one.
    Cuda(DeviceId),
}

/// What happens to a layer's input between its forward and its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// It stays, and all inner results stay with it.
    None,
    /// It stays; inner results are made anew.
    Checkpoint,
    /// It goes to pinned host memory and comes back; inner results are made anew.
    Offload,
    /// It stays, and as many bytes are copied beside the model, which waits for none of them.
    Raw,
    /// As `Offload`, where nobody reserved pinned memory: it is taken in the first step.
    Grow,
}

impl Mode {
    const ALL: [Mode; 5] = [Mode::None, Mode::Checkpoint, Mode::Offload, Mode::Raw, Mode::Grow];

    /// As the command line and the reports call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Mode::None => "none",
            Mode::Checkpoint => "checkpoint",
            Mode::Offload => "checkpoint+offload",
            Mode::Raw => "checkpoint+raw",
            Mode::Grow => "checkpoint+grow",
        }
    }

    /// Does an engine move the inputs?
    pub(crate) fn has_engine(self) -> bool {
        matches!(self, Mode::Offload | Mode::Grow)
    }
}

/// Everything the command line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// The text's file; the one shipped where there is none.
    pub(crate) text: Option<String>,
    pub(crate) device: Device,
    pub(crate) modes: Vec<Mode>,
    pub(crate) shape: Shape,
    pub(crate) steps: u64,
    pub(crate) keep_last: u64,
    /// The most pinned host memory; chosen from the shape where there is none.
    pub(crate) pinned: Option<Bytes>,
    /// How far to bring back ahead of use; chosen from the shape where there is none.
    pub(crate) prefetch: Option<Bytes>,
    pub(crate) json: bool,
    /// The simulated device keeps time and books alone.
    pub(crate) times_only: bool,
    /// File of the simulated device's figures.
    pub(crate) model: Option<String>,
    /// Where the timeline goes, if one is kept.
    pub(crate) timeline: Option<String>,
    /// The checker of order looks on.
    pub(crate) check: bool,
}

/// What to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Run(Options),
    Help,
}

const STEPS_MAX: u64 = 1_000_000;
/// Bytes of a number, until the device is known.
const ELEMENT: u64 = 4;

/// Reads the words after the program's name.
pub(crate) fn parse(mut words: impl Iterator<Item = String>) -> Result<Command, String> {
    let (mut layers, mut hidden, mut tokens) = (6, 640, 192);
    let mut options = Options {
        text: None,
        device: Device::Auto,
        modes: Mode::ALL[..3].to_vec(),
        shape: Shape::new(layers, hidden, tokens, ELEMENT)?,
        steps: 32,
        keep_last: 1,
        pinned: None,
        prefetch: None,
        json: false,
        times_only: false,
        model: None,
        timeline: None,
        check: false,
    };
    while let Some(word) = words.next() {
        let (name, attached) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value.to_string())),
            None => (word.as_str(), None),
        };
        if let ("--help" | "-h" | "--json" | "--times-only" | "--check", Some(_)) =
            (name, &attached)
        {
            return Err(format!("{name}: takes no value"));
        }
        let mut value = || {
            attached
                .clone()
                .or_else(|| words.next())
                .ok_or_else(|| format!("{name}: needs a value"))
        };
        match name {
            "--help" | "-h" => return Ok(Command::Help),
            "--json" => options.json = true,
            "--times-only" => options.times_only = true,
            "--check" => options.check = true,
            "--model" => options.model = Some(value()?),
            "--timeline" => options.timeline = Some(value()?),
            "--text" => options.text = Some(value()?),
            "--device" => options.device = device(&value()?)?,
            "--modes" => options.modes = modes(&value()?)?,
            "--layers" => layers = count(name, &value()?)?,
            "--hidden" => hidden = count(name, &value()?)?,
            "--tokens" => tokens = count(name, &value()?)?,
            "--steps" => options.steps = count(name, &value()?)?,
            "--keep-last" => options.keep_last = count(name, &value()?)?,
            "--pinned-bytes" => options.pinned = Some(size(name, &value()?)?),
            "--prefetch-bytes" => options.prefetch = Some(size(name, &value()?)?),
            _ => return Err(format!("{word}: no such option; --help lists them")),
        }
    }
    options.shape = Shape::new(layers, hidden, tokens, ELEMENT)?;
    check(&options)?;
    Ok(Command::Run(options))
}

/// Do they go together?
fn check(options: &Options) -> Result<(), String> {
    let simulates = [("--times-only", options.times_only), ("--model", options.model.is_some())];
    if let (Some((name, _)), true) =
        (simulates.into_iter().find(|(_, given)| *given), options.device != Device::Sim)
    {
        return Err(format!("{name}: only with --device sim"));
    }
    if options.timeline.is_some() && !options.modes.contains(&Mode::Offload) {
        return Err(format!("--timeline: only with the mode {}", Mode::Offload.name()));
    }
    if options.check && !options.modes.iter().any(|mode| mode.has_engine()) {
        let [one, other] = [Mode::Offload, Mode::Grow].map(Mode::name);
        return Err(format!("--check: only with the mode {one} or {other}"));
    }
    if options.steps == 0 || options.steps > STEPS_MAX {
        return Err(format!("--steps {}: must be 1 to {STEPS_MAX}", options.steps));
    }
    Ok(())
}

fn count(name: &str, text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("{name} {text}: not a number from 0 to {}", u64::MAX))
}

fn size(name: &str, text: &str) -> Result<Bytes, String> {
    text.parse().map_err(|error| format!("{name} {text}: {error}"))
}

fn device(text: &str) -> Result<Device, String> {
    match (text, text.strip_prefix("cuda:").map(str::parse)) {
        ("auto", _) => Ok(Device::Auto),
        ("sim", _) => Ok(Device::Sim),
        (_, Some(Ok(ordinal))) => Ok(Device::Cuda(DeviceId(ordinal))),
        _ => Err(format!("--device {text}: must be auto, sim or cuda:N")),
    }
}

fn modes(text: &str) -> Result<Vec<Mode>, String> {
    let one = |name: &str| {
        let known = Mode::ALL.into_iter().find(|mode| mode.name() == name);
        known.ok_or_else(|| {
            let names = Mode::ALL.map(Mode::name).join(", ");
            format!("--modes {name}: must be some of {names}, with commas")
        })
    };
    text.split(',').map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Result<Command, String> {
        parse(line.split_whitespace().map(String::from))
    }

    fn options(line: &str) -> Options {
        match of(line) {
            Ok(Command::Run(options)) => options,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn every_option_is_read() {
        let read = options(
            &[
                "--text a.txt --device cuda:3 --modes checkpoint,checkpoint+offload --layers=2",
                "--hidden 16 --tokens 32 --steps 5 --keep-last 0 --pinned-bytes 1GiB",
                "--prefetch-bytes 64KiB --json --timeline b.json --check",
            ]
            .join(" "),
        );
        let predicted = options("--times-only --device sim --model h200.txt");
        assert!(predicted.times_only);
        assert_eq!(predicted.model.as_deref(), Some("h200.txt"));
        let wanted = Options {
            text: Some(String::from("a.txt")),
            device: Device::Cuda(DeviceId(3)),
            modes: vec![Mode::Checkpoint, Mode::Offload],
            shape: Shape::new(2, 16, 32, 4).unwrap(),
            steps: 5,
            keep_last: 0,
            pinned: Some(Bytes::gib(1)),
            prefetch: Some(Bytes::kib(64)),
            json: true,
            times_only: false,
            model: None,
            timeline: Some(String::from("b.json")),
            check: true,
        };
        assert_eq!(read, wanted);
        assert_eq!(of("--layers 0 --help"), Ok(Command::Help));
    }

    #[test]
    fn every_bad_word_is_named_in_one_line() {
        for line in [
            "--layers 0",
            "--hidden 0",
            "--hidden 9",
            "--tokens 0",
            "--steps 0",
            "--steps 99999999999999999999",
            "--layers -1",
            "--tokens 1e9",
            "--hidden 1000000000000",
            "--pinned-bytes much",
            "--prefetch-bytes 99999999999GiB",
            "--device cuda",
            "--device cuda:x",
            "--device tpu",
            "--modes all",
            "--modes none,",
            "--text",
            "--json=yes",
            "--times-only=yes --device sim",
            "--times-only",
            "--times-only --device cuda:0",
            "--model",
            "--timeline",
            "--timeline a.json --modes checkpoint",
            "--check=yes",
            "--check --modes none,checkpoint",
            "--model a.txt --device auto",
            "--unknown",
            "word",
        ] {
            let error = of(line).unwrap_err();
            let name = line.split([' ', '=']).next().unwrap();
            assert!(error.starts_with(name) && !error.contains('\n'), "{line}: {error}");
        }
    }

    #[test]
    fn the_help_names_every_option_and_its_default() {
        let read = options("");
        for (name, default) in [
            ("--layers", read.shape.layers),
            ("--hidden", read.shape.hidden),
            ("--tokens", read.shape.tokens),
            ("--steps", read.steps),
            ("--keep-last", read.keep_last),
        ] {
            let line = HELP.lines().find(|line| line.trim_start().starts_with(name)).unwrap();
            assert!(line.contains(&format!("default: {default}")), "{line}");
        }
    }
}

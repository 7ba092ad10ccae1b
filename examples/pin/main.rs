//! How fast host memory is page-locked: by the pool, and by the driver's own call beside it.
//!
//! What it is not: a measure of copies. Nothing is copied.
//!
//! Invariant: what is compared alternates in one process: driver, pool, pool, driver; on memory
//! that this process has touched and freed before, but for what is called cold.
//!
//! ```text
//!   cold: pool, driver, of memory nobody touched yet -> warm up -> each size: A B B A
//!   -> the background: when is the first block there? -> one block, again and again
//! ```
//!
//! Run it with `cargo run --release --example pin -- --help`.

mod host;
mod measure;

use host::{Cuda, Host, Touched};
use lightering::backend::Spec;
use lightering::{Bytes, Error};
use measure::{Bench, Figure};
use std::io::Write;
use std::process::ExitCode;

const HELP: &str = "\
Page-locks host memory with the pool, and with the driver's own call beside it.

Usage: pin [options]

  --device NAME   auto, sim or cuda:N (default: auto)
  --bytes LIST    sizes, with commas (default: 64MiB)
  --cold SIZE     first, of memory that was not touched before (default: none)
  --json          one line of JSON a measurement: figure, simulated, pairs (the pool's and the
                  driver's; simulated, one thread's touching stands in for the driver)
  --help          this text

The machine needs three times the cold size, and the largest one and a tenth of it.
";

/// The most of one measurement.
const BYTES_MAX: Bytes = Bytes::gib(256);
/// A block that is taken and given back.
const BLOCK: Bytes = Bytes::mib(1);

/// What the command line says.
struct Wish {
    device: String,
    sizes: Vec<Bytes>,
    cold: Option<Bytes>,
    json: bool,
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Option<Wish>, String> {
    let sizes = vec![Bytes::mib(64)];
    let mut wish = Wish { device: String::from("auto"), sizes, cold: None, json: false };
    let size = |name: &str, text: &str| match text.parse::<Bytes>() {
        Ok(bytes) if bytes >= BLOCK && bytes <= BYTES_MAX => Ok(bytes),
        Ok(_) => Err(format!("{name} {text}: must be {BLOCK} to {BYTES_MAX}")),
        Err(error) => Err(format!("{name} {text}: {error}")),
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word}: needs a value"));
        match word.as_str() {
            "--help" | "-h" => return Ok(None),
            "--json" => wish.json = true,
            "--device" => wish.device = value()?,
            "--cold" => wish.cold = Some(size("--cold", &value()?)?),
            "--bytes" => {
                let sizes = value()?;
                let sizes = sizes.split(',').map(|text| size("--bytes", text));
                wish.sizes = sizes.collect::<Result<_, _>>()?;
            }
            _ => return Err(format!("{word}: no such option; --help lists them")),
        }
    }
    Ok(Some(wish))
}

/// The whole program; an error is one line and an exit status.
fn run(
    words: impl Iterator<Item = String>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<(), (String, u8)> {
    let bad = |text: String| (text, 2);
    let failed = |error: Error| (error.to_string(), 1);
    let lost = |error: std::io::Error| (format!("output: {error}"), 1);
    let Some(wish) = parse(words).map_err(bad)? else {
        return out.write_all(HELP.as_bytes()).map_err(lost);
    };
    let named = |error: Error| bad(format!("--device {}: {error}", wish.device));
    let spec: Spec = wish.device.parse().map_err(named)?;
    let opened = lightering::open(&spec.to_string()).map_err(named)?;
    let about = opened.backend.about();
    let host: Box<dyn Host> = match about.simulated {
        true => Box::new(Touched),
        false => Box::new(Cuda::open(about.device.0).map_err(failed)?),
    };
    let times =
        if about.simulated { "; what follows says nothing about a real driver" } else { "" };
    writeln!(err, "device: {}{times}", about.name).map_err(lost)?;
    let bench = Bench::new(&*opened.backend, &*host);
    let mut say = |figure: Figure| {
        let text = match wish.json {
            true => figure.json(about.simulated),
            false => figure.words(),
        };
        out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(lost)
    };
    if let Some(cold) = wish.cold {
        bench.cold(cold).map_err(failed)?.into_iter().try_for_each(&mut say)?;
    }
    let most = wish.sizes.iter().copied().max().unwrap_or(BLOCK);
    bench.warm_up(most).map_err(failed)?;
    for bytes in &wish.sizes {
        bench.pairs(*bytes).map_err(failed)?.into_iter().try_for_each(&mut say)?;
    }
    say(bench.background(most).map_err(failed)?)?;
    say(bench.block(BLOCK).map_err(failed)?)
}

fn main() -> ExitCode {
    let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    let (mut out, mut err) = (std::io::stdout(), std::io::stderr());
    match run(words, &mut out, &mut err) {
        Ok(()) => ExitCode::SUCCESS,
        Err((text, status)) => {
            // There is nobody left to tell that standard error is gone.
            let _ = writeln!(err, "pin: {text}");
            ExitCode::from(status)
        }
    }
}

#[cfg(test)]
mod tests {
    //! The fault guarded against: a figure that is not of what its line says, or bad words taken.
    use super::*;

    fn of(line: &str) -> (String, Result<(), (String, u8)>) {
        let mut out = Vec::new();
        let ended = run(line.split_whitespace().map(String::from), &mut out, &mut Vec::new());
        (String::from_utf8(out).unwrap(), ended)
    }

    #[test]
    fn every_measurement_says_what_it_is_of() {
        let (text, ended) = of("--device sim --bytes 2MiB,4MiB --cold 1MiB --json");
        ended.unwrap();
        let lines: Vec<&str> = text.lines().collect();
        let figures = [
            ("cold-1mib", 1),
            ("rate-2mib", 2),
            ("free-2mib", 2),
            ("rate-4mib", 2),
            ("free-4mib", 2),
            ("first-block", 1),
            ("block", 1),
        ];
        assert_eq!(lines.len(), figures.len(), "{text}");
        for (line, (name, pairs)) in lines.iter().zip(figures) {
            let head = format!(r#"{{"figure": "pinned.{name}", "simulated": true, "pairs": [["#);
            assert!(line.starts_with(&head) && line.ends_with("]]}"), "{line}");
            assert_eq!(line.matches("[").count(), pairs + 1, "{line}");
            assert!(!line.contains("inf") && !line.contains("[0.0,"), "{line}");
        }
    }

    #[test]
    fn bad_input_is_one_line_with_its_cause() {
        for (line, cause) in [
            ("--bytes 0", "--bytes 0"),
            ("--bytes 1MiB,", "--bytes"),
            ("--bytes 1PiB", "--bytes 1PiB"),
            ("--cold much", "--cold much"),
            ("--cold", "--cold: needs"),
            ("--device tpu", "--device tpu"),
            ("--device sim:99", "--device sim:99"),
            ("--what", "--what"),
        ] {
            let (out, ended) = of(line);
            let (text, status) = ended.unwrap_err();
            assert!(text.contains(cause) && !text.contains('\n'), "{line}: {text}");
            assert_eq!((status, out.as_str()), (2, ""));
        }
    }
}

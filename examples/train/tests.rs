//! The whole program, run as a user runs it, on small sizes.
//!
//! The faults guarded against: modes that differ in a gradient and do not say so; bad input that
//! panics, or ends without a line that names it; JSON mixed with talk.

use super::*;
use lightering::Bytes;
use lightering::backend::sim::{Config, World};

const SMALL: &str = "--device sim --layers 3 --hidden 16 --tokens 24 --steps 4";

/// Runs the program; what it wrote to its two outputs, and how it ended.
fn of(line: &str) -> (String, String, Result<(), Failure>) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let ended = run(line.split_whitespace().map(String::from), &mut out, &mut err);
    (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap(), ended)
}

fn field<'a>(json: &'a str, name: &str) -> &'a str {
    let (_, rest) = json.split_once(&format!("\"{name}\": ")).unwrap();
    rest.split([',', '}']).next().unwrap()
}

#[test]
fn every_mode_gives_the_same_gradients() {
    let (out, _, ended) = of(&format!("{SMALL} --json"));
    ended.unwrap();
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 3, "standard output holds the lines of JSON alone");
    for (line, mode) in lines.iter().zip(["none", "checkpoint", "checkpoint+offload"]) {
        assert_eq!(field(line, "mode"), format!("\"{mode}\""));
        for name in ["grad_checksum", "loss", "first_loss", "boundary_bytes"] {
            assert_eq!(field(line, name), field(lines[0], name), "{mode} {name}");
        }
        assert_eq!(field(line, "simulated"), "true");
    }
    assert_eq!(field(lines[0], "boundary_bytes"), (3 * 16 * 24 * 4).to_string());
}

/// The gradients' hash of four steps on a device that does its work in the order of a seed.
fn under_adversary(seed: u64, keep_last: usize, mode: Mode) -> u64 {
    let shape = shape::Shape::new(5, 16, 20, 4).unwrap();
    let (layers, bytes) = (shape.layers as usize, shape.boundary_bytes());
    let world = World::new(Config::adversary(seed));
    let meter = meter::Meter::default();
    let user = || Box::new(meter::Metered::new(Box::new(world.device(0).unwrap()), meter.clone()));
    let opened = device::Opened { backend: user(), engine: user(), meter: meter.clone() };
    let (pinned, prefetch) = (Bytes::mib(2), Bytes(2 * bytes.0));
    let limits = Limits { layers, bytes, keep_last, pinned, prefetch, spans: 0, check: false };
    let mut inputs: Box<dyn Inputs> = match mode {
        Mode::Offload => Box::new(Offloaded::new(opened, limits, true).unwrap()),
        Mode::Raw => Box::new(Raw::new(opened.backend, limits).unwrap()),
        _ => Box::new(Resident::new(opened.backend, layers, bytes).unwrap()),
    };
    let text = Text::open(None).unwrap();
    let trainer =
        Trainer::new(Mode::Checkpoint, shape, &text, &mut *inputs, meter.clone()).unwrap();
    let outcome = trainer.run(4, &mut |_, _| ()).unwrap();
    assert_eq!(meter.taken(), Bytes::ZERO, "seed {seed}: device bytes are left over");
    let moves = matches!(mode, Mode::Offload | Mode::Raw);
    assert!(!moves || outcome.moved.out.0 == (layers - keep_last) as u64 * bytes.0);
    outcome.checksum
}

#[test]
fn a_first_step_that_finds_no_pinned_memory_moves_as_much_as_any_other() {
    let modes = "checkpoint,checkpoint+grow,checkpoint+offload";
    let (out, _, ended) = of(&format!("{SMALL} --json --modes {modes}"));
    ended.unwrap();
    for line in out.lines().skip(1) {
        assert_eq!(field(line, "moved_bytes"), (2 * 16 * 24 * 4).to_string(), "{line}");
        assert_eq!(field(line, "first_moved_bytes"), field(line, "moved_bytes"), "{line}");
        // The host's time is no simulated one.
        assert_eq!(field(line, "reserve_seconds"), "null", "{line}");
    }
}

#[test]
fn no_order_of_the_devices_work_changes_a_bit() {
    let wanted = under_adversary(0, 0, Mode::Checkpoint);
    for seed in 1..40 {
        let mode = if seed % 4 == 0 { Mode::Raw } else { Mode::Offload };
        assert_eq!(under_adversary(seed, seed as usize % 3, mode), wanted, "seed {seed}");
    }
}

/// What the steps came to on a world like this, and when they were over.
fn on_world(config: Config, offload: bool) -> (Outcome, std::time::Duration) {
    let shape = shape::Shape::new(4, 32, 256, 4).unwrap();
    let (layers, bytes) = (shape.layers as usize, shape.boundary_bytes());
    let world = World::new(config);
    let meter = meter::Meter::default();
    let user = || Box::new(meter::Metered::new(Box::new(world.device(0).unwrap()), meter.clone()));
    let opened = device::Opened { backend: user(), engine: user(), meter: meter.clone() };
    let (pinned, prefetch, keep_last) = (Bytes::mib(2), Bytes(2 * bytes.0), 1);
    let limits = Limits { layers, bytes, keep_last, pinned, prefetch, spans: 0, check: false };
    let mut inputs: Box<dyn Inputs> = match offload {
        true => Box::new(Offloaded::new(opened, limits, true).unwrap()),
        false => Box::new(Resident::new(opened.backend, layers, bytes).unwrap()),
    };
    let text = Text::open(None).unwrap();
    let mode = Mode::Checkpoint;
    let trainer = Trainer::new(mode, shape, &text, &mut *inputs, meter).unwrap();
    (trainer.run(4, &mut |_, _| ()).unwrap(), world.now())
}

#[test]
fn a_prediction_is_the_run_but_for_what_is_computed() {
    let model = lightering::backend::sim::Model::default();
    for offload in [false, true] {
        let (run, end) = on_world(Config::timed(model), offload);
        let (predicted, predicted_end) = on_world(Config::times_only(model), offload);
        assert_eq!(predicted_end, end);
        let figures = |of: &Outcome| {
            (of.first_step, of.step, of.peak, of.after_forward, of.after_flush, of.moved)
        };
        assert_eq!(figures(&predicted), figures(&run));
        assert!(run.checksum != 0 && predicted.checksum == 0, "nothing was computed");
    }
}

#[test]
fn what_was_not_computed_is_null_and_not_a_number() {
    let modes = "--modes checkpoint,checkpoint+offload";
    let (out, err, ended) = of(&format!("{SMALL} {modes} --times-only --json"));
    ended.unwrap();
    let (run, ..) = of(&format!("{SMALL} {modes} --json"));
    for (line, run) in out.lines().zip(run.lines()) {
        for name in ["loss", "first_loss", "grad_checksum"] {
            assert_eq!(field(line, name), "null");
        }
        let names = |line: &str| -> Vec<String> {
            line.split(", ").map(|field| field.split(": ").next().unwrap().to_string()).collect()
        };
        assert_eq!(names(line), names(run), "the same fields");
        assert_eq!(field(line, "boundary_bytes"), (3 * 16 * 24 * 2).to_string());
    }
    assert!(err.contains("nothing is computed") && err.contains(" - "), "{err}");
}

#[test]
fn a_step_of_a_size_that_no_cpu_computes_is_predicted_with_its_figures() {
    let folder = std::env::temp_dir().join(format!("lightering-predict-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("half.txt");
    std::fs::write(&file, "matrix_flops_per_s = 352.5e12\nmemory_bytes_per_s = 1.95e12\n").unwrap();
    let line = "--device sim --times-only --layers 24 --hidden 4096 --tokens 8192 --steps 1 --json \
                --modes checkpoint,checkpoint+offload";
    let seconds = |line: &str| -> Vec<f64> {
        let (out, _, ended) = of(line);
        ended.unwrap();
        out.lines().map(|line| field(line, "step_seconds").parse().unwrap()).collect()
    };
    let (fast, slow) =
        (seconds(line), seconds(&format!("{line} --model {}", file.to_str().unwrap())));
    std::fs::remove_dir_all(&folder).unwrap();
    // Seven products a layer, the first made twice; memory-bound kernels are a tenth of it.
    let products = 24.0 * 7.0 * 2.0 * 8192.0 * 4096.0 * 16384.0 / 705e12;
    assert!(fast[0] > products && fast[0] < 1.2 * products, "{fast:?} {products}");
    assert!(fast[1] < 1.02 * fast[0], "the copies hide: {fast:?}");
    assert!((slow[0] / fast[0] - 2.0).abs() < 0.01, "half as fast: {slow:?} {fast:?}");
}

#[test]
fn raw_copies_move_as_many_bytes_and_change_nothing() {
    let line = "--device sim --layers 5 --hidden 32 --tokens 512 --steps 4 --keep-last 2 --json \
                --modes checkpoint,checkpoint+raw,checkpoint+offload";
    let (out, _, ended) = of(line);
    ended.unwrap();
    let lines: Vec<&str> = out.lines().collect();
    let number = |line: usize, name| field(lines[line], name).parse::<u64>().unwrap();
    assert_eq!(field(lines[1], "grad_checksum"), field(lines[0], "grad_checksum"));
    assert_eq!(number(1, "moved_bytes"), 3 * 32 * 512 * 4);
    assert_eq!(number(1, "moved_bytes"), number(2, "moved_bytes"));
    assert_eq!(number(1, "freed_bytes"), 0);
    let flushed = |line| number(line, "after_flush_device_bytes");
    assert_eq!(flushed(1), flushed(0) + 32 * 512 * 4, "what comes back is one input's room");
}

#[test]
fn a_real_devices_step_is_predicted_to_cost_what_raw_copies_do() {
    // Fewer tokens than the real run's: pinned memory is real, and copies hide alike.
    let line = "--device sim --times-only --layers 12 --hidden 4096 --tokens 2048 --steps 4 --json \
                --modes checkpoint,checkpoint+raw,checkpoint+offload";
    let (out, _, ended) = of(line);
    ended.unwrap();
    let lines: Vec<&str> = out.lines().collect();
    let number = |line: usize, name| field(lines[line], name).parse::<f64>().unwrap();
    assert!(number(2, "step_seconds") < 1.01 * number(1, "step_seconds"), "{out}");
    let gone = number(0, "after_flush_device_bytes") - number(2, "after_flush_device_bytes");
    assert!(gone > 0.97 * 11.0 / 12.0 * number(0, "boundary_bytes"), "{out}");
}

#[test]
fn a_mode_that_keeps_everything_and_finds_no_room_says_so_in_its_row() {
    let words = "--device sim --layers 6 --hidden 64 --tokens 700 --steps 2 --json";
    let Command::Run(options) = args::parse(words.split_whitespace().map(String::from)).unwrap()
    else {
        panic!("a run")
    };
    let shape = options.shape;
    let needed = [true, false].map(|keep_all| shape.peak_bytes(shape.layers, keep_all));
    let mut plan = device::plan(&mut options.clone()).unwrap();
    let device_bytes = Bytes((needed[0].0 + needed[1].0) / 2);
    plan.open = Box::new(move |meter| {
        let world = World::new(Config { device_bytes, ..Config::default() });
        let one = || -> lightering::Result<Box<dyn lightering::backend::Backend>> {
            Ok(Box::new(meter::Metered::new(Box::new(world.device(0)?), meter.clone())))
        };
        Ok([one()?, one()?])
    });
    let text = Text::open(None).unwrap();
    let mut said = Vec::new();
    let rows: Vec<Row> = (options.modes.iter())
        .map(|mode| (*mode, train(&options, &plan, &text, *mode, &mut said).unwrap()))
        .collect();
    assert!(String::from_utf8(said).unwrap().contains("none: alloc"), "the cause is said");
    let table = report::table(&options, &plan.about, &rows);
    assert!(table.lines().any(|line| line.starts_with("none") && line.contains("out of memory")));
    let json: Vec<String> =
        rows.iter().map(|row| report::json(&options, &plan.about, row)).collect();
    for (name, wanted) in [("out_of_memory", "true"), ("loss", "null"), ("step_seconds", "null")] {
        assert_eq!(field(&json[0], name), wanted);
    }
    assert_eq!(field(&json[1], "out_of_memory"), "false");
    assert_eq!(report::difference(&rows), None, "the others ran, and agree");
    assert!(rows[1].1.is_some() && rows[2].1.is_some());
}

#[test]
fn a_timeline_has_layers_and_copies_on_one_axis() {
    let folder = std::env::temp_dir().join(format!("lightering-timeline-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("t.json");
    let (_, _, ended) = of(&format!("{SMALL} --timeline {}", path.display()));
    ended.unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |name: &str| -> Vec<(f64, f64)> {
        let named = events.iter().filter(|event| event["name"] == name && event["ph"] == "X");
        named.map(|event| (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap())).collect()
    };
    // Four steps; the last layer's input stays, and each other one goes out and comes back.
    let (forward, copies) = (of("forward 0"), of("layer.0.input"));
    assert_eq!((forward.len(), of("backward 2").len(), copies.len()), (4, 4, 8), "{text}");
    let mut copies = copies;
    copies.sort_by(|a, b| a.0.total_cmp(&b.0));
    for (step, (start, took)) in forward.iter().enumerate() {
        assert!(copies[2 * step].0 >= start + took, "a copy-out is behind its producer");
    }
    let (_, _, ended) = super::tests::of(&format!("{SMALL} --timeline {}", folder.display()));
    assert!(matches!(ended, Err(Failure::Input(why)) if why.starts_with("--timeline ")));
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn the_checker_looks_at_all_that_an_engine_does_in_a_run() {
    let (_, err, ended) =
        of(&format!("{SMALL} --check --modes checkpoint+offload,checkpoint+grow"));
    ended.unwrap();
    for mode in ["checkpoint+offload", "checkpoint+grow"] {
        let start = format!("{mode}: checked: ");
        let line = err.lines().find_map(|line| line.strip_prefix(&start)).expect(&err);
        let count: u64 = line.strip_suffix(" records, no hazard").unwrap().parse().unwrap();
        // Four steps of three layers, of which two leave: each copy alone is several.
        assert!(count > 100, "{line}");
    }
}

#[test]
fn two_runs_are_equal_in_every_figure() {
    let line = format!("{SMALL} --json --modes checkpoint,checkpoint");
    let (first, _, ended) = of(&line);
    ended.unwrap();
    assert_eq!(first, of(&line).0);
    let lines: Vec<&str> = first.lines().collect();
    assert_eq!(lines[0], lines[1]);
}

#[test]
fn a_table_says_that_times_are_simulated() {
    let (out, err, ended) = of(&format!("{SMALL} --modes none"));
    ended.unwrap();
    assert!(out.contains("simulated") && out.lines().count() == 3, "{out}");
    assert!(err.contains("simulated") && err.contains("entropy"), "{err}");
    assert!(of("--help").0.contains("--prefetch-bytes"));
}

#[test]
fn the_smallest_sizes_work() {
    let (out, _, ended) = of("--device sim --layers 1 --hidden 8 --tokens 1 --steps 1 --json");
    ended.unwrap();
    assert_eq!(out.lines().count(), 3);
}

#[test]
fn the_text_is_learned() {
    let line = "--device sim --modes checkpoint --layers 2 --hidden 96 --tokens 384 --steps 40";
    let (out, _, ended) = of(&format!("{line} --json"));
    ended.unwrap();
    let entropy = Text::open(None).unwrap().unigram_entropy();
    let loss: f64 = field(&out, "loss").parse().unwrap();
    assert!((3.0..3.3).contains(&entropy), "{entropy}");
    assert!(loss < entropy - 0.1, "loss {loss}, unigram entropy {entropy}");
}

#[test]
fn what_should_leave_the_device_leaves_it() {
    let line = "--device sim --layers 9 --hidden 32 --tokens 512 --steps 3 --keep-last 2 --json";
    let (out, err, ended) = of(line);
    ended.unwrap();
    let lines: Vec<&str> = out.lines().collect();
    let number = |line: usize, name| field(lines[line], name).parse::<u64>().unwrap();
    let away = 7 * 32 * 512 * 4;
    assert_eq!(number(2, "moved_bytes"), away);
    assert_eq!(number(2, "freed_bytes"), away);
    let left = number(2, "after_flush_device_bytes");
    assert_eq!(number(1, "after_forward_device_bytes") - left, away, "all of it is off the device");
    assert!(left < number(2, "after_forward_device_bytes"), "the flush frees what was under way");
    assert!(number(2, "peak_device_bytes") < number(1, "peak_device_bytes"));
    assert!(number(1, "peak_device_bytes") < number(0, "peak_device_bytes"));
    assert!(!err.contains("stayed"), "{err}");
}

#[test]
fn a_pinned_budget_too_small_keeps_inputs_on_the_device_and_says_so() {
    let line = "--device sim --layers 5 --hidden 32 --tokens 512 --steps 3 --json \
                --modes checkpoint,checkpoint+offload --pinned-bytes";
    for (budget, moved) in [("0", 0), ("1", 0), ("65535", 0), ("140KiB", 2)] {
        let (out, err, ended) = of(&format!("{line} {budget}"));
        ended.unwrap();
        let line = out.lines().last().unwrap();
        assert_eq!(field(line, "moved_bytes"), (moved * 65536).to_string(), "{budget}");
        assert!(err.contains(&format!("{} of 5 layers' inputs stayed", 4 - moved)), "{err}");
    }
}

#[test]
fn the_estimate_of_the_peak_is_near_the_peak() {
    let line = "--device sim --layers 4 --hidden 64 --tokens 700 --steps 2 --keep-last 4 --json";
    let (out, _, ended) = of(line);
    ended.unwrap();
    let shape = shape::Shape::new(4, 64, 700, 4).unwrap();
    for (line, estimate) in out.lines().zip([
        shape.peak_bytes(4, true),
        shape.peak_bytes(4, false),
        shape.peak_bytes(4, false),
    ]) {
        let peak: u64 = field(line, "peak_device_bytes").parse().unwrap();
        assert!(peak.abs_diff(estimate.0) < peak / 50, "peak {peak}, estimate {estimate:?}");
    }
}

#[test]
fn copies_that_fit_under_the_compute_cost_under_two_percent() {
    let line = "--device sim --modes checkpoint,checkpoint+offload --steps 3 --json";
    let (out, _, ended) = of(line);
    ended.unwrap();
    let steps: Vec<f64> =
        out.lines().map(|line| field(line, "step_seconds").parse().unwrap()).collect();
    assert!(steps[1] < 1.02 * steps[0], "{steps:?}");
}

#[test]
fn copies_that_do_not_fit_cost_what_they_take_and_under_two_percent_more() {
    let line = "--device sim --modes checkpoint,checkpoint+offload --steps 3 --json \
                --layers 24 --hidden 32 --tokens 16384 --keep-last 1";
    let (out, _, ended) = of(line);
    ended.unwrap();
    let steps: Vec<f64> =
        out.lines().map(|line| field(line, "step_seconds").parse().unwrap()).collect();
    let model = lightering::backend::sim::Model::default();
    let bytes = 32.0 * 16384.0 * 4.0;
    let out = bytes / model.copy_out_bytes_per_s + model.copy_out_start_ns / 1e9;
    let back = bytes / model.copy_in_bytes_per_s + model.copy_in_start_ns / 1e9;
    // Of the 23 that leave, the last two are still on the device when the backward asks for them.
    let bound = 23.0 * out + 21.0 * back;
    assert!(steps[0] < 0.7 * bound, "the copies are not hidden: {steps:?} {bound}");
    assert!(steps[1] < 1.02 * bound && steps[1] > 0.98 * bound, "{steps:?} {bound}");
}

#[test]
fn bad_input_is_one_line_with_its_cause() {
    for (line, cause) in [
        ("--text /nonexistent/text", "--text /nonexistent/text: "),
        ("--text /", "--text /: "),
        ("--text /dev/null", "empty"),
        ("--layers 0", "--layers 0"),
        ("--device cuda:4000000000", "cuda:4000000000"),
        ("--device sim --layers 4096 --hidden 131072 --tokens 16777216", "--tokens"),
        ("--device sim --layers 8 --hidden 131072", "--hidden"),
        ("--device sim --pinned-bytes 8000TiB", "--pinned-bytes"),
    ] {
        let (out, err, ended) = of(line);
        let Err(Failure::Input(text)) = ended else { panic!("{line}: {ended:?}") };
        assert!(text.contains(cause) && !text.contains('\n'), "{line}: {text}");
        assert!(out.is_empty() && err.is_empty(), "{line}: {out}{err}");
    }
}

#[test]
fn gradients_that_differ_in_one_bit_are_an_error() {
    let outcome = |checksum| Outcome {
        first_loss: 1.0,
        loss: f64::NAN,
        checksum,
        peak: Bytes(1),
        after_forward: Bytes(1),
        after_flush: Bytes(1),
        moved: inputs::Moved::default(),
        first_moved: inputs::Moved::default(),
        pinning: inputs::Pinning::default(),
        first_step: std::time::Duration::ZERO,
        step: std::time::Duration::ZERO,
        timeline: None,
    };
    let row = |mode, checksum| (mode, Some(outcome(checksum)));
    let pair = |a, b| [row(Mode::Checkpoint, a), (Mode::None, None), row(Mode::Offload, b)];
    assert_eq!(report::difference(&pair(7, 7)), None);
    let text = report::difference(&pair(7, 7 | 1 << 63)).unwrap();
    assert!(text.contains("checkpoint and checkpoint+offload differ") && !text.contains('\n'));
    assert_eq!(report::difference(&[]), None);
}

#[test]
fn a_closed_output_is_an_error_not_a_panic() {
    struct Closed;
    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let words = format!("{SMALL} --json --modes none");
    let ended = run(words.split_whitespace().map(String::from), &mut Closed, &mut Vec::new());
    assert!(matches!(ended, Err(Failure::Run(text)) if text.contains("output")));
}

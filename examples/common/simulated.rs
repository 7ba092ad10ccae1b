//! The simulated device of an example: after which figures it keeps time, and whether bytes move.
//!
//! What it is not: a device. It makes worlds, each with its own clock.
//!
//! Invariant: figures that cannot be read, or are none, are refused in one line that names the
//! file.
//!
//! ```text
//!   --model FILE   -> Model: the file's figures over the default ones
//!   --times-only   -> a world that moves no byte
//! ```
//!
//! The examples that have these options use it.

use lightering::backend::sim::{Config, Model, World};
use std::fs::File;
use std::io::Read;

/// A model's text is some hundred bytes; more than this is no model.
const LEN_MAX: u64 = 1 << 20;

/// What worlds are to be like.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Simulated {
    pub(crate) model: Model,
    pub(crate) times_only: bool,
}

impl Simulated {
    /// With the figures of a file, where there is one.
    pub(crate) fn new(file: Option<&str>, times_only: bool) -> Result<Simulated, String> {
        let model = match file {
            Some(path) => read(path).map_err(|why| format!("--model {path}: {why}"))?,
            None => Model::default(),
        };
        Ok(Simulated { model, times_only })
    }

    /// A world of its own, so that no other's work shows in its times.
    pub(crate) fn world(&self) -> World {
        World::new(match self.times_only {
            true => Config::times_only(self.model),
            false => Config::timed(self.model),
        })
    }
}

fn read(path: &str) -> Result<Model, String> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    file.take(LEN_MAX + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > LEN_MAX {
        return Err(String::from("has more than 1 MiB"));
    }
    let text = String::from_utf8(bytes).map_err(|_| String::from("is no text"))?;
    text.parse().map_err(|error: lightering::Error| error.to_string())
}

#[cfg(test)]
mod tests {
    //! The fault guarded against: a prediction made with other figures than those asked for.
    use super::*;

    #[test]
    fn a_file_that_is_no_model_is_named_with_its_cause() {
        let folder = std::env::temp_dir().join(format!("lightering-model-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = |name: &str| folder.join(name).to_str().unwrap().to_string();
        std::fs::write(path("good"), "copy_call_ns = 1\n").unwrap();
        std::fs::write(path("wrong"), "\ncopy_call_ns = fast\n").unwrap();
        std::fs::write(path("bytes"), [0xff]).unwrap();
        for (name, says) in [
            ("missing", "No such file"),
            ("", "Is a directory"),
            ("wrong", "line 2: copy_call_ns: \"fast\" is no number"),
            ("bytes", "no text"),
        ] {
            let error = Simulated::new(Some(&path(name)), false).unwrap_err();
            let head = format!("--model {}: ", path(name));
            assert!(error.starts_with(&head) && error.contains(says), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
        let error = Simulated::new(Some("/dev/zero"), false).unwrap_err();
        assert!(error.contains("1 MiB"), "{error}");
        let good = Simulated::new(Some(&path("good")), true).unwrap();
        assert_eq!((good.model.copy_call_ns, good.times_only), (1.0, true));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

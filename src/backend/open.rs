//! Opens a device by its name in text: `auto`, `sim`, `sim:2`, `cuda`, `cuda:0`.
//!
//! What it is not: a registry. The two kinds of device are those of this crate.
//!
//! Invariant: `auto` takes the simulated device only where a CUDA device is not to be had, and says
//! why. A device that is there but out of memory, lost or forked away is an error.
//!
//! ```text
//!   "cuda:1" -> Spec::Cuda(1) -> Cuda::open(1)
//!   "auto"   -> Spec::Auto    -> Cuda::open(0), else the simulated device 0 and the reason
//! ```
//!
//! Examples, tests, the C interface and Python may use it.

use super::Backend;
use crate::error::{Error, Kind, Misuse, Result};
use std::fmt;
use std::str::FromStr;

const OP: &str = "open";

/// Which device to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Spec {
    /// CUDA device 0 where it is to be had, else simulated device 0.
    Auto,
    /// The simulated device of that ordinal.
    Sim(u32),
    /// The CUDA device of that ordinal.
    Cuda(u32),
}

impl FromStr for Spec {
    type Err = Error;

    /// Reads `auto`, `sim`, `sim:N`, `cuda` or `cuda:N`; N is 0 where it is left out.
    fn from_str(text: &str) -> Result<Spec> {
        let unknown = || {
            Error::usage(Misuse::BadValue, OP)
                .detail(format!("{text:?} is no device; try auto, sim, sim:N, cuda or cuda:N"))
        };
        let (kind, ordinal) = match text.split_once(':') {
            None => (text, None),
            Some((kind, digits)) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                (kind, Some(digits.parse().map_err(|_| unknown())?))
            }
            Some(_) => return Err(unknown()),
        };
        match (kind, ordinal) {
            ("auto", None) => Ok(Spec::Auto),
            ("sim", ordinal) => Ok(Spec::Sim(ordinal.unwrap_or(0))),
            ("cuda", ordinal) => Ok(Spec::Cuda(ordinal.unwrap_or(0))),
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Spec::Auto => f.write_str("auto"),
            Spec::Sim(ordinal) => write!(f, "sim:{ordinal}"),
            Spec::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// A device, and why it is a simulated one where nobody asked for that.
pub struct Opened {
    /// The device.
    pub backend: Box<dyn Backend>,
    /// Why `auto` found no CUDA device.
    pub why_simulated: Option<Error>,
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened")
            .field("backend", &self.backend.about())
            .field("why_simulated", &self.why_simulated)
            .finish()
    }
}

/// Opens the device that the text names.
///
/// # Errors
/// `Usage(BadValue)` for text that names none; the backend's own otherwise.
pub fn open(spec: &str) -> Result<Opened> {
    let (backend, why_simulated) = match spec.parse()? {
        Spec::Auto => either(cuda(0), || simulated(0))?,
        Spec::Sim(ordinal) => (simulated(ordinal)?, None),
        Spec::Cuda(ordinal) => (cuda(ordinal)?, None),
    };
    Ok(Opened { backend, why_simulated })
}

/// The first device, or the second where the first is not to be had.
fn either<T>(first: Result<T>, second: impl FnOnce() -> Result<T>) -> Result<(T, Option<Error>)> {
    match first {
        Ok(device) => Ok((device, None)),
        Err(why) if matches!(why.kind(), Kind::Unavailable(_)) => Ok((second()?, Some(why))),
        Err(error) => Err(error),
    }
}

#[cfg(feature = "cuda")]
fn cuda(ordinal: u32) -> Result<Box<dyn Backend>> {
    Ok(Box::new(super::cuda::Cuda::open(ordinal)?))
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: u32) -> Result<Box<dyn Backend>> {
    let error = Error::new(Kind::Unavailable(crate::error::Missing::NotBuilt), OP);
    Err(error.detail("the feature \"cuda\" is off"))
}

fn simulated(ordinal: u32) -> Result<Box<dyn Backend>> {
    Ok(Box::new(super::sim::World::process().device(ordinal)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Missing;

    #[test]
    fn a_device_is_found_by_its_name() {
        for (text, spec) in [
            ("auto", Spec::Auto),
            ("sim", Spec::Sim(0)),
            ("sim:3", Spec::Sim(3)),
            ("cuda", Spec::Cuda(0)),
            ("cuda:15", Spec::Cuda(15)),
        ] {
            assert_eq!(text.parse::<Spec>().unwrap(), spec);
            assert_eq!(spec.to_string().parse::<Spec>().unwrap(), spec);
        }
    }

    #[test]
    fn text_that_names_no_device_is_refused_with_the_text() {
        for text in [
            "",
            "gpu",
            "CUDA",
            "cuda:",
            "cuda:-1",
            "cuda:+1",
            "cuda:4294967296",
            "auto:0",
            "sim:0:1",
        ] {
            let error = open(text).unwrap_err();
            assert_eq!(error.misuse(), Some(Misuse::BadValue), "{text}");
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn auto_hides_no_error_but_that_of_a_device_that_is_not_to_be_had() {
        let missing = Error::new(Kind::Unavailable(Missing::Driver), OP);
        assert_eq!(either(Err(missing.clone()), || Ok(2)).unwrap(), (2, Some(missing)));
        assert_eq!(either(Ok(1), || Ok(2)).unwrap(), (1, None));
        for kind in [Kind::Lost, Kind::OutOfMemory, Kind::Usage(Misuse::Forked), Kind::Closed] {
            let error = either(Err(Error::new(kind, OP)), || Ok(2)).unwrap_err();
            assert_eq!(error.kind(), kind);
        }
    }
}

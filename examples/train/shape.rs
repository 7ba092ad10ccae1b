//! Sizes of the model and of a step, with what they take in memory; every product is checked.
//!
//! What it is not: it allocates nothing and knows no device.
//!
//! Invariant: a `Shape` that exists has no size of zero, and none of its counts leaves 64 bits.
//!
//! ```text
//!   --layers --hidden --tokens -> Shape::new -> counts in elements -> bytes
//! ```
//!
//! The whole example uses it.

use lightering::Bytes;

/// Tokens are bytes.
pub(crate) const VOCABULARY: u64 = 256;
/// A layer mixes each token with the seven before it.
pub(crate) const TAPS: u64 = 8;
/// A layer's inner width is this many times its outer one.
pub(crate) const WIDEN: u64 = 4;
/// The gradient of the mixing weights is summed over this many runs of tokens, then over the runs.
pub(crate) const TILES: u64 = 16;
/// Every allocation's pieces start at multiples of this many bytes, as the driver's own do.
const ALIGN: u64 = 256;

const LAYERS_MAX: u64 = 4096;
const HIDDEN_MAX: u64 = 1 << 17;
const TOKENS_MAX: u64 = 1 << 24;

/// Sizes of the model and of its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Residual blocks.
    pub(crate) layers: u64,
    /// Channels of a token between the blocks; a multiple of 8.
    pub(crate) hidden: u64,
    /// Tokens of one step: one stretch of the text.
    pub(crate) tokens: u64,
    /// Bytes of a number of the model on the device.
    pub(crate) element: u64,
}

impl Shape {
    /// Checks the sizes; the error is a sentence.
    pub(crate) fn new(
        layers: u64,
        hidden: u64,
        tokens: u64,
        element: u64,
    ) -> Result<Shape, String> {
        for (name, value, max) in [
            ("--layers", layers, LAYERS_MAX),
            ("--hidden", hidden, HIDDEN_MAX),
            ("--tokens", tokens, TOKENS_MAX),
        ] {
            if value == 0 || value > max {
                return Err(format!("{name} {value}: must be 1 to {max}"));
            }
        }
        if !hidden.is_multiple_of(8) {
            return Err(format!("--hidden {hidden}: must be a multiple of 8"));
        }
        let shape = Shape { layers, hidden, tokens, element };
        // The largest count there is; all others are parts of it.
        shape
            .total()
            .map(|_| shape)
            .ok_or_else(|| String::from("--layers, --hidden and --tokens: exceed 64 bits of bytes"))
    }

    /// Inner width of a layer.
    pub(crate) fn inner(&self) -> u64 {
        WIDEN * self.hidden
    }

    /// Numbers in one layer's input.
    pub(crate) fn boundary(&self) -> u64 {
        self.tokens * self.hidden
    }

    /// Numbers in all parameters.
    pub(crate) fn parameters(&self) -> u64 {
        2 * VOCABULARY * self.hidden
            + self.layers * (TAPS * self.hidden + 2 * self.hidden * self.inner())
    }

    /// Numbers in the partial sums of the mixing weights' gradients, in single precision.
    pub(crate) fn partials(&self) -> u64 {
        self.layers * TILES * TAPS * self.hidden
    }

    /// Bytes of one layer's input.
    pub(crate) fn boundary_bytes(&self) -> Bytes {
        Bytes(self.boundary() * self.element)
    }

    /// Bytes of all layers' inputs: what should leave the device when everything is moved.
    pub(crate) fn boundaries_bytes(&self) -> Bytes {
        Bytes(self.layers * self.boundary_bytes().0)
    }

    /// Bytes of device memory that a step has at its peak, about. `resident` is how many layers'
    /// inputs stay on the device; `keep_all` says that every layer's inner results stay too.
    pub(crate) fn peak_bytes(&self, resident: u64, keep_all: bool) -> Bytes {
        let (token, element) = (self.tokens * self.element, self.element);
        let state = self.parameters() * (2 * element + 2 * 4) + self.partials() * 4;
        let kept = (self.hidden + self.inner()) * token + 4 * self.tokens;
        let (inner, loss) = (self.inner() * token, (self.hidden + VOCABULARY) * token);
        let work = match keep_all {
            true => self.layers * kept + inner.max(loss),
            false => (kept + inner).max(loss),
        };
        Bytes(state + work + (resident + 1) * self.boundary_bytes().0)
    }

    /// Everything at once, `None` past 64 bits; with slack, so that sums of a few parts fit too.
    fn total(&self) -> Option<u64> {
        let a_layer = self.hidden.checked_mul(self.hidden)?.checked_mul(16)?;
        let kept = self.tokens.checked_mul(self.hidden)?.checked_mul(16)?;
        let layers = self.layers.checked_mul(a_layer.checked_add(kept)?)?;
        layers.checked_add(VOCABULARY * (self.tokens + self.hidden))?.checked_mul(8 * self.element)
    }
}

/// The offset at which the next piece of an allocation starts.
pub(crate) fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_of_zero_or_past_its_bound_is_named() {
        for (shape, name) in [
            (Shape::new(0, 64, 64, 4), "--layers"),
            (Shape::new(4, 0, 64, 4), "--hidden"),
            (Shape::new(4, 12, 64, 4), "--hidden"),
            (Shape::new(4, 64, 0, 4), "--tokens"),
            (Shape::new(4, 64, u64::MAX, 4), "--tokens"),
            (Shape::new(u64::MAX, 64, 64, 4), "--layers"),
        ] {
            assert!(shape.unwrap_err().starts_with(name));
        }
    }

    #[test]
    fn the_largest_shape_wraps_no_count() {
        let shape = Shape::new(LAYERS_MAX, HIDDEN_MAX, TOKENS_MAX, 4).unwrap();
        let parameters = u128::from(shape.layers) * 8 * u128::from(shape.hidden).pow(2);
        assert!(u128::from(shape.parameters()) > parameters);
        let all = shape.peak_bytes(shape.layers, true);
        let sixfold = 6 * u128::from(shape.layers * shape.boundary()) * 4;
        assert!(u128::from(all.0) > sixfold);
    }
}

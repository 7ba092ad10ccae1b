//! Where each parameter lies: all of them in one run, and their gradients in another alike.
//!
//! What it is not: it owns no memory.
//!
//! Invariant: the parts follow one another without gap or overlap, and all together are the run.
//!
//! ```text
//!   embedding 256 x h | mixing weights L x TAPS x h | per layer: up h x 4h, down 4h x h | head
//!                                                                                     h x 256
//! ```
//!
//! `model` uses it.

use crate::shape::{Shape, TAPS, VOCABULARY};
use lightering::{Bytes, DeviceRange, Result};

/// One run of parameters, or of their gradients.
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    shape: Shape,
    run: DeviceRange,
}

impl Layout {
    pub(crate) fn new(shape: Shape, run: DeviceRange) -> Layout {
        assert!(run.len().0 == shape.parameters() * shape.element, "a run holds every parameter");
        Layout { shape, run }
    }

    /// A row of `hidden` numbers for each byte.
    pub(crate) fn embedding(&self) -> Result<DeviceRange> {
        self.part(0, self.ends())
    }

    /// The mixing weights of all layers.
    pub(crate) fn mixes(&self) -> Result<DeviceRange> {
        self.part(self.ends(), self.shape.layers * self.mix_len())
    }

    /// The mixing weights of one layer.
    pub(crate) fn mix(&self, layer: u64) -> Result<DeviceRange> {
        self.part(self.ends() + layer * self.mix_len(), self.mix_len())
    }

    /// A layer's first matrix, `hidden` by `inner`.
    pub(crate) fn up(&self, layer: u64) -> Result<DeviceRange> {
        self.part(self.matrices() + 2 * layer * self.matrix_len(), self.matrix_len())
    }

    /// A layer's second matrix, `inner` by `hidden`.
    pub(crate) fn down(&self, layer: u64) -> Result<DeviceRange> {
        self.part(self.matrices() + (2 * layer + 1) * self.matrix_len(), self.matrix_len())
    }

    /// The head's matrix, `hidden` by 256.
    pub(crate) fn head(&self) -> Result<DeviceRange> {
        self.part(self.matrices() + 2 * self.shape.layers * self.matrix_len(), self.ends())
    }

    /// Numbers in the embedding, and as many in the head.
    fn ends(&self) -> u64 {
        VOCABULARY * self.shape.hidden
    }

    fn mix_len(&self) -> u64 {
        TAPS * self.shape.hidden
    }

    fn matrix_len(&self) -> u64 {
        self.shape.hidden * self.shape.inner()
    }

    fn matrices(&self) -> u64 {
        self.ends() + self.shape.layers * self.mix_len()
    }

    fn part(&self, offset: u64, len: u64) -> Result<DeviceRange> {
        let element = self.shape.element;
        self.run.part(Bytes(offset * element), Bytes(len * element))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lightering::DevicePtr;

    #[test]
    fn the_parts_tile_the_run() {
        let shape = Shape::new(3, 16, 8, 4).unwrap();
        let len = Bytes(shape.parameters() * 4);
        let layout = Layout::new(shape, DeviceRange::new(DevicePtr(4096), len).unwrap());
        let mut parts = vec![layout.embedding().unwrap()];
        parts.extend((0..3).map(|layer| layout.mix(layer).unwrap()));
        for layer in 0..3 {
            parts.extend([layout.up(layer).unwrap(), layout.down(layer).unwrap()]);
        }
        parts.push(layout.head().unwrap());
        let mut at = 4096;
        for part in &parts {
            assert_eq!(part.at().0, at);
            at = part.end();
        }
        assert_eq!(at, 4096 + len.0);
        assert_eq!(layout.mixes().unwrap().len().0, 3 * parts[1].len().0);
    }
}

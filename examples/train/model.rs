//! The model: its parameters, and the forward and backward of each part.
//!
//! What it is not: the training step. Who keeps a layer's input, and where, is for `inputs`.
//!
//! Invariant: a layer's backward gives the same bits whether its inner results were kept or are
//! made anew from its input: the same kernels run on the same numbers.
//!
//! ```text
//!   x -> norm, causal mixing -> m -> up (h, 4h) -> u -> max(u, 0)^2 = a -> down (4h, h) -> + x = y
//!
//!   allocations:  x, y: one each       slab { inv, m, u }: kept, or given back      a: given back
//! ```
//!
//! `step` uses it.

use crate::kernel::mix::Source;
use crate::kernel::product::{Size, plain, product, product_add, transposed};
use crate::kernel::{act, adam, head, mix, tally};
use crate::layout::Layout;
use crate::queue::{Cutter, Queue};
use crate::shape::{Shape, TAPS, TILES, VOCABULARY, aligned};
use lightering::{Bytes, DeviceRange, Result};

/// The parameters on the device with all that belongs to them.
pub(crate) struct Model {
    pub(crate) shape: Shape,
    state: adam::State,
    weights: Layout,
    grads: Layout,
    /// Partial sums of the mixing weights' gradients.
    partials: DeviceRange,
    /// Partial sums of the gradients' hash.
    parts: DeviceRange,
    /// The gradients' hash, and the last loss.
    pub(crate) tally: DeviceRange,
}

/// What a layer's backward needs besides its input.
pub(crate) struct Slab {
    whole: DeviceRange,
    inv: DeviceRange,
    m: DeviceRange,
    u: DeviceRange,
}

impl Model {
    /// Takes the parameters' memory and fills it; the same numbers every time.
    pub(crate) fn new(queue: &mut Queue<'_>, shape: Shape) -> Result<Model> {
        let bytes = shape.parameters() * shape.element;
        let mut run = |bytes| queue.take(bytes);
        let (weights, grads) = (run(bytes)?, run(bytes)?);
        let (mean, square) = (run(shape.parameters() * 4)?, run(shape.parameters() * 4)?);
        let state = adam::State { weights, grads, mean, square };
        let model = Model {
            shape,
            state,
            weights: Layout::new(shape, state.weights),
            grads: Layout::new(shape, state.grads),
            partials: queue.take(shape.partials() * 4)?,
            parts: queue.take(tally::parts(bytes) * 8)?,
            tally: queue.take(tally::STATE_BYTES)?,
        };
        model.fill(queue)?;
        Ok(model)
    }

    fn fill(&self, queue: &mut Queue<'_>) -> Result<()> {
        for zero in [self.state.mean, self.state.square, self.tally] {
            adam::fill(queue, zero, 0, 0.0)?;
        }
        // A uniform number between -b and b has a mean square of b^2 / 3.
        let bound = |fan_in: u64| (3.0 / fan_in as f32).sqrt();
        let shape = &self.shape;
        adam::fill(queue, self.weights.embedding()?, 1, bound(1))?;
        adam::fill(queue, self.weights.head()?, 2, 0.1 * bound(shape.hidden))?;
        // The sum over layers should stay near the size of one.
        let share = 1.0 / (2.0 * shape.layers as f32).sqrt();
        for layer in 0..shape.layers {
            let seed = 3 + 3 * layer;
            adam::fill(queue, self.weights.mix(layer)?, seed, bound(TAPS))?;
            adam::fill(queue, self.weights.up(layer)?, seed + 1, bound(shape.hidden))?;
            adam::fill(queue, self.weights.down(layer)?, seed + 2, share * bound(shape.inner()))?;
        }
        Ok(())
    }

    /// Gives the memory back.
    pub(crate) fn close(self, queue: &mut Queue<'_>) -> Result<()> {
        let state = self.state;
        for range in [state.weights, state.grads, state.mean, state.square] {
            queue.give(range)?;
        }
        queue.give(self.partials)?;
        queue.give(self.parts)?;
        queue.give(self.tally)
    }

    /// All parameters.
    #[cfg(test)]
    pub(crate) fn weights_run(&self) -> DeviceRange {
        self.state.weights
    }

    /// All gradients.
    #[cfg(test)]
    pub(crate) fn grads_run(&self) -> DeviceRange {
        self.state.grads
    }

    /// Tokens to the first layer's input.
    pub(crate) fn embed(
        &self,
        queue: &mut Queue<'_>,
        tokens: DeviceRange,
        x: DeviceRange,
    ) -> Result<()> {
        head::embed(queue, &self.shape, self.weights.embedding()?, tokens, x)
    }

    /// A layer's input to its output; returns what the backward can use, where `keep` asks for it.
    pub(crate) fn forward(
        &self,
        queue: &mut Queue<'_>,
        layer: u64,
        x: DeviceRange,
        y: DeviceRange,
        keep: bool,
    ) -> Result<Option<Slab>> {
        let slab = self.inner_results(queue, layer, x)?;
        let a = queue.take(slab.u.len().0)?;
        act::act(queue, slab.u, x, a, y)?;
        let down = plain(self.weights.down(layer)?);
        product_add(queue, plain(a), down, y, self.size_of_down())?;
        queue.give(a)?;
        if keep {
            return Ok(Some(slab));
        }
        queue.give(slab.whole)?;
        Ok(None)
    }

    /// The gradient of a layer's output to that of its input, in place, and the gradients of its
    /// parameters. What the forward did not keep is made anew from the layer's input `x`.
    pub(crate) fn backward(
        &self,
        queue: &mut Queue<'_>,
        layer: u64,
        x: DeviceRange,
        kept: Option<Slab>,
        d: DeviceRange,
    ) -> Result<()> {
        let slab = match kept {
            Some(slab) => slab,
            None => self.inner_results(queue, layer, x)?,
        };
        let shape = &self.shape;
        let Size { m: tokens, n: hidden, k: inner } = self.size_of_down();
        let (up, down) = (self.weights.up(layer)?, self.weights.down(layer)?);
        let inner_d = queue.take(slab.u.len().0)?;
        let size = Size { m: tokens, n: inner, k: hidden };
        product(queue, plain(d), transposed(down), inner_d, size)?;
        act::act_back(queue, slab.u, inner_d)?;
        let size = Size { m: inner, n: hidden, k: tokens };
        product(queue, transposed(slab.u), plain(d), self.grads.down(layer)?, size)?;
        let size = Size { m: hidden, n: inner, k: tokens };
        product(queue, transposed(slab.m), plain(inner_d), self.grads.up(layer)?, size)?;
        // Nobody reads m any more: its place takes its gradient.
        let size = Size { m: tokens, n: hidden, k: inner };
        product(queue, plain(inner_d), transposed(up), slab.m, size)?;
        queue.give(inner_d)?;
        let source = Source { x, inv: slab.inv };
        mix::mix_back(queue, shape, source, self.weights.mix(layer)?, slab.m, d)?;
        mix::mix_grad(queue, shape, source, slab.m, self.partials_of(layer)?)?;
        queue.give(slab.whole)
    }

    /// The last layer's output to the tokens' losses, and in its place its gradient.
    pub(crate) fn head(
        &self,
        queue: &mut Queue<'_>,
        tokens: DeviceRange,
        y: DeviceRange,
        losses: DeviceRange,
    ) -> Result<()> {
        let Shape { hidden, tokens: count, element, .. } = self.shape;
        let n = queue.take(y.len().0)?;
        let logits = queue.take(count * VOCABULARY * element)?;
        head::norm(queue, &self.shape, y, n)?;
        let matrix = self.weights.head()?;
        let size = Size { m: count, n: VOCABULARY, k: hidden };
        product(queue, plain(n), plain(matrix), logits, size)?;
        head::cross_entropy(queue, &self.shape, logits, tokens, losses)?;
        let size = Size { m: hidden, n: VOCABULARY, k: count };
        product(queue, transposed(n), plain(logits), self.grads.head()?, size)?;
        // Nobody reads n any more: its place takes its gradient.
        let size = Size { m: count, n: hidden, k: VOCABULARY };
        product(queue, plain(logits), transposed(matrix), n, size)?;
        head::norm_back(queue, &self.shape, n, y)?;
        queue.give(logits)?;
        queue.give(n)
    }

    /// The last gradients, their hash, and the update of all parameters.
    pub(crate) fn finish(
        &self,
        queue: &mut Queue<'_>,
        tokens: DeviceRange,
        d: DeviceRange,
        losses: DeviceRange,
        step: u64,
    ) -> Result<()> {
        head::embed_back(queue, &self.shape, d, tokens, self.grads.embedding()?)?;
        mix::mix_sum(queue, &self.shape, self.partials, self.grads.mixes()?)?;
        tally::checksum(queue, self.state.grads, self.parts)?;
        tally::tally(queue, self.parts, losses, self.tally)?;
        adam::adam(queue, &self.shape, &self.state, step)
    }

    /// Norm, mixing and the first product, the same in the forward and when made anew.
    fn inner_results(&self, queue: &mut Queue<'_>, layer: u64, x: DeviceRange) -> Result<Slab> {
        let Shape { hidden, tokens, element, .. } = self.shape;
        let inner = self.shape.inner();
        let lens = [tokens * 4, tokens * hidden * element, tokens * inner * element];
        let whole = queue.take(aligned(lens[0]) + aligned(lens[1]) + lens[2])?;
        let mut cutter = Cutter::new(whole);
        let slab = Slab {
            whole,
            inv: cutter.cut(lens[0])?,
            m: cutter.cut(lens[1])?,
            u: cutter.cut(lens[2])?,
        };
        let source = Source { x, inv: slab.inv };
        mix::norm_mix(queue, &self.shape, source, self.weights.mix(layer)?, slab.m)?;
        let up = plain(self.weights.up(layer)?);
        product(queue, plain(slab.m), up, slab.u, Size { m: tokens, n: inner, k: hidden })?;
        Ok(slab)
    }

    fn size_of_down(&self) -> Size {
        Size { m: self.shape.tokens, n: self.shape.hidden, k: self.shape.inner() }
    }

    fn partials_of(&self, layer: u64) -> Result<DeviceRange> {
        let len = TILES * TAPS * self.shape.hidden * 4;
        self.partials.part(Bytes(layer * len), Bytes(len))
    }
}

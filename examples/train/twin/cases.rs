//! A case for every kernel: its tensors, and the model's own launcher for it.
//!
//! What it is not: a choice of nice numbers. Results hold NaNs before the kernel runs, so what it
//! leaves out shows.
//!
//! Invariant: numbers of the device's element are ones that bf16 has, so both devices start alike.
//!
//! ```text
//!   Number: f32 or bf16      Single: f32      Bytes      Words      State: hash and loss
//! ```
//!
//! `twin` uses it.

use crate::kernel::adam::uniform;
use crate::kernel::mix::Source;
use crate::kernel::product::{Size, plain, product, product_add, transposed};
use crate::kernel::{act, adam, head, mix, tally};
use crate::queue::Queue;
use crate::shape::{Shape, TAPS, TILES, VOCABULARY};
use lightering::{DeviceRange, Result};

/// A tensor's values, by what they are on the device.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Data {
    /// In the device's element.
    Number(Vec<f32>),
    /// In single precision everywhere.
    Single(Vec<f32>),
    Bytes(Vec<u8>),
    Words(Vec<u64>),
    /// The tally's: a hash, and a loss's bits.
    State([u64; 2]),
}

impl Data {
    /// As they lie on a device with elements of that size.
    pub(super) fn bytes(&self, element: u64) -> Vec<u8> {
        match self {
            Data::Number(values) if element == 2 => {
                values.iter().flat_map(|x| narrow(*x).to_le_bytes()).collect()
            }
            Data::Number(values) | Data::Single(values) => {
                values.iter().flat_map(|x| x.to_le_bytes()).collect()
            }
            Data::Bytes(bytes) => bytes.clone(),
            Data::Words(words) => words.iter().flat_map(|word| word.to_le_bytes()).collect(),
            Data::State(words) => words.iter().flat_map(|word| word.to_le_bytes()).collect(),
        }
    }

    /// Values of this kind from a device's bytes.
    pub(super) fn of_bytes(&self, bytes: &[u8], element: u64) -> Data {
        let words =
            || bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
        let singles =
            || bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect();
        let halves = |x: &[u8]| wide(u16::from_le_bytes(x.try_into().unwrap()));
        match self {
            Data::Number(_) if element == 2 => {
                Data::Number(bytes.chunks_exact(2).map(halves).collect())
            }
            Data::Number(_) => Data::Number(singles()),
            Data::Single(_) => Data::Single(singles()),
            Data::Bytes(_) => Data::Bytes(bytes.to_vec()),
            Data::Words(_) => Data::Words(words().collect()),
            Data::State(_) => Data::State([words().next().unwrap(), words().nth(1).unwrap()]),
        }
    }

    /// How far `other` is off: the worst value, relative to its own size or the mean size.
    pub(super) fn off(&self, other: &Data) -> f64 {
        let exact = |same: bool| if same { 0.0 } else { f64::INFINITY };
        match (self, other) {
            (Data::Number(a), Data::Number(b)) | (Data::Single(a), Data::Single(b)) => spread(a, b),
            (Data::State(a), Data::State(b)) if a[0] == b[0] => {
                let [a, b] = [a, b].map(|state| f64::from_bits(state[1]) as f32);
                spread(&[a], &[b])
            }
            _ => exact(self == other),
        }
    }
}

fn spread(wanted: &[f32], got: &[f32]) -> f64 {
    let square = |x: &f32| f64::from(*x).powi(2);
    let size = (wanted.iter().map(square).sum::<f64>() / wanted.len() as f64).sqrt();
    let off = |(wanted, got): (&f32, &f32)| {
        let (wanted, got) = (f64::from(*wanted), f64::from(*got));
        let off = (wanted - got).abs() / wanted.abs().max(size).max(1e-30);
        // What is not a number in both is a result that neither wrote.
        if off.is_nan() { f64::INFINITY } else { off }
    };
    wanted.iter().zip(got).map(off).fold(0.0, f64::max)
}

pub(super) fn narrow(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() { 0x7fc0 } else { ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16 }
}

pub(super) fn wide(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

type Make = Box<dyn Fn(&Shape) -> Vec<Tensor>>;
type Launch = fn(&mut Queue<'_>, &Shape, &[DeviceRange]) -> Result<()>;

/// One kernel on some sizes.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) tokens: u64,
    pub(super) hidden: u64,
    /// How far off it may be: bf16 keeps 8 bits, and rounds to the nearest but for Adam's weights.
    pub(super) allowed: f64,
    pub(super) tensors: Make,
    pub(super) launch: Launch,
}

/// Two layers of those sizes.
pub(super) fn shape(tokens: u64, hidden: u64, element: u64) -> Shape {
    Shape::new(2, hidden, tokens, element).unwrap()
}

/// Half a last bit of bf16, with some room for the sums' own order.
const NEAREST: f64 = 4.2e-3;
/// cuBLAS rounds a sum to bf16 before it adds what is there, and then once more (seen on an H200
/// for every shape). The sum may be some times as large as the results' mean size.
const TWICE: f64 = 5.0 * NEAREST;
/// A whole one.
const BY_CHANCE: f64 = 8.2e-3;
const SINGLE: f64 = 1e-4;

/// A tensor that is not made yet: at the largest sizes none is made on the host.
#[derive(Clone, Copy, Debug)]
pub(super) enum Tensor {
    /// Numbers of the device's element, up to the scale.
    Number {
        seed: u64,
        len: u64,
        scale: f32,
    },
    /// Results in the device's element.
    Blank {
        len: u64,
    },
    /// Single-precision numbers up to the scale.
    Single {
        seed: u64,
        len: u64,
        scale: f32,
    },
    /// The same, above zero.
    Positive {
        seed: u64,
        len: u64,
        scale: f32,
    },
    /// Results in single precision.
    BlankSingle {
        len: u64,
    },
    Words {
        seed: u64,
        len: u64,
    },
    /// One byte more than there are tokens.
    Text {
        tokens: u64,
    },
    State,
}

impl Tensor {
    pub(super) fn data(&self) -> Data {
        let noise =
            |seed, len, scale| (0..len).map(move |i| wide(narrow(scale * uniform(seed, i))));
        let above = |scale: f32| move |x: f32| scale * (1.01 + x);
        let nothing = |len| vec![f32::NAN; len as usize];
        match *self {
            Tensor::Number { seed, len, scale } => Data::Number(noise(seed, len, scale).collect()),
            Tensor::Blank { len } => Data::Number(nothing(len)),
            Tensor::Single { seed, len, scale } => Data::Single(noise(seed, len, scale).collect()),
            Tensor::Positive { seed, len, scale } => {
                Data::Single(noise(seed, len, 1.0).map(above(scale)).collect())
            }
            Tensor::BlankSingle { len } => Data::Single(nothing(len)),
            Tensor::Words { seed, len } => {
                Data::Words((0..len).map(|i| tally::mixed(seed ^ tally::mixed(i))).collect())
            }
            Tensor::Text { tokens } => {
                // One byte is much more frequent than others.
                let rare = |i| (128.0 + 127.0 * uniform(8, i)) as u8;
                let byte = |i| if uniform(9, i) < -0.6 { 32 } else { rare(i) };
                Data::Bytes((0..=tokens).map(byte).collect())
            }
            Tensor::State => Data::State([5, 7]),
        }
    }

    /// Bytes on a device with elements of that size.
    pub(super) fn bytes(&self, element: u64) -> u64 {
        match *self {
            Tensor::Number { len, .. } | Tensor::Blank { len } => len * element,
            Tensor::Single { len, .. } | Tensor::Positive { len, .. } => 4 * len,
            Tensor::BlankSingle { len } => 4 * len,
            Tensor::Words { len, .. } => 8 * len,
            Tensor::Text { tokens } => tokens + 1,
            Tensor::State => 16,
        }
    }
}

fn number(seed: u64, len: u64) -> Tensor {
    Tensor::Number { seed, len, scale: 1.0 }
}

fn blank(len: u64) -> Tensor {
    Tensor::Blank { len }
}

fn blank_single(len: u64) -> Tensor {
    Tensor::BlankSingle { len }
}

fn positive(seed: u64, len: u64, scale: f32) -> Tensor {
    Tensor::Positive { seed, len, scale }
}

fn words(seed: u64, len: u64) -> Tensor {
    Tensor::Words { seed, len }
}

fn text(shape: &Shape) -> Tensor {
    Tensor::Text { tokens: shape.tokens }
}

/// Every kernel of the model, on those sizes.
pub(super) fn all(tokens: u64, hidden: u64) -> Vec<Case> {
    let case = |name, allowed, tensors: fn(&Shape) -> Vec<Tensor>, launch| Case {
        name,
        tokens,
        hidden,
        allowed,
        tensors: Box::new(tensors),
        launch,
    };
    let mut cases = products(tokens, hidden);
    cases.extend(ends(tokens, hidden));
    cases.extend(mixing(tokens, hidden));
    cases.extend([
        case("act", NEAREST, act_tensors, |queue, _, at| {
            act::act(queue, at[0], at[1], at[2], at[3])
        }),
        case(
            "act_back",
            NEAREST,
            |shape| vec![number(1, 4 * shape.boundary()), number(2, 4 * shape.boundary())],
            |queue, _, at| act::act_back(queue, at[0], at[1]),
        ),
        case(
            "fill",
            NEAREST,
            |shape| vec![blank(shape.boundary())],
            |queue, _, at| adam::fill(queue, at[0], 77, 0.3),
        ),
        case(
            "fill",
            0.0,
            |shape| vec![words(1, shape.boundary() / 4)],
            |queue, _, at| adam::fill(queue, at[0], 0, 0.0),
        ),
        case("adam", BY_CHANCE, adam_tensors, |queue, shape, at| {
            let state = adam::State { grads: at[0], weights: at[1], mean: at[2], square: at[3] };
            adam::adam(queue, shape, &state, 3)
        }),
        case(
            "checksum",
            0.0,
            |shape| {
                let len = shape.boundary() / 4;
                vec![words(1, len), words(2, tally::parts(8 * len))]
            },
            |queue, _, at| tally::checksum(queue, at[0], at[1]),
        ),
        case("tally", 1e-6, tally_tensors, |queue, _, at| tally::tally(queue, at[0], at[1], at[2])),
    ]);
    cases
}

fn act_tensors(shape: &Shape) -> Vec<Tensor> {
    let (inner, outer) = (4 * shape.boundary(), shape.boundary());
    vec![number(1, inner), number(2, outer), blank(inner), blank(outer)]
}

fn adam_tensors(shape: &Shape) -> Vec<Tensor> {
    let len = shape.boundary();
    let mean = Tensor::Single { seed: 3, len, scale: 0.01 };
    vec![number(1, len), number(2, len), mean, positive(4, len, 0.1)]
}

fn tally_tensors(shape: &Shape) -> Vec<Tensor> {
    vec![words(1, tally::parts(0)), positive(2, shape.tokens, 3.0), Tensor::State]
}

/// The three forms that the model uses.
fn products(tokens: u64, hidden: u64) -> Vec<Case> {
    // The largest is that of the layers; a small one is quickly computed on the host.
    fn columns(shape: &Shape) -> u64 {
        if shape.hidden < 4096 { 256 } else { shape.inner() }
    }
    fn size(shape: &Shape) -> Size {
        Size { m: shape.tokens, n: columns(shape), k: shape.hidden }
    }
    let case = |name, allowed, start: fn(u64) -> Tensor, launch| {
        let tensors: Make = Box::new(move |shape: &Shape| {
            let (a, b) = (number(1, shape.boundary()), number(2, shape.hidden * columns(shape)));
            vec![a, b, start(shape.tokens * columns(shape))]
        });
        Case { name, tokens, hidden, allowed, tensors, launch }
    };
    vec![
        case("product", NEAREST, blank, |queue, shape, at| {
            product(queue, plain(at[0]), transposed(at[1]), at[2], size(shape))
        }),
        case("product", NEAREST, blank, |queue, shape, at| {
            product(queue, transposed(at[0]), plain(at[1]), at[2], size(shape))
        }),
        case(
            "product_add",
            TWICE,
            |len| number(3, len),
            |queue, shape, at| product_add(queue, plain(at[0]), plain(at[1]), at[2], size(shape)),
        ),
    ]
}

fn ends(tokens: u64, hidden: u64) -> Vec<Case> {
    let case = |name, allowed, tensors: fn(&Shape) -> Vec<Tensor>, launch| Case {
        name,
        tokens,
        hidden,
        allowed,
        tensors: Box::new(tensors),
        launch,
    };
    vec![
        case(
            "embed",
            0.0,
            |shape| {
                let table = number(1, VOCABULARY * shape.hidden);
                vec![table, text(shape), blank(shape.boundary())]
            },
            |queue, shape, at| head::embed(queue, shape, at[0], at[1], at[2]),
        ),
        case(
            "embed_back",
            NEAREST,
            |shape| {
                let d = number(1, shape.boundary());
                vec![d, text(shape), blank(VOCABULARY * shape.hidden)]
            },
            |queue, shape, at| head::embed_back(queue, shape, at[0], at[1], at[2]),
        ),
        case(
            "norm",
            NEAREST,
            |shape| vec![number(1, shape.boundary()), blank(shape.boundary())],
            |queue, shape, at| head::norm(queue, shape, at[0], at[1]),
        ),
        case(
            "norm_back",
            NEAREST,
            |shape| vec![number(1, shape.boundary()), number(2, shape.boundary())],
            |queue, shape, at| head::norm_back(queue, shape, at[0], at[1]),
        ),
        case(
            "cross_entropy",
            NEAREST,
            |shape| {
                let len = VOCABULARY * shape.tokens;
                let logits = Tensor::Number { seed: 1, len, scale: 3.0 };
                vec![logits, text(shape), blank_single(shape.tokens)]
            },
            |queue, shape, at| head::cross_entropy(queue, shape, at[0], at[1], at[2]),
        ),
    ]
}

fn mixing(tokens: u64, hidden: u64) -> Vec<Case> {
    let case = |name, allowed, tensors: fn(&Shape) -> Vec<Tensor>, launch| Case {
        name,
        tokens,
        hidden,
        allowed,
        tensors: Box::new(tensors),
        launch,
    };
    vec![
        case("norm_mix", NEAREST, norm_mix_tensors, |queue, shape, at| {
            let source = Source { x: at[0], inv: at[2] };
            mix::norm_mix(queue, shape, source, at[1], at[3])
        }),
        case("mix_back", NEAREST, mix_back_tensors, |queue, shape, at| {
            let source = Source { x: at[0], inv: at[2] };
            mix::mix_back(queue, shape, source, at[1], at[3], at[4])
        }),
        case("mix_grad", SINGLE, mix_grad_tensors, |queue, shape, at| {
            let source = Source { x: at[0], inv: at[1] };
            mix::mix_grad(queue, shape, source, at[2], at[3])
        }),
        case(
            "mix_sum",
            NEAREST,
            |shape| {
                let partials = Tensor::Single { seed: 1, len: shape.partials(), scale: 1.0 };
                vec![partials, blank(shape.layers * TAPS * shape.hidden)]
            },
            |queue, shape, at| mix::mix_sum(queue, shape, at[0], at[1]),
        ),
    ]
}

fn norm_mix_tensors(shape: &Shape) -> Vec<Tensor> {
    let (rows, taps) = (shape.boundary(), TAPS * shape.hidden);
    vec![number(1, rows), number(2, taps), blank_single(shape.tokens), blank(rows)]
}

fn mix_back_tensors(shape: &Shape) -> Vec<Tensor> {
    let (rows, taps) = (shape.boundary(), TAPS * shape.hidden);
    let inv = positive(3, shape.tokens, 1.0);
    vec![number(1, rows), number(2, taps), inv, number(4, rows), number(5, rows)]
}

fn mix_grad_tensors(shape: &Shape) -> Vec<Tensor> {
    let (rows, parts) = (shape.boundary(), TILES * TAPS * shape.hidden);
    vec![number(1, rows), positive(2, shape.tokens, 1.0), number(3, rows), blank_single(parts)]
}

//! SHA-256, for comparing the heads of PTX files with their sources.
//!
//! What it is not: for anything else.

/// The hash as hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    let (k, mut state) = constants();
    let mut padded = bytes.to_vec();
    padded.push(0x80);
    padded.resize((padded.len() + 8).next_multiple_of(64) - 8, 0);
    padded.extend((8 * bytes.len() as u64).to_be_bytes());
    for block in padded.chunks_exact(64) {
        let mut w: Vec<u32> = block
            .chunks_exact(4)
            .map(|word| u32::from_be_bytes(word.try_into().unwrap()))
            .collect();
        for i in 16..64 {
            let (a, b) = (w[i - 15], w[i - 2]);
            let a = a.rotate_right(7) ^ a.rotate_right(18) ^ (a >> 3);
            let b = b.rotate_right(17) ^ b.rotate_right(19) ^ (b >> 10);
            w.push(w[i - 16].wrapping_add(a).wrapping_add(w[i - 7]).wrapping_add(b));
        }
        let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = state;
        for (w, k) in w.iter().zip(&k) {
            let s = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
            let choice = (e & f) ^ (!e & g);
            let one = [s, choice, *k, *w].iter().fold(h, |sum, x| sum.wrapping_add(*x));
            let s = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
            let two = s.wrapping_add((a & b) ^ (a & c) ^ (b & c));
            (h, g, f, e) = (g, f, e, d.wrapping_add(one));
            (d, c, b, a) = (c, b, a, one.wrapping_add(two));
        }
        for (state, add) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
            *state = state.wrapping_add(add);
        }
    }
    state.iter().map(|word| format!("{word:08x}")).collect()
}

/// The first 32 bits of the fractions of the first primes' cube roots, and of the square roots of
/// the first eight.
fn constants() -> ([u32; 64], [u32; 8]) {
    let is_prime = |n: &u32| (2..*n).all(|d| !n.is_multiple_of(d));
    let primes: Vec<u32> = (2..).filter(is_prime).take(64).collect();
    // floor(2^32 * root), by bisection in integers; the fraction is its lower half.
    let root = |n: u32, power: u32| {
        let (mut low, mut high) = (0u128, 1u128 << 36);
        while high - low > 1 {
            let middle = (low + high) / 2;
            if middle.pow(power) <= u128::from(n) << (32 * power) {
                low = middle;
            } else {
                high = middle;
            }
        }
        low as u32
    };
    let k = std::array::from_fn(|i| root(primes[i], 3));
    (k, std::array::from_fn(|i| root(primes[i], 2)))
}

#[test]
fn the_standards_examples_come_out() {
    let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!((sha256(b"").as_str(), sha256(b"abc").as_str()), (empty, abc));
}

//! Random names, which cannot be guessed and are unique.

use ring::rand::{SecureRandom, SystemRandom};

use crate::hash::hex;

/// The lower-case hexadecimal digits of this many random bytes. `None`: the system has no randomness.
#[must_use]
pub fn random_hex<const BYTES: usize>() -> Option<String> {
    let mut bytes = [0_u8; BYTES];
    SystemRandom::new().fill(&mut bytes).ok()?;
    Some(hex(&bytes))
}

#[cfg(test)]
mod tests {
    use super::random_hex;

    #[test]
    fn two_names_of_128_bits_have_32_digits_and_differ() {
        let [one, other] = [random_hex::<16>().unwrap(), random_hex::<16>().unwrap()];
        assert_eq!((one.len(), other.len()), (32, 32));
        assert!(one.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')));
        assert_ne!(one, other);
    }
}

//! SHA-256 hashes, and their hexadecimal digits.

use std::fmt::Write;

use ring::digest::{SHA256, digest};

/// Length of a hash.
pub const BYTES: usize = 32;

#[must_use]
pub fn sha256(bytes: impl AsRef<[u8]>) -> [u8; BYTES] {
    let mut hash = [0; BYTES];
    // A digest has as many bytes as its algorithm says.
    hash.copy_from_slice(digest(&SHA256, bytes.as_ref()).as_ref());
    hash
}

/// Lower-case hexadecimal digits of the first `length` bytes of the hash.
#[must_use]
pub fn sha256_hex(bytes: impl AsRef<[u8]>, length: usize) -> String {
    let hash = sha256(bytes);
    hex(&hash[..length.min(BYTES)])
}

/// The first eight bytes of the hash as a number.
#[must_use]
pub fn sha256_u64(bytes: impl AsRef<[u8]>) -> u64 {
    u64::from_be_bytes(sha256(bytes).first_chunk().copied().unwrap_or_default())
}

/// Lower-case hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            // Writing to a String cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_and_digits_are_those_of_the_standard() {
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hex(&sha256("abc")), abc);
        assert_eq!(sha256_hex("abc", BYTES), abc);
        assert_eq!(sha256_hex("abc", 99), abc);
        assert_eq!(sha256_hex("abc", 4), "ba7816bf");
        assert_eq!(sha256_u64("abc"), 0xba78_16bf_8f01_cfea);
        assert_eq!(hex(&[0, 15, 16, 255]), "000f10ff");
    }
}

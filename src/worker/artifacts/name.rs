//! Names of artifacts: a hash of the content, and the media type as an extension. Pure.
//!
//! Nothing in a name comes from a server, so no name leads out of the store's directory.

use std::fmt;

use crate::support::hash::sha256_hex;

/// Bytes of the hash in a name. Contents that differ have different names except by chance or by intent; then the newer
/// content replaces the older one.
const HASH_BYTES: usize = 8;

/// Media types with an extension, and whether they are text. The first one with an extension is that of the artifact.
const TYPES: &[(&str, &str, bool)] = &[
    ("image/png", "png", false),
    ("image/jpeg", "jpg", false),
    ("image/gif", "gif", false),
    ("image/webp", "webp", false),
    ("audio/wav", "wav", false),
    ("audio/x-wav", "wav", false),
    ("audio/mpeg", "mp3", false),
    ("audio/ogg", "ogg", false),
    ("application/pdf", "pdf", false),
    ("application/zip", "zip", false),
    ("text/plain", "txt", true),
    ("application/json", "json", true),
    ("application/xml", "xml", true),
    ("text/csv", "csv", true),
    ("text/html", "html", true),
    ("text/markdown", "md", true),
    ("image/svg+xml", "svg", true),
];
/// Of everything else.
const OTHER: (&str, &str, bool) = ("application/octet-stream", "bin", false);
/// Of other kinds of text.
pub const TEXT: &str = "text/plain";

/// The name of an artifact.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ArtifactName {
    text: String,
    kind: &'static (&'static str, &'static str, bool),
}

impl ArtifactName {
    /// The name of a content, whose media type may have parameters.
    #[must_use]
    pub fn of(media_type: &str, content: &[u8]) -> Self {
        let essence = media_type
            .split(';')
            .next()
            .unwrap_or_default()
            .trim()
            .to_ascii_lowercase();
        let is_text = essence.starts_with("text/");
        let found = TYPES
            .iter()
            .find(|(name, ..)| *name == essence)
            .or_else(|| TYPES.iter().find(|(name, ..)| is_text && *name == TEXT));
        let kind = found.unwrap_or(&OTHER);
        Self {
            text: format!("{}.{}", sha256_hex(content, HASH_BYTES), kind.1),
            kind,
        }
    }

    /// A name as a result has it; `None`: no artifact can have it.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (hash, extension) = text.split_once('.')?;
        let is_digit = |letter: u8| letter.is_ascii_digit() || (b'a'..=b'f').contains(&letter);
        if hash.len() != HASH_BYTES * 2 || !hash.bytes().all(is_digit) {
            return None;
        }
        let kind = TYPES.iter().chain([&OTHER]).find(|kind| kind.1 == extension)?;
        Some(Self {
            text: text.to_owned(),
            kind,
        })
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The media type that its extension stands for.
    #[must_use]
    pub fn media_type(&self) -> &'static str {
        self.kind.0
    }

    /// Whether its content is text by its media type.
    #[must_use]
    pub fn is_text(&self) -> bool {
        self.kind.2
    }
}

impl fmt::Display for ArtifactName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_hash_of_the_content_and_the_extension_of_its_media_type() {
        let name = |media_type: &str| ArtifactName::of(media_type, b"abc").to_string();
        assert_eq!(name("image/png"), "ba7816bf8f01cfea.png");
        assert_eq!(name("IMAGE/JPEG"), "ba7816bf8f01cfea.jpg");
        assert_eq!(name("text/plain; charset=utf-8"), "ba7816bf8f01cfea.txt");
        assert_eq!(name("text/x-rust"), "ba7816bf8f01cfea.txt");
        assert_eq!(name("application/x-../../etc"), "ba7816bf8f01cfea.bin");
        assert_ne!(ArtifactName::of(TEXT, b"abc"), ArtifactName::of(TEXT, b"abd"));
    }

    #[test]
    fn every_name_is_read_back_with_its_media_type_and_nothing_else_is_a_name() {
        for (media_type, extension, is_text) in TYPES.iter().chain([&OTHER]) {
            let name = ArtifactName::of(media_type, b"abc");
            let read = ArtifactName::parse(name.as_str()).unwrap();
            assert_eq!((read.as_str(), read.is_text()), (name.as_str(), *is_text));
            let first = TYPES.iter().chain([&OTHER]).find(|one| one.1 == *extension).unwrap();
            assert_eq!(read.media_type(), first.0);
        }
        for bad in [
            "",
            "..",
            "../journal.sqlite",
            "ba7816bf8f01cfea",
            "ba7816bf8f01cfea.",
            "ba7816bf8f01cfea.exe",
            "ba7816bf8f01cfe.txt",
            "BA7816BF8F01CFEA.txt",
            "ba7816bf8f01cfea.txt/",
            "ba7816bf8f01cfea.txt\0",
            "/ba7816bf8f01cfea.txt",
            "ba7816bf8f01cfea.tar.txt",
        ] {
            assert_eq!(ArtifactName::parse(bad), None, "{bad:?}");
        }
    }
}

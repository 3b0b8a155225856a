//! Images that a model is shown: their formats, their sizes, and what the bytes of those in a prompt are.
//!
//! Reads only what a header says. Decodes no image.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

/// The format and the size of an image, as its header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageHeader {
    pub media_type: &'static str,
    pub width: u32,
    pub height: u32,
}

impl ImageHeader {
    /// Reads the header of a PNG or a JPEG, which all models that take images take. `None`: it is neither.
    #[must_use]
    pub fn read(image: &[u8]) -> Option<Self> {
        png(image).or_else(|| jpeg(image))
    }
}

fn png(image: &[u8]) -> Option<ImageHeader> {
    let header = image.strip_prefix(b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR")?;
    let number = |at: usize| Some(u32::from_be_bytes(*header.get(at..)?.first_chunk()?));
    sized("image/png", number(0)?, number(4)?)
}

/// The size is in the segment that begins the frame, before the data.
fn jpeg(image: &[u8]) -> Option<ImageHeader> {
    let mut rest = image.strip_prefix(b"\xff\xd8")?;
    loop {
        let [0xff, kind, after @ ..] = rest else {
            return None;
        };
        if *kind == 0xff {
            // Fill bytes.
            rest = &rest[1..];
            continue;
        }
        // Marks without a length: where readers differ about what follows, another frame could be hidden. Then the data, or the
        // end, without a frame.
        if matches!(kind, 0x00..=0x01 | 0xd0..=0xda) {
            return None;
        }
        let length = usize::from(u16::from_be_bytes(*after.first_chunk()?));
        let segment = after.get(2..length)?;
        match kind {
            // Tables and extensions have numbers between those of the kinds of frames.
            0xc0..=0xcf if !matches!(kind, 0xc4 | 0xc8 | 0xcc) => {
                let number = |at: usize| Some(u16::from_be_bytes(*segment.get(at..)?.first_chunk()?));
                return sized("image/jpeg", number(3)?.into(), number(1)?.into());
            }
            _ => rest = after.get(length..)?,
        }
    }
}

fn sized(media_type: &'static str, width: u32, height: u32) -> Option<ImageHeader> {
    (width > 0 && height > 0).then_some(ImageHeader {
        media_type,
        width,
        height,
    })
}

/// The images of a prompt, by the names of their artifacts.
#[derive(Clone, Debug, Default)]
pub struct PromptImages(BTreeMap<String, EncodedImage>);

/// An image as it is sent.
#[derive(Clone, Debug)]
pub struct EncodedImage {
    pub media_type: &'static str,
    /// In base64.
    pub data: String,
}

impl PromptImages {
    /// Adds an image. False: it is none that models take.
    pub fn add(&mut self, name: &str, image: &[u8]) -> bool {
        let Some(header) = ImageHeader::read(image) else {
            return false;
        };
        let encoded = EncodedImage {
            media_type: header.media_type,
            data: BASE64_STANDARD.encode(image),
        };
        self.0.insert(name.to_owned(), encoded);
        true
    }

    #[must_use]
    pub fn get(&self, name: &str) -> Option<&EncodedImage> {
        self.0.get(name)
    }
}

impl EncodedImage {
    /// As a URL that contains the image.
    #[must_use]
    pub fn data_url(&self) -> String {
        format!("data:{};base64,{}", self.media_type, self.data)
    }

    /// Reads an image from such a URL: only one in base64, of a type that [`ImageHeader`] knows.
    #[must_use]
    pub fn of_data_url(url: &str) -> Option<(&str, &str)> {
        url.strip_prefix("data:")?.split_once(";base64,")
    }
}

/// Reads the header of an image in base64, and that it is of this media type.
#[must_use]
pub fn header_of_base64(media_type: &str, data: &str) -> Option<ImageHeader> {
    let image = BASE64_STANDARD.decode(data).ok()?;
    ImageHeader::read(&image).filter(|header| header.media_type == media_type)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The beginning of a PNG of this size.
    pub(crate) fn png_header(width: u32, height: u32) -> Vec<u8> {
        let mut image = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
        image.extend(width.to_be_bytes());
        image.extend(height.to_be_bytes());
        image.extend([8, 2, 0, 0, 0]);
        image
    }

    fn jpeg_header(width: u16, height: u16) -> Vec<u8> {
        // An extension, a table, fill bytes, and a progressive frame.
        let mut image = b"\xff\xd8\xff\xe0\0\x04ab\xff\xc4\0\x03t\xff\xff\xc2\0\x0b\x08".to_vec();
        image.extend(height.to_be_bytes());
        image.extend(width.to_be_bytes());
        image.extend([3, 1, 0x11, 0, 2, 0x11]);
        image
    }

    #[test]
    fn the_size_of_a_png_and_of_a_jpeg_is_that_of_its_header() {
        let header = |media_type, width, height| {
            Some(ImageHeader {
                media_type,
                width,
                height,
            })
        };
        let png = png_header(1920, 70_000);
        assert_eq!(ImageHeader::read(&png), header("image/png", 1920, 70_000));
        let jpeg = jpeg_header(640, 480);
        assert_eq!(ImageHeader::read(&jpeg), header("image/jpeg", 640, 480));
        assert_eq!(ImageHeader::read(&png_header(0, 1)), None);
        assert_eq!(ImageHeader::read(b"GIF89a\x01\0\x01\0"), None);
        assert_eq!(ImageHeader::read(b"not really a picture"), None);
        // A mark without a length, which some readers skip: what follows it is not read as a segment.
        for mark in [0x01, 0xd0, 0xd7, 0xd8] {
            let mut hidden = jpeg_header(640, 480);
            hidden.splice(2..2, [0xff, mark]);
            assert_eq!(ImageHeader::read(&hidden), None, "{mark:#x}");
        }
    }

    #[test]
    fn a_header_that_is_cut_anywhere_is_none_and_never_a_panic() {
        let complete = [("png", png_header(3, 5), 24), ("jpeg", jpeg_header(3, 5), 27)];
        for (name, image, needed) in complete {
            assert!(ImageHeader::read(&image).is_some(), "{name}");
            for end in 0..needed {
                assert_eq!(ImageHeader::read(&image[..end]), None, "{name} {end}");
            }
        }
    }

    #[test]
    fn an_image_is_sent_in_base64_and_read_back_with_its_own_type_only() {
        let mut images = PromptImages::default();
        assert!(images.add("a.png", &png_header(3, 5)));
        assert!(!images.add("b.png", b"not really a picture") && images.get("b.png").is_none());
        let url = images.get("a.png").unwrap().data_url();
        let (media_type, data) = EncodedImage::of_data_url(&url).unwrap();
        let header = header_of_base64(media_type, data).unwrap();
        assert_eq!((media_type, header.width, header.height), ("image/png", 3, 5));
        assert_eq!(header_of_base64("image/jpeg", data), None);
        assert_eq!(header_of_base64("image/png", "?"), None);
        assert_eq!(EncodedImage::of_data_url("https://example.org/a.png"), None);
    }
}

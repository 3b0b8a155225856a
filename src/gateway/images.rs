//! Images in requests: which may be sent, and what they cost at most. Pure.
//!
//! An image is accepted only in the form that the worker writes, with its content in the request, since the size of
//! content elsewhere is unknown. Its tokens have no relation to its bytes: they are counted at the spec's
//! `imageInput.tokensPerImage`, and an image that could be billed with more is rejected.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::api::agent::ImageInput;
use crate::provider::images::{EncodedImage, header_of_base64};

/// Images of a request or of one of its messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageCount {
    pub images: usize,
    /// Bytes of their contents in the request.
    pub bytes: usize,
}

impl ImageCount {
    pub fn add(&mut self, more: Self) {
        self.images = self.images.saturating_add(more.images);
        self.bytes = self.bytes.saturating_add(more.bytes);
    }

    /// What a message with `bytes` bytes counts: each image with the most tokens that it can have.
    pub fn bound(self, bytes: usize, input: Option<ImageInput>) -> usize {
        let each = input.map_or(0, |input| usize::try_from(input.tokens_per_image).unwrap_or(usize::MAX));
        bytes
            .saturating_sub(self.bytes)
            .saturating_add(self.images.saturating_mul(each))
    }
}

/// The source of an image in Anthropic messages.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ImageSource<'a> {
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
    #[serde(borrow)]
    media_type: Cow<'a, str>,
    #[serde(borrow)]
    data: Cow<'a, str>,
}

/// The URL of an image in chat completions.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ImageUrl<'a> {
    #[serde(borrow)]
    url: Cow<'a, str>,
    #[serde(borrow)]
    detail: Cow<'a, str>,
}

#[derive(Deserialize)]
struct PlainText<'a>(#[serde(borrow)] Cow<'a, str>);

/// Maximum number of bytes of a request that may be images.
pub fn max_bytes(input: Option<ImageInput>) -> usize {
    input.map_or(0, |input| {
        let images = usize::try_from(input.max_images).unwrap_or(usize::MAX);
        images.saturating_mul(ImageInput::MAX_BYTES.div_ceil(3) * 4)
    })
}

/// The image in a part with these fields. `None`: it is not in the form that the worker writes, or not allowed.
pub fn read<'a>(fields: impl Iterator<Item = (&'a str, &'a RawValue)>, input: ImageInput) -> Option<ImageCount> {
    let mut fields: Vec<(&str, &RawValue)> = fields.filter(|(name, _)| *name != "type").collect();
    fields.sort_by_key(|(name, _)| *name);
    match fields[..] {
        [("source", source)] => {
            let source: ImageSource<'_> = serde_json::from_str(source.get()).ok()?;
            (source.kind == "base64").then_some(())?;
            counted(&source.media_type, &source.data, input)
        }
        [("image_url", image)] => {
            let image: ImageUrl<'_> = serde_json::from_str(image.get()).ok()?;
            of_url(&image.url, &image.detail, input)
        }
        [("detail", detail), ("image_url", url)] => {
            let detail: PlainText<'_> = serde_json::from_str(detail.get()).ok()?;
            let url: PlainText<'_> = serde_json::from_str(url.get()).ok()?;
            of_url(&url.0, &detail.0, input)
        }
        _ => None,
    }
}

/// Other values of `detail` may be billed by the size of the image, without a bound.
fn of_url(url: &str, detail: &str, input: ImageInput) -> Option<ImageCount> {
    let (media_type, data) = EncodedImage::of_data_url(url)?;
    (detail == "high").then_some(())?;
    counted(media_type, data, input)
}

fn counted(media_type: &str, data: &str, input: ImageInput) -> Option<ImageCount> {
    let bytes = data.trim_end_matches('=').len() * 3 / 4;
    // Before it is decoded.
    (bytes <= ImageInput::MAX_BYTES).then_some(())?;
    let header = header_of_base64(media_type, data)?;
    input.allows(header.width, header.height, bytes).then_some(ImageCount {
        images: 1,
        bytes: data.len(),
    })
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use serde_json::{Value, json};

    use super::*;
    use crate::api::agent::ModelSpec;
    use crate::gateway::request::{CheckedRequest, RequestError, RequestRules};
    use crate::provider::images::PromptImages;

    const APIS: [&str; 3] = ["AnthropicMessages", "OpenAIChat", "OpenAIResponses"];

    /// A PNG of this size with `bytes` bytes.
    fn png(width: u32, height: u32, bytes: usize) -> Vec<u8> {
        let mut image = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
        image.extend(width.to_be_bytes());
        image.extend(height.to_be_bytes());
        image.resize(bytes, 0);
        image
    }

    fn model(api: &str, input: &Value) -> ModelSpec {
        serde_json::from_value(json!({"api": api, "name": "m", "contextTokens": 1000, "imageInput": input})).unwrap()
    }

    /// A request in the form of the worker with these images of one result.
    fn body(api: &str, images: &[Vec<u8>]) -> Vec<u8> {
        let mut shown = PromptImages::default();
        let encoded = images.iter().map(|image| {
            assert!(shown.add("a", image));
            shown.get("a").unwrap().clone()
        });
        let encoded: Vec<EncodedImage> = encoded.collect();
        let url = |image: &EncodedImage| format!("data:{};base64,{}", image.media_type, image.data);
        let body = match api {
            "AnthropicMessages" => {
                let source = |image: &EncodedImage| json!({"type": "base64", "media_type": image.media_type, "data": image.data});
                let mut parts = vec![json!({"type": "text", "text": "a picture"})];
                parts.extend(
                    encoded
                        .iter()
                        .map(|image| json!({"type": "image", "source": source(image)})),
                );
                json!({"model": "m", "messages": [
                    {"role": "user", "content": "Turn 1."},
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "hub__look", "input": {}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": parts}]},
                ]})
            }
            "OpenAIChat" => {
                let mut parts = vec![json!({"type": "text", "text": "the images"})];
                parts.extend(
                    encoded
                        .iter()
                        .map(|image| json!({"type": "image_url", "image_url": {"url": url(image), "detail": "high"}})),
                );
                json!({"model": "m", "messages": [
                    {"role": "user", "content": "Turn 1."},
                    {"role": "user", "content": parts},
                ]})
            }
            _ => {
                let mut parts = vec![json!({"type": "input_text", "text": "the images"})];
                parts.extend(
                    encoded
                        .iter()
                        .map(|image| json!({"type": "input_image", "image_url": url(image), "detail": "high"})),
                );
                json!({"model": "m", "input": [{"type": "message", "role": "user", "content": parts}]})
            }
        };
        serde_json::to_vec(&body).unwrap()
    }

    fn check(api: &str, input: &Value, body: &[u8]) -> Result<CheckedRequest, RequestError> {
        RequestRules::new(&model(api, input), None).unwrap().apply(body)
    }

    /// Maximum number of tokens that the messages can be billed with.
    fn bound(checked: &CheckedRequest) -> usize {
        let parts = checked.parts();
        let messages = parts.iter().filter(|part| part.is_message);
        messages
            .map(|part| part.traits.images.bound(part.bytes.len(), checked.image_input()))
            .sum()
    }

    #[test]
    fn the_images_of_the_worker_are_counted_with_their_bound_and_not_with_their_bytes() {
        let input = json!({"maxImages": 2, "tokensPerImage": 400});
        for api in APIS {
            let small = [png(28, 28, 40), png(28, 28, 40)];
            let large = [png(28, 28, 40), png(28, 28, ImageInput::MAX_BYTES)];
            let body = [&small, &large].map(|images| body(api, images));
            let [small, large] = [0, 1].map(|place| check(api, &input, &body[place]).map_err(|_| api).unwrap());
            assert_eq!(bound(&small), bound(&large), "{api}");
            let none = check(api, &input, &self::body(api, &[])).map_err(|_| api).unwrap();
            let more = bound(&small) - bound(&none);
            assert!(
                (800..1_500).contains(&more),
                "two images, and the JSON around them: {more}"
            );
        }
    }

    #[test]
    fn more_images_than_the_spec_allows_or_any_without_it_are_rejected() {
        for api in APIS {
            let images = |count: usize| body(api, &vec![png(28, 28, 40); count]);
            let two = json!({"maxImages": 2, "tokensPerImage": 400});
            assert!(check(api, &two, &images(1)).is_ok() && check(api, &two, &images(2)).is_ok());
            assert_eq!(check(api, &two, &images(3)).err(), Some(RequestError::Image));
            let rejected = check(api, &Value::Null, &images(1)).err();
            assert!(matches!(rejected, Some(RequestError::NotText(_))), "{api}");
        }
    }

    #[test]
    fn an_image_that_could_be_billed_with_more_than_its_bound_is_rejected() {
        let input = json!({"maxImages": 1, "tokensPerImage": 100});
        for api in APIS {
            let sized =
                |width: u32, height: u32, bytes: usize| check(api, &input, &body(api, &[png(width, height, bytes)]));
            assert!(sized(280, 280, 40).is_ok() && sized(28 * 100, 28, ImageInput::MAX_BYTES).is_ok());
            assert_eq!(sized(281, 280, 40).err(), Some(RequestError::Image), "110 squares");
            assert_eq!(sized(8_001, 1, 40).err(), Some(RequestError::Image), "an edge");
            let error = sized(28, 28, ImageInput::MAX_BYTES + 1).err();
            assert!(
                matches!(error, Some(RequestError::Image | RequestError::TooLong { .. })),
                "{api}: {error:?}"
            );
        }
    }

    #[test]
    fn only_images_in_the_form_of_the_worker_are_accepted() {
        let input = json!({"maxImages": 1, "tokensPerImage": 100});
        let change = |api: &str, from: &str, to: &str| {
            let text = String::from_utf8(body(api, &[png(28, 28, 40)])).unwrap();
            assert!(text.contains(from), "{api} {from}");
            check(api, &input, text.replacen(from, to, 1).as_bytes()).err()
        };
        let image = Some(RequestError::Image);
        for (api, from, to) in [
            ("OpenAIChat", "\"detail\":\"high\"", "\"detail\":\"auto\""),
            ("OpenAIChat", ",\"detail\":\"high\"", ""),
            ("OpenAIChat", "data:image/png;base64,", "https://example.org/"),
            ("OpenAIChat", "data:image/png", "data:image/gif"),
            ("OpenAIResponses", "\"detail\":\"high\"", "\"file_id\":\"f\""),
            ("OpenAIResponses", "\"detail\":\"high\"", "\"detail\":\"original\""),
            ("AnthropicMessages", "\"type\":\"base64\"", "\"type\":\"url\""),
            ("AnthropicMessages", "\"media_type\"", "\"url\":\"x\",\"media_type\""),
            ("AnthropicMessages", "image/png", "image/jpeg"),
        ] {
            assert_eq!(change(api, from, to), image, "{api}: {to}");
        }
    }

    #[test]
    fn a_text_that_is_too_long_is_rejected_also_beside_an_image() {
        let input = json!({"maxImages": 20, "tokensPerImage": 100});
        // 1,000 tokens of 8 bytes, and 64 KiB.
        let text = |bytes: usize| {
            let text = String::from_utf8(body("OpenAIChat", &[png(28, 28, 40)])).unwrap();
            check(
                "OpenAIChat",
                &input,
                text.replacen("Turn 1.", &"x".repeat(bytes), 1).as_bytes(),
            )
            .err()
        };
        assert_eq!(text(72_000), None);
        assert!(matches!(text(74_000), Some(RequestError::TooLong { .. })));
    }
}

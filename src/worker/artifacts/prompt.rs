//! The images of a prompt, read when its request is built: messages have only their names.

use std::sync::Arc;

use super::{ArtifactName, ArtifactStore};
use crate::api::agent::ImageInput;
use crate::engine::message::Message;
use crate::provider::images::{ImageHeader, PromptImages};

/// Reads the images that these messages name. One that is no longer stored, or is not what it was, is not shown: its
/// result still names it.
#[must_use]
pub fn prompt_images(store: &ArtifactStore, messages: &[Arc<Message>], input: ImageInput) -> PromptImages {
    let mut images = PromptImages::default();
    let named = messages.iter().flat_map(|message| match &**message {
        Message::Tool { artifacts, .. } => &artifacts.images[..],
        Message::System { .. } | Message::User { .. } | Message::Assistant { .. } => &[],
    });
    for image in named {
        let content = ArtifactName::parse(&image.name).and_then(|name| store.read(&name).ok());
        let allowed = content.filter(|content| {
            let header = ImageHeader::read(content);
            header.is_some_and(|header| input.allows(header.width, header.height, content.len()))
        });
        if let Some(content) = allowed {
            images.add(&image.name, &content);
        }
    }
    images
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tool::{ResultArtifacts, StoredImage};

    const PNG: &[u8] = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\0\x03\0\0\0\x05\x08\x02\0\0\0";

    #[test]
    fn an_image_is_read_by_its_name_also_by_the_next_process_and_a_deleted_one_is_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        let name = ArtifactStore::open(dir.path()).store("image/png", PNG).unwrap();
        let text = ArtifactStore::open(dir.path()).store("text/plain", b"text").unwrap();
        let image = |name: &str| StoredImage {
            name: name.into(),
            width: 3,
            height: 5,
            bytes: PNG.len(),
        };
        let gone = "0123456789abcdef.png";
        let message = Arc::new(Message::Tool {
            id: "a".into(),
            text: String::new(),
            failed: false,
            reasoning: None,
            artifacts: ResultArtifacts {
                text: None,
                images: vec![
                    image(name.as_str()),
                    image(gone),
                    image(text.as_str()),
                    image("../journal.sqlite"),
                ],
            },
        });
        let store = ArtifactStore::open(dir.path());
        let images = prompt_images(&store, &[message], ImageInput::default());
        assert_eq!(images.get(name.as_str()).unwrap().media_type, "image/png");
        assert!(images.get(gone).is_none() && images.get(text.as_str()).is_none());
    }
}

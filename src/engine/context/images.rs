//! Which images of tool results a prompt shows. Pure: a prompt has their names, and the worker reads them.
//!
//! The newest ones, up to the spec's number. When there are more, the older half leaves at once: each image that leaves
//! changes the beginning of the prompt, which misses the provider's cache.

use std::sync::Arc;

use crate::machine::Engine;
use crate::message::Message;
use crate::tool::StoredImage;
use agentloop_api::agent::ImageInput;

/// The images of a message that may be shown.
fn images(message: &Message, rules: ImageInput) -> impl Iterator<Item = &StoredImage> {
    let images: &[StoredImage] = match message {
        Message::Tool { artifacts, .. } => &artifacts.images,
        Message::System { .. } | Message::User { .. } | Message::Assistant { .. } => &[],
    };
    images
        .iter()
        .filter(move |image| rules.allows(image.width, image.height, image.bytes))
}

fn count<'a>(messages: impl Iterator<Item = &'a Arc<Message>>, rules: ImageInput) -> usize {
    messages.map(|message| images(message, rules).count()).sum()
}

/// How many of the oldest of `count` images are not shown.
fn hidden(count: usize, rules: ImageInput) -> usize {
    let max = usize::try_from(rules.max_images).unwrap_or(usize::MAX).max(1);
    let step = max.div_ceil(2);
    count.saturating_sub(max).div_ceil(step) * step
}

/// Removes from the messages of a prompt the images that it does not show. Returns how many it shows.
pub fn limit(messages: &mut [Arc<Message>], rules: Option<ImageInput>) -> usize {
    let (all, mut hidden) = rules.map_or((0, 0), |rules| {
        let all = count(messages.iter(), rules);
        (all, hidden(all, rules))
    });
    let shown = all - hidden;
    for message in messages {
        let Message::Tool { artifacts, .. } = &**message else {
            continue;
        };
        let has = artifacts.images.len();
        if has == 0 {
            continue;
        }
        let mut kept: Vec<StoredImage> = rules.map_or_else(Vec::new, |rules| images(message, rules).cloned().collect());
        let leaving = hidden.min(kept.len());
        kept.drain(..leaving);
        hidden -= leaving;
        if kept.len() < has
            && let Message::Tool { artifacts, .. } = Arc::make_mut(message)
        {
            artifacts.images = kept;
        }
    }
    shown
}

impl Engine {
    /// Maximum number of tokens of the images in a prompt of the current conversation, in estimated ones.
    pub(crate) fn image_tokens(&self) -> u64 {
        let Some(rules) = self.settings.image_input else {
            return 0;
        };
        let shown = count(self.session().iter(), rules).min(usize::try_from(rules.max_images).unwrap_or(usize::MAX));
        let billed = u64::try_from(shown)
            .unwrap_or(u64::MAX)
            .saturating_mul(rules.tokens_per_image.into());
        self.state.sizes.estimated(billed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::ResultArtifacts;

    fn rules(max_images: u32) -> ImageInput {
        ImageInput {
            max_images,
            ..ImageInput::default()
        }
    }

    fn image(name: &str, width: u32) -> StoredImage {
        StoredImage {
            name: name.into(),
            width,
            height: 28,
            bytes: 100,
        }
    }

    /// Results with this many images each, which are numbered.
    fn results(counts: &[usize]) -> Vec<Arc<Message>> {
        let mut number = 0;
        let mut result = |count: &usize| {
            let images = (0..*count).map(|_| {
                number += 1;
                image(&number.to_string(), 28)
            });
            let artifacts = ResultArtifacts {
                text: None,
                images: images.collect(),
            };
            Arc::new(Message::Tool {
                id: String::new(),
                text: String::new(),
                failed: false,
                reasoning: None,
                artifacts,
            })
        };
        counts.iter().map(&mut result).collect()
    }

    fn shown(messages: &[Arc<Message>], rules: Option<ImageInput>) -> Vec<String> {
        let mut messages = messages.to_vec();
        let count = limit(&mut messages, rules);
        let all = ImageInput {
            tokens_per_image: u32::MAX,
            ..ImageInput::default()
        };
        let names: Vec<String> = messages
            .iter()
            .flat_map(|message| images(message, all))
            .map(|image| image.name.clone())
            .collect();
        assert_eq!(names.len(), count);
        names
    }

    #[test]
    fn the_newest_images_are_shown_up_to_the_number_and_then_half_of_them_leave_at_once() {
        let four = rules(4);
        let names = |counts: &[usize]| shown(&results(counts), Some(four)).join(" ");
        assert_eq!(names(&[1, 2]), "1 2 3");
        assert_eq!(names(&[1, 2, 1]), "1 2 3 4");
        assert_eq!(names(&[1, 2, 1, 1]), "3 4 5");
        assert_eq!(names(&[1, 2, 1, 1, 1]), "3 4 5 6");
        assert_eq!(names(&[1, 2, 1, 1, 1, 1]), "5 6 7");
        assert_eq!(names(&[9]), "7 8 9");
        assert_eq!(shown(&results(&[1, 1, 1]), Some(rules(1))), ["3"]);
    }

    #[test]
    fn a_model_without_image_input_is_shown_none() {
        assert!(shown(&results(&[1, 2]), None).is_empty());
    }

    #[test]
    fn an_image_without_a_token_bound_is_not_shown_and_occupies_no_slot() {
        let mut messages = results(&[2]);
        let Message::Tool { artifacts, .. } = Arc::make_mut(&mut messages[0]) else {
            panic!()
        };
        artifacts.images.insert(1, image("large", 28 * 101));
        artifacts.images.insert(0, image("fits", 28 * 100));
        let rules = ImageInput {
            max_images: 3,
            tokens_per_image: 100,
        };
        assert_eq!(shown(&messages, Some(rules)), ["fits", "1", "2"]);
    }
}

//! Images of results in prompts.

use agentloop_api::agent::ImageInput;

use super::work::wants;
use super::*;
use crate::tool::StoredImage;

fn shows(max_images: u32) -> Driver {
    let input = ImageInput {
        max_images,
        tokens_per_image: 1_000,
    };
    Driver::with_tools(EngineSettings {
        image_input: Some(input),
        ..settings()
    })
}

/// A call of the model whose result has an image.
fn look(driver: &mut Driver, name: &str) {
    driver.answer(wants(&["files__read"]));
    let image = StoredImage {
        name: name.into(),
        width: 100,
        height: 100,
        bytes: 1_000,
    };
    driver.end_stored(
        1,
        "a picture",
        ResultArtifacts {
            text: None,
            images: vec![image],
        },
    );
}

/// The images in the prompt last sent.
fn shown(driver: &Driver) -> Vec<&str> {
    driver.prompt.iter().flat_map(|message| images(message)).collect()
}

fn images(message: &Message) -> Vec<&str> {
    match message {
        Message::Tool { artifacts, .. } => artifacts.images.iter().map(|image| &*image.name).collect(),
        Message::System { .. } | Message::User { .. } | Message::Assistant { .. } => Vec::new(),
    }
}

#[test]
fn a_prompt_shows_the_newest_images_also_after_a_restart_and_the_transcript_keeps_all() {
    let mut driver = shows(2);
    for name in ["1.png", "2.png"] {
        look(&mut driver, name);
    }
    assert_eq!(shown(&driver), ["1.png", "2.png"]);
    look(&mut driver, "3.png");
    assert_eq!(shown(&driver), ["2.png", "3.png"]);
    driver.restart(1);
    look(&mut driver, "4.png");
    assert_eq!(shown(&driver), ["3.png", "4.png"]);
    let kept = driver
        .transcript
        .iter()
        .filter(|message| matches!(&***message, Message::Tool { artifacts, .. } if !artifacts.images.is_empty()));
    assert_eq!(kept.count(), 4);
}

#[test]
fn images_use_at_most_their_tokens_of_the_window_and_without_image_input_none_is_shown() {
    let mut driver = shows(2);
    let before = driver.engine.available(0).whole;
    look(&mut driver, "1.png");
    let one = before - driver.engine.available(0).whole;
    assert!((1_000..1_100).contains(&one), "{one}");
    look(&mut driver, "2.png");
    look(&mut driver, "3.png");
    let two = before - driver.engine.available(0).whole;
    assert!((2_000..2_100).contains(&two), "at most two are shown: {two}");
    let mut blind = Driver::with_tools(settings());
    look(&mut blind, "1.png");
    assert!(shown(&blind).is_empty());
    assert_eq!(blind.engine.image_tokens(), 0);
}

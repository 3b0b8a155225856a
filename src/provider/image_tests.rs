//! Images of results in requests of each wire format.

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use crate::WireFormat;
use crate::images::PromptImages;
use crate::images::tests::png_header;
use crate::prompt::ModelPrompt;
use crate::samples::call;
use agentloop_api::agent::ModelSpec;
use agentloop_engine::message::Message;
use agentloop_engine::tool::{ResultArtifacts, StoredImage};

fn model(api: &str) -> ModelSpec {
    serde_json::from_value(json!({"api": api, "name": "m"})).unwrap()
}

fn result(id: &str, text: &str, images: &[&str]) -> Message {
    let image = |name: &&str| StoredImage {
        name: (*name).into(),
        width: 3,
        height: 5,
        bytes: 29,
    };
    Message::Tool {
        id: id.into(),
        text: text.into(),
        failed: false,
        reasoning: None,
        artifacts: ResultArtifacts {
            text: None,
            images: images.iter().map(image).collect(),
        },
    }
}

/// Two results of one answer, of which the first has two images, and one of them is not stored any more.
fn messages() -> Vec<Message> {
    vec![
        Message::User { text: "Turn 1.".into() },
        Message::Assistant {
            text: None,
            tool_calls: vec![call("a", "{}"), call("b", "{}")],
            reasoning: None,
        },
        result("a", "a picture", &["1.png", "gone.png"]),
        result("b", "another one", &["2.png"]),
    ]
}

/// The conversation in a request, with these messages after it, and `DATA` for the content of an image.
fn conversation(api: &str, has_images: bool, more: &[Message], state: Option<&str>) -> Vec<Value> {
    let mut images = PromptImages::default();
    assert!(images.add("1.png", &png_header(3, 5)) && images.add("2.png", &png_header(3, 5)));
    let data = images.get("1.png").unwrap().data.clone();
    let model = model(api);
    let messages: Vec<Message> = messages().into_iter().chain(more.iter().cloned()).collect();
    let prompt = ModelPrompt {
        images: has_images.then_some(&images),
        state,
        ..ModelPrompt::of(&messages, &[])
    };
    let body = WireFormat::of_api(model.api).body(&model, &prompt);
    let text = body.to_string().replace(&data, "DATA");
    let body: Value = serde_json::from_str(&text).unwrap();
    let field = if api == "OpenAIResponses" { "input" } else { "messages" };
    body[field].as_array().unwrap().clone()
}

const NAMED: &str =
    "[From the runtime, not from a person: the images of the results above, in their order: 1.png, 2.png.]";

#[test]
fn anthropic_messages_have_images_in_their_results_and_the_state_after_them() {
    let all = conversation("AnthropicMessages", true, &[], Some("now"));
    let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "DATA"}});
    let text = |text: &str| json!({"type": "text", "text": text});
    let results = all[2]["content"].as_array().unwrap();
    assert_eq!(results[0]["content"], json!([text("a picture"), image]));
    assert_eq!(results[1]["content"], json!([text("another one"), image, text("now")]));
}

#[test]
fn chat_completions_have_the_images_of_an_answer_after_all_its_results() {
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,DATA", "detail": "high"}});
    let text = |text: &str| json!({"type": "text", "text": text});
    let expected = |last: &[Value]| {
        let parts: Vec<Value> = [text(NAMED), image.clone(), image.clone()]
            .into_iter()
            .chain(last.iter().cloned())
            .collect();
        json!({"role": "user", "content": parts})
    };
    let all = conversation("OpenAIChat", true, &[], Some("now"));
    let roles: Vec<&str> = all.iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["user", "assistant", "tool", "tool", "user"]);
    assert_eq!(all[4], expected(&[text("now")]));
    let turn = Message::User { text: "Turn 2.".into() };
    let all = conversation("OpenAIChat", true, &[turn], None);
    assert_eq!(all[4..], [expected(&[text("Turn 2.")])]);
}

#[test]
fn responses_have_the_images_of_an_answer_after_all_its_results() {
    let image = json!({"type": "input_image", "image_url": "data:image/png;base64,DATA", "detail": "high"});
    let text = |text: &str| json!({"type": "input_text", "text": text});
    let turn = Message::User { text: "Turn 2.".into() };
    let all = conversation("OpenAIResponses", true, &[turn], Some("now"));
    assert_eq!(
        all[5..],
        [json!({"type": "message", "role": "user", "content": [text(NAMED), image, image, text("Turn 2.\n\nnow")]})]
    );
}

#[test]
fn without_images_a_request_is_as_before() {
    for api in ["AnthropicMessages", "OpenAIChat", "OpenAIResponses"] {
        let text = json!(conversation(api, false, &[], None)).to_string();
        assert!(!text.contains("DATA") && !text.contains("From the runtime") && text.contains("another one"));
    }
}

//! What differs between the wire formats of servers: where calls go, how the key is sent, and what an output limit is
//! called. How requests, answers and usage differ is said where each of them is read.

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};

use crate::api::agent::{ModelApi, ModelSpec, OutputLimitParameter};
use crate::ledger::bound::RequestOverhead;

const VERSION: HeaderName = HeaderName::from_static("anthropic-version");
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// A wire format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProviderDialect {
    /// OpenAI chat completions; the script's too.
    Chat,
    /// Anthropic messages.
    Messages,
}

impl ProviderDialect {
    /// The dialect of a model.
    pub fn of(api: ModelApi) -> Self {
        match api {
            ModelApi::OpenAIChat | ModelApi::Scripted => Self::Chat,
            ModelApi::AnthropicMessages => Self::Messages,
        }
    }

    /// Where calls go, below the base address.
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/chat/completions",
            Self::Messages => "/v1/messages",
        }
    }

    /// What a server is called in advice.
    pub fn server(self) -> &'static str {
        match self {
            Self::Chat => "chat completions; check spec.model.baseURL (with /v1 for OpenAI)",
            Self::Messages => "Anthropic messages; check spec.model.baseURL (without /v1)",
        }
    }

    /// Headers that each request has.
    pub fn headers(self) -> HeaderMap {
        match self {
            Self::Chat => HeaderMap::new(),
            Self::Messages => HeaderMap::from_iter([(VERSION, HeaderValue::from_static("2023-06-01"))]),
        }
    }

    /// The header that carries the key; `None` when the key cannot be in a header.
    pub fn authorization(self, key: &str) -> Option<(HeaderName, HeaderValue)> {
        let (name, text) = match self {
            Self::Chat => (AUTHORIZATION, format!("Bearer {key}")),
            Self::Messages => (X_API_KEY, key.to_owned()),
        };
        let mut value = HeaderValue::try_from(text).ok()?;
        value.set_sensitive(true);
        Some((name, value))
    }

    /// Name of the output limit: OpenAI's own new models know only the new one, others the old.
    pub fn output_limit(self, model: &ModelSpec, host: Option<&str>) -> &'static str {
        const OLD: &str = "max_tokens";
        const NEW: &str = "max_completion_tokens";
        match (self, model.output_limit_parameter) {
            (Self::Chat, OutputLimitParameter::MaxCompletionTokens) => NEW,
            (Self::Chat, OutputLimitParameter::Auto) if host == Some("api.openai.com") => NEW,
            (Self::Chat, OutputLimitParameter::Auto | OutputLimitParameter::MaxTokens) | (Self::Messages, _) => OLD,
        }
    }

    /// What a server renders beside the text of a request.
    pub fn overhead(self) -> RequestOverhead {
        match self {
            Self::Chat => RequestOverhead::CHAT_COMPLETIONS,
            Self::Messages => RequestOverhead::MESSAGES,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn model(api: &str, parameter: &str) -> ModelSpec {
        serde_json::from_value(json!({"api": api, "name": "m", "outputLimitParameter": parameter})).unwrap()
    }

    #[test]
    fn only_openai_itself_gets_the_new_name_of_the_limit_unless_the_spec_says_otherwise() {
        let limit = |api, parameter, host| {
            let model = model(api, parameter);
            ProviderDialect::of(model.api).output_limit(&model, host)
        };
        let openai = Some("api.openai.com");
        assert_eq!(limit("OpenAIChat", "Auto", openai), "max_completion_tokens");
        assert_eq!(limit("OpenAIChat", "MaxTokens", openai), "max_tokens");
        assert_eq!(
            limit("OpenAIChat", "Auto", Some("api.openai.com.example.org")),
            "max_tokens"
        );
        assert_eq!(limit("OpenAIChat", "Auto", None), "max_tokens");
        assert_eq!(
            limit("OpenAIChat", "MaxCompletionTokens", None),
            "max_completion_tokens"
        );
        assert_eq!(limit("AnthropicMessages", "Auto", openai), "max_tokens");
    }

    #[test]
    fn a_key_is_sensitive_and_in_the_header_of_its_dialect() {
        for (dialect, name, value) in [
            (ProviderDialect::Chat, "authorization", "Bearer k"),
            (ProviderDialect::Messages, "x-api-key", "k"),
        ] {
            let (header, sent) = dialect.authorization("k").unwrap();
            assert_eq!((header.as_str(), sent.to_str().unwrap()), (name, value));
            assert!(sent.is_sensitive());
            assert_eq!(dialect.authorization("two\nlines"), None);
        }
    }
}

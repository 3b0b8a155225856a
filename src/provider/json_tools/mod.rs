//! Tool calls for servers without native support: the model answers with one JSON object, and the server is asked to
//! enforce its schema (`response_format` of OpenAI chat completions, supported by vLLM, llama.cpp, Ollama and others).

pub(super) mod request;
pub(super) mod response;

//! The names, descriptions and schemas of the tools. Each text is part of every prompt.

use std::sync::Arc;

use agentloop_toolbox_protocol::file_report::MAX_FILES;
use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::{Value, json};

use crate::http::{MAX_BODY, MAX_HEADERS, MAX_URL, METHODS};
use crate::shell::MAX_COMMAND;
use crate::workspace::bounds::{
    DEFAULT_LINES, DEFAULT_RESULTS, MAX_CONTENT, MAX_LINES, MAX_PATH, MAX_PATTERN, MAX_RESULTS,
};

/// Tools that are offered together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ToolGroup {
    /// The tool `shell`.
    Shell,
    /// The tools `read_file`, `write_file`, `edit_file`, `list_directory` and `search_files`.
    Files,
    /// The tool `http_request`.
    Http,
}

/// The tools of a group. `timeout`: the longest time of a command in seconds.
pub(crate) fn tools(group: ToolGroup, timeout: u64) -> Vec<Tool> {
    match group {
        ToolGroup::Shell => vec![shell(timeout)],
        ToolGroup::Files => vec![read_file(), write_file(), edit_file(), list_directory(), search_files()],
        ToolGroup::Http => vec![http_request()],
    }
}

fn shell(timeout: u64) -> Tool {
    let properties = json!({
        "command": {"type": "string", "minLength": 1, "maxLength": MAX_COMMAND},
        "directory": path("Working directory, default the workspace"),
        "timeout_seconds": {"type": "integer", "minimum": 1, "maximum": timeout},
        "junit": path("JUnit report that the command writes; the result then has its counts"),
    });
    let text = "Runs a shell command in the workspace, without input. Returns its exit code and output; of a long output the \
                beginning and the end. When it ends or times out, all processes that it started are killed, also in the \
                background.";
    let hints = Hints {
        destructive: true,
        open_world: true,
        ..Hints::default()
    };
    tool("shell", text, &properties, &["command"], hints)
}

fn read_file() -> Tool {
    let properties = json!({
        "path": path("Relative to the workspace"),
        "first_line": {"type": "integer", "minimum": 1, "default": 1},
        "max_lines": {"type": "integer", "minimum": 1, "maximum": MAX_LINES, "default": DEFAULT_LINES},
    });
    let text = "Reads lines of a text file. If more follows, the result says with which line to continue.";
    tool("read_file", text, &properties, &["path"], Hints::read())
}

fn write_file() -> Tool {
    let properties = json!({
        "path": path("Relative to the workspace"),
        "content": {"type": "string", "maxLength": MAX_CONTENT},
    });
    let text = "Creates a text file, or replaces it as a whole. Creates missing directories.";
    let hints = Hints {
        destructive: true,
        idempotent: true,
        ..Hints::default()
    };
    tool("write_file", text, &properties, &["path", "content"], hints)
}

fn edit_file() -> Tool {
    let properties = json!({
        "path": path("Relative to the workspace"),
        "old_text": {"type": "string", "minLength": 1, "maxLength": MAX_CONTENT, "description": "Exact text, with enough context to occur once"},
        "new_text": {"type": "string", "maxLength": MAX_CONTENT},
        "replace_all": {"type": "boolean", "default": false},
    });
    let text = "Replaces a text in a file. The text must match exactly and occur once, unless replace_all is set.";
    let hints = Hints {
        destructive: true,
        ..Hints::default()
    };
    tool("edit_file", text, &properties, &["path", "old_text", "new_text"], hints)
}

fn list_directory() -> Tool {
    let properties = json!({
        "path": path("Relative to the workspace, default the workspace itself"),
        "files": {
            "type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_FILES,
            "description": "Instead of path: files, whose sizes are returned in this order",
        },
    });
    let text = "Lists a directory: directories end in /, links in @, files have their size in bytes.";
    tool("list_directory", text, &properties, &[], Hints::read())
}

fn search_files() -> Tool {
    let properties = json!({
        "pattern": {"type": "string", "minLength": 1, "maxLength": MAX_PATTERN, "description": "Regular expression (Rust syntax), matched against each line"},
        "path": path("Directory or file, default the workspace"),
        "file_name": {"type": "string", "minLength": 1, "maxLength": 255, "description": "Only files with such a name, e.g. *.py"},
        "max_results": {"type": "integer", "minimum": 1, "maximum": MAX_RESULTS, "default": DEFAULT_RESULTS},
    });
    let text = "Searches text files recursively. Returns path:line:text of each matching line. Skips .git and links.";
    tool("search_files", text, &properties, &["pattern"], Hints::read())
}

fn http_request() -> Tool {
    let properties = json!({
        "url": {"type": "string", "maxLength": MAX_URL},
        "method": {"type": "string", "enum": METHODS, "default": "GET"},
        "headers": {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": MAX_HEADERS},
        "body": {"type": "string", "maxLength": MAX_BODY},
    });
    let text = "Sends an HTTP request to an allowed host. Returns status, main headers and body; of a long body the beginning \
                and the end. Does not follow redirects.";
    let hints = Hints {
        destructive: true,
        open_world: true,
        ..Hints::default()
    };
    tool("http_request", text, &properties, &["url"], hints)
}

fn path(description: &str) -> Value {
    json!({"type": "string", "minLength": 1, "maxLength": MAX_PATH, "description": description})
}

#[derive(Clone, Copy, Default)]
#[expect(clippy::struct_excessive_bools, reason = "they are the protocol's hints")]
struct Hints {
    read_only: bool,
    destructive: bool,
    idempotent: bool,
    open_world: bool,
}

impl Hints {
    fn read() -> Self {
        Self {
            read_only: true,
            idempotent: true,
            ..Self::default()
        }
    }
}

fn tool(name: &'static str, description: &'static str, properties: &Value, required: &[&str], hints: Hints) -> Tool {
    let schema = json!({
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": false,
    });
    let schema: JsonObject = schema.as_object().cloned().unwrap_or_default();
    let annotations = ToolAnnotations::from_raw(
        None,
        Some(hints.read_only),
        Some(hints.destructive),
        Some(hints.idempotent),
        Some(hints.open_world),
    );
    Tool::new(name, description, Arc::new(schema)).with_annotations(annotations)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Tool> {
        [ToolGroup::Shell, ToolGroup::Files, ToolGroup::Http]
            .into_iter()
            .flat_map(|group| tools(group, 50))
            .collect()
    }

    #[test]
    fn descriptions_and_schemas_are_short() {
        let mut total = 0;
        for tool in all() {
            let text = tool.description.unwrap_or_default();
            assert!(text.len() <= 300, "{}: {} bytes", tool.name, text.len());
            let schema = serde_json::to_string(&*tool.input_schema).unwrap();
            assert!(schema.len() <= 700, "{}: {} bytes", tool.name, schema.len());
            total += text.len() + schema.len();
        }
        assert!(total <= 4096, "{total} bytes in every prompt");
    }

    #[test]
    fn only_tools_that_change_nothing_claim_it() {
        let hinted = |of: fn(&ToolAnnotations) -> Option<bool>| -> Vec<String> {
            let has = |tool: &Tool| tool.annotations.as_ref().and_then(of) == Some(true);
            all()
                .into_iter()
                .filter(has)
                .map(|tool| tool.name.to_string())
                .collect()
        };
        let reads = ["read_file", "list_directory", "search_files"];
        assert_eq!(hinted(|hints| hints.read_only_hint), reads);
        let destroys = ["shell", "write_file", "edit_file", "http_request"];
        assert_eq!(hinted(|hints| hints.destructive_hint), destroys);
        let repeats = ["read_file", "write_file", "list_directory", "search_files"];
        assert_eq!(hinted(|hints| hints.idempotent_hint), repeats);
    }

    #[test]
    fn every_argument_of_a_schema_is_accepted_and_no_other() {
        for tool in all() {
            let properties = tool.input_schema["properties"].as_object().unwrap();
            let mut arguments = JsonObject::new();
            for (name, schema) in properties {
                let value = match schema["type"].as_str().unwrap() {
                    "string" => schema["enum"].get(0).cloned().unwrap_or_else(|| json!("x")),
                    "integer" => schema["minimum"].clone(),
                    "boolean" => json!(true),
                    "object" => json!({"a": "b"}),
                    "array" => json!(["x"]),
                    other => panic!("{other}"),
                };
                arguments.insert(name.clone(), value);
            }
            assert!(
                crate::server::parses(&tool.name, arguments.clone()).is_ok(),
                "{}",
                tool.name
            );
            let required: Vec<_> = tool.input_schema["required"]
                .as_array()
                .unwrap()
                .iter()
                .map(|name| name.as_str().unwrap())
                .collect();
            let minimal: JsonObject = arguments
                .clone()
                .into_iter()
                .filter(|(name, _)| required.contains(&name.as_str()))
                .collect();
            assert!(
                crate::server::parses(&tool.name, minimal.clone()).is_ok(),
                "{}",
                tool.name
            );
            for name in required {
                let mut without = minimal.clone();
                without.remove(name);
                assert!(
                    crate::server::parses(&tool.name, without).is_err(),
                    "{}.{name}",
                    tool.name
                );
            }
            arguments.insert("other".into(), json!(1));
            assert!(crate::server::parses(&tool.name, arguments).is_err(), "{}", tool.name);
        }
    }
}
